"""Numbers, sizes, times and command lines as text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

# settings whose option has the same name
SAME_NAME = (
    *("label", "time", "split", "keep", "penalty", "budget", "max_auc_loss", "costs", "method", "level", "model"),
    *("checkpoint", "optimizer", "lr", "batch_size", "pretrain_steps", "search_steps", "precision", "finish"),
    *("seed", "seeds", "device"),
)
# names of the models of a run
MODEL_LABELS = {
    "all_fields": "all fields",
    "gated": "with gates, after the search",
    "pruned": "pruned",
    "hot_start": "pruned, trained further",
    "retrained": "kept fields from scratch",
}
# values that need no option
DEFAULTS: dict[str, Any] = {
    **{"method": "lpfs++", "level": "field", "optimizer": "adagrad", "precision": "float32", "finish": "both"},
    **{"seed": 0, "seeds": 1, "device": "auto"},
}


def format_number(value: float | None, digits: int = 3) -> str:
    """Return a number with a few significant digits.

    >>> format_number(1234567), format_number(0.012345), format_number(None), format_number(3.0)
    ('1,234,567', '0.0123', '–', '3')
    """
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.{digits}g}"


def format_decimals(value: float | None, decimals: int = 5) -> str:
    """Return a metric with a fixed number of decimals.

    >>> format_decimals(0.5), format_decimals(None)
    ('0.50000', '–')
    """
    return "–" if value is None else f"{value:.{decimals}f}"


def format_size(size: float | None) -> str:
    """Return a number of bytes.

    >>> format_size(856896), format_size(0), format_size(None)
    ('857 KB', '0 B', '–')
    """
    if size is None:
        return "–"
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_duration(seconds: float) -> str:
    """Return a duration.

    >>> format_duration(8.2), format_duration(200), format_duration(7330)
    ('8.2 s', '3 min 20 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> format_count(1, "field"), format_count(3, "field")
    ('1 field', '3 fields')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_change(before: float | None, after: float | None) -> str:
    """Return a relative change in percent.

    >>> format_change(200, 150), format_change(200, 200), format_change(0, 1)
    ('−25 %', '±0 %', '–')
    """
    if not before or after is None:
        return "–"
    percent = round(100 * (after / before - 1), 1)
    text = f"{abs(percent):.1f}" if abs(percent) < 10 and percent % 1 else f"{abs(percent):.0f}"
    return f"{_sign(percent)}{text} %"


def format_delta(value: float | None) -> str:
    """Return a difference of AUC with its sign.

    >>> format_delta(-0.00123), format_delta(0.00001), format_delta(None)
    ('−0.0012', '±0.0000', '–')
    """
    if value is None:
        return "–"
    value = round(value, 4)
    return f"{_sign(value)}{abs(value):.4f}"


def _sign(value: float) -> str:
    return "+" if value > 0 else "−" if value < 0 else "±"


def command_line(
    settings: Mapping[str, Any], out: str = "run", *, command: str = "select", extra: Sequence[str] = ()
) -> str | None:
    """Return the shell command that runs these settings; None if the source was a table in memory.

    Args:
        settings: as in ``config.json``; default values are left out.
        out: directory of the run.
        command: name of the command.
        extra: further words of the command.


    >>> command_line({"source": ["my log.csv"], "label": "click", "keep": 20, "seeds": 1})
    "lpfs select 'my log.csv' --label click --keep 20 --out run"
    """
    if not settings.get("source"):
        return None
    names = [*(settings.get("must_keep") or ()), *(settings.get("must_drop") or ())]
    if any("," in name or name != name.strip() for name in names):  # the option would split or strip them
        in_file = ["lpfs", command, "--config", "config.json", "--out", out]
        return shlex.join(in_file) if command == "select" else None
    words = ["lpfs", command, *map(str, settings["source"])]
    for name in SAME_NAME:
        value = settings.get(name)
        if value is not None and value != DEFAULTS.get(name):
            words += _option_words(_option(name), value)
    for name in ("must_keep", "must_drop"):
        for field in settings.get(name) or ():
            words += _option_words(_option(name), field)
    words += _prepare_words(settings.get("prepare") or {})
    for option, key in (("--method-option", "options"), ("--model-option", "model_options")):
        for name, value in (settings.get(key) or {}).items():
            words += _option_words(option, f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    return shlex.join([*words, *extra, "--out", out])


def _prepare_words(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        if name == "header":
            words += [] if value else ["--no-header"]
        elif value is True:
            words.append(_option(name))
        elif value is not None and value is not False:
            option = "--task" if name == "tasks" else _option(name)
            for item in value if isinstance(value, list | tuple) else [value]:
                words += _option_words(option, item.replace("\t", "\\t") if name == "separator" else item)
    return words


def _option_words(option: str, value: Any) -> list[str]:
    """Return an option and its value; a value that starts with a dash is joined to the option by ``=``."""
    text = str(value)
    return [f"{option}={text}"] if text.startswith("-") else [option, text]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
