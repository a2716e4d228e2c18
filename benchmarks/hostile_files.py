"""Hostile models, Datasets, vocabularies, checkpoints and results: each is refused in one line, or has no effect.

    python benchmarks/hostile_files.py --out benchmarks/results/hostile_files.json

Valid files of every kind are changed systematically: types, sizes, shapes and names in JSON files, headers of tensors
and arrays, truncation, flipped bits, zip bombs, links, pipes. All checksums are updated, so that a change is not found
by them alone. Each file is opened in its own process through the API and the command line. It must end with an
LpfsError of one line (exit code 1 or 2 of a command) or open; it must not hang, take ``--megabytes`` of memory, or
change anything outside of its folder. A finding is repeated with: --only NAME
"""

# mypy: disable-error-code="attr-defined, index, misc, func-returns-value, var-annotated, call-overload"

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import torch._dynamo  # of optimizers; imported here, so that its memory is not counted

from lpfs._fileio import file_checksum, json_checksum
from lpfs.cli import run as run_command
from lpfs.data.dataset import Dataset
from lpfs.data.reencode import encode_rows
from lpfs.errors import LpfsError
from lpfs.models import make_model
from lpfs.schema import Selection
from lpfs.serialization import load
from lpfs.train.fit import fit

ROWS = 600
FIELDS = {
    "ad": {"kind": "categorical"},
    "code": {"kind": "categorical"},
    "price": {"kind": "numeric", "bins": "off"},
    "binned": {"kind": "numeric", "bins": 4},
    "tags": {"kind": "multi", "separator": "|"},
    "hashed": {"kind": "categorical", "hash": 16},
}
TINY = ["--pretrain-steps", "20", "--search-steps", "60", "--batch-size", "64"]
TINY += ["--model-option", "dim=2", "--model-option", "hidden=4"]
VALUES: list[Any] = [None, True, False, -1, 0, 40_000_000, 2**31, 10**30, 1e30, -0.5, "", "x", "../../outside/x"]
VALUES += ["/etc/hostname", "a" * 100_000, "\x1b[2J", "\0", [], {}, [[]], ["x"], [-1], {"x": {}}, [1] * 100_000]
NESTED = "[" * 100_000 + "]" * 100_000


# valid files


def write_valid(folder: Path) -> None:
    """Write a log, a Dataset, a run with a model, a comparison, and a training with a checkpoint."""
    rng = np.random.default_rng(0)
    columns = {
        "click": rng.integers(0, 2, ROWS),
        "day": np.arange(ROWS) // 60,
        "ad": [f"a{number}" for number in rng.integers(0, 20, ROWS)],
        "code": rng.integers(0, 30, ROWS),
        "price": rng.lognormal(2, 1, ROWS),
        "binned": rng.normal(size=ROWS),
        "tags": ["|".join(f"g{number}" for number in rng.integers(0, 9, 3)) for _ in range(ROWS)],
        "hashed": [f"h{number}" for number in rng.integers(0, 200, ROWS)],
    }
    pl.DataFrame(columns).write_csv(folder / "log.csv")
    lines = [f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in FIELDS[name].items()) for name in FIELDS]
    (folder / "fields.toml").write_text("".join(lines))
    data = str(folder / "dataset")
    options = ["--label", "click", "--time", "day", "--fields", str(folder / "fields.toml"), "--quiet"]
    compared = ["--methods", "permutation,random", "--keep", "2,4", "--seeds", "1", *TINY, "--quiet"]
    for words in (
        ["prepare", str(folder / "log.csv"), *options, "--out", data],
        ["select", data, "--keep", "3", "--out", str(folder / "run"), *TINY, "--quiet"],
        ["compare", data, *compared, "--out", str(folder / "comparison")],
    ):
        if run_command(words):
            raise SystemExit(f"lpfs {words[0]} failed")
    train(folder / "training", Dataset(data), 4)


def train(folder: Path, dataset: Dataset, steps: int) -> None:
    torch.manual_seed(0)
    model = make_model("mlp", dataset.schema, dim=2, hidden=[4])
    fit(model, dataset.stream(32), "adam", folder=folder, steps=steps, checkpoint_every=2, resume=True, quiet=True)


# changes: a function that changes a copy of a valid folder


Change = Callable[[Path], None]


def json_changes(path: Path, count: int, rng: random.Random) -> Iterator[tuple[str, Any]]:
    """Yield changed contents of a JSON file: each value of another type or size, keys removed and added."""
    whole = json.loads(path.read_text())
    places: dict[str, list[Any]] = {}

    def walk(value: Any, place: list[Any]) -> None:
        shape = ".".join("*" if isinstance(step, int) or "." in step else step for step in place)
        places.setdefault(shape, place)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value[:2]):
            if isinstance(item, dict | list):
                walk(item, [*place, key])
            else:
                places.setdefault(".".join([shape, str(key)]), [*place, key])

    walk(whole, [])
    cases = [(place, value) for place in places.values() for value in (*VALUES, "remove", "rename")]
    for place, value in rng.sample(cases, min(count, len(cases))):
        copy = json.loads(json.dumps(whole))
        label = f"{path.name}: {'.'.join(map(str, place)) or 'all'} = {json.dumps(value)[:24]}"
        if not place:
            yield label, value
            continue
        parent = copy
        for key in place[:-1]:
            parent = parent[key]
        if value in ("remove", "rename"):
            item = parent.pop(place[-1])
            if value == "rename" and isinstance(parent, dict):
                parent["../../outside/x"] = item
        else:
            parent[place[-1]] = value
        yield label, copy


def write_checked(path: Path, values: Any) -> None:
    """Write JSON values, with a valid checksum if they are an object that has one."""
    if isinstance(values, dict) and "checksum" in values:
        values = {key: value for key, value in values.items() if key != "checksum"}
        values["checksum"] = json_checksum(values)
    path.write_text(json.dumps(values))


def update_checksums(folder: Path) -> None:
    """Update sizes and checksums of the files in every manifest below a folder."""
    for path in sorted(folder.rglob("*.json"), key=lambda path: -len(path.parts)):
        try:
            values = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(values, dict) or not _update_entries(values, path.parent):
            continue
        write_checked(path, values)


def _update_entries(values: dict[str, Any], folder: Path) -> bool:
    days = values["days"] if isinstance(values.get("days"), list) else []
    tables = [(values.get(key), folder) for key in ("files", "vocabularies")]
    tables += [(day.get("files"), folder / f"days/{number:04d}") for number, day in enumerate(days) if day]
    if isinstance(values.get("weights"), dict):
        tables.append(({"model.safetensors": values["weights"]}, folder))
    changed = False
    for table, parent in tables:
        for name, entry in table.items() if isinstance(table, dict) else ():
            path = parent / name
            if not path.is_file() or path.stat().st_size > 1 << 28:
                continue
            changed = True
            if isinstance(entry, str):
                table[name] = file_checksum(path)
            elif isinstance(entry, dict):
                entry["bytes"] = path.stat().st_size
                if "checksum" in entry:
                    entry["checksum"] = file_checksum(path)
                if "sha256" in entry:
                    entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return changed


def file_changes(file: str) -> Iterator[tuple[str, bool, Change]]:
    """Yield changes of a file as a whole: label, whether it must be refused, and the change."""

    def data(change: Callable[[bytes], bytes]) -> Change:
        def apply(folder: Path) -> None:
            (folder / file).write_bytes(change((folder / file).read_bytes()))
            update_checksums(folder)

        return apply

    def replaced(create: Callable[[Path, Path], Any], *, update: bool = True) -> Change:
        def apply(folder: Path) -> None:
            path, outside = folder / file, folder.parent / "outside"
            path.rename(outside / "moved")
            create(path, outside)
            if update:
                update_checksums(folder)

        return apply

    yield "empty", False, data(lambda whole: b"")
    for share in (0.1, 0.5, 0.9, 0.99):
        yield f"cut at {share}", False, data(lambda whole, share=share: whole[: int(len(whole) * share)])
    for share in (0.02, 0.2, 0.4, 0.6, 0.8, 0.98):

        def flip(whole: bytes, share: float = share) -> bytes:
            byte = int(len(whole) * share)
            return whole[:byte] + bytes([whole[byte] ^ 16]) + whole[byte + 1 :]

        yield f"bit at {share}", False, data(flip)
    yield "random bytes", False, data(lambda whole: random.Random(len(whole)).randbytes(len(whole)))
    yield "zeros", False, data(lambda whole: bytes(len(whole)))
    yield "longer", False, data(lambda whole: whole + bytes(1000))
    yield "link outside", True, replaced(lambda path, outside: path.symlink_to(outside / "moved"))
    yield "link to /dev/zero", True, replaced(lambda path, outside: path.symlink_to("/dev/zero"), update=False)
    yield "link to itself", True, replaced(lambda path, outside: path.symlink_to(path), update=False)
    yield "pipe", True, replaced(lambda path, outside: os.mkfifo(path), update=False)
    yield "directory", True, replaced(lambda path, outside: path.mkdir(), update=False)
    yield "sparse", False, replaced(lambda path, outside: (path.touch(), os.truncate(path, 1 << 36)), update=False)


def tensor_changes(file: str) -> Iterator[tuple[str, Change]]:
    """Yield changes of the header of a safetensors file."""

    def change(edit: Callable[[dict[str, Any]], Any], length: int | None = None) -> Change:
        def apply(folder: Path) -> None:
            whole = (folder / file).read_bytes()
            size = int.from_bytes(whole[:8], "little")
            header = json.loads(whole[8 : 8 + size])
            edited = edit(header)
            text = (edited if isinstance(edited, str) else json.dumps(header if edited is None else edited)).encode()
            count = len(text) if length is None else length
            (folder / file).write_bytes(count.to_bytes(8, "little") + text + whole[8 + size :])
            update_checksums(folder)

        return apply

    def entry(**values: Any) -> Change:
        return change(lambda header: header[next(iter(header))].update(values))

    for shape in ([1 << 40], [1 << 62, 4], [-1], [True], "x", None, {}, [1.5], [[1]], [0], [1] * 1000, [10**30]):
        yield f"shape {str(shape)[:24]}", entry(shape=shape)
    for dtype in ("F8", "I64", "U8", "BOOL", "PICKLE", None, [], 3, "F64"):
        yield f"dtype {dtype}", entry(dtype=dtype)
    for offsets in ([0, 1 << 40], [-8, 0], [8, 0], ["a", "b"], [0], None, [0, 1.5], [10**30, 10**31], 3):
        yield f"offsets {offsets}", entry(data_offsets=offsets)
    for header in ([], 3, None, "x", {}, {"x": None}, {"x": {}}, {"__metadata__": 3}, NESTED, "{", '{"a": 1' * 1000):
        yield f"header {str(header)[:24]}", change(lambda _, header=header: "null" if header is None else header)
    for length in (0, 1, 1 << 20, 1 << 40, (1 << 64) - 1):
        yield f"length {length}", change(lambda header: None, length)
    yield "a name", change(lambda header: header.update({"../../outside/x": header.pop(next(iter(header)))}))
    yield "no names", change(lambda header: header.clear())


def npz_contents() -> Iterator[tuple[str, bytes]]:
    """Yield archives that are not the vocabulary of a field."""

    def header(shape: str, dtype: str = "<i8", data: bytes = b"") -> bytes:
        text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data

    def pack(arrays: dict[str, Any], compression: int = zipfile.ZIP_STORED) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", compression) as archive:
            for name, array in arrays.items():
                data = io.BytesIO()
                if isinstance(array, bytes):
                    data.write(array)
                else:
                    np.save(data, array, allow_pickle=True)
                archive.writestr(name, data.getvalue())
        return out.getvalue()

    ends, text = np.array([0, 1, 3]), np.frombuffer(b"abc", np.uint8)
    arrays: dict[str, Any] = {
        "objects": np.array([print, 1], object),
        "text": np.array(["a"]),
        "matrix": np.ones((2, 2)),
        "scalar": np.array(3),
        "complex": np.ones(2, complex),
        "records": np.zeros(2, [("a", int)]),
        "times": np.zeros(2, "datetime64[s]"),
        "big-endian": np.ones(2, ">i8"),
        "half": np.ones(2, np.float16),
        "booleans": np.ones(2, bool),
        "nan": np.full(20, np.nan),
        "equal": np.zeros(300_000, np.int64),
        "too few": np.arange(2),
        "too many": np.arange(100_000),
        "magic": b"\x93NUMPY\x01\x00",
        "version": b"\x93NUMPY\x09\x00" + bytes(100),
        "expression": header("(__import__('os').mkdir('../outside/x'),)"),
        "nested": header("(" * 5000),
        "huge": header("(1000000000000,)", data=bytes(8)),
        "overflow": header("(9223372036854775807,)", data=bytes(8)),
        "negative": header("(-1,)", data=bytes(8)),
        "void": header("(1,)", "|V1000000000", bytes(8)),
    }
    yield from ((name, pack({"numbers.npy": array})) for name, array in arrays.items())
    texts = {
        "ends of floats": np.array([0.0, 3.0]),
        "ends beyond": np.array([0, 99]),
        "ends decrease": np.array([0, 3] * 50_000),
        "ends empty": np.zeros(0, np.int64),
        "ends negative": np.array([0, -1, 3]),
        "ends of objects": np.array([0, print], object),
    }
    yield from ((name, pack({"text.npy": text, "ends.npy": array})) for name, array in texts.items())
    big = np.frombuffer(bytes(200_000), np.uint8)
    repeated = np.array([0, 200_000] * 20_000)
    yield "repeated text", pack({"text.npy": big, "ends.npy": repeated})
    yield "invalid UTF-8", pack({"text.npy": np.frombuffer(b"\xff\xfe\xff", np.uint8), "ends.npy": ends})
    for name in ("words.npy", "../numbers.npy", "/numbers.npy", "numbers", "text.npy", "ends.npy"):
        yield f"name {name!r}", pack({name: ends})
    yield "both", pack({"text.npy": text, "ends.npy": ends, "numbers.npy": ends})
    yield "many names", pack({f"{number}.npy": b"" for number in range(20_000)})
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        yield f"compressed {method}", pack({"numbers.npy": ends}, method)
    for items in (50_000_000, 300_000_000):
        out = io.BytesIO()
        archive = zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED)
        with archive, archive.open("numbers.npy", "w", force_zip64=True) as file:
            file.write(header(f"({items},)"))
            for _ in range(items // 1_000_000):
                file.write(bytes(8_000_000))
        yield f"bomb of {items} numbers", out.getvalue()
    encrypted = bytearray(pack({"numbers.npy": ends}))
    encrypted[6] |= 1
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    yield "encrypted", bytes(encrypted)


def npy_headers() -> Iterator[tuple[str, bytes]]:
    for shape in ("(1000000000000,)", "(-1,)", "(60, 60)", "()", "(60,", "((60,),)", "(__import__('os').getpid(),)"):
        for dtype in ("'|u1'", "'|O'", "'<f8'", "'|V9'", "[('a', '|O')]"):
            text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
            yield f"{dtype} {shape}", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


# cases: kind, valid folder, change


def make_cases(valid: Path, rng: random.Random) -> Iterator[tuple[str, str, str, bool, Change]]:
    """Yield kind, name, valid folder, whether it must be refused, and the change."""

    def of_json(folder: str, file: str, count: int) -> Iterator[tuple[str, str, bool, Change]]:
        for label, values in json_changes(valid / folder / file, count, rng):

            def apply(copy: Path, values: Any = values) -> None:
                write_checked(copy / file, values)
                if file == "schema.json" or file == "state.json":
                    update_checksums(copy)

            yield label, folder, False, apply
        nested = (("nested", NESTED), ("repeated keys", '{"a": 1, ' * 50), ("NaN", "NaN"), ("number", "3"))
        for label, text in (*nested, ("long number", "1" * 10_000), ("not UTF-8", "\udcff"), ("blank", "")):

            def write(copy: Path, text: str = text) -> None:
                (copy / file).write_bytes(text.encode("utf-8", "surrogateescape"))
                update_checksums(copy)

            yield f"{file}: {label}", folder, False, write

    def of_file(folder: str, file: str) -> Iterator[tuple[str, str, bool, Change]]:
        for label, refuse, change in file_changes(file):
            yield f"{file}: {label}", folder, refuse, change

    def of_bytes(folder: str, file: str, contents: Iterator[tuple[str, bytes]], keep: int | None = None) -> Any:
        for label, data in contents:

            def apply(copy: Path, data: bytes = data) -> None:
                rest = b"" if keep is None else (copy / file).read_bytes()[keep:]
                (copy / file).write_bytes(data + rest)
                update_checksums(copy)

            yield f"{file}: {label}", folder, False, apply

    def tensors(folder: str, file: str) -> Iterator[tuple[str, str, bool, Change]]:
        for label, change in tensor_changes(file):
            yield f"{file}: {label}", folder, False, change

    weights = "model.safetensors"
    training = "checkpoints/step-000000000004"
    day_file = next((valid / "dataset").glob("days/0000/*.npy")).relative_to(valid / "dataset").as_posix()
    words = sorted(path.relative_to(valid / "dataset").as_posix() for path in valid.glob("dataset/vocab/*"))[:2]
    groups: dict[str, list[Any]] = {
        "model": [
            of_json("run/model", "model.json", 70),
            tensors("run/model", weights),
            of_file("run/model", "model.json"),
            of_file("run/model", weights),
        ],
        "dataset": [
            of_json("dataset", "dataset.json", 70),
            of_json("dataset", "schema.json", 30),
            of_file("dataset", "dataset.json"),
            of_file("dataset", "schema.json"),
            of_file("dataset", day_file),
            of_bytes("dataset", day_file, npy_headers(), 128),
        ],
        "vocabulary": [
            *(of_bytes("dataset", file, npz_contents() if file.endswith(".npz") else npy_headers()) for file in words),
            of_file("dataset", words[0]),
        ],
        "checkpoint": [
            of_json("training", f"{training}/checkpoint.json", 30),
            of_json("training", f"{training}/state.json", 50),
            tensors("training", f"{training}/tensors.safetensors"),
            *(of_file("training", f"{training}/{name}") for name in ("checkpoint.json", "state.json")),
            of_file("training", f"{training}/tensors.safetensors"),
        ],
        "result": [
            of_json("run", "selection.json", 50),
            of_json("run", "config.json", 20),
            of_file("run", "selection.json"),
            of_file("run", "history.parquet"),
            of_json("comparison", "comparison.json", 50),
            of_file("comparison", "comparison.json"),
        ],
    }
    for kind, parts in groups.items():
        for folder in {"model": ["run/model"], "result": ["run", "comparison"]}.get(
            kind, ["training" if kind == "checkpoint" else "dataset"]
        ):
            yield kind, "valid", folder, False, lambda copy: None
        for part in parts:
            for label, folder, refuse, change in part:
                yield kind, label, folder, refuse, change


# opening


def openers(kind: str, folder: str, case: Path, valid: Path) -> dict[str, Callable[[], Any]]:
    """Return the ways in which a user opens a folder."""
    target = case / "target"

    def command(*words: str | Path) -> Callable[[], Any]:
        return lambda: run_command([str(word) for word in words])

    log, dataset, out = valid / "log.csv", valid / "dataset", case / "out"
    if kind == "model":
        return {"lpfs.load": lambda: load(target), "lpfs evaluate": command("evaluate", target, dataset)}
    if kind == "checkpoint":
        return {"lpfs.fit(resume=True)": lambda: train(target, Dataset(dataset), 6)}
    if kind in ("dataset", "vocabulary"):
        like = command("prepare", log, "--like", target, "--out", out, "--quiet")
        return {"lpfs.Dataset": lambda: read_dataset(target, log), "lpfs prepare --like": like}
    report = {"lpfs report": command("report", target, "--out", case / "out.html")}
    if folder == "comparison":
        return report
    return {"Selection.load": lambda: Selection.load(target / "selection.json"), **report}


def read_dataset(folder: Path, log: Path) -> None:
    """Read all rows and all vocabularies of a Dataset, and encode rows like it."""
    dataset = Dataset(folder)
    for batch in dataset.stream(256):
        assert len(batch)
    for name in dataset.schema.names:
        dataset.vocabulary(name)
    encode_rows(dataset, pl.read_csv(log))


def memory(name: str) -> int:
    """Return VmRSS or VmHWM of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) // 1024


def open_case(opener: Callable[[], Any], case: Path) -> None:
    """Open a folder and write the outcome; runs in a child process."""
    os.chdir(case / "home")
    os.environ.update(HOME=str(case / "home"), XDG_CACHE_HOME=str(case / "home"), TMPDIR=str(case / "tmp"))
    tempfile.tempdir = None
    torch.set_num_threads(1)
    out, err, start, lines = io.StringIO(), io.StringIO(), memory("VmRSS"), []
    outcome = "opened"
    try:
        with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
            warnings.simplefilter("ignore")
            if code := opener():
                outcome = "refused" if isinstance(code, int) and code in (1, 2) else "opened"
    except LpfsError as error:
        outcome, lines = "refused", str(error).splitlines()
    except BaseException:
        outcome, lines = "traceback", traceback.format_exc().splitlines()[-6:]
    lines = lines or err.getvalue().splitlines()
    if outcome == "refused" and len([line for line in lines if "error" in line or len(lines) == 1]) != 1:
        outcome = "not one line"
    if any("Traceback" in line for line in lines):
        outcome = "traceback"
    result = {"outcome": outcome, "message": "\n".join(lines)[-600:], "megabytes": memory("VmHWM") - start}
    (case / "outcome.json").write_text(json.dumps(result))


def snapshot(case: Path) -> dict[str, str]:
    """Return everything beside the target and the output of a case."""
    files = {}
    for part in ("outside", "home"):
        for path in sorted((case / part).rglob("*")):
            size = -1 if path.is_dir() else path.lstat().st_size
            files[f"{part}/{path.relative_to(case / part)}"] = str(size)
    names = {path.name for path in case.iterdir()} - {"target", "out", "out.html", "outcome.json"}
    return {**files, "names": str(sorted(names))}


def run_cases(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Open every case in its own process, some at a time; return counts and failures."""
    valid = folder / "valid"
    waiting, running = make_cases(valid, random.Random(arguments.seed)), {}
    counts: dict[str, Counter[str]] = {}
    peaks: dict[str, int] = {}
    files: Counter[str] = Counter()
    failures, queue, number, done = [], [], 0, False
    while not done or queue or running:
        while not done and len(queue) + len(running) < arguments.workers:
            try:
                kind, name, source, refuse, change = next(waiting)
            except StopIteration:
                done = True
                break
            if arguments.only and arguments.only not in f"{kind} {name}":
                continue
            files[kind] += 1
            queue += [(kind, name, source, refuse, change, way) for way in openers(kind, source, folder, valid)]
        while queue and len(running) < arguments.workers:
            kind, name, source, refuse, change, opener = queue.pop(0)
            number += 1
            case = folder / "cases" / str(number)
            for part in ("outside", "home", "tmp"):
                (case / part).mkdir(parents=True)
            shutil.copytree(valid / source, case / "target", symlinks=True)
            change(case / "target")
            before = snapshot(case)
            pid = os.fork()
            if not pid:
                try:
                    open_case(openers(kind, source, case, valid)[opener], case)
                finally:
                    os._exit(0)
            running[pid] = kind, name, refuse, opener, case, before, time.monotonic()
        for pid, (kind, name, refuse, opener, case, before, start) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() - start < arguments.limit:
                continue
            if not ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del running[pid]
            result = {"outcome": f"ended by signal {status}" if ended else "hang", "message": "", "megabytes": 0}
            if (case / "outcome.json").exists():
                result = json.loads((case / "outcome.json").read_text())
            outcome = result["outcome"]
            after = snapshot(case)
            if after != before:
                outcome = "changed files outside"
                result["message"] = f"{sorted(set(after.items()) ^ set(before.items()))[:4]} {result['message']}"
            elif result["megabytes"] >= arguments.megabytes:
                outcome = "memory"
            elif refuse and outcome == "opened" and must_refuse(kind, name, opener):
                outcome = "opened a link or a special file"
            elif name == "valid":
                outcome = "valid" if outcome == "opened" else f"a valid file: {outcome}"
            counts.setdefault(f"{kind}: {opener}", Counter())[outcome] += 1
            peaks[kind] = max(peaks.get(kind, 0), result["megabytes"])
            if outcome not in ("opened", "refused", "valid"):
                failures.append({"kind": kind, "name": name, "opener": opener, **result, "outcome": outcome})
                print(f"{kind}: {name}: {opener}: {outcome}: {result['message'][-300:]}", file=sys.stderr, flush=True)
            elif arguments.only:
                print(f"{kind}: {name}: {opener}: {outcome}: {result['message'][-300:]}", file=sys.stderr, flush=True)
            shutil.rmtree(case, ignore_errors=True)
        time.sleep(0.002)
    return {
        "command": "python benchmarks/hostile_files.py",
        "seed": arguments.seed,
        "files": dict(files),
        "opened": number,
        "counts": {name: dict(counter) for name, counter in counts.items()},
        "peak_megabytes": peaks,
        "failures": failures,
    }


def must_refuse(kind: str, name: str, opener: str) -> bool:
    """Return whether a link or special file must be refused by something that opens the folder.

    A training resumes from the other checkpoint and warns. The folder of a run is named by the user, so that a link
    to a regular file may be followed, unless its name comes from a file. Selection.load does not read the history.
    """
    if kind == "checkpoint":
        return False
    return kind != "result" or not ("json: link outside" in name or (opener == "Selection.load" and "history" in name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the counts and failures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until a file counts as a hang")
    parser.add_argument("--megabytes", type=int, default=300, help="growth of the resident memory that is a failure")
    parser.add_argument("--only", default="", help="part of the kind and name of the files to open")
    parser.add_argument("--valid", type=Path, help="folder of valid files, written if it does not exist")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        folder = Path(name)
        valid = arguments.valid or folder / "valid"
        if not valid.exists():  # in its own process: this one must have no threads when it forks
            valid.mkdir()
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    write_valid(valid)
                    code = 0
                finally:
                    os._exit(code)
            if os.waitpid(pid, 0)[1]:
                raise SystemExit("the valid files could not be written")
        if arguments.valid:
            (folder / "valid").symlink_to(arguments.valid.resolve())
        result = run_cases(arguments, folder)
    text = json.dumps(result, indent=1, ensure_ascii=True)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    sys.exit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
