"""Write the comparison table of README.md from the committed results of ``lpfs compare``.

    python benchmarks/compare_summary.py --out benchmarks/results/compare_summary.json
    python tools/readme_table.py

The table stands between two marks in README.md. ``tests/docs/test_pages.py`` compares it with the results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "benchmarks" / "logs.json"
SUMMARY = ROOT / "benchmarks" / "results" / "compare_summary.json"
BEGIN, END = "<!-- made by tools/readme_table.py -->", "<!-- end -->"
RIVALS = 10  # the best by mean rank
SHARES = ("N/8", "N/4", "N/2")


def main() -> None:
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text("utf-8")), "utf-8")


def readme(text: str) -> str:
    """Return README.md with the table as the results have it."""
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n" + "\n".join(table()) + f"\n{END}{after}"


def table() -> Iterator[str]:
    """Yield the lines of the table of unseen logs: LPFS++ and the rivals with the best mean ranks."""
    values = json.loads(SUMMARY.read_text("utf-8"))
    reference = values["reference"]
    auc, ranks, overall = ([row for row in values[key] if row["unseen"]] for key in ("auc", "ranks", "overall"))
    by_size = {row["keep"]: row["auc"] for row in auc}
    differences = {(row["method"], row["keep"]): row for row in overall}
    logs = max(row["logs"] for row in ranks)
    families = {row["family"]: row["logs"] for row in values["differences"] if row["unseen"]}
    names = ", ".join(f"{count} `{family}`" for family, count in families.items())
    total = sum(log["status"] == "unseen" for log in json.loads(LOGS.read_text("utf-8"))["logs"])
    yield f"{logs} of {total} logs so far: {names}.\n"
    yield f"| method | mean rank of {len(ranks)} | {' | '.join(f'K = {share}' for share in SHARES)} |"
    yield "|---|" + "---:|" * (1 + len(SHARES))
    rivals = [row for row in ranks if row["method"] != reference and row["logs"] == logs][:RIVALS]
    for row in sorted([*rivals, *(row for row in ranks if row["method"] == reference)], key=lambda row: row["rank"]):
        method = row["method"]
        if method == reference:
            cells = [f"{by_size[share]:.4f}" for share in SHARES]
        else:
            cells = [difference_cell(differences[method, share]) for share in SHARES]
        name = f"**`{method}`**" if method == reference else f"`{method}`"
        yield f"| {name} | {row['rank']:.1f} | {' | '.join(cells)} |"
    every = f"{by_size['N']:.4f}"
    yield f"| all N fields | | {' | '.join([every] * len(SHARES))} |"


def difference_cell(row: dict[str, Any]) -> str:
    """Return a difference with its half interval, in bold if it is significant after Holm's correction."""
    text = f"{row['difference']:+.4f} ± {(row['high'] - row['low']) / 2:.4f}"
    return text if row["verdict"] == "level" else f"**{text}**"


if __name__ == "__main__":
    main()
