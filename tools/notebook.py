"""Run the notebook from its first cell to its last, and write what it shows back into it.

    python tools/notebook.py

It needs ``pip install 'lpfs[docs]'``. ``make test-docs`` runs it too, without writing.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "lpfs.ipynb"


def main() -> None:
    import nbformat

    done = executed(NOTEBOOK)
    for cell in done.cells:
        cell.get("metadata", {}).pop("execution", None)  # the time of day says nothing
    nbformat.write(done, NOTEBOOK)
    print(f"{NOTEBOOK}: {NOTEBOOK.stat().st_size / 1000:.0f} kB")


def executed(path: Path) -> Any:
    """Return the notebook with its outputs, run in an empty folder; an error in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="lpfs-") as folder:
        client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}})
        client.execute()
    return notebook


if __name__ == "__main__":
    main()
