"""Text of users in HTML, in scripts and in CSV: every name that is shown goes through here.

Names of fields come out of tables that anybody may have written. They are escaped where they are written, controls
and lone surrogates are made visible, and the direction of a right-to-left name stays its own.
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

LONGEST = 120  # characters of a name that are shown
TOLD = 2000  # characters of it in its tooltip
HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]")
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
VOID = frozenset({"meta", "input", "br", "hr", "col"})


class Html(str):
    """Text that is markup already, and safe."""

    __slots__ = ()


def visible(text: str) -> str:
    r"""Return text with what cannot be shown written as an escape.

    >>> visible("a\x00b")
    'a\\x00b'
    """
    return HIDDEN.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode(), text)


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return text with its middle left out where it is longer than this.

    >>> shortened("abcdefghij", 7)
    'abcd…ij'
    """
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 3
    return f"{text[: longest - 1 - tail]}…{text[len(text) - tail :]}"


def escaped(value: object) -> Html:
    """Return a value as text of HTML; what is markup already stays as it is.

    >>> escaped('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return value if isinstance(value, Html) else Html(html.escape(visible(str(value))))


def tag(name: str, /, *inside: object, **attributes: object) -> Html:
    """Return an element; ``class_`` is ``class``, ``data_x`` is ``data-x``, True is an attribute without a value.

    >>> tag("p", "1 < 2", class_="note", hidden=False)
    '<p class="note">1 &lt; 2</p>'
    """
    said = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        said.append(f" {key}" if value is True else f' {key}="{escaped(value)}"')
    if name in VOID:
        return Html(f"<{name}{''.join(said)}>")
    return Html(f"<{name}{''.join(said)}>{''.join(map(escaped, inside))}</{name}>")


def together(*parts: object) -> Html:
    """Return several pieces as one."""
    return Html("".join(map(escaped, parts)))


def named(name: str) -> Html:
    """Return the name of a field: isolated from the direction of what is around it, shortened where it is long."""
    short = shortened(visible(name))
    full = shortened(visible(name), TOLD) if short != visible(name) else None
    return tag("bdi", short, class_="name", title=full)


def embedded(identity: str, values: Any) -> Html:
    r"""Return values as JSON inside a page, for its script; nothing in them can end the element.

    >>> embedded("x", ["</script>"])
    '<script type="application/json" id="x">["\\u003c/script\\u003e"]</script>'
    """
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(f'<script type="application/json" id="{escaped(identity)}">{text}</script>')


def cell(value: object) -> str:
    """Return a value as a cell of CSV: quoted where it must be, and never a formula to a spreadsheet.

    >>> print(cell("=1+2"), cell("a,b"), cell(-0.5))
    '=1+2 "a,b" -0.5
    """
    if value is None:
        return ""
    text = str(value)
    if not isinstance(value, int | float) and text.startswith(FORMULA):
        text = "'" + text
    if any(sign in text for sign in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text
