"""README and docs: links lead somewhere, commands exist, code can be read, what code made is up to date."""

from __future__ import annotations

import re
import sys

import click
import pytest
from blocks import NAV, PAGES, ROOT, Block, anchors, blocks, every_block, tool

from lpfs.cli.app import cli
from lpfs.methods.registry import METHODS
from lpfs.models import MODELS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LANGUAGES = {"python", "sh", "toml", "text", "json"}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
named = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@named
def test_every_link_and_anchor_leads_somewhere(page):
    text = page.read_text("utf-8")
    for target in LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{page.name} -> {target}"
        assert goal.is_relative_to(ROOT), f"{page.name} -> {target}"
        if anchor:
            assert anchor in anchors(goal), f"{page.name} -> {target}; there are {sorted(anchors(goal))}"
        if page.parent.name == "docs" and path.startswith(".."):
            assert goal.is_file(), f"{page.name} -> {target}: the site takes files along, not folders"


def test_every_page_is_in_the_navigation_once():
    assert sorted(NAV) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@named
def test_every_block_says_its_language(page):
    for each in blocks(page):
        assert each.language in LANGUAGES, f"{each}: {each.language!r}"
    assert page.read_text("utf-8").count("\n```") % 2 == 0


@named
def test_what_is_not_run_says_why(page):
    marks = re.findall(r"^<!-- (?:not run|file): .+? -->$", page.read_text("utf-8"), re.MULTILINE)
    assert len(marks) == sum(bool(each.not_run or each.file) for each in blocks(page))


@pytest.mark.parametrize("block", every_block("python"), ids=str)
def test_python_can_be_read(block):
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", every_block("toml"), ids=str)
def test_toml_can_be_read(block):
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", every_block("sh"), ids=str)
def test_commands_exist_with_these_options(block):
    for words in block.commands():
        program = words[0].removeprefix(".venv/bin/")
        if program == "lpfs":
            parsed(words[1:])
        elif program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
            assert set(words[1:]) <= set(targets), f"{block}: {words}"
        elif program in ("python", "pytest"):
            paths = [each for each in words[1:] if each.endswith(".py")]
            assert paths, f"{block}: {words}"
            assert all((ROOT / each).is_file() for each in paths), f"{block}: {words}"
        elif program == "eval":
            parsed(re.findall(r"\$\(lpfs (.+)\)", words[1])[0].split())
        else:
            assert program in ("pip", "tensorboard") or block.not_run, f"{block}: what is {program}?"


def parsed(words: list[str]) -> None:
    """Read a command as click does, without running it."""
    if ">" in words:
        words = words[: words.index(">")]
    cli.commands[words[0]].make_context(
        words[0], words[1:], parent=click.Context(cli, info_name="lpfs", **cli.context_settings)
    )


def test_a_wrong_command_would_be_noticed():
    wrong = Block(ROOT / "README.md", 1, "sh", "lpfs select clicks.csv --kep 3  # a comment\n")
    with pytest.raises(click.UsageError):
        test_commands_exist_with_these_options(wrong)


@pytest.mark.parametrize("page", ["options.md", "methods.md"])
def test_pages_made_from_the_code_are_up_to_date(page):
    found = (ROOT / "docs" / page).read_text("utf-8")
    assert found == tool("pages").pages()[page], (
        f"run python tools/pages.py: docs/{page} is not what the code says"
    )


def test_every_command_method_and_model_is_on_its_page():
    def text(name: str) -> str:
        return (ROOT / "docs" / name).read_text("utf-8")

    assert [name for name in cli.commands if f"`lpfs {name}`" not in text("cli.md")] == []
    assert [name for name in METHODS if f"| [`{name}`]" not in text("methods.md")] == []
    assert [name for name in MODELS if f"| `{name}` |" not in text("models.md")] == []
    examples = [each.name for each in (ROOT / "examples").iterdir() if each.suffix in (".py", ".ipynb")]
    assert [name for name in examples if name not in text("examples.md")] == []


def test_paths_in_the_readme_exist():
    text = (ROOT / "README.md").read_text("utf-8")
    for path in re.findall(r"(?:tests|examples|benchmarks|docs)/[\w/.-]+\.\w+", text):
        assert (ROOT / path).exists(), path
