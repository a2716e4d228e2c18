"""The trainer: dead letters, commits, metrics, the change log, bundles; killed or not, the state is the same."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lpfs._console import Console
from lpfs.cli import run as command
from lpfs.data.simulate_stream import simulate_events, write_segment
from lpfs.errors import CheckpointError, InputError, LockedError, StateError
from lpfs.online import bundle
from lpfs.online.gates import GateSettings
from lpfs.online.learner import LearnerSettings
from lpfs.online.run import EventFilter, OnlineSettings, OnlineTrainer, parse_time
from lpfs.online.source import SegmentSource
from lpfs.online.state import StateReader, replay_changes
from tests.online.conftest import EVENTS, SPEC

LEARNER = LearnerSettings(
    options={"dim": 4, "hidden": (8,)},
    warmup=2,
    gate_every=1,
    probe_every=4,
    gates=GateSettings(lr=1.0, penalty=0.05, error=0.01),
)
SETTINGS = OnlineSettings(LEARNER, batch=256, commit_every=4, publish_every=3, key="event", window=500)


def train(folder: Path, run: Path, settings: OnlineSettings = SETTINGS, **limits: Any) -> Any:
    source = SegmentSource(folder / "segments")
    trainer = OnlineTrainer(source, run, folder / "like", settings, console=Console(quiet=True))
    return trainer.run(**{"idle_seconds": 0.0, **limits})


@pytest.fixture(scope="module")
def unbroken(stream_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("online") / "run"
    train(stream_folder, run)
    return run


def committed(run: Path) -> dict[str, Any]:
    """Return all that was committed besides times."""
    reader = StateReader(run)
    columns = "id, rows, position, sha256, state, dead_letters, kept, publish"
    values = {"commits": reader._query(f"SELECT {columns} FROM commits ORDER BY id")}
    for table in ("metrics", "changes", "alarms"):
        rows = reader._query(f"SELECT * FROM {table} ORDER BY id")
        values[table] = [{key: value for key, value in row.items() if key != "time"} for row in rows]
    return {**values, "letters": (run / "dead_letters.jsonl").read_text()}


def test_numbers_that_are_not_finite_are_missing_also_in_bundles(stream_folder: Path, tmp_path: Path) -> None:
    missing = pl.when(pl.int_range(pl.len()) % 3 == 0).then(float("nan")).otherwise(pl.col("number"))
    events = simulate_events(SPEC, 0, 2048).with_columns(missing.alias("number"))
    (tmp_path / "segments").mkdir()
    write_segment(tmp_path / "segments" / "0.parquet", events)
    (tmp_path / "like").symlink_to(stream_folder / "like")
    settings = replace(SETTINGS, publish_every=1)
    for _ in range(2):  # a restart publishes what was not published
        train(tmp_path, tmp_path / "run", settings)
    published = bundle.current(tmp_path / "run" / "bundles")
    assert published is not None
    assert None in [row["number"] for row in published.samples()]


def test_a_run_whose_settings_are_refused_can_be_started_with_others(stream_folder: Path, tmp_path: Path) -> None:
    wrong = replace(LEARNER, gates=replace(LEARNER.gates, keep=500))
    with pytest.raises(InputError, match="500"):
        train(stream_folder, tmp_path / "run", replace(SETTINGS, learner=wrong))
    train(stream_folder, tmp_path / "run", max_rows=512)


def test_times_may_be_dates() -> None:
    moment = datetime(2026, 3, 1, 12, 30)
    assert parse_time(moment) == parse_time(moment.isoformat()) == moment.timestamp()
    assert parse_time(moment.date()) == datetime(2026, 3, 1).timestamp()
    assert parse_time("yesterday") is None
    assert parse_time(float("nan")) is None


def test_every_event_is_learned_or_a_dead_letter(unbroken: Path) -> None:
    letters = [json.loads(line) for line in (unbroken / "dead_letters.jsonl").read_text().splitlines()]
    summary = StateReader(unbroken).summary()
    kinds = {letter["kind"] for letter in letters}
    assert kinds == {"duplicate", "malformed"}
    assert summary["rows"] > EVENTS
    duplicates = [letter["event"]["event"] for letter in letters if letter["kind"] == "duplicate"]
    malformed = [letter["event"]["event"] for letter in letters if letter["kind"] == "malformed"]
    assert len(malformed) == len({*malformed})
    assert summary["rows"] == EVENTS + len(duplicates)
    assert all("'broken' is not a number" in letter["reason"] for letter in letters if letter["kind"] == "malformed")


def test_metrics_are_written_with_every_commit(unbroken: Path) -> None:
    reader = StateReader(unbroken)
    metrics = reader.metrics()
    assert len(metrics) == reader.summary()["commits"] == -(-(reader.summary()["rows"]) // (256 * 4))
    assert metrics[-1]["low"] < metrics[-1]["auc"] < metrics[-1]["high"]
    assert metrics[-1]["auc"] > metrics[0]["auc"] + 0.05
    assert len(reader.metrics(2)) == 2


def test_the_published_bundle_predicts_as_the_trainer(unbroken: Path, stream_folder: Path) -> None:
    current = bundle.current(unbroken / "bundles")
    assert current is not None
    current.verify_files()
    assert current.manifest["metadata"]["commit"] == StateReader(unbroken).summary()["commits"] // 3 * 3
    assert len(current.samples()) == len(current.manifest["logits"]) > 0


def test_the_change_log_replays_to_the_selection(unbroken: Path) -> None:
    reader = StateReader(unbroken)
    changes, summary = reader.changes(), reader.summary()
    start = set(changes[0]["before"]) if changes else set(summary["kept"])
    assert replay_changes(changes, start, summary["rows"]) == set(summary["kept"])
    assert replay_changes(changes, start, 0) == start
    for before, after in zip(changes, changes[1:], strict=False):
        assert before["after"] == after["before"]


@pytest.mark.parametrize("rows", [1, 1500, 3300])
def test_a_stopped_run_continues_bit_for_bit(stream_folder: Path, unbroken: Path, tmp_path: Path, rows: int) -> None:
    trainer = OnlineTrainer(
        SegmentSource(stream_folder / "segments"), tmp_path / "run", stream_folder / "like", SETTINGS
    )
    while trainer.rows < rows:  # some batches are not committed
        trainer.process(trainer._collect(0.0))  # type: ignore[arg-type]
        if trainer._window_batches >= SETTINGS.commit_every:
            trainer.commit()
    trainer.store._letters.flush()
    trainer.store.close()
    unfinished = tmp_path / "run" / "weights" / f"{trainer.store.last_commit + 1:08d}.safetensors"
    unfinished.write_bytes(b"half")  # of a commit that did not happen
    train(stream_folder, tmp_path / "run")
    assert committed(tmp_path / "run") == committed(unbroken)


def test_a_crash_between_commit_and_publication_publishes_later(
    stream_folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bundle, "publish", crash)
        with pytest.raises(KeyboardInterrupt):
            train(stream_folder, tmp_path / "run")
    assert bundle.current(tmp_path / "run" / "bundles") is None
    train(stream_folder, tmp_path / "run", max_rows=1)
    current = bundle.current(tmp_path / "run" / "bundles")
    assert current is not None
    assert current.manifest["metadata"]["commit"] == 1
    train(stream_folder, tmp_path / "run")
    assert committed(tmp_path / "run") == committed(unbroken)


def start_trainer(folder: Path, run: Path) -> subprocess.Popen[bytes]:
    words = ["online", str(folder / "segments"), str(run), "--like", str(folder / "like"), "--key", "event", "-q"]
    words += ["--batch", "256", "--commit-every", "1", "--publish-every", "4", "--idle", "0.1"]
    return subprocess.Popen([sys.executable, "-m", "lpfs", *words], env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.long
def test_sigkill_of_the_command(stream_folder: Path, tmp_path: Path) -> None:
    assert start_trainer(stream_folder, tmp_path / "unbroken").wait() == 0
    kills = 0
    while True:
        process = start_trainer(stream_folder, tmp_path / "killed")
        wait_for(lambda: rows_of(tmp_path / "killed"), process, kills * 1000)
        if process.poll() is None and kills < 5:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert process.wait() == 0
        break
    assert kills == 5
    assert committed(tmp_path / "killed") == committed(tmp_path / "unbroken")


def rows_of(run: Path) -> int:
    try:
        return int(StateReader(run).summary()["rows"])
    except StateError:
        return 0


def wait_for(rows: Callable[[], int], process: subprocess.Popen[bytes], at_least: int) -> None:
    """Wait until a run has committed more than a number of rows, or the process has ended."""
    while process.poll() is None and rows() <= at_least:
        time.sleep(0.01)


def test_another_setting_or_dataset_is_refused(stream_folder: Path, unbroken: Path) -> None:
    with pytest.raises(InputError, match="was started with settings"):
        train(stream_folder, unbroken, OnlineSettings(LEARNER, batch=128, commit_every=4, publish_every=3, key="event"))


def test_two_trainers_cannot_write_one_run(stream_folder: Path, tmp_path: Path) -> None:
    source = SegmentSource(stream_folder / "segments")
    trainer = OnlineTrainer(source, tmp_path / "run", stream_folder / "like", SETTINGS)
    with pytest.raises(LockedError):
        OnlineTrainer(source, tmp_path / "run", stream_folder / "like", SETTINGS)
    trainer.store.close()


def test_damaged_weights_are_refused(stream_folder: Path, tmp_path: Path) -> None:
    train(stream_folder, tmp_path / "run", max_rows=1100)
    [*_, path] = sorted((tmp_path / "run" / "weights").iterdir())
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        train(stream_folder, tmp_path / "run")


def test_the_status_names_the_current_bundle(unbroken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = bundle.current_version(unbroken / "bundles")
    assert StateReader(unbroken).summary()["version"] == version
    assert command(["online", "status", str(unbroken)]) == 0
    assert f"the current bundle is {version}" in capsys.readouterr().err
    assert command(["online", "status", str(unbroken), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == version


def test_a_reader_without_a_run() -> None:
    with pytest.raises(StateError, match="no state at"):
        StateReader("nowhere").summary()


def test_a_segment_without_a_field_is_refused_row_by_row(stream_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    frame = simulate_events(SPEC, 0, 300)
    write_segment(tmp_path / "segments" / "1.parquet", frame.drop("dies"))
    write_segment(tmp_path / "segments" / "2.parquet", frame)
    source = SegmentSource(tmp_path / "segments")
    settings = OnlineSettings(LEARNER, batch=300, publish_every=0, key="event")
    result = OnlineTrainer(source, tmp_path / "run", stream_folder / "like", settings).run(idle_seconds=0.0)
    assert (result.rows, result.learned, result.refused) == (600, 300, {"malformed": 300})
    letter = json.loads((tmp_path / "run" / "dead_letters.jsonl").read_text().splitlines()[0])
    assert letter["reason"].startswith("dies: the field is absent")


def test_json_events_train_the_same_model_as_tables(stream_folder: Path, unbroken: Path, tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    for path in (stream_folder / "segments").glob("*.parquet"):
        write_segment(tmp_path / "segments" / f"{path.stem}.jsonl", pl.read_parquet(path))
    trainer = OnlineTrainer(SegmentSource(tmp_path / "segments"), tmp_path / "run", stream_folder / "like", SETTINGS)
    trainer.run(idle_seconds=0.0)
    one, other = committed(tmp_path / "run"), committed(unbroken)
    assert [commit["sha256"] for commit in one["commits"]] == [commit["sha256"] for commit in other["commits"]]
    assert one["metrics"] == other["metrics"]
    assert one["alarms"] == other["alarms"]
    assert trainer.encoder._table.is_built


def test_late_and_repeated_events() -> None:
    events = EventFilter(OnlineSettings(key="id", window=2, time="at", lateness=10.0))
    first = events.check([1, 2, 1, None, 5, 7, 8, 9], [100.0, 90, 101, 102, "noon", math.inf, 10**400, 95])
    expected = ["", "", "duplicate", "malformed", "malformed", "malformed", "malformed", ""]
    assert [reason.partition(":")[0] for reason in first] == expected
    events.remember([1, 2, 3])
    assert events.latest == 95  # the median of the others
    reasons = events.check([1, 3, 4, 6, 7], ["1970-01-01T00:01:50+00:00", 110, 84, 111, 1e15])
    assert [reason.partition(":")[0] for reason in reasons] == ["", "duplicate", "late", "", ""]  # 1 was forgotten
    assert events.check([10, 11], [1e15, 1e15]) == ["", ""]
    assert events.latest == 110  # the events of 1e15 make no other one late
    other = EventFilter(events.settings)
    other.load(events.state())
    assert other.check([2, 3], [99, 100]) == events.check([2, 3], [99, 100])


def test_invalid_settings() -> None:
    with pytest.raises(InputError, match="time and lateness"):
        OnlineSettings(time="at")
    with pytest.raises(InputError, match="batch"):
        OnlineSettings(batch=1)
