"""reproduce: repeat one experiment of the paper; write its results as JSON, a figure and a page.

lpfs.paper.reproduce("gates", "paper")
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lpfs._console import Console
from lpfs._fileio import read_json, write_json_atomic
from lpfs._imports import callable_package
from lpfs._validation import check_int, check_name
from lpfs.errors import InputError
from lpfs.gates.controller import MIN_STEPS
from lpfs.paper.context import ExperimentContext, ExperimentData, ExperimentResult, open_given, simulate_preset
from lpfs.paper.registry import EXPERIMENTS, Experiment
from lpfs.pipeline.results import versions
from lpfs.plots import new_figure, style_axes
from lpfs.report import report_experiment

FORMAT = "lpfs-paper"
REAL_DATA_MODEL = "dlrm"  # backbone on a log without user and item fields, instead of user_item


@dataclass(frozen=True)
class Reproduced:
    """The files of an experiment; ``values`` are those of its JSON file."""

    values: dict[str, Any]
    path: Path
    figure: Path


def reproduce(
    name: str,
    out: str | os.PathLike[str] = "paper",
    *,
    data: str | os.PathLike[str] | None = None,
    full: bool = False,
    seed: int = 0,
    rows: int | None = None,
    steps: int | None = None,
    seeds: int | None = None,
    fleet: bool | None = None,
    quiet: bool = False,
) -> Reproduced:
    """Run one experiment of the paper; write ``NAME.json``, ``NAME.png`` and ``NAME.html`` to a directory.

    Searches and trainings are kept in ``work/NAME`` there, so a second call does only what is missing.

    Args:
        name: one of ``EXPERIMENTS``.
        out: the directory.
        data: a real log: the days of Criteo Terabyte, Kaggle's ``train.txt``, or the directory of any Dataset; by
            default a simulated log.
        full: use the full size; the default is small and takes minutes on two cores.
        seed: the first seed.
        rows: number of rows of the simulated log.
        steps: number of steps of pretraining and of every search.
        seeds: number of seeds.
        fleet: train models that are trained alike together, see :class:`Settings`.
        quiet: print nothing.
    """
    check_name(name, EXPERIMENTS, "experiment")
    experiment, console, directory = EXPERIMENTS[name], Console(quiet=quiet), Path(out)
    for option, value, minimum in (("rows", rows, 1), ("steps", steps, MIN_STEPS), ("seeds", seeds, 1)):
        if value is not None:
            check_int(option, value, minimum)
    if data is not None and experiment.presets is None:
        raise InputError(f"the experiment {name} needs no data; leave --data out")
    if data is not None and rows is not None:
        raise InputError("rows is the size of a simulated log; leave it out if data is given")
    new_figure(1, 1)  # fails before any training if matplotlib is missing
    sizes: dict[str, Any] = {"rows": rows, "pretrain": steps, "search": steps, "seeds": seeds}
    scale = experiment.full if full else experiment.small
    scale = replace(scale, **{key: value for key, value in sizes.items() if value})
    log: ExperimentData | None = None
    description: dict[str, Any] = {"kind": "none", "description": "no data"}
    if experiment.presets is not None:
        data_dir, preset = directory / "work" / "data", experiment.presets[full]
        if data is not None:
            log = open_given(Path(data), data_dir, quiet=quiet)
        else:
            log = simulate_preset(preset, scale.rows, seed, data_dir / f"{preset}-{scale.rows or 'all'}-{seed}")
        description = log.to_json()
        if scale.model == "user_item" and not {"user", "item"} <= {field.group for field in log.dataset.schema}:
            scale = replace(scale, model=REAL_DATA_MODEL, model_options={})
    console.message(f"{name}: {experiment.summary}; {description['description']}")
    start = time.perf_counter()
    context = ExperimentContext(log, directory / "work" / name, scale, seed, full, console, fleet)
    result = load_function(experiment)(context)
    seconds = time.perf_counter() - start
    values = {
        "format": FORMAT,
        "experiment": name,
        "claim": experiment.claim,
        "data": description,
        "paper": dict(result.paper),
        "measured": dict(result.measured),
        "table": [list(row) for row in result.rows],
        "full": full,
        "seed": seed,
        "settings": asdict(scale),
        "command": command_line(name, full, data, {"seed": seed or None, "rows": rows, "steps": steps, "seeds": seeds}),
        "seconds": round(seconds, 1),
        "versions": versions(),
    }
    files = write_results(json.loads(json.dumps(values)), result, directory, f"{name}: {experiment.summary}")
    console.message(f"  the paper: {files.values['claim']}")
    console.table(f"{name}, {description['description']}", ["", "paper", "here"], files.values["table"])
    console.message(f"  {files.path}, {files.figure.name}; {seconds:.0f} s; open {files.path.with_suffix('.html')}")
    return files


def load_function(experiment: Experiment) -> Callable[[ExperimentContext], ExperimentResult]:
    """Return the function of an experiment."""
    module, _, name = experiment.run.partition(":")
    function: Callable[[ExperimentContext], ExperimentResult] = getattr(importlib.import_module(module), name)
    return function


def write_results(values: dict[str, Any], result: ExperimentResult, directory: Path, title: str) -> Reproduced:
    """Write JSON, figure and page; the seconds of an earlier call of the same experiment are added."""
    path = directory / f"{values['experiment']}.json"
    before = read_json(path, {"seconds?": float}, missing_ok=True)
    same = ("format", "data", "settings", "seed", "full")  # if they are, this call continued an earlier one
    if before is not None and all(before.get(key) == values[key] for key in same):
        values["seconds"] = round(values["seconds"] + before["seconds"], 1)
    write_json_atomic(path, values)
    figure, picture = new_figure(*result.size), path.with_suffix(".png")
    result.draw(figure)
    heading = f"{values['experiment']} ({values['data']['description'].partition(':')[0]})"
    style_axes(figure).suptitle(heading, x=0.01, ha="left", fontsize=10)
    figure.savefig(picture, dpi=100)
    report_experiment(values, title, picture, path.with_suffix(".html"))
    return Reproduced(values, path, picture)


def command_line(name: str, full: bool, data: Any, options: Mapping[str, int | None]) -> str:
    """Return the command that repeats the experiment."""
    words = ["lpfs", "reproduce", name, *(["--full"] if full else [])]
    words += [] if data is None else ["--data", Path(data).name]
    for option, value in options.items():
        words += [] if value is None else [f"--{option}", str(value)]
    return shlex.join(words)


callable_package(__name__, f"{__name__}:reproduce")  # lpfs.paper.reproduce is this module, once it is imported
