"""Places that are not on this machine: what is a URL, and the file system it is on (through fsspec)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lpfs.errors import DataError, MissingPackageError

URL = re.compile(r"^([a-z][a-z0-9+.\-]+):(/+)(.*)$")


def url_of(place: Any) -> str | None:
    """Return the URL that a place is, or None for a path; ``pathlib`` takes a slash away, which is put back.

    >>> url_of("s3://logs/day_0"), url_of("s3:/logs/day_0"), url_of("logs/day_0")
    ('s3://logs/day_0', 's3://logs/day_0', None)
    """
    if not isinstance(place, str | os.PathLike):
        return None
    text = os.fspath(place)
    found = URL.match(text) if isinstance(text, str) else None
    if found is None or (found[2] == "/" and os.path.exists(text)):
        return None
    slashes = "///" if found[1] in ("file", "local") else "//"
    return f"{found[1]}:{slashes}{found[3].rstrip('/')}"


def absolute(place: str) -> str:
    """Return a path from the root, and a URL as it is."""
    return url_of(place) or os.path.abspath(place)


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path on it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingPackageError(
            f"{url}: object stores need fsspec; install: pip install 'lpfs[fsspec]'"
        ) from None
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        raise MissingPackageError(f"{url}: {error}") from None
    except ValueError as error:
        raise DataError(f"{url}: no such kind of place ({error})") from None
    return system, str(path).rstrip("/")


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turn failures of an object store, whose errors are of many kinds, into a DataError that names the place."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{url}: there is nothing") from None
    except (DataError, MissingPackageError):
        raise
    except Exception as error:
        raise DataError(f"{url}: cannot be reached: {str(error)[:200] or type(error).__name__}") from error


def cache() -> Path:
    """Return the folder for what is fetched: $LPFS_CACHE, or .cache/lpfs in the home folder."""
    given = os.environ.get("LPFS_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "lpfs"
