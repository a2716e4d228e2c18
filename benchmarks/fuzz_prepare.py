"""Fuzzed logs, tables, fields.toml files and Datasets: only errors of lpfs may come out, within seconds.

    python benchmarks/fuzz_prepare.py --jobs 2 --out benchmarks/results/fuzz_prepare.json

Every input follows from the seed and its number, so a finding is repeated with: --first NUMBER --inputs 1 --show.
Inputs are run in batches of 1,000 by worker processes; one that dies, or takes longer than --limit seconds for an
input, is a finding, and its batch is run again without that input. With --seconds the run stops early; the same
command with the same --out continues it (delete the file to start again). A finding is

- an error that is not one of lpfs, or one without a message or with a message of several lines,
- an input that takes too long, ends the process, or for which two parsers return different rows,
- a file that is opened for writing, a directory that is made or a path that is renamed outside the output folder,
- anything left behind by a run that failed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import mmap
import os
import platform
import random
import resource
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from importlib.metadata import version
from pathlib import Path
from typing import Any

BATCH = 1000  # inputs run by a worker before it reports; the numbers of inputs below add up to it
WEIGHTS = {  # inputs of each kind in a batch
    "read csv bytes": 160,
    "read csv cells": 60,
    "read gzip": 30,
    "read zstd": 30,
    "read parquet bytes": 15,
    "read parquet pages": 15,
    "read json": 20,
    "read path": 20,
    "parse block": 270,
    "parse header": 80,
    "parse values": 180,
    "read table": 20,
    "read toml": 50,
    "dataset bytes": 10,
    "dataset json": 10,
    "prepare csv bytes": 6,
    "prepare csv cells": 9,
    "prepare gzip": 2,
    "prepare zstd": 2,
    "prepare parquet bytes": 2,
    "prepare parquet pages": 2,
    "prepare table": 3,
    "prepare toml": 4,
}
KINDS = [kind for kind, count in WEIGHTS.items() for _ in range(count)]
random.Random(0).shuffle(KINDS)
SUCCESSES = ("read", "parsed", "opened", "prepared")
TOKENS = [b'"', b",", b"\n", b"\r", b"\r\n", b"\t", b"\0", b"\xff", b"\xc3", b"|", b";", b'""', b'",', b"NA"]
TOKENS += [b"nan", b"inf", b"-", b"1e999", b"9" * 40, b"2", b"\xef\xbb\xbf", b"../x", "日本".encode(), b" ", b"'"]
TOKENS += [b"[", b"]", b"=", b"#", b"true", b'kind = "multi"\n', b"hash = 3\n", b"[day]\n", b"2020-01-01", b"click"]
CSV = b"click,ad,price,tags,day,code\n" + b"".join(
    b"%d,%s,%d.5,%s,2020-01-0%d,%d\n" % (i % 2, b"abcd"[i % 4 : i % 4 + 1], i, b"x|y|z"[: 1 + i % 5], 1 + i // 5, i)
    for i in range(14)
)
JSON = b'{"click": 1, "ad": "a", "price": 1.5}\n{"click": 0, "ad": "b", "price": [1, {"x": null}]}\n'
TOML = b'price = "categorical"\n[ad]\ngroup = "item"\ncost = 2.5\nmin_count = 1\n'
TOML += b'[tags]\nkind = "multi"\nseparator = "|"\n'
TOML += b'[code]\nkind = "numeric"\nbins = 3\ntransform = "log"\n["day"]\nkind = "ignore"\n'
CELLS = [
    "",
    "0",
    "1",
    "a",
    "b",
    "-1",
    "2.5",
    "nan",
    "inf",
    "1e308",
    "1e999",
    "9" * 40,
    "NA",
    " 7 ",
    "x|y|",
    "|",
    "日本",
]
CELLS += ["2020-01-01", "2020-13-45", "20200101", "1582898399", "\0", "../../x", "'", "true", "0x1f", "00ff", "\u202e"]
CELLS += ["-0.0", '"', "a\nb", "a,b", "\r", "#", "=1+1", "train", "test", "١", "1_000", "+5", ".5", "5.", "\x1f"]
CELLS += [
    "é" * 300,
    "3,14",
    "01/02/2020",
    "2020-02-30T25:61",
    "1582898399000",
    "9007199254740993",
    "-9223372036854775808",
]
CELLS += [
    "18446744073709551616",
    "1e-400",
    "0000-00-00",
    "9999-12-31",
    "-0001-01-01",
    "2020-01-01T00:00:00+14:00",
    "1;2",
]
TIME_FORMATS = [
    "iso",
    "number",
    "name",
    "unix s",
    "unix ms",
    "unix us",
    "unix ns",
    "%Y%m%d",
    "%y%m%d%H",
    "%d/%m/%Y",
    "%s",
]
TIME_FORMATS += [
    "%",
    "%%",
    "%Q",
    "%H",
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y-%m-%dT%H:%M:%S%z",
    "%j",
    "%U %w",
    "%c",
    "%I %p",
    "\0%Y",
]
PATHS = [
    "log.csv",
    "*",
    "**",
    "[",
    "]",
    "?",
    "/",
    "..",
    ".",
    "~",
    "\0",
    "\udcff",
    "é",
    " ",
    "\n",
    "a" * 300,
    "{a,b}",
    "[!a]",
]
PATHS += ["nosuch://", "memory://", "file:", "-", "room", "$HOME", "%00", "C:\\", "\\", "|", ";"]
VALUES: list[Any] = ["numeric", "categorical", "multi", "ignore", "item", "log", "none", "|", "", "x" * 50, 0, 1, 2, 3]
VALUES += [
    -1,
    2**31,
    2**63,
    10**30,
    0.5,
    -0.5,
    float("nan"),
    float("inf"),
    True,
    False,
    [],
    [1],
    {},
    {"kind": "numeric"},
]
NAMES = ["ad", "price", "tags", "day", "code", "click", "nothing", "", "../x", "日本"]
OPTIONS = ["kind", "group", "cost", "separator", "hash", "min_count", "max_values", "bins", "transform", "width"]
OPTIONS += ["hexadecimal", "dim", "why", "name", "typo"]


def valid_fields(rng: random.Random) -> dict[str, Any]:
    """Return corrections that are mostly allowed."""
    choices: dict[str, list[Any]] = {
        "kind": ["numeric", "categorical", "multi", "ignore"],
        "separator": ["|", ",", "a", "\n"],
        "hash": [1, 2, 1000, 2**31 - 3],
        "min_count": [1, 2, 100],
        "max_values": [1, 3],
        "bins": [2, 5, 65_000],
        "transform": ["log", "none"],
        "width": [1, 2, 3],
        "hexadecimal": [True, False],
        "cost": [0, 2.5],
        "group": ["user", "item"],
    }
    result = {}
    for name in rng.sample(("ad", "price", "tags", "day", "code"), rng.randrange(4)):
        picked = rng.sample(sorted(choices), rng.randrange(1, 4))
        result[name] = {option: rng.choice(choices[option]) for option in picked}
    return result


def prepare_options(rng: random.Random) -> dict[str, Any]:
    """Return options that are mostly allowed."""
    some: list[dict[str, Any]] = [{}, {"parts": 3}, {"time": "day"}, {"parts": 1}, {"parts": "files"}, {"time": "code"}]
    some += [{"time": "day", "ordered": True}, {"time": "day", "time_format": "%Y-%m-%d"}, {"time": "ad"}]
    more: list[dict[str, Any]] = [{}, {}, {"negatives": 0.5}, {"bins": 3}, {"hash": 10}, {"missing": ["a", ""]}]
    more += [{"train": 1}, {"train": 99}, {"min_count": 2}, {"max_values": 1}, {"tasks": ["code"]}, {"positive": "a"}]
    more += [{"separator": ","}, {"header": False}, {"seed": 7}]
    keep = {"keep_all": rng.random() < 0.8}
    return {"label": "click", "quiet": True, **rng.choice(some), **rng.choice(more), **keep}


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few mutations."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(result) + 1)
        size = rng.choice((1, 1, 2, 5, 40))
        what = rng.randrange(6)
        if what == 0 and at < len(result):
            result[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del result[at : at + size]
        elif what == 2:
            result[at:at] = rng.choice(TOKENS)
        elif what == 3:
            result[at:at] = result[at : at + size]
        elif what == 4:
            result[at : at + size] = rng.randbytes(size)
        elif rng.random() < 0.3:
            del result[at:]
        else:
            other = rng.randrange(len(result) + 1)
            result[at : at + size] = result[other : other + size]
    return bytes(result)


def odd_csv(rng: random.Random) -> bytes:
    """Return a well-formed CSV file with odd cells."""
    table = [line.split(",") for line in CSV.decode().splitlines()]
    for _ in range(rng.choice((1, 2, 5, 30))):
        row = rng.randrange(len(table))
        table[row][rng.randrange(6)] = rng.choice(CELLS)
    if rng.random() < 0.2:
        column = rng.randrange(6)
        value = rng.choice(CELLS)
        for row_cells in table[1:]:
            row_cells[column] = value
    buffer = io.StringIO()
    style: dict[str, Any] = {"lineterminator": rng.choice(("\n", "\r\n")), "delimiter": rng.choice(",,,\t;|")}
    writer = csv.writer(buffer, quoting=rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)), **style)
    writer.writerows(table[: rng.choice((15, 15, 15, 2, 1))])
    return buffer.getvalue().encode()


def odd_table(rng: random.Random) -> Any:
    """Return a table with columns of any type."""
    import polars as pl

    rows = rng.choice((1, 2, 14))
    flat: list[Any] = [
        pl.String,
        pl.Int8,
        pl.Int64,
        pl.UInt64,
        pl.Float32,
        pl.Float64,
        pl.Boolean,
        pl.Date,
        pl.Time,
        pl.Binary,
    ]
    flat += [
        pl.Datetime("us"),
        pl.Datetime("ns", "UTC"),
        pl.Duration("ms"),
        pl.Decimal(10, 2),
        pl.Decimal(38, 0),
        pl.Null,
        pl.Categorical,
    ]
    nested: list[Any] = [pl.List(dtype) for dtype in flat[:7]] + [
        pl.Array(pl.Float64, 2),
        pl.Struct({"x": pl.Int64}),
        pl.List(pl.List(pl.Int8)),
    ]
    columns: dict[str, Any] = {"click": pl.Series([rng.randrange(2) for _ in range(rows)])}
    for name in ("ad", "price", "tags", "day", "code"):
        dtype = rng.choice(flat + nested)
        values = pl.Series([rng.choice((*range(-2, 6), None)) for _ in range(rows)], dtype=pl.Int64)
        try:
            if isinstance(dtype, pl.List) and not isinstance(dtype.inner, pl.List):
                inner = dtype.inner
                columns[name] = pl.Series([[v, None][: rng.randrange(3)] for v in values]).cast(
                    pl.List(inner), strict=False
                )
            elif isinstance(dtype, pl.Array):
                columns[name] = pl.Series([[float(v or 0), 1.0] for v in values], dtype=dtype)
            elif isinstance(dtype, pl.Struct):
                columns[name] = pl.Series([{"x": v} for v in values])
            elif dtype in (pl.Binary, pl.Categorical):
                columns[name] = values.cast(pl.String).cast(dtype)
            else:
                columns[name] = values.cast(dtype, strict=False)
        except pl.exceptions.PolarsError:
            columns[name] = values
    if rng.random() < 0.1:
        columns["click"] = columns["ad"]
    return pl.DataFrame(columns)


def options_toml(rng: random.Random) -> bytes:
    """Return valid TOML with odd options."""
    lines = []
    for name in rng.sample(NAMES, rng.randrange(1, 4)):
        lines.append(f"[{json.dumps(name)}]")
        for option in rng.sample(OPTIONS, rng.randrange(4)):
            value = rng.choice(VALUES)
            text = str(value) if isinstance(value, float) else json.dumps(value)
            lines.append(f"{option} = {text}" if not isinstance(value, dict) else f"{option} = {{}}")
    return "\n".join(lines).encode()


def replace_value(values: Any, rng: random.Random) -> Any:
    """Return JSON values with one place changed."""
    if isinstance(values, (dict, list)) and values and rng.random() < 0.9:
        key = rng.choice(list(values) if isinstance(values, dict) else range(len(values)))
        if rng.random() < 0.1:
            del values[key]
        else:
            values[key] = replace_value(values[key], rng)
        return values
    return rng.choice([None, 0, -1, 1, 3, 10**20, 0.5, "", "x", "../../x", [], {}, [1], {"x": 1}, True])


def random_cell(rng: random.Random) -> str:
    """Return a number, a date, or another text, sometimes mutated."""
    choice = rng.randrange(6)
    text = rng.choice(CELLS)
    if choice == 0:
        text = repr(rng.choice((rng.gauss(0, 1), rng.randrange(-(10**6), 10**6), 10.0 ** rng.randrange(-320, 309))))
    elif choice == 1:
        numbers = (rng.randrange(10000), rng.randrange(14), rng.randrange(33), rng.randrange(25), rng.randrange(61))
        text = rng.choice(("{:04d}-{:02d}-{:02d}", "{:04d}-{:02d}-{:02d} {:02d}:{:02d}", "{2}/{1}/{0}")).format(
            *numbers
        )
    return mutate(text.encode(), rng).decode("utf-8", "replace") if choice == 2 else text


def random_column(rng: random.Random) -> Any:
    """Return a short column, mostly text."""
    import polars as pl

    rows = rng.choice((0, 1, 2, 5, 9))
    name = rng.choice(("click", "ad", "user_id", "time", ""))
    if rng.random() < 0.8:
        same = [random_cell(rng) for _ in range(rng.choice((1, 2, 9)))]
        return pl.Series(name, [rng.choice((*same, *same, *same, None)) for _ in range(rows)], pl.String)
    if rng.random() < 0.5:
        floats = (0.0, -0.0, 1.0, 5e-324, 1.7e308, float("nan"), float("inf"), -float("inf"), 1.6e9, 2.0**53, None)
        return pl.Series(name, [rng.choice(floats) for _ in range(rows)], pl.Float64)
    integers = (0, 1, -1, 2**63 - 1, -(2**63), 1582898399, 20200101, None)
    dtype = rng.choice((pl.Int64, pl.Int64, pl.Datetime("us"), pl.Datetime("ns", "UTC"), pl.Duration("ms"), pl.Time))
    return pl.Series(name, [rng.choice(integers) for _ in range(rows)], pl.Int64).cast(dtype, strict=False)


def gzip_or_zstd(data: bytes, kind: str) -> bytes:
    if kind.endswith("gzip"):
        return gzip.compress(data, 1, mtime=0)
    import zstandard

    return zstandard.compress(data)


class WriteGuard:
    """Records paths that are opened for writing, made or renamed outside a folder, by any code in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder)
        self.outside: list[str] = []
        sys.addaudithook(self.check)

    def check(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            paths = [path] if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else []
        elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
            paths = [argument for argument in arguments[:2] if isinstance(argument, (str, bytes, os.PathLike))]
        else:
            return
        for path in paths:
            if isinstance(path, int) or path == os.devnull:
                continue
            parent, name = os.path.split(os.path.abspath(os.fsdecode(path)))
            target = os.path.join(os.path.realpath(parent), name)
            if target != self.folder and not target.startswith(self.folder + os.sep):
                self.outside.append(os.fsdecode(path))


class InputRunner:
    """Runs inputs in a folder, with samples that are made once."""

    def __init__(self, folder: Path) -> None:
        import polars as pl

        from lpfs.data.prepare import prepare

        self.folder, self.room = folder, folder / "room"
        self.room.mkdir()
        (folder / "cwd").mkdir()
        os.chdir(folder / "cwd")
        frame = pl.read_csv(CSV, try_parse_dates=True).with_columns(
            pl.col("tags").str.split("|"), pl.Series("v", [[float(i), 1.0] for i in range(14)])
        )
        self.parquets = []
        for compression in ("uncompressed", "zstd", "snappy"):
            for columns in (frame, frame.drop("tags", "v")):
                buffer = io.BytesIO()
                columns.write_parquet(buffer, compression=compression, row_group_size=5)
                self.parquets.append(buffer.getvalue())
        self.log = folder / "log.csv"
        self.log.write_bytes(CSV)
        prepare(self.log, folder / "sample", label="click", quiet=True)
        self.dataset_files = {
            path.relative_to(folder / "sample"): path.read_bytes()
            for path in sorted((folder / "sample").rglob("*"))
            if path.is_file()
        }
        self.entries = sorted(os.listdir(folder))
        self.guard = WriteGuard(self.room)

    def run(self, number: int, seed: int) -> tuple[str, str]:
        """Run one input; return its kind and what came out."""
        from lpfs.errors import LpfsError

        rng = random.Random(seed * 10**9 + number)
        kind = KINDS[number % BATCH]
        action, _, form = kind.partition(" ")
        try:
            outcome = str(getattr(self, f"_{action}")(form, rng))
        except LpfsError as error:
            outcome, message = type(error).__name__, str(error)
            if not message.strip() or len(message) > 2000 or ("\n" in message and form != "path"):
                outcome = f"odd message: {message[:300]!r}"
        except BaseException as error:  # every other error is a finding
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = f"{type(error).__name__}: {str(error)[:300]!r}"
            traceback.print_exc()
        left = set(os.listdir(self.room)) - {"log.csv", "log.json", "fields.toml", "data"}
        if left != ({"out"} if outcome == "prepared" else set()):
            outcome = f"left behind: {sorted(left)}"
        if self.guard.outside or sorted(os.listdir(self.folder)) != self.entries or os.listdir(self.folder / "cwd"):
            outcome = f"outside: {self.guard.outside or sorted(os.listdir(self.folder))}"
        for entry in os.scandir(self.room):
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        self.guard.outside.clear()
        return kind, outcome

    def _write_log(self, form: str, rng: random.Random) -> Path:
        """Write a fuzzed file of a format; return its path."""
        path = self.room / ("log.json" if form == "json" and rng.random() < 0.7 else "log.csv")
        if form == "csv cells":
            data = odd_csv(rng)
        elif form.startswith("parquet"):
            data = rng.choice(self.parquets)
            if form == "parquet bytes":
                data = mutate(data, rng)
            else:
                footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
                pages = mutate(data[4:footer], rng)[: footer - 4].ljust(footer - 4, b"\1")
                data = data[:4] + pages + data[footer:]
        else:
            rows = CSV.replace(b",", b"\t") if rng.random() < 0.2 else CSV
            data = mutate(JSON if form == "json" else rows, rng)
            if form in ("gzip", "zstd"):
                data = gzip_or_zstd(data, form)
                data = mutate(data, rng) if rng.random() < 0.7 else data
        path.write_bytes(data)
        return path

    def _read(self, form: str, rng: random.Random) -> str:
        """Read a source: all chunks, the first rows with the inferred kinds, and the fingerprint."""
        from lpfs.data.fields import read_fields
        from lpfs.data.infer import infer
        from lpfs.data.sources import open_source

        if form == "toml":
            path = self.room / "fields.toml"
            path.write_bytes(mutate(TOML, rng) if rng.random() < 0.6 else options_toml(rng))
            read_fields(path)
            return "read"
        source: Any
        if form == "table":
            source = odd_table(rng)
        elif form == "path":
            (self.room / "log.csv").write_bytes(CSV)
            source = "".join(rng.choice(PATHS) for _ in range(rng.randrange(1, 4)))
            source = source.lstrip("/")  # /** would search the whole disk
            source = f"{self.room}/{source}" if rng.random() < 0.5 else source
        else:
            source = self._write_log(form, rng)
        names = ("click", *(f"c{i}" for i in range(5)))
        options = rng.choice(({}, {}, {}, {"header": False}, {"header": names}, {"separator": rng.choice(",;\t|é\n")}))
        table = open_source(source, **options)
        table.block = rng.choice((*[1 << 24] * 15, 8, 100, 100, 300, 300))  # type: ignore[attr-defined]  # of a text table
        for chunk in table.chunks(table.names):
            if chunk.frame.height:
                chunk.locate(chunk.frame.height - 1)
        if rng.random() < 0.1:
            for column in table.sample(5):
                infer(column)
            table.fingerprint(lambda done: None)
        return "read"

    def _parse(self, form: str, rng: random.Random) -> str:
        if form == "block":
            return parse_block(rng)
        if form == "header":
            from lpfs.data.sources.csv import column_names, first_record

            self.log = self.room / "log.csv"
            self.log.write_bytes(mutate(odd_csv(rng) if rng.random() < 0.5 else CSV, rng)[: rng.choice((5, 40, 300))])
            column_names(first_record(self.log, rng.choice((None, None, ",", "\x01")))[0], "log.csv")
            return "parsed"
        return parse_values(rng)

    def _dataset(self, form: str, rng: random.Random) -> str:
        """Open a Dataset of which one file is damaged, or holds wrong values under the right checksums."""
        from lpfs._fileio import file_checksum, json_checksum
        from lpfs.data.dataset import Dataset

        root = self.room / "data"
        for name, data in self.dataset_files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        if form == "bytes":
            path = root / rng.choice(list(self.dataset_files))
            if rng.random() < 0.1:
                path.unlink()
            else:
                path.write_bytes(mutate(path.read_bytes(), rng))
        else:
            manifest = json.loads((root / "dataset.json").read_text())
            if rng.random() < 0.3:
                path = root / "schema.json"
                path.write_text(json.dumps(replace_value(json.loads(path.read_text()), rng)))
                manifest["files"]["schema.json"] = {"bytes": path.stat().st_size, "checksum": file_checksum(path)}
            else:
                manifest = replace_value(manifest, rng)
            if isinstance(manifest, dict):
                manifest.pop("checksum", None)
                manifest["checksum"] = json_checksum(manifest)
            (root / "dataset.json").write_text(json.dumps(manifest))
        dataset = Dataset(root)
        dataset.verify()
        for _ in dataset.stream(5, prefetch=0):
            pass
        for field in dataset.schema.names:
            dataset.vocabulary(field)
        return "opened"

    def _prepare(self, form: str, rng: random.Random) -> str:
        from lpfs.data.prepare import prepare

        source: Any = self.room / "log.csv"
        fields: Any = valid_fields(rng) if rng.random() < 0.5 else None
        if form == "table":
            source = odd_table(rng)
            if rng.random() < 0.5:
                source.write_parquet(self.room / "log.csv")
                source = self.room / "log.csv"
        elif form == "toml":
            source.write_bytes(CSV)
            fields = self.room / "fields.toml"
            fields.write_bytes(mutate(TOML, rng) if rng.random() < 0.5 else options_toml(rng))
        else:
            source = self._write_log(form, rng)
        prepare(source, self.room / "out", fields=fields, **prepare_options(rng))
        return "prepared"


def parse_block(rng: random.Random) -> str:
    """Parse a block with polars and with the csv module; where both accept it, the rows are equal."""
    from lpfs.data.sources.csv import Dialect, parse, parse_with_csv_module
    from lpfs.errors import DataError

    lines = [",".join(random_cell(rng)[:20] for _ in range(3)).encode() for _ in range(rng.choice((1, 2, 4)))]
    block = rng.choice((b"\n", b"\n", b"\r\n")).join(lines) + rng.choice((b"\n", b""))
    block = mutate(block, rng) if rng.random() < 0.7 else block
    dialect = Dialect(rng.choice(",,,;"), rng.random() < 0.8)
    names = ("a", "b", "c")[: rng.choice((3, 3, 3, 2))]
    options: dict[str, Any] = {"file": "log.csv", "first": 1, "last": True}
    parsed = parse(block, names, names, dialect, **options)
    for row in range(parsed.frame.height):
        parsed.locate(row)
    try:
        expected = parse_with_csv_module(block, names, names, dialect, **options)
    except DataError as error:
        return f"different rows: {block!r} is accepted by polars and refused by csv: {error}"
    if not parsed.frame.equals(expected.frame):
        return f"different rows: {block!r} {dialect} {parsed.frame.rows()} {expected.frame.rows()}"
    return "parsed"


def parse_values(rng: random.Random) -> str:
    """Run one of the functions for values on a short column."""
    from lpfs.data.encoders import make_encoder
    from lpfs.data.fields import FieldPlan
    from lpfs.data.infer import infer
    from lpfs.data.parsing import detect_time_format, read_days
    from lpfs.data.passes import read_label
    from lpfs.data.planning import PrepareOptions
    from lpfs.data.sources.base import row_locator

    column, locate, choice = random_column(rng), row_locator("log.csv"), rng.randrange(6)
    if choice == 0:
        infer(column)
    elif choice == 1 and len(column):
        read_days(column, detect_time_format(column))
    elif choice == 2:
        read_days(column, rng.choice(TIME_FORMATS))
    elif choice == 3:
        read_label(column, PrepareOptions("click", positive=rng.choice((None, "1", "a"))), locate)
    else:
        plan = infer(column)
        if rng.random() < 0.7:
            options: dict[str, Any] = rng.choice(({}, {"hash": 7}, {"hexadecimal": True}, {"max_values": 1}))
            numbers: dict[str, Any] = rng.choice(({"transform": "none"}, {"bins": 3}, {"bins": "auto"}, {"width": 2}))
            multi = FieldPlan("x", "multi", separator=rng.choice("|;,a"))
            plan = rng.choice((FieldPlan("x", **options), FieldPlan("x", "numeric", **numbers), multi))
        if plan.kind != "ignore":
            encoder = make_encoder(plan, 0)
            encoder.observe(column, locate)()
            encoder.finish()
            encoder.encode(column, locate)
            encoder.encode(random_column(rng), locate)
    return "parsed"


def work(folder: Path, seed: int) -> None:
    """Run the batches named on standard input; write a line of results for each."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    with (folder / "progress").open("r+b") as file:
        progress = mmap.mmap(file.fileno(), 8)
    results, runner = os.fdopen(os.dup(1), "w"), InputRunner(folder / "box")
    os.dup2(2, 1)  # what a library prints is not a result
    print("ready", file=results, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        counts: Counter[str] = Counter()
        findings = []
        for number in range(task["first"], task["stop"]):
            if number in task["skip"]:
                continue
            struct.pack_into("q", progress, 0, number)
            kind, outcome = runner.run(number, seed)
            counts[f"{kind} -> {outcome.split(':')[0]}"] += 1
            if not is_allowed(outcome):
                findings.append({"input": number, "kind": kind, "outcome": outcome})
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(json.dumps({"counts": counts, "findings": findings, "memory_mb": memory}), file=results, flush=True)


def is_allowed(outcome: str) -> bool:
    """Return whether an input ended as it should: read, or refused with an error of lpfs."""
    import lpfs.errors

    return outcome in SUCCESSES or hasattr(lpfs.errors, outcome)


class Worker:
    """A process that runs batches; it is started again when an input ends it or takes too long."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.task: dict[str, Any] | None = None
        self.findings: list[dict[str, Any]] = []  # inputs of the present batch that ended the process
        self.start()

    def start(self) -> None:
        """Start the process, in a new folder."""
        self.folder = Path(tempfile.mkdtemp(prefix="lpfs-fuzz-", dir=self.options.place))
        (self.folder / "box").mkdir()
        (self.folder / "progress").write_bytes(struct.pack("q", -1))
        command = [sys.executable, __file__, "--worker", str(self.folder), "--seed", str(self.options.seed)]
        variables = {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "LPFS_CACHE": str(self.folder / "cache")}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self.options.show else subprocess.DEVNULL,
            env={**os.environ, **variables},
        )
        assert self.process.stdout is not None
        self.pipe, self.buffer, self.is_ready = self.process.stdout, b"", False
        self.number, self.since = -1, time.monotonic()

    def give(self, first: int, stop: int) -> None:
        """Start a batch."""
        self.task, self.findings = {"first": first, "stop": stop, "skip": []}, []
        self._send()

    def _send(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(self.task).encode() + b"\n")
        self.process.stdin.flush()
        self.since = time.monotonic()

    def take(self) -> dict[str, Any] | None:
        """Return the results of the batch once it is complete; restart the process if it died or hangs."""
        ready, _, _ = select.select([self.pipe], [], [], 0.05)
        data = os.read(self.pipe.fileno(), 1 << 16) if ready else b""
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            if line != b"ready":
                results: dict[str, Any] = json.loads(line)
                results["findings"] += self.findings
                self.task = None
                return results
            self.is_ready = True
        (number,) = struct.unpack("q", (self.folder / "progress").read_bytes())
        if number != self.number:
            self.number, self.since = number, time.monotonic()
        limit = self.options.limit if number >= 0 else 120  # to start
        if ready and not data:
            self._restart(f"crash: exit code {self.process.wait()}")
        elif time.monotonic() - self.since > limit:
            self._restart("hang: no result in time")
        return None

    def _restart(self, outcome: str) -> None:
        """Note what became of the present input and run the batch again without it."""
        assert self.task is not None
        if self.number < 0:
            raise SystemExit(f"a worker does not start: {outcome}; see --show")
        self.findings.append({"input": self.number, "kind": KINDS[self.number % BATCH], "outcome": outcome})
        self.task["skip"].append(self.number)
        self.end()
        self.start()
        self._send()

    def end(self) -> None:
        """End the process and remove its folder."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Campaign:
    """The results of all batches so far, in the order of the inputs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, time.monotonic()
        self.counts: Counter[str] = Counter()
        self.findings: list[dict[str, Any]] = []
        self.next, self.seconds_before, self.memory_mb = options.first, 0.0, 0
        self.pending: dict[int, tuple[int, dict[str, Any]]] = {}
        if options.out is not None and options.out.exists():
            saved = json.loads(options.out.read_text())
            settings = {"seed": options.seed, "first": options.first, "weights": WEIGHTS}
            if all(saved.get(name) == value for name, value in settings.items()):
                self.counts.update(saved["outcomes"])
                self.findings, self.next = saved["findings"], options.first + saved["inputs"]
                self.seconds_before, self.memory_mb = saved["seconds"], saved["memory_mb"]

    def add(self, first: int, stop: int, results: dict[str, Any]) -> None:
        """Add a batch; it counts once all batches before it are complete."""
        self.pending[first] = (stop, results)
        while self.next in self.pending:
            self.next, results = self.pending.pop(self.next)
            self.counts.update(results["counts"])
            self.memory_mb = max(self.memory_mb, results["memory_mb"])
            for finding in results["findings"]:
                self.findings.append(finding)
                print(f"input {finding['input']} ({finding['kind']}): {finding['outcome']}", flush=True)
                if finding["outcome"].startswith(("crash", "hang")):
                    self.counts[f"{finding['kind']} -> {finding['outcome'].split(':')[0]}"] += 1
        self.save()

    def result(self) -> dict[str, Any]:
        """Return everything that the file of results holds."""
        kinds: Counter[str] = Counter()
        for name, count in self.counts.items():
            kinds[name.partition(" -> ")[0]] += count
        finding_kinds = Counter(finding["outcome"].split(":")[0] for finding in self.findings)
        return {
            "command": "python benchmarks/fuzz_prepare.py --jobs 2 --out benchmarks/results/fuzz_prepare.json",
            "seed": self.options.seed,
            "first": self.options.first,
            "inputs": self.next - self.options.first,
            "prepare_runs": sum(count for kind, count in kinds.items() if kind.startswith("prepare")),
            "seconds": round(self.seconds_before + time.monotonic() - self.started, 1),
            "memory_mb": self.memory_mb,
            "versions": {"python": platform.python_version(), "polars": version("polars")},
            "kinds": dict(sorted(kinds.items())),
            "outcomes": dict(sorted(self.counts.items())),
            "finding_kinds": {name: finding_kinds[name] for name in ("crash", "hang", "outside")}
            | {"other": sum(finding_kinds.values()) - sum(finding_kinds[n] for n in ("crash", "hang", "outside"))},
            "findings": self.findings,
            "weights": WEIGHTS,
        }

    def save(self) -> None:
        """Write the results, so that the same command continues from here."""
        if self.options.out is not None:
            temporary = self.options.out.with_suffix(".new")
            temporary.write_text(json.dumps(self.result(), indent=1) + "\n")
            temporary.replace(self.options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="number of inputs in all")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time; run again to go on")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one input")
    parser.add_argument("--place", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    parser.add_argument("--out", type=Path, help="file of results; an incomplete one is continued")
    parser.add_argument("--show", action="store_true", help="show what workers print on standard error")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.seed)
        return
    campaign, end = Campaign(options), time.monotonic() + options.seconds
    stop = options.first + options.inputs
    batches = deque((first, min(first + BATCH, stop)) for first in range(campaign.next, stop, BATCH))
    workers = [Worker(options) for _ in range(min(options.jobs, len(batches)))]
    try:
        while True:
            for worker in workers:
                if worker.task is None and batches and time.monotonic() < end:
                    worker.give(*batches.popleft())
            running = [worker for worker in workers if worker.task is not None]
            if not running:
                break
            for worker in running:
                task = worker.task
                assert task is not None
                results = worker.take()
                if results is not None:
                    campaign.add(task["first"], task["stop"], results)
    finally:
        for worker in workers:
            worker.end()
    print(json.dumps({**campaign.result(), "findings": len(campaign.findings), "weights": None}, indent=1))
    sys.exit(1 if campaign.findings else 0)


if __name__ == "__main__":
    main()
