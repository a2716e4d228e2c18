"""Write the pages that say what the code says: every option of the command line, every method.

    python tools/pages.py

``docs/options.md`` is written whole, ``docs/methods.md`` between its two marks. A test compares both with the
code.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from lpfs.cli.app import Command, cli
from lpfs.errors import LpfsError
from lpfs.methods.costs import Costs
from lpfs.methods.registry import METHODS, check_search
from lpfs.methods.wish import Wish

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
    """Yield the lines about each method; those of one file have one heading."""
    files: dict[str, list[str]] = {}
    for name, entry in METHODS.items():
        files.setdefault(entry.module, []).append(name)
    yield from ("| name | what it does | one search gives | takes |", "|---|---|---|---|")
    for name, entry in METHODS.items():
        gives = "one K" if entry.each_keep else "a ranking, cut at every K"
        linked = f"[`{name}`](#{anchor(', '.join(files[entry.module]))})"
        yield f"| {linked} | {cell(entry.summary)} | {gives} | {', '.join(taken(name))} |"
    for path, names in files.items():
        module, entry = importlib.import_module(path), METHODS[names[0]]
        yield from ("", f"## {', '.join(names)}", "", *prose(module.__doc__ or ""), *formula_of(module), "")
        cited = "" if entry.reference == "-" else f" Reference: {entry.reference}."
        yield f"Code: [{path}](../src/{path.replace('.', '/')}.py).{cited}"
        yield from options(module.Options, dict(entry.preset))
    yield ""


def taken(name: str) -> Iterator[str]:
    """Yield the ways to say what is wanted that a method does not refuse."""
    fields = ["a", "b", "c"]
    costs = Costs(dict.fromkeys(fields, 1.0))
    ways = {"keep": Wish(keep=2), "penalty": Wish(penalty=0.1), "max_auc_loss": Wish(max_auc_loss=0.001)}
    for way, wish in {**ways, "budget": Wish(budget=2.0, costs=costs)}.items():
        try:
            check_search(name, {}, wish, fields, 1000)
        except LpfsError:
            continue
        yield f"`{way}`"


def formula_of(module: ModuleType) -> Iterator[str]:
    """Yield what a class of the module says in a formula, where the module itself has none."""
    if "math::" in (module.__doc__ or ""):
        return
    for each in vars(module).values():
        if inspect.isclass(each) and each.__module__ == module.__name__ and "math::" in (each.__doc__ or ""):
            yield from ("", *prose(each.__doc__ or ""))


def anchor(name: str) -> str:
    """Return what a heading is linked by, on the site and on code hosts."""
    return re.sub(r"[^\w-]", "", name.replace(" ", "-"))


def options(kind: Any, preset: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the settings of a method and their defaults."""
    fields = dataclasses.fields(kind)
    if not fields:
        yield from ("", "It has no options.")
        return
    yield from ("", *prose(kind.__doc__ or ""), "", "| `--method-option` | default |", "|---|---|")
    for each in fields:
        yield f"| `{each.name}` | `{preset.get(each.name, each.default)}` |"


def prose(docstring: str) -> list[str]:
    """Return a docstring as Markdown: formulas between dollars, names as code."""
    text = inspect.cleandoc(docstring)
    text = re.sub(
        r"^\.\. math::\s*(.+?)(?=\n\n|\Z)", lambda found: f"$${found[1].strip()}$$", text, flags=re.M | re.S
    )
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text).replace("``", "`")
    return text.splitlines()


def cell(text: str) -> str:
    """Return text that fits into a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
