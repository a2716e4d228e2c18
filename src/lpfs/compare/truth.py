"""The truth of a simulated log, where there is one: which fields matter, which are copies, pairs or noise."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lpfs.compare.store import put, read
from lpfs.data.dataset import Dataset
from lpfs.errors import InputError

NAME = "truth.json"
TRUE = ("main", "pair")  # the click depends on these
# in the order of the tables
KINDS = {
    "main": "true, by itself",
    "pair": "true, only with its partner",
    "copy": "noisy copy of a true one",
    "correlated": "shares a cause with a true one",
    "noise": "noise",
}


def keep_truth(folder: Path, dataset: Dataset, given: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the kind of every field, and keep it with the comparison; empty where the truth is not known."""
    place = folder / NAME
    if given is not None:
        try:
            values = json.loads(Path(given).read_text("utf-8"))
            put(place, {each["name"]: each["role"] for each in values["fields"]})
        except OSError as error:
            raise InputError(f"the truth {os.fspath(given)} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{os.fspath(given)} is not the truth.json of a simulated log") from None
    elif not place.exists():
        try:
            values = dataset.attached(NAME)
        except InputError:
            return {}
        put(place, {each["name"]: each["role"] for each in values["fields"]})
    kinds = read(place) or {}
    order = list(KINDS)
    return dict(sorted(kinds.items(), key=lambda each: order.index(each[1]) if each[1] in order else len(order)))
