"""FuxiCTR's configuration with fewer fields: inactive columns, and tables that have lost their namesake."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from lpfs.errors import FieldError

SHARED = "share_embedding"


def kept_columns(config: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """Return a dataset configuration whose dropped columns are inactive; the rest of it is as it was.

    They are not removed: other columns may be made of them by ``preprocess``. A dropped column whose vocabulary
    others share hands that over to the first of them.

    >>> columns = [{"name": ["user", "city"], "active": True, "dtype": "str", "type": "categorical"}]
    >>> kept_columns({"feature_cols": columns}, ["city"])["feature_cols"][1]
    {'name': ['city'], 'active': False, 'dtype': 'str', 'type': 'categorical'}

    """
    result = copy.deepcopy(dict(config))
    columns: list[dict[str, Any]] = []
    for column in result.get("feature_cols", []):
        names = column["name"] if isinstance(column["name"], list) else [column["name"]]
        for gone in (False, True):
            several = [name for name in names if (name in dropped) == gone]
            if not several:
                continue
            if SHARED in column:  # each of them may point elsewhere
                columns += [_column(column, name, gone) for name in several]
            else:
                columns.append(_column(column, several if isinstance(column["name"], list) else several[0], gone))
    known = {name for column in columns for name in _names(column)}
    unknown = [name for name in dropped if name not in known]
    if unknown:
        raise FieldError(f"feature_cols has no column {unknown[0]!r} that was dropped; it has {sorted(known)}")
    stays = {name: column for column in columns if column["active"] is not False for name in _names(column)}
    repoint(stays, {name: column.get(SHARED, name) for name, column in stays.items()})
    for column in columns:
        if column["active"] is False:
            column.pop(SHARED, None)
            column.pop("pretrained_emb", None)  # FuxiCTR would look for the feature
    result["feature_cols"] = columns
    return result


def repoint(features: Mapping[str, dict[str, Any]], groups: Mapping[str, Any]) -> None:
    """Let features that share a table point at one of them that is left, in place.

    ``groups`` is feature -> what is equal for those that share a table: the name of one of them, which stays what
    they point at if it is there, or anything else.
    """
    first: dict[Any, str] = {}
    for name, spec in features.items():
        group = groups[name]
        head = group if group in features else first.setdefault(group, name)
        spec.pop(SHARED, None)
        if head != name:
            spec[SHARED] = head


def _column(column: Mapping[str, Any], name: Any, gone: bool) -> dict[str, Any]:
    result = copy.deepcopy({**column, "name": name})
    result["active"] = False if gone else column.get("active", True)
    return result


def _names(column: Mapping[str, Any]) -> list[str]:
    return column["name"] if isinstance(column["name"], list) else [column["name"]]
