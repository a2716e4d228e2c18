"""SparkEngine: a cluster engine on Spark. Each piece is a task; ibis expressions sum up the counts of values.

The active Spark session is used if there is one. Otherwise one is created as the Spark settings say
(spark-defaults.conf, PYSPARK_SUBMIT_ARGS), on this machine by default. The workers need lpfs, and must see the
files of the log under the given paths. If the environment variable LPFS_SHARED names a directory or a URL that all
machines can access, encoded rows are passed through it; otherwise through Spark, which is slow for many rows.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any

import ibis
import polars as pl
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import lpfs.errors
from lpfs._console import Console
from lpfs.data.encoders.numeric import SAMPLE_SIZE
from lpfs.data.encoders.vocabulary import VocabularyLimits
from lpfs.data.engines.cluster import (
    COUNT_COLUMNS,
    PICKLE_PROTOCOL,
    SAMPLE_TYPE,
    ChunkState,
    ClusterEngine,
    Item,
    PieceResults,
    Result,
    SharedFolder,
)
from lpfs.data.passes import LabelCopies
from lpfs.data.planning import PreparePlan
from lpfs.errors import DataError

SHARED_VARIABLE = "LPFS_SHARED"  # environment variable: a directory or URL that all machines can access
TABLE_SCHEMA = "item long, value binary, field int, type string, text string, number long, count long"
TABLE_TYPES = dict(zip(COUNT_COLUMNS, (pa.int32(), pa.string(), pa.string(), pa.int64(), pa.int64()), strict=True))
NO_LIMITS = VocabularyLimits(0, None)  # for a column with different types in different files
NO_CAP = 1 << 62
MAX_FETCH_ROWS = 1 << 22  # rows of counts fetched at a time
MAX_BATCH_ROWS = 1 << 16  # rows of a record batch
LPFS_ERROR = re.compile(r"lpfs\.errors\.(\w+): (.*)")


class SparkEngine(ClusterEngine):
    """Run one task per piece; large results stay on the disks of the workers until they are fetched."""

    def __init__(self, plan: PreparePlan, console: Console) -> None:
        super().__init__(plan, console)
        self._owns_session = SparkSession.getActiveSession() is None
        self.session = get_session()
        self.ibis = ibis.pyspark.connect(self.session)
        self._persisted: list[DataFrame] = []

    def __exit__(self, *error: object) -> None:
        """Free the results on the workers; stop the session if it was created here."""
        for frame in self._persisted:
            frame.unpersist()
        if self._owns_session:
            self.session.stop()

    def map(self, task: str, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        with self._timed(task, len(items)):
            rows = self._map_items(partial(yield_result, function), items).select("item", "value").collect()
        return [pickle.loads(row.value) for row in sorted(rows, key=lambda row: row.item)]

    def map_large(
        self, task: str, function: Callable[[Item], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        """Yield all results of a function; the workers compute all of them before the first is fetched."""
        parent = os.environ.get(SHARED_VARIABLE)
        if parent:
            shared = SharedFolder.create_in(parent)
            try:
                names = self.map(task, partial(shared.write_all, function), items)
                for name in chain.from_iterable(names):
                    yield shared.pop(name)
            finally:
                shared.remove()
            return
        with self._timed(task, len(items)):
            frame = self._persist(self._map_items(function, items).select("value"))
            frame.count()
        with self._timed("fetching", len(items)):
            for row in frame.toLocalIterator(prefetchPartitions=True):
                yield pickle.loads(row.value)

    def reduce_counts(
        self,
        task: str,
        function: Callable[[Item], Iterator[ChunkState | pl.DataFrame | LabelCopies]],
        items: Sequence[Item],
        limits: Mapping[int, VocabularyLimits],
    ) -> PieceResults:
        results = PieceResults()
        with self._timed(task, len(items)):
            observed = self._table("observed", self._persist(self._map_items(function, items)))
            pickled = self._fetch(observed.filter(observed["value"].notnull()).select("item", "value"))
            for data in pickled.sort("item", maintain_order=True)["value"].to_list():
                value = pickle.loads(data)
                (results.label_copies if isinstance(value, LabelCopies) else results.chunks).append(value)

            values = observed.filter(observed["value"].isnull() & (observed["type"] != SAMPLE_TYPE))
            summed = values.group_by("field", "type", "text", "number").agg(count=values["count"].sum())
            counts = self._table("counted", self._persist(self._to_frame(summed)))
            by_type = counts.group_by("field", "type").agg(values=counts.count(), rows=counts["count"].sum())
            by_field = self._fetch(by_type).group_by("field").agg("type", pl.col("values", "rows").sum()).sort("field")
            total = {row["field"]: row for row in by_field.iter_rows(named=True)}
            results.types = {index: row["type"] for index, row in total.items()}
            for fields in fetch_groups({index: row["values"] for index, row in total.items()}):
                one_type = {index: len(results.types[index]) == 1 for index in fields}
                group_limits = {index: limits[index] if one_type[index] else NO_LIMITS for index in fields}
                frequent = self._fetch(frequent_values(counts, group_limits))
                for index in fields:
                    results.counts[index] = rows = frequent.filter(pl.col("field") == index)
                    rows_left_out = total[index]["rows"] - int(rows["count"].sum())
                    results.left_out[index] = total[index]["values"] - rows.height, rows_left_out
            samples = self._fetch(lowest_hashes(observed.filter(observed["type"] == SAMPLE_TYPE)))
            results.samples = {int(key[0]): rows for key, rows in samples.group_by("field")}
        return results

    def _map_items(self, function: Callable[[Item], Iterator[Any]], items: Sequence[Item]) -> DataFrame:
        """Return ``to_rows`` of all results, with one task per item; function and items are broadcast."""
        shared = self.session.sparkContext.broadcast((function, items))

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            worker_function, worker_items = shared.value
            for batch in batches:
                for index in batch["id"].to_pylist():
                    for value in worker_function(worker_items[index]):
                        yield from to_rows(index, value)

        return self.session.range(0, len(items), 1, len(items)).mapInArrow(run, TABLE_SCHEMA)

    def _persist(self, frame: DataFrame) -> DataFrame:
        """Keep the rows of a frame on the disks of the workers until the engine is closed."""
        self._persisted.append(frame.persist(StorageLevel.DISK_ONLY))
        return self._persisted[-1]

    def _table(self, name: str, frame: DataFrame) -> ibis.Table:
        name = f"lpfs_{name}_{id(self)}"
        frame.createOrReplaceTempView(name)
        return self.ibis.table(name)

    def _to_frame(self, table: ibis.Table) -> DataFrame:
        return self.session.sql(str(self.ibis.compile(table)))

    def _fetch(self, table: ibis.Table) -> pl.DataFrame:
        return pl.DataFrame(self._to_frame(table).toArrow())

    @contextmanager
    def _timed(self, task: str, count: int) -> Iterator[None]:
        """Report a task and its duration; convert errors of the workers to errors of lpfs."""
        start = monotonic()
        try:
            yield
        except PySparkException as error:
            raise convert_spark_error(error) from error
        pieces = f"{count:,} piece{'s' * (count != 1)}"
        self.console.message(f"spark: {task}: {pieces} in {monotonic() - start:,.1f} s")


def yield_result(function: Callable[[Item], Result], item: Item) -> Iterator[Result]:
    """Yield the result of a function."""
    yield function(item)


def get_session() -> SparkSession:
    """Return the active session, or a new one."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if (active := SparkSession.getActiveSession()) is not None:
        return active
    builder = SparkSession.builder.appName("lpfs prepare").config("spark.ui.showConsoleProgress", "false")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return builder.getOrCreate()
    except PySparkException as error:
        raise DataError(
            f"Spark did not start: {' '.join(str(error).split())[:200]}; "
            "it needs java 17 (JAVA_HOME) and a master that can be reached"
        ) from error


def frequent_values(counts: ibis.Table, limits: Mapping[int, VocabularyLimits]) -> ibis.Table:
    """Return the values that can get an id: with at least the minimum count and, if there is a cap, below it.

    Values with the same count as the last one below the cap are all returned: the caller breaks the ties.
    """
    rows = counts.filter(counts["field"].isin(list(limits)))
    min_count = rows["field"].cases(*((index, limit.min_count) for index, limit in limits.items()), else_=0)
    rows = rows.filter(rows["count"] >= min_count)
    caps = [(index, limit.max_values) for index, limit in limits.items() if limit.max_values is not None]
    if caps:
        rank = ibis.rank().over(group_by="field", order_by=ibis.desc("count"))
        rows = rows.mutate(rank=rank, cap=rows["field"].cases(*caps, else_=NO_CAP))
        rows = rows.filter(rows["rank"] < rows["cap"])
    return rows.select(*COUNT_COLUMNS)


def lowest_hashes(samples: ibis.Table) -> ibis.Table:
    """Return the rows of each field with the lowest hashes, as many as a sample has."""
    numbered = samples.mutate(position=ibis.row_number().over(group_by="field", order_by="number"))
    return numbered.filter(numbered["position"] < SAMPLE_SIZE).select(*COUNT_COLUMNS)


def fetch_groups(values: Mapping[int, int]) -> Iterator[list[int]]:
    """Yield groups of fields to fetch together, given the number of values of each; a large field is a group."""
    group: list[int] = []
    for index, count in values.items():
        if group and sum(values[other] for other in group) + count > MAX_FETCH_ROWS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def to_rows(item: int, value: Any) -> Iterator[pa.RecordBatch]:
    """Yield counts and samples as rows of ``TABLE_SCHEMA``, other values as one row with the pickled value."""
    if not isinstance(value, pl.DataFrame):
        nulls = {name: pa.nulls(1, type) for name, type in TABLE_TYPES.items()}
        data = pa.array([pickle.dumps(value, PICKLE_PROTOCOL)], pa.binary())
        yield pa.record_batch({"item": pa.array([item], pa.int64()), "value": data, **nulls})
        return
    for part in value.iter_slices(MAX_BATCH_ROWS):
        columns = {name: part[name].to_arrow().cast(type) for name, type in TABLE_TYPES.items()}
        indices, no_values = pa.array([item] * part.height, pa.int64()), pa.nulls(part.height, pa.binary())
        yield pa.record_batch({"item": indices, "value": no_values, **columns})


def convert_spark_error(error: PySparkException) -> Exception:
    """Return the error of lpfs that a worker raised, or a DataError that quotes Spark."""
    if matches := LPFS_ERROR.findall(str(error)):
        name, message = matches[-1]
        converted: Exception = getattr(lpfs.errors, name, DataError)(message)
        return converted
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return DataError(f"Spark failed: {lines[-1][:300] if lines else type(error).__name__}; see the log of Spark")
