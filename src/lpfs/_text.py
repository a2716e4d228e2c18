"""User text made safe for HTML, scripts, CSV, Markdown and terminals.

Field names come from tables that anyone may have written. Control characters and lone surrogates are shown as
escapes, right-to-left names are isolated from the text around them, and markupsafe and Jinja2 escape the rest.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import BaseLoader, Environment

MAX_NAME_LENGTH = 120  # characters of a field name that are shown
MAX_TITLE_LENGTH = 2000  # characters of a field name in its tooltip
CONTROL_CHARS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]")
FORMULA_CHARS = "=+-@＝＋－＠"


def escape_control_chars(text: str) -> str:
    r"""Return text with control characters, line breaks and lone surrogates written as escapes.

    >>> escape_control_chars("a\x00b")
    'a\\x00b'
    """
    return CONTROL_CHARS.sub(lambda match: match.group().encode("unicode_escape", "surrogatepass").decode(), text)


def escape_unprintable(text: str) -> str:
    r"""Return text with every unprintable character written as an escape, so that it cannot control a terminal.

    >>> escape_unprintable("\x1b[31mred\u202e")
    '\\x1b[31mred\\u202e'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def escape_json(text: str) -> str:
    r"""Return JSON in which every unprintable character except line breaks is an escape; its values are the same.

    >>> print(escape_json('["\x7f\x85"]'))
    ["\u007f\u0085"]
    """

    def escape(char: str) -> str:
        digits = char.encode("utf-16-be", "surrogatepass").hex()
        return "".join(f"\\u{digits[start : start + 4]}" for start in range(0, len(digits), 4))

    return "".join(char if char.isprintable() or char == "\n" else escape(char) for char in text)


def quote_command(*words: str | os.PathLike[str]) -> str:
    r"""Return a command that a shell reads as these words; unprintable characters are escapes in $'…'.

    >>> print(quote_command("lpfs", "report", "my run"), quote_command("a\x1b"))
    lpfs report 'my run' $'a\x1b'
    """

    def quote(word: str) -> str:
        if word.isprintable():
            return shlex.quote(word)
        chars = (f"\\{c}" if c in "\\'" else c if c.isprintable() else _hex_escape(c) for c in word)
        return f"$'{''.join(chars)}'"

    return " ".join(quote(os.fspath(word)) for word in words)


def _hex_escape(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def truncate_middle(text: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """Return text of at most ``max_length`` characters; an ellipsis replaces the middle of a longer text.

    >>> truncate_middle("abcdefghij", 7)
    'abcd…ij'
    """
    if len(text) <= max_length:
        return text
    tail = (max_length - 1) // 3
    return f"{text[: max_length - 1 - tail]}…{text[len(text) - tail :]}"


def field_name_html(name: str) -> Markup:
    """Return the HTML of a field name: isolated from the surrounding text direction, truncated if it is long.

    >>> field_name_html("<b>")
    Markup('<bdi class="name">&lt;b&gt;</bdi>')
    """
    text = escape_control_chars(name)
    short = truncate_middle(text)
    if short == text:
        return Markup('<bdi class="name">{}</bdi>').format(text)
    return Markup('<bdi class="name" title="{}">{}</bdi>').format(truncate_middle(text, MAX_TITLE_LENGTH), short)


def multiline_html(text: str) -> Markup:
    """Return escaped text that keeps its line breaks, for a ``pre`` element."""
    return Markup("\n").join(escape_control_chars(line) for line in text.split("\n"))


def html_environment(loader: BaseLoader | None = None) -> Environment:
    """Return a Jinja2 environment with the filters below that escapes every value, control characters included."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if hasattr(value, "__html__") else escape_control_chars(str(value)),
    )
    environment.filters |= {"field_name": field_name_html, "multiline": multiline_html}
    return environment


def json_script(values: Any, element_id: str) -> Markup:
    r"""Return a script element that holds values as JSON; no value can end the element.

    >>> print(json_script(["</script>"], "x"))
    <script type="application/json" id="x">["\u003c/script\u003e"]</script>
    """
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup('<script type="application/json" id="{}">{}</script>').format(element_id, Markup(text))


def csv_cell(value: object) -> str:
    """Return a value (a list or mapping as JSON) as a CSV cell that no spreadsheet reads as a formula.

    >>> print(csv_cell("=1+2"), csv_cell("a,b"), csv_cell(-0.5))
    '=1+2 "a,b" -0.5
    """
    if value is None:
        return ""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | Mapping) else str(value)
    if not isinstance(value, int | float) and is_formula(text):
        text = "'" + text
    if any(char in text for char in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def is_formula(text: str) -> bool:
    """Return whether a spreadsheet may read a cell as a formula: it ignores blanks and invisible characters first."""
    first = next((char for char in text if char.isprintable() and not char.isspace()), "")
    return text.startswith(("\t", "\r", "\n")) or (first != "" and first in FORMULA_CHARS)


def escape_markdown(text: str) -> str:
    r"""Return text that Markdown, and HTML rendered from it, shows unchanged on one line.

    >>> escape_markdown("a|b <i>")
    'a\\|b &lt;i&gt;'
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for char in "\\`|[]":
        text = text.replace(char, f"\\{char}")
    return " ".join(text.split())


def describe_target(
    keep: int | None = None,
    penalty: float | None = None,
    budget: float | None = None,
    max_auc_loss: float | None = None,
    unit: str = "",
) -> str:
    """Return the target of a selection in words; empty if none is set.

    >>> describe_target(keep=20), describe_target(budget=2.5, unit="ms"), describe_target(max_auc_loss=0.001)
    ('keep exactly 20 fields', 'keep the total cost within 2.5 ms', 'lose at most 0.001 of AUC')
    """
    if keep is not None:
        return f"keep exactly {keep} field{'' if keep == 1 else 's'}"
    if penalty is not None:
        return f"use a fixed penalty of {penalty:g}"
    if budget is not None:
        return f"keep the total cost within {budget:g} {unit}".rstrip()
    return "" if max_auc_loss is None else f"lose at most {max_auc_loss:g} of AUC"
