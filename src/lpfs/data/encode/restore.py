"""Encoders as they were when a Dataset was made, from what it stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lpfs.data.encoders.base import Encoder
from lpfs.data.encode.passes import encoder_type
from lpfs.data.fields import FieldPlan
from lpfs.errors import DataError

PLAN = tuple(each.name for each in fields(FieldPlan))


def restore(settings: Mapping[str, Any], values: Any) -> Encoder:
    """Return the encoder of a field from its settings (plan and what was learned) and its stored values."""
    plan = FieldPlan(**{name: settings[name] for name in PLAN if name in settings})
    try:
        return encoder_type(plan).restored(plan, settings, values)
    except KeyError as error:
        raise DataError(
            f"field {plan.name!r}: {error} is not stored, an older lpfs made this Dataset; prepare its log again"
        ) from None
