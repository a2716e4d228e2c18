"""State of continual training: weights as safetensors, then one SQLite transaction; its row is the commit.

::

    RUN/state.sqlite            commits, metrics, changes of the selection, alarms
    RUN/weights/N.safetensors   tensors of commit N; written and synced before the transaction
    RUN/dead_letters.jsonl      refused rows; a resumed run truncates it to the length of the last commit
    RUN/bundles/                published models, see ``lpfs.online.bundle``

After a crash, whatever the transaction does not name does not count: a newer file of weights is overwritten, later
dead letters are cut off, and the source is read again from the position of the last commit.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lpfs._fileio import fsync_path
from lpfs._locks import FileLock
from lpfs.errors import CheckpointError, InputError, StateError
from lpfs.online.bundle import current_version
from lpfs.train.tensor_io import flatten_state, read_tensors, restore_state, write_tensors

VERSION = 4
DATABASE, WEIGHTS, DEAD_LETTERS, BUNDLES = "state.sqlite", "weights", "dead_letters.jsonl", "bundles"
KEEP_WEIGHTS = 2  # files of weights that are kept, the last one included
RECORD = "id INTEGER PRIMARY KEY, commit_id INTEGER NOT NULL, rows INTEGER NOT NULL, time REAL NOT NULL"
TABLES = (
    "about (version INTEGER NOT NULL, settings TEXT NOT NULL)",
    "commits (id INTEGER PRIMARY KEY, time REAL NOT NULL, rows INTEGER NOT NULL, position TEXT NOT NULL, "
    "weights TEXT NOT NULL, sha256 TEXT NOT NULL, state TEXT NOT NULL, dead_letters INTEGER NOT NULL, "
    "kept TEXT NOT NULL, publish INTEGER NOT NULL, rate REAL, lag REAL)",
    f"metrics ({RECORD}, auc REAL, low REAL, high REAL, logloss REAL, calibration REAL)",
    f"changes ({RECORD}, position TEXT NOT NULL, field TEXT NOT NULL, action TEXT NOT NULL, gain REAL, low REAL, "
    "high REAL, tested INTEGER NOT NULL, before TEXT NOT NULL, after TEXT NOT NULL)",
    f"alarms ({RECORD}, field TEXT, kind TEXT NOT NULL, size REAL NOT NULL, since INTEGER NOT NULL, "
    "message TEXT NOT NULL)",
)
LAST_COMMIT = "SELECT * FROM commits ORDER BY id DESC LIMIT 1"
JSON_COLUMNS = ("position", "before", "after", "kept")


@dataclass(frozen=True)
class Commit:
    """Everything that a commit stores besides the dead letters."""

    rows: int  # number of events read so far, refused ones included
    position: Any  # of the source, after these events; JSON values
    state: Any  # nested state of the trainer: tensors, numbers, text
    kept: tuple[str, ...]  # the selected fields
    publish: bool = False  # whether a bundle of this state must be published
    rate: float | None = None  # rows per second since the last commit
    lag: float | None = None  # events or segments that the source holds beyond ``position``; None if it is unknown
    records: Mapping[str, Iterable[Mapping[str, Any]]] = field(default_factory=dict)  # by table


class StateStore:
    """The state of one run; only one process at a time can write it.

    Args:
        run: the run directory, which is created if it is missing.
        settings: what the state depends on; a run that exists must have been started with the same.
    """

    def __init__(self, run: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.run = Path(run)
        self.run.mkdir(parents=True, exist_ok=True)
        (self.run / WEIGHTS).mkdir(exist_ok=True)
        self._lock = FileLock(self.run / ".lock", self.run)
        with ExitStack() as stack:  # undone if the run cannot be opened
            stack.callback(self._lock.release)
            self._connection = self._open(json.dumps(settings, sort_keys=True))
            stack.callback(self._connection.close)
            row = self._last_row()
            self.last_commit: int = row["id"] if row else 0
            self._letters = self._open_letters(row["dead_letters"] if row else 0)
            stack.pop_all()

    def _open(self, settings: str) -> sqlite3.Connection:
        path = self.run / DATABASE
        try:
            connection = sqlite3.connect(path, isolation_level=None)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            with connection:  # commits, or rolls back
                connection.execute("BEGIN IMMEDIATE")
                if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone():
                    for table in TABLES:
                        connection.execute(f"CREATE TABLE {table}")
                    connection.execute("INSERT INTO about VALUES (?, ?)", (VERSION, settings))
                about = connection.execute("SELECT version, settings FROM about").fetchone()
        except sqlite3.Error as error:
            raise CheckpointError(f"cannot use {path}: {error}; name another run directory, or restore it") from error
        if about["version"] != VERSION:
            raise CheckpointError(f"{path} has format version {about['version']}, this lpfs reads version {VERSION}")
        if about["settings"] != settings:
            before, now = json.loads(about["settings"]), json.loads(settings)
            name = next(name for name in sorted({*before, *now}) if before.get(name) != now.get(name))
            raise InputError(
                f"{self.run} was started with {name} = {before.get(name)!r}, found {now.get(name)!r}; "
                "use the same settings to continue it, or another run directory"
            )
        return connection

    def _open_letters(self, size: int) -> BinaryIO:
        """Open the dead letters at the length of the last commit; what was written after it is cut off."""
        path = self.run / DEAD_LETTERS
        file = path.open("r+b" if path.exists() else "w+b")
        if path.stat().st_size < size:
            raise CheckpointError(f"{path} is shorter than at the last commit, {size} bytes; restore it")
        file.truncate(size)
        file.seek(size)
        return file

    def _last_row(self) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._connection.execute(LAST_COMMIT).fetchone()
        return row

    def load(self) -> Commit | None:
        """Return the last commit, without its records; None if there is none."""
        row = self._last_row()
        if row is None:
            return None
        path = self.run / WEIGHTS / row["weights"]
        try:
            state = restore_state(json.loads(row["state"]), read_tensors(path, row["sha256"]))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; restore it from a backup of the run") from error
        position, kept = json.loads(row["position"]), tuple(json.loads(row["kept"]))
        return Commit(row["rows"], position, state, kept, bool(row["publish"]))

    def write_letter(self, letter: Mapping[str, Any]) -> None:
        """Append a refused row with the reason; it counts from the next commit on."""
        self._letters.write(json.dumps(letter, ensure_ascii=False, default=str).encode() + b"\n")

    def commit(self, commit: Commit) -> int:
        """Write a commit: tensors and dead letters first, then one transaction; return its number."""
        number = self.last_commit + 1
        values, tensors = flatten_state(commit.state, sparse=True)
        name, now = f"{number:08d}.safetensors", time.time()
        digest = write_tensors(self.run / WEIGHTS / name, tensors)["sha256"]
        self._letters.flush()
        os.fsync(self._letters.fileno())
        fsync_path(self.run / WEIGHTS)
        columns = {name: getattr(commit, name) for name in ("rows", "position", "kept", "publish", "rate", "lag")}
        columns |= {"id": number, "time": now, "weights": name, "sha256": digest, "state": json.dumps(values)}
        try:
            with self._connection as connection:  # commits, or rolls back
                connection.execute("BEGIN IMMEDIATE")
                self._insert("commits", {**columns, "dead_letters": self._letters.tell()})
                connection.execute("UPDATE commits SET state = '' WHERE id < ?", (number,))
                for table, records in commit.records.items():
                    for record in records:
                        self._insert(table, {"commit_id": number, "time": now, **record})
        except sqlite3.Error as error:
            raise CheckpointError(f"cannot commit to {self.run / DATABASE}: {error}; the last commit holds") from error
        self.last_commit = number
        for path in (self.run / WEIGHTS).iterdir():
            if path.suffix == ".safetensors" and int(path.stem) <= number - KEEP_WEIGHTS:
                path.unlink(missing_ok=True)
        return number

    def _insert(self, table: str, record: Mapping[str, Any]) -> None:
        values = {name: json.dumps(value) if name in JSON_COLUMNS else value for name, value in record.items()}
        marks = ", ".join("?" * len(values))
        self._connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))

    def close(self) -> None:
        """Close the files and release the lock; nothing is committed. Safe to call twice."""
        self._letters.close()
        self._connection.close()
        self._lock.release()


class StateReader:
    """Reads the state of a run while a trainer writes it; the live page shows what it returns.

    Args:
        path: RUN/state.sqlite, or the run directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = Path(path)
        self.path = file / DATABASE if file.is_dir() else file

    def _query(self, query: str, *values: Any) -> list[dict[str, Any]]:
        if not self.path.is_file():
            raise StateError(f"no state at {self.path}: the trainer has not started yet, or it is another run")
        try:
            with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                connection.row_factory = sqlite3.Row
                rows = connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StateError(f"cannot read {self.path}: {error}") from error
        return [
            {name: json.loads(value) if name in JSON_COLUMNS else value for name, value in dict(row).items()}
            for row in rows
        ]

    def summary(self) -> dict[str, Any]:
        """Return rows, commits, position, kept fields, rate (rows per second), lag and time of the last commit.

        ``version`` is the current bundle, which servers take over; None if nothing was published.
        """
        rows = self._query(LAST_COMMIT.replace("*", "id, time, rows, position, kept, rate, lag"))
        empty: dict[str, Any] = {"id": 0, "rows": 0, "kept": [], **dict.fromkeys(("position", "rate", "lag", "time"))}
        last = rows[0] if rows else empty
        return {"commits": last.pop("id"), **last, "version": current_version(self.path.parent / BUNDLES)}

    def metrics(self, limit: int = 500) -> list[dict[str, Any]]:
        """Return the last records of progressive validation: rows, time, auc, low, high, logloss, calibration."""
        return self._last("metrics", limit)

    def changes(self, limit: int = 100) -> list[dict[str, Any]]:
        """Return the last changes of the selection: field, closed or reopened, evidence, fields before and after."""
        return self._last("changes", limit)

    def alarms(self, limit: int = 100) -> list[dict[str, Any]]:
        """Return the last drift alarms: field (None: the model), kind, size, since which row."""
        return self._last("alarms", limit)

    def _last(self, table: str, limit: int) -> list[dict[str, Any]]:
        rows = self._query(f"SELECT * FROM {table} ORDER BY id DESC LIMIT ?", limit)
        return [{key: value for key, value in row.items() if key not in ("id", "commit_id")} for row in reversed(rows)]


def replay_changes(changes: Iterable[Mapping[str, Any]], start: Iterable[str], rows: int) -> set[str]:
    """Return the selected fields after this many rows: the fields at the start, and the changes up to then."""
    kept = set(start)
    for change in changes:
        if change["rows"] <= rows:
            (kept.discard if change["action"] == "closed" else kept.add)(change["field"])
    return kept
