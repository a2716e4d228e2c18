"""README and docs: links lead somewhere, commands exist, code compiles, generated parts are up to date."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys

import click
import pytest

import lpfs
from lpfs.cli.app import cli
from tests.helpers.doc_blocks import DOCS, NAV, PAGES, ROOT, Block, anchors, blocks, every_block, tool

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNDOCUMENTED = {"REPORT_FILE", "build_report", "report_experiment", "write_report_safely"}  # for the pipeline
LANGUAGES = {"python", "sh", "toml", "text", "json"}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# words of a private idiom, with the plain ones to use instead
IDIOM = {
    r"by heart": "memorized",
    r"beyond noise": "statistically significant",
    r"bit by bit": "bit for bit",
    r"\bis told\b": "is reported",
    r"\bdear(er)?\b": "expensive",
    r"\banew\b": "again",
    r"\ba (field|row|run|step|gate|seed|day) a (field|row|run|step|gate|line|seed|file)\b": "one … per …",
    r"\bgo(es)? on (with|from|training)\b": "continues, resumes",
}
all_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@all_pages
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
        if page.is_relative_to(DOCS) and not goal.is_relative_to(DOCS):
            assert goal.is_file(), f"{page.name} -> {target}: the site copies files, not folders"


def test_every_page_is_in_the_navigation_once_and_there_are_few():
    assert sorted(NAV) == sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md"))
    assert len(list(DOCS.glob("*.md"))) <= 20


def test_the_method_fits_on_a_page():
    assert len((DOCS / "method.md").read_text("utf-8").splitlines()) <= 150


@all_pages
def test_every_block_says_its_language(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: {block.language!r}"
    assert page.read_text("utf-8").count("\n```") % 2 == 0


@all_pages
def test_what_is_not_run_says_why(page):
    marks = re.findall(r"^<!-- (?:not run|file): .+? -->$", page.read_text("utf-8"), re.MULTILINE)
    assert len(marks) == sum(bool(block.not_run or block.file) for block in blocks(page))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("options.md", "methods.md")], ids=lambda page: page.name
)
def test_plain_words(page):
    text = page.read_text("utf-8")
    found = {match[0]: plain for word, plain in IDIOM.items() if (match := re.search(word, text))}
    assert not found, f"{page.name}: write instead {found}"


@pytest.mark.parametrize("block", every_block("python"), ids=str)
def test_python_compiles(block):
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", every_block("toml"), ids=str)
def test_toml_can_be_read(block):
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", every_block("sh"), ids=str)
def test_commands_exist_with_these_options(block):
    for words in block.commands():
        program = words[0].removeprefix(".venv/bin/")
        if program == "lpfs":
            parse_command(words[1:])
        elif program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
            assert set(words[1:]) <= set(targets), f"{block}: {words}"
        elif program in ("python", "pytest"):
            paths = [word for word in words[1:] if word.endswith(".py")]
            assert paths, f"{block}: {words}"
            assert all((ROOT / path).is_file() for path in paths), f"{block}: {words}"
        elif program == "eval":
            parse_command(re.findall(r"\$\(lpfs (.+)\)", words[1])[0].split())
        else:
            assert program in ("pip", "tensorboard") or block.not_run, f"{block}: what is {program}?"


@all_pages
def test_commands_in_the_text_exist(page):
    """Commands between backticks, as in the tables of claims: the script or test is there, options are known."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for path in re.findall(r"`(?:\.venv/bin/)?(?:python|pytest) (?:-\S+ )*([\w/.]+\.py)", text):
        assert (ROOT / path).is_file(), f"{page.name}: {path}"
    for target in re.findall(r"`make ([\w-]+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE), target
    for command in re.findall(r"`lpfs (\w+ [^`…]+)`", text):
        if not re.search(r"\b[A-Z]+\b|\|", command):  # a placeholder, as NAME
            with contextlib.suppress(click.MissingParameter):  # only a part of the command
                parse_command(command.split())


def parse_command(words: list[str]) -> None:
    """Parse a command as click does, without running it."""
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
    text = (DOCS / page).read_text("utf-8")
    assert text == tool("pages").pages()[page], f"run python tools/pages.py: docs/{page} is not what the code says"


def test_the_table_of_the_readme_is_what_the_results_say():
    text = (ROOT / "README.md").read_text("utf-8")
    assert text == tool("readme_table").readme(text), "run python tools/readme_table.py"


def test_every_command_method_model_and_public_name_is_on_its_page():
    def text(name: str) -> str:
        return (DOCS / name).read_text("utf-8")

    assert [name for name in cli.commands if f"`lpfs {name}`" not in text("cli.md")] == []
    assert [name for name in lpfs.METHODS if f"| [`{name}`]" not in text("methods.md")] == []
    assert [name for name in lpfs.MODELS if f"| `{name}` |" not in text("models.md")] == []
    examples = [path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")]
    assert [name for name in examples if name not in text("getting-started.md")] == []
    documented = set(re.findall(r"^::: lpfs\.(?:\w+\.)*(\w+)$", text("api.md"), re.MULTILINE))
    public = list(lpfs.__all__)
    for package in ("adapters", "data", "embeddings", "export", "gates", "methods", "models", "paper", "report"):
        if importlib.util.find_spec(f"lpfs.{package}") is not None:
            public += getattr(importlib.import_module(f"lpfs.{package}"), "__all__", [])
    assert sorted(set(public) - documented - UNDOCUMENTED) == []


def test_paths_in_the_readme_exist():
    text = (ROOT / "README.md").read_text("utf-8")
    for path in re.findall(r"(?:tests|examples|benchmarks|docs|tools)/[\w/.-]+\.\w+", text):
        assert (ROOT / path).exists(), path
