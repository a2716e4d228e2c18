"""The logs of benchmarks/search_variants.py: simulated logs with known probabilities, and training rows of real tables.

    python benchmarks/search_logs.py --tables tables/ --out tmp/search_tables   # encodes the real tables once

Simulated logs have seeds that were used for nothing else; another split seed is another log of the same kind. Real
tables are encoded as ``lpfs compare`` encodes them, without their test rows: a split is a random order of the others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.data.dataset import Dataset
from lpfs.data.simulate_spec import SimulationSpec, preset_spec
from lpfs.data.simulate_world import Simulator, concat_rows, sigmoid
from lpfs.data.store.format import FIRST_ID
from lpfs.data.store.writer import DatasetWriter
from lpfs.schema import Field, Schema

PARTS = 20  # of a table that is split at random
UNSEEN_ID = 1
SCORED_ROWS = 20_000  # fresh rows of a simulated log, with their probabilities

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class BenchmarkLog:
    """A kind of log; ``make(seed, folder)`` writes the Dataset and the scored rows of a split."""

    make: Callable[[int, Path], tuple[Dataset, Dataset, Array | None]]


def simulated(preset: str, rows: int, seed: int, largest: int = 20_000) -> BenchmarkLog:
    """Return a log of the simulator; fields have at most ``largest`` values, so that a table fits many processes."""

    def make(split: int, folder: Path) -> tuple[Dataset, Dataset, Array | None]:
        world = seed + 1000 * split
        spec = preset_spec(preset, rows, None, world)
        spec = replace(spec, specs=tuple(replace(field, values=min(field.values, largest)) for field in spec.specs))
        simulator = Simulator(replace(spec, tasks=()), world)
        log = write_days(simulator.spec, simulator, folder / "log", spec.day_rows())
        return log, *scored_rows(simulator, folder / "scored")

    return BenchmarkLog(make)


def write_days(spec: SimulationSpec, simulator: Simulator, folder: Path, day_rows: list[int]) -> Dataset:
    with DatasetWriter(folder, spec.schema(), fingerprint="simulated", settings={}) as writer:
        for day, count in enumerate(day_rows):
            block = concat_rows(list(simulator.chunks(day, count, 1 << 18)))
            writer.day(f"day_{day}").append(**simulator.writer_columns(block))
    return Dataset(folder)


def scored_rows(simulator: Simulator, folder: Path) -> tuple[Dataset, Array]:
    """Return fresh rows of the last day, and their probabilities."""
    day, spec = simulator.spec.days - 1, simulator.spec
    blocks = [simulator.block(day, 1000 + number, 1 << 14) for number in range(-(-SCORED_ROWS // (1 << 14)))]
    with DatasetWriter(folder, spec.schema(), fingerprint="scored", settings={}) as writer:
        writer.day("day").append(**simulator.writer_columns(concat_rows(blocks)))
    return Dataset(folder), sigmoid(np.concatenate([block.logit for block in blocks]))


# ------------------------------------------------------------------------------------------------ ids that turn over


def turnover(rows: int, seed: int, days: int = 20, user_days: float = 6.0, item_days: float = 10.0) -> BenchmarkLog:
    """Return a log whose users and items come and go; the genres of an item, and the age of a user, are implied."""

    def make(split: int, folder: Path) -> tuple[Dataset, Dataset, Array | None]:
        rng = np.random.default_rng([seed, split])
        world = TurnoverWorld(rng, rows, days, user_days, item_days)
        columns, logit = world.rows(rng, np.repeat(np.arange(days), rows // days))
        label = rng.random(len(logit)) < sigmoid(logit)
        known = {name: np.unique(columns[name][: int(0.9 * len(logit))]) for name in columns}
        codes = {name: encode(columns[name], known[name]) for name in columns}
        schema = Schema(tuple(Field(name, cardinality=len(known[name]) + FIRST_ID) for name in columns), label="click")
        with DatasetWriter(folder / "log", schema, fingerprint="turnover", settings={}) as writer:
            for day in range(days):
                part = slice(day * (rows // days), (day + 1) * (rows // days))
                ids = {name: values[part] for name, values in codes.items()}
                writer.day(f"day_{day:02d}").append(ids=ids, labels={"click": label[part]})
        fresh, logit = world.rows(rng, np.full(SCORED_ROWS, days - 1))
        with DatasetWriter(folder / "scored", schema, fingerprint="scored", settings={}) as writer:
            ids = {name: encode(fresh[name], known[name]) for name in fresh}
            writer.day("day").append(ids=ids, labels={"click": rng.random(len(logit)) < sigmoid(logit)})
        return Dataset(folder / "log"), Dataset(folder / "scored"), sigmoid(logit)

    return BenchmarkLog(make)


def encode(values: Array, known: Array) -> Array:
    """Return ids; values that are not known are unseen."""
    place = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.where(known[place] == values, place + FIRST_ID, UNSEEN_ID)


class TurnoverWorld:
    """Users and items with a birth and a lifetime, their effects, and the rows that they make."""

    def __init__(self, rng: np.random.Generator, rows: int, days: int, user_days: float, item_days: float) -> None:
        self.users, self.items = Population(rng, rows // 250, days, user_days), Population(rng, 120, days, item_days)
        self.genre = rng.integers(12, size=self.items.count)
        self.maker = rng.integers(40, size=self.items.count)
        self.age = rng.integers(8, size=self.users.count)
        effects = {"genre": 12, "maker": 40, "age": 8, "device": 5, "hour": 24, "place": 30}
        self.effects = {name: rng.normal(size=count) for name, count in effects.items()}
        self.user_effect = 1.0 * rng.normal(size=self.users.count) + 0.4 * self.effects["age"][self.age]
        self.item_effect = 0.8 * rng.normal(size=self.items.count) + 0.5 * self.effects["genre"][self.genre]
        self.tags = rng.integers(2, size=(12, 4))  # flags of every genre

    def rows(self, rng: np.random.Generator, day: Array) -> tuple[dict[str, Array], Array]:
        """Return the columns and the true logits of rows of these days."""
        user, item, count = self.users.draw(rng, day), self.items.draw(rng, day), len(day)
        columns = {
            "user": user,
            "item": item,
            "genre": self.genre[item],
            "maker": self.maker[item],
            "age": self.age[user],
            "age_band": self.age[user] // 2,
            "device": rng.integers(5, size=count),
            "hour": rng.integers(24, size=count),
            "place": rng.integers(30, size=count),
            "session": rng.integers(count // 3, size=count),
        }
        for tag in range(4):
            columns[f"tag_{tag}"] = self.tags[self.genre[item], tag]
        columns |= {f"noise_{size}": rng.integers(size, size=count) for size in (3, 10, 50, 300, 2000)}
        logit = self.user_effect[user] + self.item_effect[item] - 1.5
        for name, weight in (("device", 0.4), ("hour", 0.3), ("place", 0.25)):
            logit += weight * self.effects[name][columns[name]]
        return columns, logit


class Population:
    """Users or items that are alive on some days."""

    def __init__(self, rng: np.random.Generator, alive: int, days: int, lifetime: float) -> None:
        self.count = round(alive * (days + 3 * lifetime) / lifetime)
        birth = rng.uniform(-3 * lifetime, days, self.count)
        death = birth + rng.exponential(lifetime, self.count)
        activity = rng.exponential(1.0, self.count)
        self.weights = [activity * ((birth < day + 1) & (death > day)) for day in range(days)]

    def draw(self, rng: np.random.Generator, day: Array) -> Array:
        """Return a member for each row, one that exists on the day of the row."""
        drawn = np.empty(len(day), np.int64)
        for number in np.unique(day):
            weights = self.weights[number]
            at = np.flatnonzero(day == number)
            drawn[at] = rng.choice(self.count, len(at), p=weights / weights.sum())
        return drawn


# ------------------------------------------------------------------------------------------------ real tables


def table(name: str, rows: int | None = None) -> BenchmarkLog:
    """Return random splits of the rows of a table that are not its test rows; the others beyond ``rows`` score."""

    def make(split: int, folder: Path) -> tuple[Dataset, Dataset, Array | None]:
        stored = np.load(TABLES / f"{name}.npz")
        schema = Schema.from_json(json.loads(str(stored["schema"])))
        order = np.random.default_rng([7, split]).permutation(len(stored["labels"]))
        used = order if rows is None else order[:rows]
        log = write_table(stored, schema, used, folder / "log", PARTS)
        if rows is None:
            return log, log, None
        return log, write_table(stored, schema, order[rows:], folder / "scored", 1), None

    return BenchmarkLog(make)


def write_table(stored: Any, schema: Schema, index: Array, folder: Path, parts: int) -> Dataset:
    settings = {"options": {"shuffle": True}}
    with DatasetWriter(folder, schema, fingerprint="table", settings=settings) as writer:
        for part, rows in enumerate(np.array_split(index, parts)):
            columns: dict[str, dict[str, Array]] = {"categorical": {}, "numeric": {}}
            position = {"categorical": 0, "numeric": 0}
            for field in schema:
                start = position[field.kind]
                position[field.kind] += field.dim if field.kind == "numeric" else 1
                values = stored["ids" if field.kind == "categorical" else "dense"][rows, start : position[field.kind]]
                columns[field.kind][field.name] = values[:, 0] if values.shape[1] == 1 else values
            writer.day(f"part_{part:02d}").append(
                ids=columns["categorical"], dense=columns["numeric"], labels={schema.label: stored["labels"][rows]}
            )
    return Dataset(folder)


def store_table(source: Path, options: dict[str, Any], most: int, out: Path, must_drop: tuple[str, ...] = ()) -> None:
    """Encode a table and store its rows without the test rows as a compressed file of arrays."""
    from lpfs._console import Console
    from lpfs.pipeline.data import prepare_dataset
    from lpfs.pipeline.settings import Settings
    from lpfs.pipeline.splits import split_dataset

    with tempfile.TemporaryDirectory() as folder:
        dataset = prepare_dataset(str(source), Settings(keep=1, **options), Path(folder), Console(quiet=True))
        splits = split_dataset(dataset)
        schema = dataset.schema.subset([name for name in dataset.schema.names if name not in must_drop])
        rows = dataset.reader(schema).read([(0, splits.valid.span[1])])
        chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:most])
        taken = rows.take(chosen)
        dense = taken.dense if taken.missing is None else np.where(taken.missing, np.nan, taken.dense)
        ids = taken.ids.astype(np.uint16 if taken.ids.size and taken.ids.max() < 1 << 16 else np.int32)
        out.mkdir(parents=True, exist_ok=True)
        labels = taken.labels[:, 0].astype(np.uint8)
        text = json.dumps(schema.to_json())
        np.savez_compressed(out / f"{source.stem}.npz", ids=ids, dense=dense, labels=labels, schema=text)
    print(source.stem, len(labels), "rows", int(labels.sum()), "positives", len(schema), "fields")


TABLES = Path(__file__).resolve().parent.parent / "tmp" / "search_tables"
LOGS: dict[str, BenchmarkLog] = {
    "small": simulated("small", 24_000, 410),
    "terabyte": simulated("terabyte", 48_000, 420),
    "industrial-small": simulated("industrial-small", 40_000, 430),
    "turnover": turnover(40_000, 440),
    "turnover-fast": turnover(24_000, 450, user_days=4.0, item_days=6.0),
    "catalog": simulated("catalog", 48_000, 460),
    "catalog-200k": simulated("catalog", 200_000, 470, largest=100_000),
    "turnover-200k": simulated("turnover", 200_000, 480, largest=100_000),
    "small-100k": simulated("small", 100_000, 490, largest=100_000),
    "terabyte-200k": simulated("terabyte", 200_000, 500, largest=100_000),
    "coil": table("coil2000"),
    "bank": table("bank_marketing", 15_000),
    "census": table("census_income_kdd", 20_000),
}
TABLE_LOGS = ("coil", "bank", "census")  # in random order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="directory of the Parquet files")
    parser.add_argument("--out", type=Path, default=TABLES)
    options = parser.parse_args()
    split = {"label": "label", "split": "split"}
    store_table(options.tables / "coil2000.parquet", split, 100_000, options.out)
    store_table(options.tables / "census_income_kdd.parquet", split, 70_000, options.out)
    store_table(options.tables / "bank_marketing.parquet", {"label": "label"}, 100_000, options.out, ("duration",))


if __name__ == "__main__":
    main()
