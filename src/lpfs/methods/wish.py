"""Wish: what a search is asked for, in one of four ways, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lpfs.errors import InputError
from lpfs.methods.costs import Costs
from lpfs.methods.known import known

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
        object.__setattr__(self, "must_keep", tuple(dict.fromkeys(self.must_keep)))
        ways = {name: getattr(self, name) for name in ("keep", "penalty", "budget", "max_auc_loss")}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"say what you want in one way: found {' and '.join(given)}")
        if not given:
            object.__setattr__(self, "max_auc_loss", DEFAULT_LOSS)
        for name in ("penalty", "budget", "max_auc_loss"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value < float("inf")):
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
            weights = self.costs.weights(names, names)
            free = [name for name, cost in zip(names, weights, strict=True) if cost == 0 and any(weights)]
            stay = {*free, *self.must_keep}
            if self.keep is not None and len(stay) > self.keep:
                raise InputError(
                    f"keep={self.keep}, but {len(stay)} fields must be kept or cost nothing, and such fields are "
                    "never dropped; give them a small cost, or keep more"
                )
        if self.budget is not None and self.costs is not None:
            least = self.costs.total(self.must_keep) if self.must_keep else self.costs.cheapest(names)
            if self.budget < least:
                what = "the fields that must be kept" if self.must_keep else "even the cheapest field"
                raise InputError(f"a budget of {self.budget:g} is too small: {what} costs {least:g}")
