"""Files that are complete or absent: atomic writes, fsync, checksums, JSON, staging directories."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shlex
import shutil
import stat
import tempfile
import uuid
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from lpfs._locks import FileLock
from lpfs._validation import check_json
from lpfs.errors import DataError, InputError

if TYPE_CHECKING:
    import numpy.typing as npt

FSYNC_THREADS = 16
CHECKSUM_BYTES = 1 << 20  # bytes of a file that one checksum covers
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{32}\.\w+")  # of replace_atomic
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2
MAX_JSON_BYTES = 64 << 20  # of a JSON file; its values need up to 20 times as much memory
MAX_JSON_DEPTH = 100  # lists and objects inside each other
MAX_JSON_DIGITS = 40  # of an integer; the states of random generators have 128 bits
LONG_NUMBER = re.compile(f"[0-9]{{{MAX_JSON_DIGITS}}}")  # also in a text
JSON_CONTAINERS = frozenset((dict, list))
RUN_CONFIG, RUN_FORMAT = "config.json", "lpfs-run"  # the settings of a run, and their format
RUN_RESULTS = ("selection.json", "model")  # a finished run has one of these
DATASET_FILES = ("dataset.json", "truth.json")
SPECIAL_FILES = {  # reading one of these fails or may wait forever
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFDIR: "directory",
}


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Do not search for cycles while a block makes many objects that stay; the searches would take half of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def replace_atomic(path: Path, suffix: str = ".new") -> Iterator[Path]:
    """Yield the path of a hidden file, which is renamed to ``path`` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}{suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file for writing that replaces ``path`` when the block ends without an error."""
    with replace_atomic(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_text_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text; a reader sees the old or the new file, never a part. Make missing parent directories."""
    with open_atomic(path) as file:
        file.write(text.encode())


def write_json_atomic(
    path: Path, values: Mapping[str, Any], *, allow_nan: bool = False, files: Iterable[str] = ()
) -> None:
    """Write JSON atomically, with a checksum that ``read_json`` verifies.

    Args:
        path: the file.
        values: an object; NaN and infinity raise ValueError unless ``allow_nan`` is set.
        files: names of files beside ``path`` whose checksums are added as ``files``, for ``check_files``.
    """
    text = json.dumps(values, ensure_ascii=False, allow_nan=allow_nan, default=plain_value)
    plain = json.loads(text)
    if checksums := {name: file_checksum(path.parent / name) for name in files}:
        plain["files"] = checksums
    text = json.dumps({**plain, "checksum": json_checksum(plain)}, indent=1, ensure_ascii=False)
    write_text_atomic(path, text + "\n")


def write_array_atomic(path: Path, array: npt.NDArray[Any]) -> None:
    """Write a NumPy array as ``.npy`` atomically."""
    import numpy as np

    with open_atomic(path) as file:
        np.save(file, array)


def read_json(
    path: Path,
    schema: Any = dict,
    *,
    advice: str = "use another copy of the file, or make it again",
    missing_ok: bool = False,
    allow_nan: bool = False,
    verify: bool | Literal["required"] = True,
    max_bytes: int = MAX_JSON_BYTES,
) -> Any:
    """Return the values of a JSON file that has the types of ``schema``; anything else raises InputError on one line.

    Args:
        path: a regular file; if it does not exist, FileNotFoundError is raised.
        schema: type of the values, see :func:`check_json`.
        advice: end of every message.
        missing_ok: return None if the file does not exist.
        allow_nan: accept NaN and infinity.
        verify: compare the key ``checksum``, if there is one or if it is required, with the other keys; remove it.
        max_bytes: size of the largest file that is read.
    """
    try:
        check_regular_file(path)
        if (size := path.stat().st_size) > max_bytes:
            raise ValueError(f"it has {size} bytes, and at most {max_bytes} are read")
        values = parse_json(path.read_bytes(), allow_nan=allow_nan)
        checksum = values.pop("checksum", None) if verify and isinstance(values, dict) else None
        if (checksum is not None or verify == "required") and checksum != json_checksum(values):
            raise ValueError("it is damaged: its checksum does not match (if you edited it, remove the key 'checksum')")
        check_json(values, schema)
    except FileNotFoundError:
        if missing_ok:
            return None
        raise
    except DataError as error:
        raise InputError(f"{error}; {advice}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; {advice}") from None
    except ValueError as error:
        raise InputError(f"{path} cannot be used: {error}; {advice}") from None
    return values


def is_run(run_dir: Path) -> bool:
    """Return whether a directory is a run, by its configuration."""
    try:
        return bool(read_json(run_dir / RUN_CONFIG, verify=False).get("format") == RUN_FORMAT)
    except (OSError, ValueError):
        return False


def no_result_error(run_dir: Path, problem: str, advice: str) -> InputError:
    """Return the error for a directory without a result: how to finish a killed run, or ``advice`` for another one."""
    if is_run(run_dir) and not any((run_dir / name).exists() for name in RUN_RESULTS):
        command = f"lpfs select --resume --out {shlex.quote(str(run_dir))}"
        advice = f"the run is not finished; finish it with the command that started it and --resume, as in {command}"
    return InputError(f"{problem}; {advice}")


def parse_json(data: bytes | str, *, allow_nan: bool = False) -> Any:
    """Return the values of JSON in UTF-8; raise ValueError for invalid text, a repeated key or deep nesting."""

    def number(text: str) -> float:
        if not allow_nan and (text in ("NaN", "Infinity", "-Infinity") or abs(float(text)) == float("inf")):
            raise ValueError(f"it contains the number {text[:MAX_JSON_DIGITS]}, which is not finite")
        return float(text)

    def integer(text: str) -> int:
        if len(text) > MAX_JSON_DIGITS:
            raise ValueError(f"it contains an integer of {len(text)} digits, {text[:9]}…")
        return int(text)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise ValueError(f"the key {name[:80]!r} occurs twice")
        return values

    try:
        text = data if isinstance(data, str) else data.decode()
        parse_int = integer if LONG_NUMBER.search(text) else None  # a call for every integer takes long
        values = json.loads(
            text, object_pairs_hook=unique, parse_float=number, parse_constant=number, parse_int=parse_int
        )
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    level = [values] if type(values) in JSON_CONTAINERS else []
    for _ in range(MAX_JSON_DEPTH):
        items = (parent.values() if type(parent) is dict else parent for parent in level)
        level = [item for children in items for item in children if type(item) in JSON_CONTAINERS]
        if not level:
            return values
    raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")


def check_files(directory: Path, files: Mapping[str, str], advice: str) -> None:
    """Raise InputError if a file of ``write_json_atomic`` is missing or differs from its checksum."""
    for name, checksum in files.items():
        try:
            path = safe_child(directory, name)
            check_regular_file(path)
            problem = None if file_checksum(path) == checksum else f"{path} is damaged: its checksum does not match"
        except DataError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{directory / name} cannot be read: {error.strerror or error}"
        if problem:
            raise InputError(f"{problem}; {advice}")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON in place, neither atomic nor synced: for staging directories. ASCII, one line per key.

    Indented JSON of 10,000 fields takes ten times as long.
    """
    lines = (f"{json.dumps(str(key))}: {json.dumps(value)}" for key, value in values.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def plain_value(value: Any) -> Any:
    """Return a NumPy or torch scalar as a number and any other object as text: ``default`` of ``json.dumps``."""
    return value.item() if hasattr(value, "item") else str(value)


def check_regular_file(path: Path) -> None:
    """Raise DataError if a path is a pipe, a socket, a device or a directory; OSError if there is nothing."""
    kind = SPECIAL_FILES.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        raise DataError(f"{path} is a {kind}, not a regular file; write its content to a file, or name another file")


def safe_child(folder: Path, name: str) -> Path:
    """Return the path of a file below ``folder`` whose name comes from a file; raise DataError if it is elsewhere.

    The name is relative, with ``/`` between its parts; ``..``, absolute names, drive letters, backslashes and
    symbolic links that leave the folder are refused.
    """
    parts = name.split("/") if isinstance(name, str) else []
    is_plain = bool(parts) and all(part not in ("", ".", "..") and part.isprintable() for part in parts)
    if not is_plain or "\\" in name or ":" in name:
        raise DataError(
            f"{folder} names the file {str(name)[:200]!r}; only names of files inside the folder are allowed"
        )
    path = folder.joinpath(*parts)
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a link to itself
        is_inside = False
    if not is_inside:
        raise DataError(f"{path} is a link that leaves {folder}; only files inside the folder are allowed")
    return path


def file_checksum(path: Path) -> str:
    """Return the CRC-32 of each MiB of a file in hex, one after another, so that parts can be checked alone."""
    with path.open("rb") as file:
        checksums = [zlib.crc32(file.read(CHECKSUM_BYTES))]
        while block := file.read(CHECKSUM_BYTES):
            checksums.append(zlib.crc32(block))
    return "".join(f"{checksum:08x}" for checksum in checksums)


def json_checksum(values: Mapping[str, Any]) -> str:
    """Return the CRC-32 of JSON values in hex, independent of the order of their keys."""
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Flush everything below a directory to disk, several files at a time: first files, then directories."""
    paths = sorted(directory.rglob("*"), reverse=True)  # a directory comes after its content
    with ThreadPoolExecutor(FSYNC_THREADS) as pool:
        list(pool.map(fsync_path, (path for path in paths if not path.is_dir())))
        list(pool.map(fsync_path, (path for path in paths if path.is_dir())))


class StagingDirectory:
    """A temporary directory beside ``out`` that :meth:`commit` renames to ``out``.

    ``path`` is the directory to fill; a ``with`` block yields it, and commits it unless an error is raised. ``out`` is
    locked meanwhile, and :class:`LockedError` is raised if another process writes to it. A killed process leaves its
    directory behind, which the next staging directory for the same ``out`` removes.

    Args:
        out: the final directory.
        replace: whether ``out`` may exist and contain one of ``markers``.
        markers: files of which one must be in a directory that is replaced.
    """

    def __init__(self, out: Path, *, replace: bool = False, markers: Collection[str] = DATASET_FILES) -> None:
        self.out, self.replace, self.markers = out, replace, markers
        self._prefix = f".{out.name[:80]}.lpfs-"
        self._old = out.parent / f"{self._prefix}old"  # only where two directories cannot be exchanged
        check_output_dir(out, replace=replace, markers=markers)
        self._lock = FileLock(out.parent / f"{self._prefix}lock", out)
        try:
            self._recover()
            check_output_dir(out, replace=replace, markers=markers)
            self.path = Path(tempfile.mkdtemp(prefix=self._prefix, suffix=".tmp", dir=out.parent))
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()

    def commit(self) -> None:
        """Rename the directory to ``out`` in one step; what was there before is then removed."""
        check_output_dir(self.out, replace=self.replace, markers=self.markers)
        umask = os.umask(0)
        os.umask(umask)
        self.path.chmod(0o777 & ~umask)
        if not self.out.exists():
            self.path.rename(self.out)
        elif not exchange_paths(self.path, self.out):
            self.out.rename(self._old)
            try:
                self.path.rename(self.out)
            except BaseException:
                self._old.rename(self.out)
                raise
            remove_tree(self._old)
        fsync_path(self.out.parent)

    def discard(self) -> None:
        """Remove the directory, or what :meth:`commit` replaced, and release the lock. Safe to call twice."""
        remove_tree(self.path)
        self._lock.release()

    def _recover(self) -> None:
        """Restore ``out`` if a process was killed while it replaced it; remove what killed processes left."""
        if self._old.is_dir():
            if self.out.exists():
                remove_tree(self._old)
            else:
                self._old.rename(self.out)
                warnings.warn(f"{self.out} is restored: a command was killed while it replaced it", stacklevel=4)
        if self._lock.is_exclusive:
            staging_name = re.compile(re.escape(self._prefix) + r"[a-z0-9_]{8}\.tmp")
            for path in self.out.parent.iterdir():
                if staging_name.fullmatch(path.name):
                    remove_tree(path)


def exchange_paths(first: Path, second: Path) -> bool:
    """Exchange two files or directories in one step; return False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2  # Linux
    except (AttributeError, OSError, TypeError):
        return False
    return bool(rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0)


def remove_tree(path: Path) -> None:
    """Remove a directory with its content, a link or a file; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def remove_temporary_files(directory: Path) -> None:
    """Remove the hidden files that a killed process was writing in a directory, which must be locked."""
    for path in directory.iterdir():
        if TEMPORARY_NAME.fullmatch(path.name):
            remove_tree(path)


def check_output_dir(out: Path, *, replace: bool, markers: Collection[str] = DATASET_FILES) -> None:
    """Raise DataError if ``out`` is not empty, unless it may be replaced and contains one of ``markers``."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise DataError(f"{out} exists and is not a directory; choose another path")
    names = {path.name for path in out.iterdir()}
    if names and not replace:
        raise DataError(f"{out} exists and is not empty; choose another path, or replace it (--replace, replace=True)")
    if names and not names & set(markers):
        raise DataError(f"{out} contains none of {', '.join(markers)} and is not replaced; choose another path")
