"""Write the pages that say what the code says: every option of the command line, every method.

    python tools/pages.py

``docs/options.md`` is written whole, ``docs/methods.md`` between its two marks. A test compares both with the
code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from lpfs.cli.app import Command, cli
from lpfs.methods.base import Method
from lpfs.methods.registry import METHODS, method_class

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- made by tools/pages.py -->", "<!-- until here -->"


def main() -> None:
    for name, text in pages().items():
        (DOCS / name).write_text(text, "utf-8")


def pages() -> dict[str, str]:
    """Return the pages by name, as they should be."""
    methods = (DOCS / "methods.md").read_text("utf-8")
    before, after = methods.split(BEGIN)[0], methods.split(END)[1]
    told = "\n".join(every_method())
    return {"options.md": "\n".join(every_option()), "methods.md": f"{before}{BEGIN}\n\n{told}\n{END}{after}"}


def every_option() -> Iterator[str]:
    """Yield the lines of the page of options."""
    yield "# Every option"
    yield ""
    yield "What `--help` says, on one page, made from the commands themselves (`python tools/pages.py`)."
    yield "[The command line](cli.md) says how the commands go together, and what all of them share."
    context = click.Context(cli, info_name="lpfs", **cli.context_settings)
    for name in cli.list_commands(context):
        command = cli.commands[name]
        assert isinstance(command, Command)
        inner = click.Context(command, info_name=name, parent=context)
        usage = " ".join(["lpfs", name, *command.collect_usage_pieces(inner)])
        yield from ("", f"## {name}", "", inspect.cleandoc(command.help or ""), "", "```text", usage, "```")
        for title, records in command.sections(inner).items():
            yield from ("", f"**{title}**", "", "| option | |", "|---|---|")
            yield from (f"| `{cell(names)}` | {cell(told)} |" for names, told in records)
        yield from ("", "```sh", *command.examples, "```")
    yield ""


def every_method() -> Iterator[str]:
    """Yield the lines about each method: a table of all, then a section each, from the docstrings of the classes.

    A method that derives from another one is in its section.
    """
    sections: dict[type[Method], list[str]] = {}
    for name in METHODS:
        cls = method_class(name)
        sections.setdefault(next((base for base in sections if issubclass(cls, base)), cls), []).append(name)
    anchors = {name: anchor(", ".join(names)) for names in sections.values() for name in names}
    yield from ("| name | what it does | one search gives | targets |", "|---|---|---|---|")
    for name, entry in METHODS.items():
        cls = method_class(name)
        gives = "one K" if cls.search_per_k else "a ranking, for every K"
        targets = ", ".join(f"`{kind}`" for kind in cls.targets)
        yield f"| [`{name}`](#{anchors[name]}) | {cell(entry.summary)} | {gives} | {targets} |"
    for cls, names in sections.items():
        yield from ("", f"## {', '.join(names)}", "", *prose(cls.__doc__ or ""), *mask_formula(cls))
        for name in names[1:]:
            yield from ("", f"`{name}`: {chr(10).join(prose(method_class(name).__doc__ or ''))}")
        entry = METHODS[names[0]]
        path = entry.path.partition(":")[0]
        reference = "" if entry.reference == "-" else f" Reference: {entry.reference}."
        yield from ("", f"Code: [{path}](../src/{path.replace('.', '/')}.py).{reference}", *options(cls.Options))
    yield ""


def mask_formula(cls: type[Method]) -> Iterator[str]:
    """Yield the docstring of the mask that a method trains, which has the formula."""
    mask = getattr(cls, "mask_class", None)
    if mask is not None:
        yield from ("", *prose(mask.__doc__ or ""))


def anchor(name: str) -> str:
    """Return what a heading is linked by, on the site and on code hosts."""
    return re.sub(r"[^\w-]", "", name.replace(" ", "-"))


def options(kind: Any) -> Iterator[str]:
    """Yield a table of the settings of a method and their defaults."""
    fields = dataclasses.fields(kind)
    if not fields:
        yield from ("", "It has no options.")
        return
    yield from ("", *prose(kind.__doc__ or ""), "", "| `--method-option` | default |", "|---|---|")
    for field in fields:
        yield f"| `{field.name}` | `{field.default}` |"


def prose(docstring: str) -> list[str]:
    """Return a docstring as Markdown: formulas between dollars, names as code."""
    text = inspect.cleandoc(docstring)
    text = re.sub(r"^\.\. math::\s*(.+?)(?=\n\n|\Z)", lambda found: f"$${found[1].strip()}$$", text, flags=re.M | re.S)
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text).replace("``", "`")
    return text.splitlines()


def cell(text: str) -> str:
    """Return text that fits into a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
