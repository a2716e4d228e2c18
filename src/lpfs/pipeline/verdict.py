"""The verdict of a run: whether the kept fields are enough, what they cost, or why that cannot be decided.

A loss is AUC(all fields) - AUC(kept fields) of the two final models on the same rows. The validation rows check the
allowance δ: the one-sided 95 % upper bound of the loss must not exceed it. The test rows, on which nothing was chosen,
give the loss and its two-sided 95 % interval, and can contradict the check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lpfs.pipeline.allowance import SMALLEST, Z_POWER, describe_change
from lpfs.pipeline.stages import RowScores
from lpfs.report.format import format_count, format_with_interval
from lpfs.train.intervals import Z_950, PairedDifference

MAX_ALLOWED_SHARE = 0.05  # of AUC(all) - 0.5; if the rows can only decide larger losses, nothing is called enough

Record = dict[str, Any]


@dataclass(frozen=True)
class LossOnRows:
    """The loss from all fields to the kept fields on some rows."""

    auc: PairedDifference
    logloss: PairedDifference
    full_auc: float
    rows: int
    positives: int
    full_low: float = 1.0  # lower end of the interval of the AUC of all fields

    @classmethod
    def of(cls, full: RowScores, kept: RowScores) -> LossOnRows:
        """Compare the predictions of two models for the same rows."""
        full_auc = math.nan if full["auc"] is None else full["auc"]
        pairs = full["positives"] * (full["rows"] - full["positives"])
        auc = full.loss_to(kept)
        # DeLong's error is zero if no order changes, as where both models separate the classes; no sample shows that
        auc = replace(auc, se_rows=max(auc.se_rows, 0.5 / math.sqrt(max(1, pairs))))
        low = full["auc_low"] or 0.0
        return cls(auc, full.logloss_to(kept), full_auc, full["rows"], full["positives"], low)

    def describe(self) -> str:
        """Return the loss with its interval, and the rows."""
        return f"{format_loss(self.auc)} of AUC ({self.describe_rows()})"

    def describe_rows(self) -> str:
        """Return the number of rows and positives."""
        return f"{format_count(self.rows, 'row')}, {format_count(self.positives, 'positive')}"


def format_loss(difference: PairedDifference) -> str:
    """Return a loss with its two-sided 95 % interval."""
    interval = difference.interval
    return format_with_interval(interval.value, interval.high - interval.value)


def format_auc(scores: Record) -> str:
    """Return an AUC with its 95 % interval; a dash if it is not defined."""
    auc, low, high = (scores.get(name) for name in ("auc", "auc_low", "auc_high"))
    half = None if low is None or high is None else (high - low) / 2
    return "-" if auc is None else format_with_interval(auc, half)


def describe_allowance(verdict: Record) -> str:
    """Return a line with the allowed loss, its reason and the check of the final set."""
    if verdict["allowed"] is None or verdict["checks"][-1]["upper"] is None:
        return "the allowed loss of AUC could not be checked"
    last = verdict["checks"][-1]
    return (
        f"allowed loss of AUC: {_digits(verdict['allowed'])} ({verdict['allowed_because']}); on the validation rows "
        f"the kept fields {describe_change(last)}"
    )


def make_verdict(
    kept: int,
    total: int,
    valid: LossOnRows,
    test: LossOnRows,
    *,
    allowed: float,
    because: str,
    checks: Sequence[Record],
    too_few: str | None = None,
) -> Record:
    """Return the verdict as in ``selection.json``.

    Args:
        kept, total: number of fields.
        valid, test: the final models on the validation and on the test rows.
        allowed, because: the allowed loss of AUC and the reason.
        checks: of the sets that were tried, the final one last.
        too_few: why nothing can be decided on these rows; None if something can.
    """
    is_given = because != SMALLEST
    kind, text, reason = decide(
        kept, total, valid, test, allowed=allowed, is_given=is_given, holds=checks[-1]["holds"], too_few=too_few
    )
    interval, logloss = test.auc.interval, test.logloss.interval
    return {
        "kind": kind,
        "text": text,
        "reason": reason,
        **_finite({"loss": interval.value, "low": interval.low, "high": interval.high}),
        "rows": test.rows,
        "positives": test.positives,
        "logloss_loss": _finite(asdict(logloss)),
        **_finite({"allowed": allowed}),
        "allowed_because": because,
        "checks": [_finite(check) for check in checks],
    }


def decide(
    kept: int,
    total: int,
    valid: LossOnRows,
    test: LossOnRows,
    *,
    allowed: float,
    is_given: bool,
    holds: bool,
    too_few: str | None = None,
) -> tuple[str, str, str | None]:
    """Return the kind of the verdict, its text and the reason.

    - *enough*: the check on the validation rows holds, and the test rows do not contradict it: their interval reaches
      down to the allowance, and they do not show a loss that is both above zero and larger than the allowance.
    - *costs*: the test rows show a loss above zero, or the validation rows show one above the allowance and the test
      rows agree.
    - *not decided*: everything else.
    """
    fields = f"{kept} of {total} fields"
    loss, checked, gain = test.auc.interval, valid.auc.interval, max(0.0, valid.full_auc - 0.5)
    if too_few is not None or math.isnan(loss.value) or math.isnan(checked.value):
        reason = too_few or "the test or validation rows have one class only"
        return "not decided", f"not decided: {reason}", reason
    if kept == total:
        more = f"; no smaller set was shown to lose at most {_digits(allowed)} of AUC"
        return "enough", f"all {total} fields are kept{more}", None
    change = format_loss(PairedDifference(-test.auc.value, test.auc.se_rows, test.auc.se_folds, test.auc.folds))
    sign = "+" if float(change.split()[0]) > 0 else ""
    shows_loss = loss.low > 0 and loss.value > allowed
    too_coarse = not is_given and allowed > MAX_ALLOWED_SHARE * gain
    if holds and loss.low <= allowed and not shows_loss and not too_coarse:
        verb = "is" if kept == 1 else "are"
        return "enough", f"{fields} {verb} enough (AUC {sign}{change} on {test.describe_rows()})", None
    verb = "costs" if kept == 1 else "cost"
    if loss.low > 0:
        return "costs", f"{fields} {verb} {test.describe()}", None
    lower = 2 * valid.auc.value - valid.auc.upper  # one-sided 95 % lower bound
    if not holds and lower > allowed:
        if loss.high >= checked.low:
            reason = f"on the validation rows; on the test rows {format_loss(test.auc)}"
            return "costs", f"{fields} {verb} {valid.describe()} {reason}", reason
        reason = (
            f"{fields} lose {format_loss(valid.auc)} of AUC on the validation rows and "
            f"{format_loss(test.auc)} on the test rows"
        )
        return "not decided", f"not decided: {reason}", reason
    if valid.full_low <= 0.5:
        reason = (
            f"all {total} fields together do not clearly predict the label: their AUC on the validation rows "
            f"({valid.describe_rows()}) is {format_with_interval(valid.full_auc, valid.full_auc - valid.full_low)}"
        )
    elif too_coarse:
        reason = (
            f"the validation rows ({valid.describe_rows()}) can only exclude losses above {_digits(allowed)} of AUC, "
            f"and all fields gain {_digits(gain)} over none"
            f"{_rows_needed(valid, MAX_ALLOWED_SHARE * gain, Z_950 + Z_POWER)}"
        )
    else:
        reason = (
            f"{fields} may lose up to {_digits(valid.auc.upper)} of AUC on the validation rows, and "
            f"{_digits(allowed)} is allowed{_rows_needed(valid, allowed - max(0.0, valid.auc.value), Z_950)}"
        )
    return "not decided", f"not decided: {reason}", reason


def _rows_needed(valid: LossOnRows, margin: float, factor: float) -> str:
    """Return the number of validation rows with which ``factor`` standard errors equal ``margin``, as a clause."""
    rows = valid.rows * (factor * valid.auc.se_rows / margin) ** 2 if margin > 0 else math.inf
    if rows > 1000 * valid.rows:
        return "; keep more fields, or allow more (--max-auc-loss)"
    digits = max(0, len(str(int(rows))) - 2)
    return f"; about {math.ceil(rows / 10**digits) * 10**digits:,} rows would decide"


def _digits(value: float) -> str:
    """Return a loss with two significant digits.

    >>> _digits(0.00213), _digits(0.25)
    ('0.0021', '0.25')
    """
    return f"{value:.{max(2, 1 - math.floor(math.log10(abs(value))))}f}" if value else "0"


def _finite(values: Record) -> Record:
    """Return the values with None in place of NaN."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
