"""Write the table in docs/adapters.md from the results of the tests: python tests/adapters/table.py."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "adapters.md"
BEGIN, END = "<!-- made by tests/adapters/table.py -->\n", "<!-- end -->\n"
PACKAGES = {"torchrec": "TorchRec", "fuxictr": "FuxiCTR", "deepctr": "DeepCTR-Torch", "plain": "plain torch"}
COLUMNS = {
    "attach": "attach",
    "leak": "ungated parts",
    "truth": "planted truth found",
    "absorb": "absorb",
    "prune": "prune, zeros fed",
    "cut": "prune, columns cut",
}


def table() -> str:
    """Return the table in Markdown: one row per model, one column per check."""
    lines = ["| | model | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for package, title in PACKAGES.items():
        path = HERE / "results" / f"{package}.json"
        rows = json.loads(path.read_text("utf-8")) if path.exists() else {}
        for model, results in rows.items():
            cells = [results.get(check, "not tested").replace("|", "\\|") for check in COLUMNS]
            lines.append(f"| {title} | {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with the current table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
