"""ComparisonPlan: which methods, numbers of fields and seeds to compare, and the runs that follow from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lpfs._validation import check_int, check_keys
from lpfs.errors import InputError
from lpfs.methods.registry import METHODS, make_method, trial_settings
from lpfs.methods.target import SelectionTarget

ALL_FIELDS = "all fields"  # name of the runs that train all fields, as a reference


@dataclass(frozen=True)
class RunSpec:
    """One run: a method, the number of fields it keeps, and the seed."""

    method: str
    keep: int
    seed: int

    @property
    def name(self) -> str:
        """The stem of its file names."""
        return f"{file_safe_name(self.method)}-k{self.keep}-s{self.seed}"

    def __str__(self) -> str:
        return f"{self.method}, keep {self.keep}, seed {self.seed}"


@dataclass(frozen=True)
class ComparisonPlan:
    """What to compare.

    Args:
        methods: names from ``lpfs methods``; ``all`` alone stands for all of them.
        keep: numbers of fields to keep, K.
        seeds: number of seeds.
        tune: number of option sets of each method to try on the validation rows; 0: only the first one, untuned.
        options: options of single methods instead of their defaults.
    """

    methods: tuple[str, ...]
    keep: tuple[int, ...]
    seeds: int = 3
    tune: int = 0
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (self.methods,) if isinstance(self.methods, str) else tuple(self.methods)
        names = tuple(METHODS) if names == ("all",) else tuple(dict.fromkeys(names))
        object.__setattr__(self, "methods", names)
        sizes = (self.keep,) if isinstance(self.keep, int) else tuple(self.keep)
        if not names or not sizes:
            raise InputError(f"a comparison needs methods and keep, found {list(names)} and {list(sizes)}")
        for size in sizes:
            check_int("keep", size, 1)
        check_int("seeds", self.seeds, 1)
        check_int("tune", self.tune, 0)
        object.__setattr__(self, "keep", tuple(sorted(set(sizes))))
        for name in dict.fromkeys((*names, *self.options)):
            make_method(name, self.options.get(name, {}))

    def check(self, names: Sequence[str], must_keep: Sequence[str] = ()) -> None:
        """Raise InputError if a number of fields is impossible for these fields."""
        for size in (self.keep[-1], self.keep[0]):
            SelectionTarget(keep=size, must_keep=tuple(must_keep)).check(names)

    def runs(self, first_seed: int, fields: int) -> list[RunSpec]:
        """Return every run, seed by seed, all fields first."""
        searches = [(method, size) for method in self.methods for size in self.keep]
        seeds = range(first_seed, first_seed + self.seeds)
        return [RunSpec(*run, seed) for seed in seeds for run in ((ALL_FIELDS, fields), *searches)]

    def trial_settings(self, method: str) -> list[dict[str, Any]]:
        """Return the option sets to try for a method; those of ``options`` come first."""
        return trial_settings(method, self.tune, self.options.get(method, {}))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, which ``from_json`` reads back."""
        return {**asdict(self), "methods": list(self.methods), "keep": list(self.keep)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ComparisonPlan:
        """Return a plan from plain values; an unknown key is an error."""
        return cls(**check_keys(cls, values))


def file_safe_name(name: str) -> str:
    """Return a name with only characters that are safe in a file name.

    >>> file_safe_name("all fields"), file_safe_name("lpfs++")
    ('all_fields', 'lpfs++')
    """
    return re.sub(r"[^A-Za-z0-9+_.]", "_", name)
