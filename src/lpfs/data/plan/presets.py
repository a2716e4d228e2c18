"""Public click logs whose layout is known."""

from __future__ import annotations

from typing import Any

from lpfs.data.fields import suggestion
from lpfs.errors import InputError

INTEGERS = tuple(f"I{index}" for index in range(1, 14))
CATEGORIES = tuple(f"C{index}" for index in range(1, 27))
CRITEO: dict[str, Any] = {
    "label": "label",
    "separator": "\t",
    "header": ("label", *INTEGERS, *CATEGORIES),
    "min_count": 10,
    "fields": {
        **{name: {"kind": "numeric"} for name in INTEGERS},
        **{name: {"kind": "categorical", "hexadecimal": True} for name in CATEGORIES},
    },
}
AVAZU_IDS = (
    *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *(f"C{index}" for index in range(14, 22)),
)

PRESETS: dict[str, dict[str, Any]] = {
    # day_0 … day_23, one file a day
    "criteo-terabyte": {**CRITEO, "parts": "files"},
    # train.txt, seven days in order, without a time
    "criteo-kaggle": {**CRITEO, "parts": 7},
    # train.csv, ten days, hour is YYMMDDHH
    "avazu": {
        "label": "click",
        "time": "hour",
        "time_format": "%y%m%d%H",
        "min_count": 2,
        "fields": {
            "id": {"kind": "ignore"},
            **{name: {"kind": "categorical"} for name in AVAZU_IDS},
        },
    },
}


def preset_options(name: str) -> dict[str, Any]:
    """Return the options of a preset."""
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}{suggestion(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return dict(PRESETS[name])
