"""The command line that a configuration stands for, ready to be copied into a shell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

SAME = (
    *("label", "time", "split", "keep", "penalty", "budget", "max_auc_loss", "costs", "method", "level", "model"),
    *("checkpoint", "optimizer", "lr", "batch_size", "pretrain_steps", "search_steps", "precision", "finish"),
    *("seed", "seeds", "device"),
)
USUAL = {"method": "lpfs++", "level": "field", "optimizer": "adagrad", "precision": "float32", "finish": "both"}
USUAL_TOO = {"seed": 0, "seeds": 1, "device": "auto"}


def command_of(
    settings: Mapping[str, Any], out: str = "run", *, verb: str = "select", more: Sequence[str] = ()
) -> str | None:
    """Return ``lpfs select …`` with the settings that are not the usual ones; None for a table in memory.

    Args:
        settings: as ``config.json`` holds them.
        out: folder of the run.
        verb: the command.
        more: words that it takes beside the settings.


    >>> command_of({"source": ["my log.csv"], "label": "click", "keep": 20, "seeds": 1})
    "lpfs select 'my log.csv' --label click --keep 20 --out run"

    """
    if not settings.get("source"):
        return None
    names = [*(settings.get("must_keep") or ()), *(settings.get("must_drop") or ())]
    if any("," in each or each != each.strip() for each in names):
        return shlex.join(["lpfs", verb, "--config", "config.json", "--out", out]) if verb == "select" else None
    words = ["lpfs", verb, *map(str, settings["source"])]
    usual = {**USUAL, **USUAL_TOO}
    for name in SAME:
        value = settings.get(name)
        if value is not None and value != usual.get(name):
            words += said(option(name), value)
    for name in ("must_keep", "must_drop"):
        for each in settings.get(name) or ():
            words += said(option(name), each)
    words += prepared(settings.get("prepare") or {})
    for name, key in (("--method-option", "options"), ("--model-option", "model_options")):
        for inner, value in (settings.get(key) or {}).items():
            words += said(name, f"{inner}={json.dumps(value) if not isinstance(value, str) else value}")
    return shlex.join([*words, *more, "--out", out])


def prepared(options: Mapping[str, Any]) -> list[str]:
    """Return the options of ``prepare`` as words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        if name == "header":
            words += [] if value else ["--no-header"]
        elif value is True:
            words.append(option(name))
        elif value is not None and value is not False:
            key = "--task" if name == "tasks" else option(name)
            for each in value if isinstance(value, list | tuple) else [value]:
                words += said(key, each.replace("\t", "\\t") if name == "separator" else each)
    return words


def said(name: str, value: Any) -> list[str]:
    """Return an option and its value; one that looks like an option itself is tied to its name."""
    text = str(value)
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def option(name: str) -> str:
    """Return the option of a setting."""
    return "--" + name.replace("_", "-")
