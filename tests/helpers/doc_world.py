"""What the commands and programs of the docs need to run: the files and names they use, with few rows."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import nn
from torch.nn import functional

import lpfs
from lpfs import cli
from tests.helpers.doc_blocks import Block

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


def click_table() -> pl.DataFrame:
    """Return the reader's own table: 31 columns, ten days."""
    files = lpfs.simulate("simulated", "small", rows=ROWS, format="parquet")
    table = pl.concat([pl.read_parquet(path) for path in files]).rename(NAMES)
    shutil.rmtree("simulated")
    timestamp = pl.datetime(2026, 1, 1) + pl.duration(days=pl.col("day"))
    return table.with_columns(pl.col("price") + 0.5, timestamp=timestamp)


def write_csv(table: pl.DataFrame, path: str) -> None:
    """Write a CSV; a list is joined by |."""
    lists = [pl.col(name).list.join("|") for name, kind in table.schema.items() if kind == pl.List]
    table.with_columns(lists).write_csv(path)


def run_select(table: pl.DataFrame, **options: Any) -> None:
    lpfs.select(table, "run", label="click", time="day", quiet=True, **options)


def make_dataset(path: str) -> None:
    """Make a Dataset: a copy of that of the run, if there is one."""
    if Path("run/data").exists():
        shutil.copytree("run/data", path)
    else:
        lpfs.prepare(click_table(), path, label="click", time="day", quiet=True)


def make_criteo(folder: str) -> None:
    lpfs.simulate("criteo-raw", "terabyte", rows=ROWS, days=6, format="csv")
    for path in Path("criteo-raw/log").iterdir():
        Path(folder).mkdir(exist_ok=True)
        path.rename(Path(folder) / path.name)


def make_kaggle() -> None:
    make_criteo("days")
    days = sorted(Path("days").iterdir())
    Path("train.txt").write_text("".join(path.read_text("utf-8") for path in days), "utf-8")


def make_avazu() -> None:
    rng = np.random.default_rng(0)
    names = ["C1", "banner_pos", *(f"site_{name}" for name in ("id", "domain", "category"))]
    names += [f"app_{name}" for name in ("id", "domain", "category")]
    names += [f"device_{name}" for name in ("id", "ip", "model", "type", "conn_type")]
    names += [f"C{number}" for number in range(14, 22)]
    table = {"id": np.arange(ROWS), "click": rng.integers(0, 2, ROWS)}
    table["hour"] = 14102100 + 100 * (np.arange(ROWS) * 10 // ROWS)
    table |= {name: rng.integers(0, 30, ROWS) for name in names}
    pl.DataFrame(table).write_csv("train.csv")


def last_day() -> pl.DataFrame:
    return click_table().filter(pl.col("day") == 9)


# name in the docs -> function that makes the file
FILES: dict[str, Callable[[], Any]] = {
    "clicks.parquet": lambda: click_table().write_parquet("clicks.parquet"),
    "clicks.csv": lambda: write_csv(click_table(), "clicks.csv"),
    "log.csv": lambda: write_csv(click_table().drop("day"), "log.csv"),
    "new.parquet": lambda: last_day().write_parquet("new.parquet"),
    "tomorrow.parquet": lambda: last_day().write_parquet("tomorrow.parquet"),
    "week.parquet": lambda: click_table().write_parquet("week.parquet"),
    "costs.toml": lambda: Path("costs.toml").write_text(COSTS, "utf-8"),
    "data/log": lambda: make_dataset("data/log"),
    "run": lambda: run_select(click_table(), keep=20),
    "trained": lambda: cli.run(["train", "data/log", "--rows", "early", "--steps", "60", "--out", "trained", "-q"]),
    "found": lambda: cli.run(["search", "trained", "data/log", "--keep", "20", "--out", "found", "-q"]),
    "train.txt": make_kaggle,
    "train.csv": make_avazu,
    "day_*": lambda: make_criteo("."),
}
DEFAULT_OUT = {"select": "run", "compare": "comparison"}
TRAINED = ("run", "trained", "found")
NEEDS = {"trained": ["data/log"], "found": ["data/log", "trained"]}


def provide(word: str) -> None:
    """Make the file or folder that a command or a program names, if it is known and missing."""
    name = word.rstrip("/").removesuffix("/model").removesuffix("/data").removesuffix("/config.json")
    if name in FILES and not Path(name).exists():
        for needed in NEEDS.get(name, []):
            provide(needed)
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        if name not in TRAINED:
            FILES[name]()
            return
        copy = Path.cwd().parent / f"{Path.cwd().name}-{name}"  # made once for all examples of a page
        if not copy.exists():
            FILES[name]()
            shutil.copytree(name, copy)
        else:
            shutil.copytree(copy, name)


def run_command(words: list[str]) -> None:
    """Run a command of lpfs; its output folder is removed first unless the command continues in it."""
    if ">" in words:
        words = words[: words.index(">")]
    out = words[words.index("--out") + 1] if "--out" in words else DEFAULT_OUT.get(words[0])
    for word in words:
        if word != out:
            provide(word)
    if out is not None and {"--resume", "--replace", "--tables-only"} & set(words):
        provide(out)
    elif out is not None and words != ["compare", "--out", out]:
        remove(Path(out))
    if len(words) > 1 and words[0] == "reproduce" and words[1] != "gates":
        return  # minutes to hours; tests/paper runs every experiment in small
    if any("://" in word for word in words):
        return  # needs an object store; tests/data/test_remote.py has one in memory
    if words[0] == "serve" or (words[0] == "online" and "--idle" not in words):
        return  # runs until it is stopped, or needs such a run; tests/serve and tests/online do both
    code = cli.run(words)
    assert code == 0, f"lpfs {' '.join(words)} ended with {code}"


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run a program in the names that the programs before it on the page have left."""
    for word in re.findall(r'"([\w./]+)"', block.text):
        if not re.search(rf'(simulate\("{word}"|(select|compare|prepare)\([^)]*?, "{word}")', block.text):
            provide(word)
    for out in re.findall(r'simulate\("([\w./]+)"|(?:select|compare|prepare)\([^,]+, "([\w./]+)"', block.text):
        remove(Path(out[0] or out[1]))
    if "export_run(" in block.text:
        remove(Path("run/model.onnx"))
        remove(Path("run/model.pt2"))
    text = block.text
    for large, small in SMALLER.get(block.page.name, {}).items():
        text = text.replace(large, small)
    exec(compile(text, str(block), "exec"), names)


class TwoFields(nn.Module):
    """A user's model: two tables and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({"user": nn.Embedding(30, 4), "item": nn.Embedding(30, 4)})
        self.top = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.emb["user"](ids[:, 0]), self.emb["item"](ids[:, 1])], 1)).squeeze(1)


def own_model() -> dict[str, Any]:
    """Return the names of a page about a user's model; only the item decides the click."""
    ids = torch.randint(30, (300, 64, 2), generator=torch.Generator().manual_seed(0))
    stream = [(rows, (rows[:, 1] % 2).float()) for rows in ids]

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0]).float(), batch[1])

    return {"torch": torch, "model": TwoFields(), "stream": stream, "loss_of": loss_of, "ids": ids[0]}


def lpfs_model() -> dict[str, Any]:
    """Return the names of a page about models of lpfs: a Dataset, a model, a batch, a table."""
    dataset = lpfs.prepare(click_table(), "prepared", label="click", time="day", quiet=True)
    model = lpfs.make_model("mlp", dataset.schema, dim=4, hidden=[8])
    batch = next(iter(dataset.stream(64)))
    table = click_table().head(20)
    return {"np": np, "torch": torch, "dataset": dataset, "model": model, "batch": batch, "table": table}


def served_model() -> dict[str, Any]:
    """Return the names of the page about serving: a run that reads a city, a price and tags."""
    rng = np.random.default_rng(0)
    cities = rng.choice(["Basel", "Bern", "Chur"], ROWS)
    table = pl.DataFrame(
        {
            "click": (rng.random(ROWS) < np.where(cities == "Basel", 0.6, 0.2)).astype(int),
            "day": np.arange(ROWS) * 10 // ROWS,
            "city": cities,
            "price": rng.random(ROWS) * 20,
            "tags": [rng.choice(["a", "b", "c"], rng.integers(1, 3)).tolist() for _ in range(ROWS)],
            "noise": rng.choice(["x", "y", "z"], ROWS),
        }
    )
    run_select(table, keep=3, must_keep=("city", "price", "tags"), prepare={"bins": "off"})
    model = lpfs.load("run/model")
    dataset = lpfs.Dataset("run/data")
    batch = next(iter(dataset.stream(64, fields=model.reads.names)))
    return {"torch": torch, "dataset": dataset, "model": model, "batch": batch}


def pandas_table() -> dict[str, Any]:
    """Return the names of the section about scikit-learn: a pandas table."""
    import pandas as pd

    rng = np.random.default_rng(0)
    table = pd.DataFrame({f"column_{n}": rng.normal(size=400) for n in range(12)})
    return {"frame": table, "clicked": (table["column_0"] + table["column_1"] > 0).astype(int)}


# page -> numbers in its programs that are made smaller
SHORT = {"20_000": "300", "keep=20": "keep=1"}
SMALLER = {"README.md": SHORT, "own-model.md": SHORT}
# page -> the names that it uses without defining them
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": own_model,
    "own-model.md": own_model,
    "adapters.md": pandas_table,
    "export.md": served_model,
    **dict.fromkeys(["data.md", "models.md", "extending.md", "getting-started.md"], lpfs_model),
}
