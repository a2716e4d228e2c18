"""The record of a selection with verdict, warnings, curve and what each field is worth, for tests of the report."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from tests.helpers import hostile

ROWS, POSITIVES = 61_000, 3_900
ALLOWED = 0.0021
NAMES = (
    *("user_id", "item_id", "category", "brand", "price", "hour", "weekday", "device_type", "os_version", "app_id"),
    *("city", "region", "country", "position", "page", "query", "query_length", "user_clicks_7d", "user_views_7d"),
    *("item_clicks_7d", "item_ctr_30d", "category_ctr_30d", "brand_ctr_30d", "advertiser", "campaign", "creative_size"),
    *("network", "language", "age_band", "gender", "account_age_days", "last_visit_hours", "referrer", "cookie_age"),
    *("session_depth", "noise_a", "noise_b", "request_id", "user_category_click_frequency_90d", "user_agent_family"),
)


def interval(value: float, half_width: float) -> dict[str, float]:
    """Return a value with its interval."""
    return {"value": value, "low": value - half_width, "high": value + half_width}


def judged_record(fields: Sequence[str] = NAMES, kept: int | None = None, **sections: Any) -> dict[str, Any]:
    """Return a complete ``selection.json`` whose keys are all there; ``sections`` replace its parts."""
    rng, names, count = random.Random(1), list(fields), len(fields)
    kept = max(1, 3 * count // 10) if kept is None else kept
    record = hostile.selection_record(names, kept)
    worth = [0.06 * math.exp(-6 * number / count) for number in range(count)]
    for number, name in enumerate(names):
        is_kept, value = number < kept, worth[number]
        record["fields"][name] = {
            **record["fields"][name],
            "loss_if_removed": interval(value / 4, 0.0009),
            "loss_if_removed_from_kept": interval(value, 0.0012) if is_kept else None,
            "gain_if_added_to_kept": None if is_kept else interval(value / 20, 0.0004),
            "auc_alone": 0.5 + 2 * value,
            "substitutes": [
                {"name": other, "share": rng.random()} for other in rng.sample(names, min(count, number % 4))
            ],
            "missing": rng.choice([0.0, 0.0, 0.021, 0.4]),
            "distinct": rng.choice([2, 24, 7, 1_300, 88_124]),
            "drift": round(rng.expovariate(12), 3),
        }
    rate = math.log(0.36 / 0.0009) / kept
    losses = [0.0, *(0.36 * math.exp(-rate * (count - number)) for number in range(1, count + 1))]
    points = [
        {
            "fields": count - number,
            "removed": None if number == 0 else names[count - number],
            **{"auc": 0.86 - loss, "logloss": 0.35 + loss / 2, "logloss_loss": loss / 2, "loss": loss},
            **{"low": loss - width, "high": loss + width, "upper": loss + 0.84 * width},
        }
        for number, loss in enumerate(losses)
        for width in [0.0002 + 0.0016 * number / count]
    ]
    counts = {"rows": ROWS, "positives": POSITIVES}
    text = f"{kept} of {count} fields are enough (AUC -0.0004 ± 0.0011 on {ROWS:,} rows, {POSITIVES:,} positives)"
    scores = {
        name: {"auc": auc, "logloss": 0.36, "auc_low": auc - 0.0061, "auc_high": auc + 0.0061, **counts}
        for name, auc in zip(record["metrics"], (0.8614, 0.8551, 0.8551, 0.8610, 0.8602), strict=True)
    }
    check = {"loss": 0.0008, "rows": 20_000, "positives": 1_200}
    return {
        **record,
        "verdict": {
            **{"kind": "enough", "text": text, "reason": None, "loss": 0.0004, "low": -0.0007, "high": 0.0015},
            **{"logloss_loss": interval(0.0002, 0.0005), "allowed": ALLOWED, **counts},
            "allowed_because": "1 % of what all fields gain over none",
            "checks": [
                {**check, "fields": max(0, kept - 2), "upper": 0.0031, "holds": False},
                {**check, "fields": kept, "upper": 0.0019, "holds": True},
            ],
        },
        "warnings": [
            {
                "kind": "leak",
                "fields": names[:1],
                "text": f"{names[0]!r} alone has an AUC of 0.97. Is it known in time?",
            },
            {"kind": "near unique", "fields": names[-3:], "text": "Nearly every row has a value of its own."},
            {"kind": "drift", "fields": names[3:4], "text": "The values changed between training and test rows."},
        ],
        "curve": {
            **{"points": points, "kept": names[:kept], "recommended": kept, "allowed": ALLOWED, "rows": 44_000},
            **{"positives": 2_900, "folds": 1, "networks": 1, "seconds": 12.0},
        },
        "groups": [names[1:3], names[-3:-1]] if count > 6 else [],
        "cost": {"all_fields": 41.5, "kept": 13.0, "unit": "ms"},
        "metrics": scores,
        "validation": scores,
        "splits": {
            "early": {"rows": 300_000, "days": ["2024-05-01", "2024-05-08"], "positives": 19_000},
            "test": {**counts, "days": ["2024-05-10", "2024-05-11"]},
        },
        "savings": {
            "all_fields": {"table_bytes": 681_408, "parameters": 330_609, "rows_per_second": 140_394},
            "kept": {
                **{"table_bytes": 130_560, "parameters": 85_697, "rows_per_second": 318_346},
                **{"rows_per_second_low": 301_000, "rows_per_second_high": 325_000},
            },
        },
        **sections,
    }
