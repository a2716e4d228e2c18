"""Write the comparison table of README.md from the committed results of ``lpfs compare``.

    python tools/readme_table.py

The table stands between two marks in README.md. ``tests/docs/test_pages.py`` compares it with the JSON files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "compare"
BEGIN, END = "<!-- made by tools/readme_table.py -->", "<!-- end -->"

# folder of the results -> name in the table; the three smallest K of each are shown. The simulated log `industrial` is
# left out: the control of λ was tuned on it.
TABLES = {
    "census": "census",
    "coil2000": "COIL 2000",
    "bank": "bank marketing",
    "small": "simulated `small`",
    "terabyte": "simulated `terabyte`",
}
METHODS = {
    "lpfs++": "LPFS++",
    "lpfs": "LPFS",
    "shufflegate": "ShuffleGate",
    "permutation": "permutation",
    "gbdt": "boosted trees",
    "mutual_information": "mutual information",
}
NOT_RANKED = ("all", "oracle")  # every field; the known truth


def main() -> None:
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text("utf-8")), "utf-8")


def readme(text: str) -> str:
    """Return README.md with the table as the results have it."""
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n" + "\n".join(table()) + f"\n{END}{after}"


def table() -> Iterator[str]:
    """Yield the lines of the table: one row per table and K, the best AUC of each row in bold."""
    yield f"| table, fields | K | {' | '.join(METHODS.values())} | best of all methods | all fields |"
    yield "|---|" + "---:|" * (len(METHODS) + 2) + "---:|"
    for folder, name in TABLES.items():
        values = json.loads((RESULTS / folder / "comparison.json").read_text("utf-8"))
        for number, keep in enumerate(map(str, sorted(values["sizes"])[:3])):
            auc = auc_by_method(values, keep)
            best = max(auc, key=lambda method: auc[method])
            texts = [f"{auc[method]:.4f}" for method in METHODS]
            cells = [f"**{text}**" if text == f"{auc[best]:.4f}" else text for text in texts]
            whole = f"{values['all_fields']['auc']['value']:.4f}"
            title = f"{name}, {values['fields']}" if number == 0 else ""
            yield f"| {title} | {keep} | {' | '.join(cells)} | {auc[best]:.4f} `{best}` | {whole} |"


def auc_by_method(values: dict[str, Any], keep: str) -> dict[str, float]:
    """Return method -> mean test AUC of the fields that it kept, for one K."""
    return {
        name: record["sizes"][keep]["auc"]["value"]
        for name, record in values["methods"].items()
        if name not in NOT_RANKED and record["sizes"].get(keep, {}).get("auc") is not None
    }


if __name__ == "__main__":
    main()
