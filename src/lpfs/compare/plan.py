"""Plan: which methods, how many fields, which seeds; and the runs that makes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lpfs.errors import InputError
from lpfs.methods.registry import METHODS, check_method, settings_to_try
from lpfs.methods.wish import Wish
from lpfs.schema import known_keys

ALL_FIELDS = "all fields"  # trained as the selections are, to compare with


@dataclass(frozen=True)
class RunSpec:
    """One run: a method, how many fields it keeps, and the seed."""

    method: str
    keep: int
    seed: int

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{file_safe_name(self.method)}-k{self.keep}-s{self.seed}"

    def __str__(self) -> str:
        return f"{self.method}, keep {self.keep}, seed {self.seed}"


@dataclass(frozen=True)
class ComparisonPlan:
    """What to compare.

    Args:
        methods: names out of ``lpfs methods``; ``all`` alone stands for every one.
        keep: numbers of fields, K.
        seeds: how many seeds.
        tune: how many settings of each method are tried on validation rows; 0: its defaults, untried.
        options: settings of single methods in place of their defaults.

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
            raise InputError(f"a comparison needs methods and keep=, found {list(names)} and {list(sizes)}")
        for name, value, least in [
            *(("keep", size, 1) for size in sizes),
            ("seeds", self.seeds, 1),
            ("tune", self.tune, 0),
        ]:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} must be a whole number >= {least}, found {value!r}")
        object.__setattr__(self, "keep", tuple(sorted(set(sizes))))
        for name in names:
            check_method(name, self.options.get(name, {}))
        for name, options in self.options.items():
            check_method(name, options)

    def check(self, parts: Sequence[str], must_keep: Sequence[str] = ()) -> None:
        """Refuse sizes that cannot be had from these fields."""
        for size in (self.keep[-1], self.keep[0]):
            Wish(keep=size, must_keep=tuple(must_keep)).check(parts)

    def jobs(self, first_seed: int, fields: int) -> list[RunSpec]:
        """Return every run, seed by seed, all fields first."""
        found = []
        for seed in range(first_seed, first_seed + self.seeds):
            found.append(RunSpec(ALL_FIELDS, fields, seed))
            found += [RunSpec(method, size, seed) for method in self.methods for size in self.keep]
        return found

    def trial_settings(self, method: str) -> list[dict[str, Any]]:
        """Return the settings that a method is tried with; those given go before its defaults."""
        return settings_to_try(method, self.tune, self.options.get(method, {}))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_json`` reads them back."""
        values = asdict(self)
        return {**values, "methods": list(self.methods), "keep": list(self.keep)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ComparisonPlan:
        """Build a plan from plain values; an unknown key is an error."""
        return cls(**known_keys(cls, values))


def file_safe_name(name: str) -> str:
    """Return a name that is fit for a file.

    >>> plain("all fields"), plain("lpfs++")
    ('all_fields', 'lpfs++')
    """
    return re.sub(r"[^A-Za-z0-9+_.]", "_", name)
