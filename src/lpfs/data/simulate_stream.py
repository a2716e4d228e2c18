"""A simulated click stream with a known schedule: one field dies, another wakes, a third drifts."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lpfs._fileio import replace_atomic, write_json_atomic
from lpfs._validation import check_int
from lpfs.errors import InputError

if TYPE_CHECKING:
    import polars as pl

DIES, WAKES, DRIFTS = "dies", "wakes", "drifts"  # names of the three fields that change
SCHEDULE = "schedule.json"


@dataclass(frozen=True)
class StreamSpec:
    """What is simulated; the same spec gives the same rows, whatever the sizes of segments.

    Args:
        fields: number of fields, the three that change included.
        informative: number of fields that always predict clicks.
        values: number of values of a field.
        strength: standard deviation of the effect of an informative field on the logit.
        dies: event after which the field ``dies`` no longer predicts clicks (T1).
        wakes: event after which the field ``wakes`` does (T2).
        drifts: event after which ever more values of the field ``drifts`` are new.
        rate: share of clicks, about.
        duplicates: share of events that are sent a second time, under the same key.
        malformed: share of events with a text in a numeric field.
        seed: of everything.
    """

    fields: int = 40
    informative: int = 8
    values: int = 100
    strength: float = 0.5
    dies: int = 400_000
    wakes: int = 700_000
    drifts: int = 500_000
    rate: float = 0.2
    duplicates: float = 0.0
    malformed: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value, share = getattr(self, item.name), item.name in ("rate", "duplicates", "malformed")
            if item.type == "int":
                check_int(item.name, value, 0)
            elif not 0 <= value < (1 if share else 100):
                raise InputError(f"{item.name} must be at least 0 and below {1 if share else 100}, found {value!r}")
        if self.fields < self.informative + 4:
            raise InputError(f"fields must be at least informative + 4 = {self.informative + 4}, found {self.fields}")

    @property
    def names(self) -> tuple[str, ...]:
        """The fields in order; ``number`` is numeric, the others have values ``v0``, ``v1``, …"""
        noise = self.fields - self.informative - 4
        informative = (f"informative_{index:02d}" for index in range(self.informative))
        return (DIES, WAKES, DRIFTS, "number", *informative, *(f"noise_{index:02d}" for index in range(noise)))

    def useful(self, event: int) -> set[str]:
        """Return the fields that predict clicks at an event."""
        changing = {DRIFTS, "number"} | ({DIES} if event < self.dies else set())
        changing |= {WAKES} if event >= self.wakes else set()
        return changing | {name for name in self.names if name.startswith("informative")}


def simulate_events(spec: StreamSpec, first: int, rows: int) -> pl.DataFrame:
    """Return events ``first`` to ``first + rows`` of the stream; each block of 1,000 has its own generator."""
    import polars as pl

    block = 1000
    parts = [_block(spec, index, block) for index in range(first // block, -(-(first + rows) // block))]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    start = first - first // block * block
    frame = pl.DataFrame(columns).slice(start, rows)
    texts = [name for name in spec.names if name != "number"]
    return frame.with_columns(pl.concat_str(pl.lit("v"), pl.col(name).cast(pl.String)).alias(name) for name in texts)


def _block(spec: StreamSpec, index: int, rows: int) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng([spec.seed, 1, index])
    event = np.arange(index * rows, (index + 1) * rows)
    effects = np.random.default_rng([spec.seed, 0]).normal(0, spec.strength, (len(spec.names), spec.values))
    skew = rng.random((len(spec.names), rows)) ** 1.5
    values = (skew * spec.values).astype(np.int64)  # (N, rows); small values are more frequent
    number = rng.normal(size=rows)
    logit = np.full(rows, np.log(spec.rate / (1 - spec.rate)))
    for position, name in enumerate(spec.names):
        if name == "number":
            logit += spec.strength * number
        elif name in (DIES, WAKES):
            active = event < spec.dies if name == DIES else event >= spec.wakes
            logit += np.where(active, effects[position, values[position]], 0.0)
        elif name == DRIFTS or name.startswith("informative"):
            logit += effects[position, values[position]]
    drifted = np.clip((event - spec.drifts) / max(1, spec.drifts), 0.0, 0.8)  # share of new values
    position = spec.names.index(DRIFTS)
    values[position] += np.where(rng.random(rows) < drifted, spec.values, 0)
    click = rng.random(rows) < 1 / (1 + np.exp(-logit))
    columns: dict[str, npt.NDArray[Any]] = {"event": event, "click": click.astype(np.int64)}
    columns |= {name: number if name == "number" else values[at] for at, name in enumerate(spec.names)}
    return columns


def write_stream(
    out: str | os.PathLike[str],
    spec: StreamSpec,
    *,
    events: int,
    segment: int = 10_000,
    format: str = "parquet",
    first: int = 0,
    rate: float | None = None,
) -> None:
    """Write segments with the schedule beside them; each appears complete, by rename.

    Args:
        out: folder; ``schedule.json`` in it says when which field changes.
        spec: what is simulated.
        events: number of events.
        segment: events per segment.
        format: ``parquet``, ``csv`` or ``jsonl``.
        first: number of the first event; a stream can be continued.
        rate: events per second; None: as fast as possible.
    """
    if format not in ("parquet", "csv", "jsonl"):
        raise InputError(f"format must be parquet, csv or jsonl, found {format!r}")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(folder / SCHEDULE, {"spec": asdict(spec), "events": first + events, "segment": segment})
    started = time.monotonic()
    for start in range(first, first + events, segment):
        rows = min(segment, first + events - start)
        if rate is not None:
            time.sleep(max(0.0, (start + rows - first) / rate - (time.monotonic() - started)))
        write_segment(folder / f"{start:012d}.{format}", inject_faults(spec, simulate_events(spec, start, rows)))


def inject_faults(spec: StreamSpec, frame: pl.DataFrame) -> pl.DataFrame:
    """Return events with duplicates (same key, at once again) and texts in the numeric field, as the spec asks."""
    import polars as pl

    if not spec.duplicates and not spec.malformed:
        return frame
    events = frame["event"].to_numpy()
    rng = np.random.default_rng([spec.seed, 2, int(events[0])])
    twice, broken = rng.random(len(events)) < spec.duplicates, rng.random(len(events)) < spec.malformed
    number = pl.when(pl.Series(broken)).then(pl.lit("broken")).otherwise(pl.col("number").cast(pl.String))
    return frame.with_columns(number=number)[np.repeat(np.arange(len(events)), 1 + twice)]


def write_segment(path: Path, frame: pl.DataFrame) -> None:
    """Write a segment under a hidden name, then rename it."""
    with replace_atomic(path) as temporary:
        if path.suffix == ".parquet":
            frame.write_parquet(temporary)
        elif path.suffix == ".csv":
            frame.write_csv(temporary)
        else:
            temporary.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in frame.iter_rows(named=True)))
