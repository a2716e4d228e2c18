"""Wish: what a search is asked for, in one of four ways, checked before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lpfs.errors import FieldError, InputError
from lpfs.methods.costs import Costs

# The AUC loss that is allowed where nothing is asked for.
DEFAULT_LOSS = 0.001


@dataclass(frozen=True)
class Wish:
    """How much to keep: exactly one of the first four, or none, which allows a small AUC loss.

    Args:
        keep: exactly so many fields.
        penalty: the paper's fixed λ.
        budget: what the kept fields may cost together, see ``costs``.
        max_auc_loss: as few fields as possible, this much validation AUC below that of all fields at most.
        must_keep: fields that stay in any case; they count within ``keep`` and ``budget``.
        costs: what each field costs, needed by ``budget``; with ``keep`` they weight λ.

    """

    keep: int | None = None
    penalty: float | None = None
    budget: float | None = None
    max_auc_loss: float | None = None
    must_keep: tuple[str, ...] = ()
    costs: Costs | None = field(default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "must_keep", tuple(self.must_keep))
        ways = {name: getattr(self, name) for name in ("keep", "penalty", "budget", "max_auc_loss")}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"say what you want in one way: found {' and '.join(given)}")
        if not given:
            object.__setattr__(self, "max_auc_loss", DEFAULT_LOSS)
        for name in ("penalty", "budget", "max_auc_loss"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value < float("inf")):
                raise InputError(f"{name} must be a number >= 0, found {value!r}")
        if self.keep is not None and (isinstance(self.keep, bool) or not isinstance(self.keep, int)):
            raise InputError(f"keep must be a whole number of fields, found {self.keep!r}")
        if self.budget is not None and self.costs is None:
            raise InputError("a budget needs to know what each field costs: give costs=")

    def check(self, names: Sequence[str]) -> None:
        """Refuse what cannot be had from these fields."""
        if self.keep is not None and not 1 <= self.keep <= len(names):
            raise InputError(f"keep must be between 1 and the {len(names)} fields, found {self.keep}")
        for name in self.must_keep:
            known(name, names, "must_keep")
        if self.keep is not None and len(self.must_keep) > self.keep:
            raise InputError(f"keep={self.keep}, but {len(self.must_keep)} fields must be kept")
        if self.costs is not None:
            self.costs.check(names)
        if self.budget is not None and self.costs is not None:
            least = self.costs.total(self.must_keep) if self.must_keep else self.costs.cheapest(names)
            if self.budget < least:
                what = "the fields that must be kept" if self.must_keep else "even the cheapest field"
                raise InputError(f"a budget of {self.budget:g} is too small: {what} costs {least:g}")


def known(name: str, names: Sequence[str], where: str) -> None:
    """Refuse a name that is no field, with the nearest one suggested."""
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names[:10])}"
        raise FieldError(f"{where}: there is no field {name!r}{hint}")


def listed(names: Mapping[str, object] | Sequence[str] | str) -> tuple[str, ...]:
    """Return names given as one text with commas, or as several."""
    if isinstance(names, str):
        return tuple(each.strip() for each in names.split(",") if each.strip())
    return tuple(names)
