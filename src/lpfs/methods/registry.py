"""Every method by name; adding one is a file here and a line in METHODS."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpfs.errors import InputError
from lpfs.schema import Selection, known_keys

if TYPE_CHECKING:  # so that the command line can list the methods without torch
    from lpfs.methods.task import Task
    from lpfs.methods.wish import Wish


@dataclass(frozen=True)
class Entry:
    """Where a method is, what it does in a line, and who proposed it.

    ``preset`` are options it starts from; ``tried`` are those that a tuning tries after its defaults, in order.
    ``each_keep`` says that another K is another search; else one gives scores that can be cut at every K.
    """

    module: str
    summary: str
    reference: str
    preset: tuple[tuple[str, Any], ...] = ()
    tried: tuple[Mapping[str, Any], ...] = ()
    each_keep: bool = False


PAPER = "Guo et al., LPFS: Learnable Polarizing Feature Selection for Click-Through Rate Prediction, 2022"
METHODS: dict[str, Entry] = {
    "lpfs++": Entry(
        "lpfs.methods.lpfs",
        "gates x²/(x²+ε) with an odd term, so that a dead field can come back",
        PAPER,
        tried=({"alpha": 30.0}, {"lr": 0.02}, {"lr": 0.005}, {"alpha": 100.0}),
        each_keep=True,
    ),
    "lpfs": Entry(
        "lpfs.methods.lpfs",
        "gates x²/(x²+ε)",
        PAPER,
        (("gate", "lpfs"),),
        ({"lr": 0.01}, {"lr": 0.0025}, {"epsilon": 0.2}, {"epsilon": 0.05}),
        each_keep=True,
    ),
    "permutation": Entry(
        "lpfs.methods.permutation",
        "AUC lost on held-out rows when a field is shuffled; the best K of that ranking",
        "Fisher et al., All Models are Wrong, but Many are Useful, 2019",
        tried=({"repeats": 3},),
    ),
}
FACTORS = (0.3, 3.0, 0.1, 10.0)  # on λ of a method that does not say what to try
LAMBDAS = ("penalty", "strength")  # options that are a λ


def entry_of(name: str) -> Entry:
    """Return what is known about a method."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"there is no method {name!r}{hint}; known are {', '.join(METHODS)}")
    return METHODS[name]


def options_of(name: str, options: Mapping[str, Any]) -> Any:
    """Return the settings of a method, checked, with those that its name stands for."""
    entry = entry_of(name)
    kind = importlib.import_module(entry.module).Options
    return kind(**known_keys(kind, {**dict(entry.preset), **options}))


def settings_to_try(name: str, count: int) -> list[dict[str, Any]]:
    """Return at most ``count`` settings for a tuning, the defaults first.

    They are those of ``Entry.tried``; for a method that names none but has a λ among its options, factors on it.

    >>> settings_to_try("permutation", 3)
    [{}, {'repeats': 3}]
    """
    tried, options = entry_of(name).tried, options_of(name, {})
    for each in LAMBDAS:
        value = getattr(options, each, None)
        if not tried and isinstance(value, float) and value > 0:
            tried = tuple({each: value * factor} for factor in FACTORS)
    return [{}, *map(dict, tried)][: max(1, count)]


def check_method(name: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown method or option, or a value that is none, before anything runs."""
    options_of(name, options)


def check_search(name: str, options: Mapping[str, Any], wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search of these fields that could not be begun, before anything is trained for it."""
    wish.check(names)
    importlib.import_module(entry_of(name).module).check(options_of(name, options), wish, names, steps)


def method_named(name: str) -> Callable[[Task], Selection]:
    """Return the search of a method."""
    entry = entry_of(name)

    def search(task: Task) -> Selection:
        task.options = {**dict(entry.preset), **task.options}
        found: Selection = importlib.import_module(entry.module).search(task)
        return found

    return search
