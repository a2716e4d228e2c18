"""Allowance: how much AUC the kept fields may lose against all fields, and the check of the final model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lpfs.pipeline.plan import RunPlan
from lpfs.pipeline.stages import RowScores
from lpfs.train.intervals import Z_950

GAIN_SHARE = 0.01  # allowed loss, of what all fields gain over none
Z_POWER = 0.842  # normal quantile: a set without any loss passes the check in 80 % of all cases
SMALLEST = "smallest loss that these rows can decide"  # reason of an allowance
GROWTH = 0.25  # share by which the number of fields grows if the check fails
MAX_TRIES = 5  # searches of a run without a number of fields


@dataclass(frozen=True)
class Allowance:
    """The allowed loss of AUC and where it comes from.

    Args:
        allowed: loss of AUC that is allowed; ``because`` is the reason.
        se_training: standard error, on the validation rows, of the AUC difference of two trainings of all fields.
        positives: of the validation rows.
        finds_count: whether the number of fields depends on the allowance.
    """

    allowed: float
    because: str
    se_training: float
    positives: int
    finds_count: bool = True

    @classmethod
    def of_run(cls, plan: RunPlan, full: RowScores, pretrained: RowScores) -> Allowance:
        """Return the allowance of a run: the given one, or the default, from scores on the validation rows.

        The default is 1 % of AUC(all) - 0.5. It is larger if the validation rows cannot decide so small a loss: the
        difference between two trainings of all fields, which is known to be about zero, has a standard error there.
        """
        se_training = full.loss_to(pretrained).se_rows
        known = se_training, full["positives"], plan.settings.finds_count
        given = plan.settings.max_auc_loss
        if given is not None:
            return cls(given, "given", *known)
        gain, decidable = GAIN_SHARE * max(0.0, (full["auc"] or 0.5) - 0.5), (Z_950 + Z_POWER) * se_training
        if math.isnan(gain) or gain >= decidable:
            return cls(gain, "1 % of what all fields gain over none", *known)
        return cls(decidable, SMALLEST, *known)

    def describe(self) -> str:
        """Return the allowance in words."""
        return f"{self.allowed:.4f} of AUC may be lost ({self.because})"

    def check(self, full: RowScores, kept: RowScores, fields: int) -> dict[str, Any]:
        """Return the paired loss of AUC of a model on the validation rows, and whether the allowance holds."""
        difference = full.loss_to(kept)
        return {
            "fields": fields,
            "loss": difference.value,
            "upper": difference.upper,
            "rows": full["rows"],
            "positives": full["positives"],
            "holds": bool(difference.upper <= self.allowed),
        }


def describe_check(check: Mapping[str, Any], allowance: Allowance) -> str:
    """Return the result of a check in words."""
    return (
        f"{check['fields']} fields {describe_change(check)} on {check['rows']:,} validation rows; "
        f"{allowance.allowed:.4f} may be lost: it {'holds' if check['holds'] else 'does not hold'}"
    )


def describe_change(check: Mapping[str, Any]) -> str:
    """Return the loss of a check and its bound in words; a loss below zero is a gain.

    >>> describe_change({"loss": 0.0031, "upper": 0.0052})
    'lose 0.0031 of AUC (at most 0.0052 at 95 %)'
    >>> describe_change({"loss": -0.0079, "upper": 0.0039})
    'gain 0.0079 of AUC (or lose at most 0.0039 at 95 %)'
    >>> describe_change({"loss": -0.0786, "upper": -0.0354})
    'gain 0.0786 of AUC (at least 0.0354 at 95 %)'
    """
    loss, upper = check["loss"], check["upper"]
    if not loss < 0:  # also NaN
        return f"lose {loss:.4f} of AUC (at most {upper:.4f} at 95 %)"
    bound = f"or lose at most {upper:.4f}" if upper >= 0 else f"at least {-upper:.4f}"
    return f"gain {-loss:.4f} of AUC ({bound} at 95 %)"


def next_size(fields: int, total: int) -> int:
    """Return the number of fields to try after ``fields`` were too few.

    >>> next_size(3, 20), next_size(10, 20), next_size(19, 20)
    (4, 13, 20)
    """
    return min(total, fields + max(1, math.ceil(GROWTH * fields)))
