"""kept_fields.txt: a field a line."""

from __future__ import annotations

import json
from collections.abc import Iterable


def listed(names: Iterable[str]) -> str:
    r"""Return names one a line; one that a line cannot hold as it is becomes a JSON string.

    That is a name with a line break in it, with a blank at an end, with a quotation mark in front, or without a
    letter.

    >>> listed(["user", "two\nlines"])
    'user\n"two\\nlines"\n'
    """
    return "".join(f"{name if _plain(name) else json.dumps(name)}\n" for name in names)


def names_in(text: str) -> tuple[str, ...]:
    r"""Return the names that ``listed`` wrote.

    >>> names_in('user\n"two\\nlines"\n')
    ('user', 'two\nlines')
    """
    return tuple(json.loads(line) if line.startswith('"') else line for line in text.splitlines())


def _plain(name: str) -> bool:
    return name.splitlines() == [name] and name == name.strip() and not name.startswith('"')
