"""The code blocks of Markdown pages, and the comment in front of a block.

<!-- not run: reason -->      it is checked, but not run
<!-- file: name.py -->        it is written to that file, and not run by itself
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAV = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
MARK = re.compile(r"<!-- (not run|file): (.+?) -->\n$")


@dataclass(frozen=True)
class Block:
    """One block: its place, its language, and what the comment in front of it says."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def commands(self) -> list[list[str]]:
        """Return the commands of a block of sh, as words."""
        text = self.text.replace("\\\n", " ")
        return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text, result = page.read_text("utf-8"), []
    for fence in FENCE.finditer(text):
        mark = MARK.search(text[: fence.start()])
        options = {mark[1].replace(" ", "_"): mark[2]} if mark else {}
        result.append(Block(page, text.count("\n", 0, fence.start()) + 1, fence[1], fence[2], **options))
    return result


def every_block(language: str) -> list[Block]:
    """Return the blocks of all pages in one language."""
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as code hosts and the site make them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def tool(name: str) -> Any:
    """Return a module of tools/, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
