"""Encoders of columns: the type for a plan, new ones, and those restored from a Dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import polars as pl

from lpfs.data.encoders.base import Encoder
from lpfs.data.encoders.categorical import BagEncoder, CategoricalEncoder
from lpfs.data.encoders.numeric import BinningEncoder, NumericEncoder
from lpfs.data.fields import FieldPlan
from lpfs.errors import DataError, LpfsError

PLAN_OPTIONS = tuple(option.name for option in fields(FieldPlan))


def encoder_type(plan: FieldPlan) -> type[Encoder]:
    """Return the encoder class for a plan."""
    if plan.kind == "multi":
        return BagEncoder
    if plan.kind == "numeric":
        return BinningEncoder if plan.binned else NumericEncoder
    return CategoricalEncoder


def make_encoder(plan: FieldPlan, seed: int, first: int = 0) -> Encoder:
    """Return an unfitted encoder; ``first`` is the number of the first row it observes."""
    kind = encoder_type(plan)
    return BinningEncoder(plan, seed, first) if kind is BinningEncoder else kind(plan)


def restore_encoder(settings: Mapping[str, Any], values: Any) -> Encoder:
    """Return the fitted encoder of a field from its settings (plan and metadata) and its stored values."""
    advice = "another version of lpfs made this Dataset, or it is damaged; delete it and prepare its log again"
    try:
        plan = FieldPlan(**{name: settings[name] for name in PLAN_OPTIONS if name in settings})
        return encoder_type(plan).from_stored(plan, settings, values)
    except KeyError as error:
        raise DataError(f"field {settings.get('name')!r}: {error} is not stored, {advice}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, pl.exceptions.PolarsError) as error:
        if isinstance(error, LpfsError):
            raise
        raise DataError(f"field {str(settings)[:80]}: its settings are invalid ({error}), {advice}") from None
