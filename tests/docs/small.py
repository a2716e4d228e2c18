"""A small world in which the commands and programs of the docs run: every file they name, with few rows."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from blocks import Block
from torch import nn
from torch.nn import functional

import lpfs
from lpfs import cli

ROWS = 3000
NAMES = {  # fields of the simulator -> columns as the docs call them
    **{"f00": "user_id", "f01": "ad_id", "f02": "user_history", "f03": "city", "f04": "referrer"},
    **{"f06": "price", "f16": "age", "f19": "income"},
}
COSTS = """unit = "ms"
default = 0.5
[fields]
user_history = 4.0
[groups.profile]
cost = 3.0
fields = ["age", "city", "income"]
"""


def clicks() -> pl.DataFrame:
    """Return the table that stands for the reader's own: 31 columns, ten days."""
    files = lpfs.simulate("simulated", "small", rows=ROWS, format="parquet")
    table = pl.concat([pl.read_parquet(each) for each in files]).rename(NAMES)
    shutil.rmtree("simulated")
    stamp = pl.datetime(2026, 1, 1) + pl.duration(days=pl.col("day"))
    return table.with_columns(pl.col("price") + 0.5, timestamp=stamp)


def text(table: pl.DataFrame, path: str) -> None:
    """Write a CSV; a list is joined by |."""
    lists = [pl.col(name).list.join("|") for name, kind in table.schema.items() if kind == pl.List]
    table.with_columns(lists).write_csv(path)


def run_of(table: pl.DataFrame, **given: Any) -> None:
    lpfs.select(table, "run", label="click", time="day", quiet=True, **given)


def dataset(path: str) -> None:
    """Make a Dataset: that of the run, where there is one."""
    if Path("run/data").exists():
        shutil.copytree("run/data", path)
    else:
        lpfs.prepare(clicks(), path, label="click", time="day", quiet=True)


def criteo(folder: str) -> None:
    lpfs.simulate("criteo-raw", "terabyte", rows=ROWS, days=6, format="csv")
    for each in Path("criteo-raw/log").iterdir():
        Path(folder).mkdir(exist_ok=True)
        each.rename(Path(folder) / each.name)


def kaggle() -> None:
    criteo("days")
    days = sorted(Path("days").iterdir())
    Path("train.txt").write_text("".join(each.read_text("utf-8") for each in days), "utf-8")


def avazu() -> None:
    draw = np.random.default_rng(0)
    names = ["C1", "banner_pos", *(f"site_{name}" for name in ("id", "domain", "category"))]
    names += [f"app_{name}" for name in ("id", "domain", "category")]
    names += [f"device_{name}" for name in ("id", "ip", "model", "type", "conn_type")]
    names += [f"C{number}" for number in range(14, 22)]
    table = {"id": np.arange(ROWS), "click": draw.integers(0, 2, ROWS)}
    table["hour"] = 14102100 + 100 * (np.arange(ROWS) * 10 // ROWS)
    table |= {name: draw.integers(0, 30, ROWS) for name in names}
    pl.DataFrame(table).write_csv("train.csv")


# what the docs name -> how it is made where it is not there
FILES: dict[str, Callable[[], Any]] = {
    "clicks.parquet": lambda: clicks().write_parquet("clicks.parquet"),
    "clicks.csv": lambda: text(clicks(), "clicks.csv"),
    "log.csv": lambda: text(clicks().drop("day"), "log.csv"),
    "new.parquet": lambda: clicks().filter(pl.col("day") == 9).write_parquet("new.parquet"),
    "tomorrow.parquet": lambda: clicks().filter(pl.col("day") == 9).write_parquet("tomorrow.parquet"),
    "week.parquet": lambda: clicks().write_parquet("week.parquet"),
    "costs.toml": lambda: Path("costs.toml").write_text(COSTS, "utf-8"),
    "data/log": lambda: dataset("data/log"),
    "run": lambda: run_of(clicks(), keep=20),
    "trained": lambda: cli.run(
        ["train", "data/log", "--rows", "early", "--steps", "60", "--out", "trained", "-q"]
    ),
    "found": lambda: cli.run(["search", "trained", "data/log", "--keep", "20", "--out", "found", "-q"]),
    "train.txt": kaggle,
    "train.csv": avazu,
    "day_*": lambda: criteo("."),
}
DEFAULT_OUT = {"select": "run", "compare": "comparison"}
NEEDS = {"trained": ["data/log"], "found": ["data/log", "trained"]}


def provide(word: str) -> None:
    """Make what a command or a program names, if it is ours to make and not there."""
    name = word.rstrip("/").removesuffix("/model").removesuffix("/data").removesuffix("/config.json")
    if name in FILES and not Path(name).exists():
        for each in NEEDS.get(name, []):
            provide(each)
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        FILES[name]()


def run_command(words: list[str]) -> None:
    """Run a command of lpfs as it stands there, in an empty place unless it goes on with what is there."""
    if ">" in words:
        words = words[: words.index(">")]
    out = words[words.index("--out") + 1] if "--out" in words else DEFAULT_OUT.get(words[0])
    for each in words:
        if each != out:
            provide(each)
    if out is not None and {"--resume", "--replace", "--tables-only"} & set(words):
        provide(out)
    elif out is not None and words != ["compare", "--out", out]:
        remove(Path(out))
    if len(words) > 1 and words[0] == "reproduce" and words[1] != "gates":
        return  # minutes to hours; tests/paper does every experiment in small
    if any("://" in each for each in words):
        return  # needs an object store; tests/data/test_remote.py has one in memory
    code = cli.run(words)
    assert code == 0, f"lpfs {' '.join(words)} ended with {code}"


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run a program as it stands there, in the names that those before it on the page have left."""
    for word in re.findall(r'"([\w./]+)"', block.text):
        if not re.search(rf'(simulate\("{word}"|(select|compare|prepare)\([^)]*?, "{word}")', block.text):
            provide(word)
    for out in re.findall(r'simulate\("([\w./]+)"|(?:select|compare|prepare)\([^,]+, "([\w./]+)"', block.text):
        remove(Path(out[0] or out[1]))
    if "export_run(" in block.text:
        remove(Path("run/model.onnx"))
        remove(Path("run/model.pt2"))
    text = block.text
    for large, little in SMALLER.get(block.page.name, {}).items():
        text = text.replace(large, little)
    exec(compile(text, str(block), "exec"), names)


class TwoFields(nn.Module):
    """Somebody's model: two tables and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({"user": nn.Embedding(30, 4), "item": nn.Embedding(30, 4)})
        self.top = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.emb["user"](ids[:, 0]), self.emb["item"](ids[:, 1])], 1)).squeeze(1)


def own_model() -> dict[str, Any]:
    """Names of a page about a model of the reader's own; only the item tells the click."""
    ids = torch.randint(30, (300, 64, 2), generator=torch.Generator().manual_seed(0))
    stream = [(each, (each[:, 1] % 2).float()) for each in ids]

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return {"torch": torch, "model": TwoFields(), "stream": stream, "loss_of": loss_of, "ids": ids[0]}


def of_dataset() -> dict[str, Any]:
    """Names of a page about models of lpfs: a Dataset, a model, a batch, a table."""
    dataset = lpfs.prepare(clicks(), "prepared", label="click", time="day", quiet=True)
    model = lpfs.make_model("mlp", dataset.schema, dim=4, hidden=[8])
    batch = next(iter(dataset.stream(64)))
    return {
        "np": np,
        "torch": torch,
        "dataset": dataset,
        "model": model,
        "batch": batch,
        "table": clicks().head(20),
    }


def to_serve() -> dict[str, Any]:
    """Names of the page about serving: a run that reads a city, a price and tags."""
    draw = np.random.default_rng(0)
    cities = draw.choice(["Basel", "Bern", "Chur"], ROWS)
    table = pl.DataFrame(
        {
            "click": (draw.random(ROWS) < np.where(cities == "Basel", 0.6, 0.2)).astype(int),
            "day": np.arange(ROWS) * 10 // ROWS,
            "city": cities,
            "price": draw.random(ROWS) * 20,
            "tags": [draw.choice(["a", "b", "c"], draw.integers(1, 3)).tolist() for _ in range(ROWS)],
            "noise": draw.choice(["x", "y", "z"], ROWS),
        }
    )
    run_of(table, keep=3, must_keep=("city", "price", "tags"), prepare={"bins": "off"})
    model = lpfs.load("run/model")
    dataset = lpfs.Dataset("run/data")
    batch = next(iter(dataset.stream(64, fields=model.reads.names)))
    return {"torch": torch, "dataset": dataset, "model": model, "batch": batch}


def frame() -> dict[str, Any]:
    """Names of the page about scikit-learn: a table of pandas."""
    import pandas as pd

    draw = np.random.default_rng(0)
    table = pd.DataFrame({f"column_{n}": draw.normal(size=400) for n in range(12)})
    return {"frame": table, "clicked": (table["column_0"] + table["column_1"] > 0).astype(int)}


# page -> numbers in its programs that are made smaller
SHORT = {"20_000": "300", "keep=20": "keep=1"}
SMALLER = {"README.md": SHORT, "own-model.md": SHORT}
# page -> what it takes for granted
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": own_model,
    "own-model.md": own_model,
    "sklearn.md": frame,
    "export.md": to_serve,
    **dict.fromkeys(["data.md", "models.md", "training.md", "extending.md", "own-table.md"], of_dataset),
}
