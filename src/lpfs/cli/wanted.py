"""From options of the command line to the Settings of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lpfs.cli.app import Near
from lpfs.cli.options import GRAPHS, PREPARED, Decorator, given_only, output, prepare_options, section, together

if TYPE_CHECKING:
    from lpfs.pipeline.settings import Settings

WIDTHS = ("hidden", "bottom", "head")  # of a model: lists, also where one number is given
METHOD_OPTIONS = ("alpha", "tau", "epsilon", "schedule", "rescale")

wish, how = section("What you want, in one way"), section("The search")

WISH = together(
    wish("--keep", type=int, help="Exactly so many fields."),
    wish(
        "--max-auc-loss",
        type=float,
        help="As few fields as cost at most this much AUC (0.001, if nothing is said).",
    ),
    wish("--budget", type=float, help="Fields that cost this much together at most; needs --costs."),
    wish("--penalty", type=float, help="The paper's fixed penalty λ."),
    wish("--costs", help="TOML file of what each field costs, or 'complexity'."),
    wish("--must-keep", multiple=True, help="Fields that stay, as a,b; may be repeated."),
    wish("--must-drop", multiple=True, help="Fields that are never looked at, as a,b; may be repeated."),
)


def search_options() -> Decorator[Any]:
    """Return the options of a search; the methods are listed without torch."""
    from lpfs.methods.registry import METHODS

    return together(
        how("--method", type=Near(tuple(METHODS)), metavar="NAME", help="One of lpfs methods (lpfs++)."),
        how("--alpha", type=float, help="Weight of the odd term of the gate."),
        how("--tau", type=float, help="Its ε is raised to 1/τ."),
        how("--epsilon", type=float, help="ε of the gate at the start."),
        how("--schedule", type=Near(("scaled", "terabyte", "industrial")), help="How ε and the gate's rate move."),
        how("--rescale", type=Near(("epsilon", "rms", "off")), help="What the gates are divided by."),
        how(
            "--method-option",
            "options",
            multiple=True,
            help="Any other of the method, as name=value; may be repeated.",
        ),
        how("--search-steps", type=int, help="Steps of the search."),
    )


SEARCH = search_options()
CONFIG = output(
    "--config", type=click.Path(path_type=Path), help="Settings of an earlier run: its config.json or folder."
)


def settings_of(
    source: Sequence[str], out: Path, *, resume: bool, config: Path | None = None, **given: Any
) -> Settings:
    """Return the settings: those of --config, or of the run to go on with, and those given in their place."""
    from lpfs.pipeline.settings import CONFIG as NAME
    from lpfs.pipeline.settings import Settings

    base = Settings()
    if config is not None:
        base = Settings.load(config)
    elif resume and (out / NAME).exists():
        base = Settings.load(out)
    prepare = prepare_options({name: given.pop(name, None) for name in PREPARED})
    options = given_only({name: given.pop(name, None) for name in METHOD_OPTIONS})
    options |= pairs(given.pop("options", ()), "--method-option")
    model_options = pairs(given.pop("model_options", ()), "--model-option")
    model_options |= {name: [model_options[name]] for name in WIDTHS if isinstance(model_options.get(name), int)}
    for name in ("must_keep", "must_drop"):
        given[name] = listed(given.pop(name, ()))
    graph = given.pop("graph", None)
    values = {name: str(value) if isinstance(value, Path) else value for name, value in given_only(given).items()}
    if "fields" in prepare:
        prepare["fields"] = str(prepare["fields"])
    merged: dict[str, Any] = {
        "prepare": {**base.prepare, **prepare},
        "options": {**base.options, **options},
        "model_options": {**base.model_options, **model_options},
    }
    if graph is not None:
        merged["graph"] = GRAPHS[graph]
    settings = base.updated(**values, **merged, **({"source": tuple(source)} if source else {}))
    if not settings.source:
        there = f" There is nothing in {out} to go on with." if resume else ""
        raise click.UsageError(
            f"Missing argument: the log, as files or the folder of a Dataset (or --config).{there}"
        )
    return settings


def listed(names: Iterable[str]) -> tuple[str, ...]:
    """Return names given as a,b or one by one."""
    return tuple(each.strip() for text in names for each in text.split(",") if each.strip())


def pairs(given: Iterable[str], option: str) -> dict[str, Any]:
    """Return name=value pairs; a value is a number, true, false, null, a list as 64,32, or text."""
    result = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise click.BadParameter(f"{text!r} is not of the form name=value", param_hint=option)
        result[name.strip().replace("-", "_")] = plain(value.strip())
    return result


def plain(text: str) -> Any:
    """Return text as the value it stands for."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return json.loads(f"[{text}]") if "," in text else text
    except ValueError:
        return text
