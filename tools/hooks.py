"""What the site needs beyond Markdown: files of the repository that pages link to, and formulas.

A page links to ``../examples/own_model.py`` as it would on a code host; the site copies that file, so that
the link works offline too. Formulas between ``$$`` become MathML, which browsers draw without a script.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FORMULA = re.compile(r"^\$\$(.+?)\$\$$", re.MULTILINE | re.DOTALL)


def outside(page: str) -> re.Pattern[str]:
    """Return the pattern of links from a page, as ``research/a.md``, to files outside of docs/."""
    return re.compile(r"\]\(" + r"\.\./" * (page.count("/") + 1) + r"(?!\.\./)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files that pages link to outside of docs/."""
    for page in files.documentation_pages():
        for target in outside(page.src_uri).findall(Path(page.abs_src_path).read_text("utf-8")):
            if (ROOT / target).is_file() and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to those files, and write formulas as MathML."""
    up = "../" * page.file.src_uri.count("/")
    markdown = outside(page.file.src_uri).sub(rf"]({up}\1", markdown)
    return FORMULA.sub(lambda match: _mathml(match[1]), markdown)


def _mathml(formula: str) -> str:
    from latex2mathml.converter import convert

    return str(convert(formula.strip(), display="block"))
