"""The engine on a Spark cluster: pieces are its tasks, like values are added up by ibis expressions.

A running session is used if there is one; else one is made as the Spark settings say (spark-defaults.conf,
PYSPARK_SUBMIT_ARGS), on this machine where they say nothing. Workers need lpfs, and must see the files of the log
under the paths that were given. Where LPFS_SHARED names a folder or a URL that all of them see, encoded rows come
back through it; else through Spark, which is slow for many.

Encoded rows by way of files: a folder that all machines see moves more than Spark moves to its driver.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import ibis
import polars as pl
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import lpfs.errors
from lpfs.data.encoders.numeric import SAMPLED
from lpfs.data.engines.cluster import (
    COUNTS,
    SAMPLE,
    ChunkState,
    ClusterEngine,
    Item,
    PieceResults,
    Result,
    VocabularyLimits,
    to_bytes,
)
from lpfs.data.passes import LabelCopies
from lpfs.data.planning import PreparePlan
from lpfs.data.progress import Reporter
from lpfs.data.remote import as_url, convert_remote_errors, file_system
from lpfs.errors import DataError

VARIABLE = "LPFS_SHARED"  # the folder or URL


@dataclass(frozen=True)
class SharedFolder:
    """A folder of our own in a place that all machines see, a path or a URL."""

    place: str

    @classmethod
    def create_in(cls, place: str) -> SharedFolder:
        """Return a new folder in a place."""
        return cls(f"{(as_url(place) or place).rstrip('/')}/lpfs-{uuid.uuid4().hex}")

    def put(self, value: Any) -> str:
        """Write a value; return the name it has."""
        name = uuid.uuid4().hex
        if as_url(self.place) is None:
            Path(self.place).mkdir(parents=True, exist_ok=True)
            Path(self.place, name).write_bytes(to_bytes(value))
        else:
            system, root = file_system(self.place)
            with convert_remote_errors(self.place):
                system.pipe_file(f"{root}/{name}", to_bytes(value))
        return name

    def take(self, name: str) -> Any:
        """Return the value of a name, and remove it."""
        if as_url(self.place) is None:
            path = Path(self.place, name)
            data = path.read_bytes()
            path.unlink()
        else:
            system, root = file_system(self.place)
            with convert_remote_errors(self.place):
                data = system.cat_file(f"{root}/{name}")
                system.rm_file(f"{root}/{name}")
        return pickle.loads(data)

    def clear(self) -> None:
        """Remove the folder and whatever is left in it, by tasks that were done twice for example."""
        if as_url(self.place) is None:
            shutil.rmtree(self.place, ignore_errors=True)
        else:
            system, root = file_system(self.place)
            with convert_remote_errors(self.place):
                if system.exists(root):
                    system.rm(root, recursive=True)


def write_all(shared: SharedFolder, function: Callable[[Any], Iterator[Any]], item: Any) -> list[str]:
    """Write all that a function yields for an item; return the names, in order."""
    return [shared.put(value) for value in function(item)]


BINARY_SCHEMA = "at long, lot binary"
TABLE = "at long, lot binary, field int, type string, text string, number long, count long"
MIXED = VocabularyLimits(0, None)  # of a column that has several types, in several files
NO_CAP = 1 << 62
MAX_FETCH_ROWS = 1 << 22  # values fetched at a time
OURS = re.compile(r"lpfs\.errors\.(\w+): (.*)")


class SparkEngine(ClusterEngine):
    """A piece a task; results that are large wait on the disks of the workers until they are fetched."""

    def __init__(self, job: PreparePlan, reporter: Reporter) -> None:
        super().__init__(job, reporter)
        self._own = SparkSession.getActiveSession() is None
        self.session = get_session()
        self.ibis = ibis.pyspark.connect(self.session)
        self._kept: list[DataFrame] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free what waits on the workers; stop the session if it was made here."""
        for each in self._kept:
            each.unpersist()
        if self._own:
            self.session.stop()

    def map(self, what: str, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return what a function gives for each item."""
        with self._telling(what, len(items)):
            frame = self._mapped(partial(once, function), items, to_batch)
            rows = frame.select("at", "lot").collect()
        return [pickle.loads(row.lot) for row in sorted(rows, key=lambda row: row.at)]

    def map_large(
        self, what: str, function: Callable[[Item], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        """Yield all that a function yields; all of it is made first, on the workers, then fetched in order."""
        place = os.environ.get(VARIABLE)
        if place:
            shared = SharedFolder.create_in(place)
            try:
                names = self.map(what, partial(write_all, shared, function), items)
                for name in chain.from_iterable(names):
                    yield shared.take(name)
            finally:
                shared.clear()
            return
        with self._telling(what, len(items)):
            frame = self._keep(self._mapped(function, items, to_batch).select("lot"))
            frame.count()
        with self._telling("fetching", len(items)):
            for row in frame.toLocalIterator(prefetchPartitions=True):
                yield pickle.loads(row.lot)

    def reduce_counts(
        self,
        what: str,
        function: Callable[[Item], Iterator[ChunkState | pl.DataFrame | LabelCopies]],
        items: Sequence[Item],
        limits: Mapping[int, VocabularyLimits],
    ) -> PieceResults:
        """Add up with one expression for all fields; only values that can get an id leave the cluster."""
        found = PieceResults()
        with self._telling(what, len(items)):
            mapped = self._table("observed", self._keep(self._mapped(function, items, to_table_rows)))
            notes = self._fetch(mapped.filter(mapped["lot"].notnull()).select("at", "lot"))
            for lot in notes.sort("at", maintain_order=True)["lot"].to_list():
                value = pickle.loads(lot)
                (found.leaks if isinstance(value, LabelCopies) else found.notes).append(value)

            valued = mapped.filter(mapped["lot"].isnull() & (mapped["type"] != SAMPLE))
            summed = valued.group_by("field", "type", "text", "number").agg(count=valued["count"].sum())
            counts = self._table("counted", self._keep(self._frame(summed)))
            grouped = counts.group_by("field", "type").agg(values=counts.count(), rows=counts["count"].sum())
            totals = self._fetch(grouped)
            by_field = totals.group_by("field").agg("type", pl.col("values", "rows").sum()).sort("field")
            of_fields = {row["field"]: row for row in by_field.iter_rows(named=True)}
            found.types = {index: each["type"] for index, each in of_fields.items()}
            for fields in fetch_groups({index: each["values"] for index, each in of_fields.items()}):
                known = {index: limits[index] if len(found.types[index]) == 1 else MIXED for index in fields}
                kept = self._fetch(frequent_values(counts, known))
                for index in fields:
                    found.counts[index] = rows = kept.filter(pl.col("field") == index)
                    found.left_out[index] = (
                        of_fields[index]["values"] - rows.height,
                        of_fields[index]["rows"] - int(rows["count"].sum()),
                    )
            sampled = mapped.filter(mapped["type"] == SAMPLE)
            found.samples = {
                int(index[0]): rows for index, rows in self._fetch(lowest_marks(sampled)).group_by("field")
            }
        return found

    def _mapped(
        self, function: Callable[[Item], Iterator[Any]], items: Sequence[Item], row: Callable[[int, Any], Any]
    ) -> DataFrame:
        """Have a task do each item; function and items go to a worker once, whatever they hold."""
        shared = self.session.sparkContext.broadcast((function, items))

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            work, of = shared.value
            for batch in batches:
                for at in batch["id"].to_pylist():
                    for value in work(of[at]):
                        yield from row(at, value)

        numbers = self.session.range(0, len(items), 1, len(items))
        return numbers.mapInArrow(run, TABLE if row is to_table_rows else BINARY_SCHEMA)

    def _keep(self, frame: DataFrame) -> DataFrame:
        """Have a table wait on the disks of the workers, to be used more than once."""
        kept = frame.persist(StorageLevel.DISK_ONLY)
        self._kept.append(kept)
        return kept

    def _table(self, name: str, frame: DataFrame) -> ibis.Table:
        name = f"lpfs_{name}_{id(self)}"
        frame.createOrReplaceTempView(name)
        return self.ibis.table(name)

    def _frame(self, table: ibis.Table) -> DataFrame:
        return self.session.sql(str(self.ibis.compile(table)))

    def _fetch(self, table: ibis.Table) -> pl.DataFrame:
        fetched = pl.from_arrow(self._frame(table).toArrow())
        return fetched if isinstance(fetched, pl.DataFrame) else fetched.to_frame()

    @contextmanager
    def _telling(self, what: str, count: int) -> Iterator[None]:
        """Say what is done and how long it took; turn what a worker says into an error of ours."""
        begin = monotonic()
        try:
            yield
        except PySparkException as error:
            raise convert_spark_error(error) from error
        pieces = f"{count:,} piece{'s' * (count != 1)}"
        self.reporter.say(f"spark: {what}: {pieces} in {monotonic() - begin:,.1f} s")


def once(function: Callable[[Item], Result], item: Item) -> Iterator[Result]:
    """Yield what a function returns."""
    yield function(item)


def get_session() -> SparkSession:
    """Return the running session, or a new one."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName("lpfs prepare").config("spark.ui.showConsoleProgress", "false")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return builder.getOrCreate()
    except PySparkException as error:
        raise DataError(
            f"spark did not start: {' '.join(str(error).split())[:200]}; "
            "it needs java 17 (JAVA_HOME), and a master that can be reached"
        ) from error


def frequent_values(counts: ibis.Table, limits: Mapping[int, VocabularyLimits]) -> ibis.Table:
    """Return the values of fields that can get an id: frequent enough, and where there is a cap, among the first.

    Values that are as frequent as the last one under the cap are all there: their order decides.
    """
    own = counts.filter(counts["field"].isin(list(limits)))
    least = own["field"].cases(*((index, each.least) for index, each in limits.items()), else_=0)
    own = own.filter(own["count"] >= least)
    caps = [(index, each.most) for index, each in limits.items() if each.most is not None]
    if caps:
        place = ibis.rank().over(group_by="field", order_by=ibis.desc("count"))
        own = own.mutate(place=place, most=own["field"].cases(*caps, else_=NO_CAP))
        own = own.filter(own["place"] < own["most"])
    return own.select(*COUNTS)


def lowest_marks(sampled: ibis.Table) -> ibis.Table:
    """Return the rows of each field with the lowest marks, as many as a sample holds."""
    place = ibis.row_number().over(group_by="field", order_by="number")
    placed = sampled.mutate(place=place)
    return placed.filter(placed["place"] < SAMPLED).select(*COUNTS)


def fetch_groups(values: Mapping[int, int]) -> Iterator[list[int]]:
    """Yield fields, given how many values each has, in lots to fetch at once; a large one comes alone."""
    share: list[int] = []
    for index, count in values.items():
        if share and sum(values[each] for each in share) + count > MAX_FETCH_ROWS:
            yield share
            share = []
        share.append(index)
    if share:
        yield share


def to_batch(at: int, value: Any) -> Iterator[pa.RecordBatch]:
    """Return anything as a row."""
    yield pa.record_batch({"at": pa.array([at], pa.int64()), "lot": pa.array([to_bytes(value)], pa.binary())})


def to_table_rows(at: int, value: ChunkState | pl.DataFrame | LabelCopies) -> Iterator[pa.RecordBatch]:
    """Return counts and samples as rows of the table, notes as a row of bytes."""
    types = [pa.int32(), pa.string(), pa.string(), pa.int64(), pa.int64()]
    if not isinstance(value, pl.DataFrame):
        columns = {name: pa.array([None], type) for name, type in zip(COUNTS, types, strict=True)}
        lot = pa.array([to_bytes(value)], pa.binary())
        yield pa.record_batch({"at": pa.array([at], pa.int64()), "lot": lot, **columns})
        return
    for start in range(0, value.height, 1 << 16):
        part = value.slice(start, 1 << 16)
        columns = {name: part[name].to_arrow().cast(type) for name, type in zip(COUNTS, types, strict=True)}
        ats, lots = pa.array([at] * part.height, pa.int64()), pa.nulls(part.height, pa.binary())
        yield pa.record_batch({"at": ats, "lot": lots, **columns})


def convert_spark_error(error: PySparkException) -> Exception:
    """Return the error of lpfs that a worker raised, or one that quotes what Spark says."""
    found = OURS.findall(str(error))
    if found:
        kind = getattr(lpfs.errors, found[-1][0], DataError)
        ours: Exception = kind(found[-1][1])
        return ours
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return DataError(f"spark could not do it: {lines[-1][:300] if lines else type(error).__name__}")
