"""reproduce: one experiment of the paper, its numbers as JSON and its figure, beside the paper's own.

lpfs.paper.verb.reproduce("gates", "paper")
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpfs.compare.run_dir import put, read
from lpfs.data.dataset import Dataset
from lpfs.errors import InputError
from lpfs.gates.plan import FEWEST_STEPS
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.registry import EXPERIMENTS, Entry
from lpfs.paper.source import NONE, Log, given, simulated
from lpfs.pipeline.results import versions
from lpfs.pipeline.tell import Console
from lpfs.plots import blank, finished
from lpfs.report.verb import report_reproduced

FORMAT = "lpfs-paper"
REAL = "dlrm"  # the backbone on the user's own log where the experiment's needs groups of fields


@dataclass(frozen=True)
class Reproduced:
    """What an experiment left: ``values`` is what its JSON file holds."""

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
    quiet: bool = False,
) -> Reproduced:
    """Do one experiment of the paper; write ``NAME.json``, ``NAME.png`` and ``NAME.html`` into a folder.

    What was trained is kept in ``work/NAME`` there, so that a second call does only what is missing.

    Args:
        name: one of ``EXPERIMENTS``.
        out: the folder.
        data: a real log: the days of Criteo Terabyte, Kaggle's ``train.txt``, or the folder of any Dataset;
            without one the simulator's preset is taken.
        full: the real thing; else small, in minutes on two cores.
        seed: the first.
        rows, steps, seeds: another size: rows of the simulated log, steps of pretraining and of every search,
            how many seeds.
        quiet: print nothing.

    """
    check(name, data=data, rows=rows, steps=steps, seeds=seeds)
    entry, tell, folder = EXPERIMENTS[name], Console(quiet=quiet), Path(out)
    blank(1, 1)  # says at once where there is no matplotlib
    module = importlib.import_module(entry.module)
    size = {"rows": rows, "pretrain": steps, "search": steps, "seeds": seeds}
    scale = replace(module.FULL if full else module.SMALL, **{key: each for key, each in size.items() if each})
    log = log_of(entry, scale, data, folder / "work" / "data", seed, full, quiet=quiet)
    if log is not None and scale.model == "user_item" and not grouped(log.data):
        scale = replace(scale, model=REAL, model_options={})
    told = NONE if log is None else log.about()
    tell.message(f"{name}: {entry.summary}; {told['said']}")
    begin = time.perf_counter()
    found: Found = module.run(Job(log, folder / "work" / name, scale, seed, full, tell))
    seconds = time.perf_counter() - begin
    asked = {"seed": seed or None, "rows": rows, "steps": steps, "seeds": seeds}
    values = {
        "format": FORMAT,
        "experiment": name,
        "claim": entry.claim,
        "data": told,
        "paper": dict(found.paper),
        "ours": dict(found.ours),
        "table": [list(each) for each in found.rows],
        "full": full,
        "seed": seed,
        "settings": scale.to_json(),
        "command": command(name, full, data, asked),
        "seconds": round(seconds, 1),
        "versions": versions(),
    }
    made = written(json.loads(json.dumps(values)), found, folder, f"{name}: {entry.summary}")
    show(made.values, tell)
    tell.message(f"  {made.path}, {made.figure.name}; {seconds:.0f} s; open {made.path.with_suffix('.html')}")
    return made


def check(name: str, *, data: Any = None, **sizes: Any) -> None:
    """Refuse an experiment that there is not, a size that is none, or data that would not be read."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"there is no experiment {name!r}{hint}; there are {', '.join(EXPERIMENTS)}")
    for each, value in sizes.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{each} must be a whole number >= 1, found {value!r}")
    if (sizes.get("steps") or FEWEST_STEPS) < FEWEST_STEPS:
        raise InputError(
            f"steps must be at least {FEWEST_STEPS}, or no gate has time to move: found {sizes['steps']}"
        )
    if data is not None and EXPERIMENTS[name].preset is None:
        raise InputError(f"{name} needs no data; leave it out")
    if data is not None and sizes.get("rows") is not None:
        raise InputError("rows is the size of a simulated log; leave it out where data is given")


def log_of(
    entry: Entry,
    scale: Scale,
    data: str | os.PathLike[str] | None,
    folder: Path,
    seed: int,
    full: bool,
    *,
    quiet: bool,
) -> Log | None:
    """Return the log of an experiment: the one given, or that of its preset; None if it needs none."""
    if entry.preset is None:
        return None
    if data is not None:
        return given(Path(data), folder, quiet=quiet)
    preset = entry.preset[full]
    return simulated(preset, scale.rows, seed, folder / f"{preset}-{scale.rows or 'all'}-{seed}")


def written(values: dict[str, Any], found: Found, folder: Path, title: str) -> Reproduced:
    """Write JSON, figure and page; the seconds of earlier calls that did a part of it count too."""
    path = folder / f"{values['experiment']}.json"
    before = read(path)
    if before is not None and same(before, values):
        values["seconds"] = round(values["seconds"] + before["seconds"], 1)
    put(path, values)
    figure, picture = blank(*found.size), path.with_suffix(".png")
    found.draw(figure)
    said = f"{values['experiment']} ({values['data']['said'].partition(':')[0]})"
    finished(figure).suptitle(said, x=0.01, ha="left", fontsize=10)
    figure.savefig(picture, dpi=100)
    report_reproduced(values, title, picture, path.with_suffix(".html"))
    return Reproduced(values, path, picture)


def same(before: dict[str, Any], values: dict[str, Any]) -> bool:
    """Whether an earlier call did the same, so that this one went on where that one had been."""
    return all(before.get(key) == values[key] for key in ("format", "data", "settings", "seed", "full"))


def grouped(log: Dataset) -> bool:
    """Whether a log has user and item fields."""
    return {"user", "item"} <= {each.group for each in log.schema}


def command(name: str, full: bool, data: Any, asked: dict[str, Any]) -> str:
    """Return the command that does the same again."""
    words = ["lpfs", "reproduce", name, *(["--full"] if full else [])]
    words += [] if data is None else ["--data", Path(data).name]
    for key, value in asked.items():
        words += [] if value is None else [f"--{key}", str(value)]
    return shlex.join(words)


def show(values: dict[str, Any], tell: Console) -> None:
    """Print what was found beside the paper's words."""
    tell.message(f"  the paper: {values['claim']}")
    tell.table(f"{values['experiment']}, {values['data']['said']}", ["", "paper", "here"], values["table"])
