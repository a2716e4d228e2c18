"""Mutated logs, fields.toml files and Dataset folders: only our own errors may come out.

    python benchmarks/fuzz_prepare.py --inputs 100000 --out benchmarks/results/fuzz_prepare.json

Inputs run in worker processes that are ended when one input takes longer than --limit seconds. Every input
follows from the seed and its number, so a finding is repeated with: --first NUMBER --inputs 1 --show
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

ALLOWED = ("prepared", "opened", "DataError", "FieldError", "InputError")
KINDS: tuple[str, ...] = (
    "csv bytes",
    "csv cells",
    "csv cells",
    "csv packed",
    "parquet bytes",
    "parquet pages",
    "table types",
)
KINDS += ("toml bytes", "toml options", "dataset bytes", "dataset json")
TOKENS = [b'"', b",", b"\n", b"\r", b"\r\n", b"\t", b"\0", b"\xff", b"\xc3", b"|", b";", b'""', b'",', b"NA"]
TOKENS += [b"nan", b"inf", b"-", b"1e999", b"9" * 40, b"2", b"\xef\xbb\xbf", b"../x", "日本".encode(), b" ", b"'"]
TOKENS += [b"[", b"]", b"=", b"#", b"true", b'kind = "multi"\n', b"hash = 3\n", b"[day]\n", b"2020-01-01", b"click"]
CSV = b"click,ad,price,tags,day,code\n" + b"".join(
    b"%d,%s,%d.5,%s,2020-01-0%d,%d\n" % (i % 2, b"abcd"[i % 4 : i % 4 + 1], i, b"x|y|z"[: 1 + i % 5], 1 + i // 5, i)
    for i in range(14)
)
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
CELLS += [
    "2020-01-01",
    "2020-13-45",
    "20200101",
    "1582898399",
    "\0",
    "../../x",
    "'",
    "true",
    "0x1f",
    "00ff",
    "\u202e",
    "-0.0",
]
CELLS += ['"', "a\nb", "a,b", "\r", "#", "=1+1", "train", "test", "١", "1_000", "+5", ".5", "5.", "\x1f", "é" * 300]
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


def sensible(rng: random.Random) -> dict[str, Any]:
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


def settings(rng: random.Random) -> dict[str, Any]:
    """Return options that are mostly allowed."""
    some: list[dict[str, Any]] = [{}, {"parts": 3}, {"time": "day"}, {"parts": 1}, {"parts": "files"}, {"time": "code"}]
    some += [{"time": "day", "ordered": True}, {"time": "day", "time_format": "%Y-%m-%d"}, {"time": "ad"}]
    more: list[dict[str, Any]] = [{}, {}, {"negatives": 0.5}, {"bins": 3}, {"hash": 10}, {"missing": ["a", ""]}]
    more += [{"train": 1}, {"train": 99}, {"min_count": 2}, {"max_values": 1}, {"tasks": ["code"]}, {"positive": "a"}]
    more += [{"separator": ","}, {"header": False}, {"seed": 7}]
    keep = {"keep_all": rng.random() < 0.8}
    return {"label": "click", "quiet": True, **rng.choice(some), **rng.choice(more), **keep}


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few accidents."""
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


class Box:
    """A folder in which one worker plays, with samples made once."""

    def __init__(self, folder: Path) -> None:
        import polars as pl

        from lpfs.data.prepare import prepare

        self.folder = folder
        self.room = folder / "room"
        self.room.mkdir(parents=True)
        frame = pl.read_csv(CSV, try_parse_dates=True).with_columns(
            pl.col("tags").str.split("|"), pl.Series("v", [[float(i), 1.0] for i in range(14)])
        )
        self.parquets = []
        for compression in ("uncompressed", "zstd", "snappy"):
            for columns in (frame, frame.drop("tags", "v")):
                buffer = io.BytesIO()
                columns.write_parquet(buffer, compression=compression, row_group_size=5)
                self.parquets.append(buffer.getvalue())
        (folder / "log.csv").write_bytes(CSV)
        prepare(folder / "log.csv", folder / "sample", label="click", quiet=True)
        self.files = sorted(path.relative_to(folder / "sample") for path in (folder / "sample").rglob("*.*"))
        self.outside = sorted(path.name for path in folder.iterdir())

    def play(self, number: int, seed: int) -> str:
        """Run one input; return what came out."""
        from lpfs.errors import LpfsError

        rng = random.Random(seed * 10**9 + number)
        kind = KINDS[number % len(KINDS)]
        try:
            outcome = self._dataset(kind, rng) if kind[:7] == "dataset" else self._prepare(kind, rng)
        except LpfsError as error:
            outcome = type(error).__name__
            if not str(error).strip() or len(str(error)) > 2000:
                outcome = f"odd message: {str(error)[:200]!r}"
        except BaseException as error:  # every other one is a finding
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = f"{type(error).__name__}: {str(error)[:200]!r}"
            traceback.print_exc()
        left = {path.name for path in self.room.iterdir()} - {"log.csv", "fields.toml"}
        expected = {"prepared": {"out"}}.get(outcome, {"data"} if kind[:7] == "dataset" else set())
        if left != expected:
            outcome = f"left behind: {sorted(left)}"
        if sorted(path.name for path in self.folder.iterdir()) != self.outside:
            outcome = f"outside: {sorted(path.name for path in self.folder.iterdir())}"
        for path in self.room.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return f"{kind}\t{outcome}"

    def _prepare(self, kind: str, rng: random.Random) -> str:
        from lpfs.data.prepare import prepare

        path = self.room / "log.csv"
        source: Any = path
        fields: Any = sensible(rng) if rng.random() < 0.5 else None
        path.write_bytes(CSV)
        if kind in ("csv bytes", "csv packed"):
            path.write_bytes(mutate(CSV.replace(b",", b"\t") if rng.random() < 0.2 else CSV, rng))
        if kind == "csv packed":
            packed = gzip.compress(path.read_bytes(), 1) if rng.random() < 0.5 else zstd(path.read_bytes())
            path.write_bytes(mutate(packed, rng) if rng.random() < 0.7 else packed)
        if kind == "csv cells":
            path.write_bytes(cells(rng))
        if kind == "parquet bytes":
            path.write_bytes(mutate(rng.choice(self.parquets), rng))
        if kind == "parquet pages":
            data = rng.choice(self.parquets)
            footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
            pages = mutate(data[4:footer], rng)[: footer - 4].ljust(footer - 4, b"\1")
            path.write_bytes(data[:4] + pages + data[footer:])
        if kind == "table types":
            source = types(rng)
            if rng.random() < 0.5:
                source.write_parquet(path)
                source = path
        if kind.startswith("toml"):
            fields = self.room / "fields.toml"
            fields.write_bytes(mutate(TOML, rng) if kind == "toml bytes" else options_toml(rng))
        prepare(source, self.room / "out", fields=fields, **settings(rng))
        return "prepared"

    def _dataset(self, kind: str, rng: random.Random) -> str:
        from lpfs._fileio import file_checksum, json_checksum
        from lpfs.data.dataset import Dataset

        root = self.room / "data"
        shutil.copytree(self.folder / "sample", root)
        if kind == "dataset bytes":
            path = root / rng.choice(self.files)
            if rng.random() < 0.1:
                path.unlink()
            else:
                path.write_bytes(mutate(path.read_bytes(), rng))
        else:  # values that are wrong although all checksums are right
            manifest = json.loads((root / "dataset.json").read_text())
            if rng.random() < 0.3:
                schema = twist(json.loads((root / "schema.json").read_text()), rng)
                (root / "schema.json").write_text(json.dumps(schema))
                entry = {
                    "bytes": (root / "schema.json").stat().st_size,
                    "checksum": file_checksum(root / "schema.json"),
                }
                manifest["files"]["schema.json"] = entry
            elif rng.random() < 0.3:
                day = rng.randrange(len(manifest["days"]))
                name = rng.choice(sorted(manifest["days"][day]["files"]))
                path = root / "days" / f"{day:04d}" / name
                path.write_bytes(mutate(path.read_bytes(), rng))
                entry = manifest["days"][day]["files"][name]
                if isinstance(entry, dict):
                    entry.update(bytes=path.stat().st_size, checksum=file_checksum(path))
            else:
                manifest = twist(manifest, rng)
            if isinstance(manifest, dict):
                manifest.pop("checksum", None)
                manifest["checksum"] = json_checksum(manifest)
            (root / "dataset.json").write_text(json.dumps(manifest))
        dataset = Dataset(root)
        dataset.verify()
        for _ in dataset.stream(5, prefetch=0):
            pass
        for name in dataset.schema.names:
            dataset.vocabulary(name)
        return "opened"


def cells(rng: random.Random) -> bytes:
    """Return a well-formed CSV file with odd cells."""
    import csv

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


def types(rng: random.Random) -> Any:
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
    nested: list[Any] = [pl.List(each) for each in flat[:7]] + [
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


def twist(values: Any, rng: random.Random) -> Any:
    """Return JSON values with one place changed."""
    if isinstance(values, (dict, list)) and values and rng.random() < 0.9:
        key = rng.choice(list(values) if isinstance(values, dict) else range(len(values)))
        if rng.random() < 0.1:
            del values[key]
        else:
            values[key] = twist(values[key], rng)
        return values
    return rng.choice([None, 0, -1, 1, 3, 10**20, 0.5, "", "x", "../../x", [], {}, [1], {"x": 1}, True])


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


def work(first: int, stop: int, seed: int, folder: Path) -> None:
    """Play inputs and tell the parent about each."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    box = Box(folder)
    print("ready", flush=True)
    for number in range(first, stop):
        print(box.play(number, seed), flush=True)


class Worker:
    """A worker process with its share of the inputs, started again after each crash or hang."""

    def __init__(self, first: int, stop: int, options: argparse.Namespace) -> None:
        self.next, self.stop, self.options = first, stop, options
        self.findings: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        """Start a process for what is left."""
        self.folder = Path(tempfile.mkdtemp(prefix="lpfs-fuzz-", dir=self.options.place))
        command = [sys.executable, __file__, "--worker", str(self.folder / "box"), "--seed", str(self.options.seed)]
        command += ["--first", str(self.next), "--inputs", str(self.stop - self.next)]
        errors = None if self.options.show else subprocess.DEVNULL
        environment = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert self.process.stdout is not None
        self.pipe = self.process.stdout
        self.buffer, self.heard, self.ready = b"", time.monotonic() + 60, False

    def listen(self) -> bool:
        """Take in what the worker says; whether it has more to do."""
        ready, _, _ = select.select([self.pipe], [], [], 0.2)
        data = os.read(self.pipe.fileno(), 1 << 16) if ready else b""
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            self.heard = time.monotonic()
            if not self.ready:
                self.ready = True
                continue
            kind, outcome = line.decode().split("\t", 1)
            self.note(kind, outcome)
        if self.next >= self.stop:
            self.end()
            return False
        if ready and not data:
            self.note(KINDS[self.next % len(KINDS)], f"crash: exit code {self.process.wait()}")
        elif time.monotonic() - self.heard > self.options.limit:
            self.note(KINDS[self.next % len(KINDS)], "hang")
        else:
            return True
        self.end()
        if self.next < self.stop:
            self.start()
        return self.next < self.stop

    def note(self, kind: str, outcome: str) -> None:
        """Count what came of the next input."""
        short = outcome if outcome in ALLOWED else outcome.split(":")[0]
        self.counts[f"{kind} -> {short}"] += 1
        if outcome not in ALLOWED:
            self.findings.append({"input": self.next, "kind": kind, "outcome": outcome})
            print(f"input {self.next} ({kind}): {outcome}", flush=True)
        self.next += 1

    def end(self) -> None:
        """End the process and remove its folder."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one input")
    parser.add_argument("--place", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true", help="show what workers print on standard error")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.first, options.first + options.inputs, options.seed, options.worker)
        return
    start = time.monotonic()
    edges = [options.first + options.inputs * i // options.workers for i in range(options.workers + 1)]
    workers = [Worker(a, b, options) for a, b in pairwise(edges) if b > a]
    going = list(workers)
    while going:
        going = [worker for worker in going if worker.listen()]
    counts = sum((worker.counts for worker in workers), Counter[str]())
    findings = [each for worker in workers for each in worker.findings]
    result = {
        "command": f"python benchmarks/fuzz_prepare.py --inputs {options.inputs} --seed {options.seed}",
        "inputs": options.inputs,
        "seconds": round(time.monotonic() - start, 1),
        "outcomes": dict(sorted(counts.items())),
        "findings": findings,
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
