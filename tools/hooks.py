"""What the site needs beyond Markdown: files of the repository that pages link to, and formulas.

A page links to ``../examples/own_model.py`` as it would on a code host; the site takes that file along, so that
the link leads somewhere offline too. Formulas between ``$$`` become MathML, which browsers draw by themselves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
FORMULA = re.compile(r"^\$\$(.+?)\$\$$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Take the files along that pages link to outside of docs/."""
    for page in files.documentation_pages():
        for target in OUTSIDE.findall(Path(page.abs_src_path).read_text("utf-8")):
            if (ROOT / target).is_file() and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to those files, and write formulas as MathML."""
    from latex2mathml.converter import convert

    markdown = OUTSIDE.sub(r"](\1", markdown)
    return FORMULA.sub(lambda found: convert(found[1].strip(), display="block"), markdown)
