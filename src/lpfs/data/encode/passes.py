"""Passes over the log: every field observes the training days, then encodes all rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lpfs.data.encoders.categorical import CategoricalEncoder, MultiEncoder
from lpfs.data.passes import DayRows
from lpfs.data.encoders.base import Encoder
from lpfs.data.encode.numeric import BinsEncoder, NumericEncoder
from lpfs.data.encode.twins import Twins, digested
from lpfs.data.fields import FieldPlan

Work = Callable[[Encoder], Any]
SMALL = 2000  # rows below which threads cost more than they save


def encoder_type(plan: FieldPlan) -> type[Encoder]:
    """Return the kind of encoder for a plan."""
    if plan.kind == "multi":
        return MultiEncoder
    if plan.kind == "numeric":
        return BinsEncoder if plan.binned else NumericEncoder
    return CategoricalEncoder


def make_encoder(plan: FieldPlan, seed: int, first: int = 0) -> Encoder:
    """Return an encoder that has learned nothing yet; ``first`` is the number of the first row it will observe."""
    kind = encoder_type(plan)
    return BinsEncoder(plan, seed, first) if kind is BinsEncoder else kind(plan)


def in_parallel(
    pool: ThreadPoolExecutor, encoders: Sequence[Encoder], work: Work, rows: int = SMALL
) -> dict[str, Any]:
    """Do something with every field, on all cores where there are rows enough."""
    done = pool.map(work, encoders) if rows >= SMALL else map(work, encoders)
    return dict(zip((each.name for each in encoders), done, strict=True))


def make_pool(threads: int | None = None) -> ThreadPoolExecutor:
    """Return a pool with so many threads, or a thread a core, eight at most."""
    return ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1))


def observe(parts: Iterable[DayRows], encoders: Sequence[Encoder]) -> Twins:
    """Show the training period to every field; return what was learned about equal columns."""
    twins = Twins(encoders)
    with make_pool() as pool:
        rows = 0
        for part in parts:
            rows += part.frame.height

            def look(each: Encoder, part: DayRows = part) -> bytes | None:
                signature = each.observe(part.frame[each.name], part.where)
                return digested(signature()) if twins.needs(each.name) else None

            found = in_parallel(pool, encoders, look, part.frame.height)
            twins.add({name: digest for name, digest in found.items() if digest is not None})
        in_parallel(pool, encoders, lambda each: each.finish(), rows)
    return twins


def encode(
    parts: Iterable[DayRows], encoders: Sequence[Encoder], threads: int | None = None
) -> Iterator[tuple[DayRows, dict[str, dict[str, Any]]]]:
    """Yield the rows of each part with their ids, numbers and bags, as ``DayWriter.append`` takes them."""
    kinds = {
        each.name: {"categorical": "ids", "numeric": "dense", "multi": "bags"}[each.kind] for each in encoders
    }
    with make_pool(threads) as pool:
        for part in parts:

            def turn(each: Encoder, part: DayRows = part) -> Any:
                return each.encode(part.frame[each.name], part.where)

            columns: dict[str, dict[str, Any]] = {"ids": {}, "dense": {}, "bags": {}}
            for name, values in in_parallel(pool, encoders, turn, part.frame.height).items():
                columns[kinds[name]][name] = values
            yield part, columns


def by_day(part: DayRows, columns: dict[str, dict[str, Any]]) -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:
    """Cut encoded rows where a day ends; yield each day with the arguments of ``DayWriter.append``."""
    ends = {name: np.concatenate([[0], np.cumsum(lengths)]) for name, (_, lengths) in columns["bags"].items()}
    start = 0
    for day, rows in part.days:
        stop = start + rows
        cut = {kind: {name: each[start:stop] for name, each in columns[kind].items()} for kind in ("ids", "dense")}
        bags = {
            name: (values[ends[name][start] : ends[name][stop]], lengths[start:stop])
            for name, (values, lengths) in columns["bags"].items()
        }
        labels = {name: values[start:stop] for name, values in part.labels.items()}
        yield day, {**cut, "bags": bags, "labels": labels}
        start = stop
