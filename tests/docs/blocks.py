"""The code blocks of a Markdown page, and what a comment in front of one says about it.

<!-- not run: reason -->      it is looked at, but not run
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
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAV = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
MARK = re.compile(r"<!-- (not run|file): (.+?) -->\n$")


@dataclass(frozen=True)
class Block:
    """One block: where it begins, in which language, and what its mark says."""

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
    """Return the blocks of a page in their order."""
    text, found = page.read_text("utf-8"), []
    for each in FENCE.finditer(text):
        mark = MARK.search(text[: each.start()])
        said = {mark[1].replace(" ", "_"): mark[2]} if mark else {}
        found.append(Block(page, text.count("\n", 0, each.start()) + 1, each[1], each[2], **said))
    return found


def every_block(language: str) -> list[Block]:
    """Return the blocks of all pages in one language."""
    return [each for page in PAGES for each in blocks(page) if each.language == language]


def anchors(page: Path) -> set[str]:
    """Return what can be linked to on a page, as code hosts and the site name headings."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-"))
    return found


def tool(name: str) -> Any:
    """Return a module of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
