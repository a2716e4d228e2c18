"""Encoders as they were when a Dataset was made, from what it stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lpfs.data.encoders.base import Encoder
from lpfs.data.encoders.categorical import BagEncoder, CategoricalEncoder
from lpfs.data.encoders.numeric import BinningEncoder, NumericEncoder
from lpfs.data.fields import FieldPlan
from lpfs.errors import DataError


def encoder_type(plan: FieldPlan) -> type[Encoder]:
    """Return the kind of encoder for a plan."""
    if plan.kind == "multi":
        return BagEncoder
    if plan.kind == "numeric":
        return BinningEncoder if plan.binned else NumericEncoder
    return CategoricalEncoder


def make_encoder(plan: FieldPlan, seed: int, first: int = 0) -> Encoder:
    """Return an encoder that has learned nothing yet; ``first`` is the number of the first row it will observe."""
    kind = encoder_type(plan)
    return BinningEncoder(plan, seed, first) if kind is BinningEncoder else kind(plan)


PLAN = tuple(each.name for each in fields(FieldPlan))


def restore_encoder(settings: Mapping[str, Any], values: Any) -> Encoder:
    """Return the encoder of a field from its settings (plan and what was learned) and its stored values."""
    plan = FieldPlan(**{name: settings[name] for name in PLAN if name in settings})
    try:
        return encoder_type(plan).from_stored(plan, settings, values)
    except KeyError as error:
        raise DataError(
            f"field {plan.name!r}: {error} is not stored, an older lpfs made this Dataset; prepare its log again"
        ) from None
