"""Numbers, sizes, times and command lines as text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lpfs._text import quote_command

# settings whose option has the same name
SAME_NAME = (
    *("label", "time", "split", "keep", "penalty", "budget", "max_auc_loss", "costs", "method", "level", "model"),
    *("checkpoint", "optimizer", "lr", "batch_size", "pretrain_steps", "search_steps", "precision", "finish"),
    *("seed", "seeds", "device", "force", "tensorboard", "mlflow"),
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
    **{"seed": 0, "seeds": 1, "device": "auto", "tensorboard": False, "mlflow": False},
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


def format_decimals(value: float | None) -> str:
    """Return a metric with five decimals.

    >>> format_decimals(0.5), format_decimals(None)
    ('0.50000', '–')
    """
    return "–" if value is None else f"{value:.5f}"


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


def format_share(share: float | None, decimals: int = 1) -> str:
    """Return a share in percent.

    >>> format_share(0.0), format_share(0.0214), format_share(0.00001), format_share(0.93, 0), format_share(None)
    ('0 %', '2.1 %', '< 0.1 %', '93 %', '–')
    """
    if share is None:
        return "–"
    if 0 < share < 0.5 * 10 ** -(decimals + 2):
        return f"< {10**-decimals:g} %"
    return f"{100 * share:.{decimals}f} %" if share else "0 %"


def format_delta(value: float | None) -> str:
    """Return a difference of AUC with its sign.

    >>> format_delta(-0.00123), format_delta(0.00001), format_delta(None)
    ('−0.0012', '±0.0000', '–')
    """
    if value is None:
        return "–"
    value = round(value, 4)
    return f"{_sign(value)}{abs(value):.4f}"


def format_with_interval(value: float | None, half_width: float | None) -> str:
    """Return a value and the half width of its interval, with no more digits than the interval supports.

    The half width has two digits if they are at most 35, else one (the rule of the Particle Data Group), and the value
    ends at the same digit. Without a half width the value has four decimals.

    >>> format_with_interval(-0.00042, 0.00113), format_with_interval(0.81234, 0.0061), format_with_interval(0.0, 0.0)
    ('-0.0004 ± 0.0011', '0.812 ± 0.006', '0.0000')
    >>> format_with_interval(18234.0, 1200.0), format_with_interval(0.5, None), format_with_interval(None, 0.1)
    ('18,200 ± 1,200', '0.5000', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if half_width is None or not math.isfinite(half_width) or half_width <= 0:
        return f"{round(value, 4) + 0.0:,.4f}"
    decimals = interval_decimals(half_width)
    return " ± ".join(f"{round(number, decimals) + 0.0:,.{max(0, decimals)}f}" for number in (value, half_width))


def format_measured(value: float | None, half_width: float | None = None) -> str:
    r"""Return :func:`format_with_interval` for a page: with a minus sign, and without a line break.

    >>> format_measured(-0.00042, 0.00113)
    '−0.0004\xa0±\xa00.0011'
    """
    return format_with_interval(value, half_width).replace("-", "−").replace(" ", "\N{NO-BREAK SPACE}")


def interval_decimals(half_width: float) -> int:
    """Return the number of decimals that an interval supports, at most six; negative for tens, hundreds, …

    >>> interval_decimals(0.00113), interval_decimals(0.0061), interval_decimals(1200)
    (4, 3, -2)
    """
    digits, _, exponent = f"{half_width:.1e}".partition("e")
    return min(6, -int(exponent) + (float(digits) <= 3.5))


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
    forced = [(name, field) for name in ("must_keep", "must_drop") for field in settings.get(name) or ()]
    if any("," in field or field != field.strip() for _, field in forced):  # the option would split or strip them
        in_file = ["lpfs", command, "--config", "config.json", "--out", out]
        return quote_command(*in_file) if command == "select" else None
    options = [(name, settings.get(name)) for name in SAME_NAME if settings.get(name) != DEFAULTS.get(name)]
    options += [*forced, *_prepare_options(settings.get("prepare") or {}), ("no_curve", settings.get("curve") is False)]
    if settings.get("graph") is not None:
        options.append(("graph", "on" if settings["graph"] else "off"))
    if settings.get("fleet") is not None:
        options.append(("fleet" if settings["fleet"] else "no_fleet", True))
    for option, key in (("method_option", "options"), ("model_option", "model_options")):
        options += [(option, f"{name}={option_text(value)}") for name, value in (settings.get(key) or {}).items()]
    words = [word for name, value in options if value is not None for word in _option_words(name, value)]
    return quote_command("lpfs", command, *map(str, settings["source"]), *words, *extra, *_option_words("out", out))


def option_text(value: Any) -> str:
    """Return the value of an option as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _prepare_options(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every option; a flag has the value True."""
    for name, value in options.items():
        if name == "header":
            yield "no_header", not value
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                text = item.replace("\t", "\\t") if name == "separator" and item is not None else item
                yield "task" if name == "tasks" else name, text


def _option_words(name: str, value: Any) -> list[str]:
    """Return an option and its value; a value that starts with a dash is joined to the option by ``=``."""
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [option] if value else []
    return [f"{option}={value}"] if str(value).startswith("-") else [option, str(value)]
