"""One contract for all sources: every event once and in order, positions survive, a lost position is an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lpfs.data.simulate_stream import write_segment
from lpfs.errors import DataError, InputError, MissingPackageError
from lpfs.online.source import EventSource, Malformed, SegmentSource, open_source, read_segment
from tests.helpers.online import MockCluster, RedisServer, redis_program

Write = Callable[[Sequence[Mapping[str, Any]]], None]
Opened = tuple[Callable[[], EventSource], Write]


def rows(first: int, stop: int) -> list[dict[str, Any]]:
    return [{"event": number, "word": f"w{number % 7}", "click": number % 2} for number in range(first, stop)]


@pytest.fixture(params=["parquet", "csv", "jsonl", "kafka", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    """Return how to open a source, and how to write events to it."""
    if request.param == "kafka":
        pytest.importorskip("confluent_kafka")
        with MockCluster() as cluster, ExitStack() as sources:
            address = f"kafka://{cluster.address}/clicks"
            yield (
                lambda: sources.enter_context(closing(open_source(address))),
                lambda events: cluster.send("clicks", events),
            )
        return
    if request.param == "redis":
        pytest.importorskip("redis")
        if redis_program() is None:
            pytest.skip("redis-server is not installed")
        with RedisServer(tmp_path) as server:
            written = [1]

            def write_entries(events: Sequence[Mapping[str, Any]]) -> None:
                server.send("clicks", events, written[0])
                written[0] += len(events)

            yield lambda: open_source(f"redis://127.0.0.1:{server.port}/clicks"), write_entries
        return
    folder, count = tmp_path / "segments", [0]
    folder.mkdir()

    def write_file(events: Sequence[Mapping[str, Any]]) -> None:
        write_segment(folder / f"{count[0]:04d}.{request.param}", pl.DataFrame(events))
        count[0] += 1

    yield lambda: open_source(str(folder)), write_file


def read(source: EventSource, number: int) -> list[int]:
    """Return the numbers of the next events."""
    events: list[int] = []
    for _ in range(200):
        batch = source.poll(number - len(events))
        table = batch.to_dicts() if isinstance(batch, pl.DataFrame) else batch
        events += [int(row["event"]) for row in table]  # type: ignore[index]
        if len(events) >= number:
            break
    return events


def test_every_event_once_and_in_order(opened: Opened) -> None:
    open_it, write = opened
    write(rows(0, 30))
    write(rows(30, 50))
    source = open_it()
    source.seek(None)
    assert read(source, 20) == list(range(20))
    position = json.loads(json.dumps(source.position()))
    assert read(source, 15) == list(range(20, 35))
    source.seek(position)
    assert read(source, 5) == list(range(20, 25))
    source.close()
    other = open_it()
    other.seek(position)
    assert read(other, 30) == list(range(20, 50))
    end = other.position()
    assert len(other.poll(10)) == 0
    write(rows(50, 53))
    assert read(other, 3) == [50, 51, 52]
    other.seek(end)
    assert read(other, 3) == [50, 51, 52]
    other.close()


def test_malformed_events_are_named(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"a": 1}\n{"a": \n[1]\n\n{"a": 2}\n')
    (tmp_path / "2.csv").write_text("a,b\n1,2\n3\n4,\n")
    source = SegmentSource(tmp_path)
    events: list[Any] = [*source.poll(10), *source.poll(10)]
    assert [event for event in events if not isinstance(event, Malformed)] == [
        {"a": 1}, {"a": 2}, {"a": "1", "b": "2"}, {"a": "4", "b": None}
    ]  # fmt: skip
    reasons = [event.reason for event in events if isinstance(event, Malformed)]
    assert "not JSON" in reasons[0]
    assert "not an object" in reasons[1]
    assert "1 values, the header has 2" in reasons[2]


def test_a_lost_segment_is_an_error(tmp_path: Path) -> None:
    for number in range(3):
        write_segment(tmp_path / f"{number}.parquet", pl.DataFrame(rows(number * 10, number * 10 + 10)))
    source = SegmentSource(tmp_path)
    assert read(source, 15) == list(range(15))
    position = source.position()
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(DataError, match="is missing, but the trainer has read only 5 rows"):
        SegmentSource(tmp_path).seek(position)
    (tmp_path / "0.parquet").unlink()  # a segment that was read completely may go


def test_a_late_segment_is_an_error(tmp_path: Path) -> None:
    write_segment(tmp_path / "2.parquet", pl.DataFrame(rows(0, 5)))
    source = SegmentSource(tmp_path)
    assert len(source.poll(10)) == 5
    write_segment(tmp_path / "1.parquet", pl.DataFrame(rows(0, 5)))
    with pytest.raises(DataError, match="published after '2.parquet' had been read"):
        source.poll(10)


def test_a_segment_that_arrives_late_while_the_trainer_is_down_is_an_error(tmp_path: Path) -> None:
    for number in (1, 3):
        write_segment(tmp_path / f"{number}.parquet", pl.DataFrame(rows(number * 10, number * 10 + 10)))
    source = SegmentSource(tmp_path)
    assert len(read(source, 15)) == 15
    position = source.position()
    (tmp_path / "1.parquet").unlink()  # read completely
    SegmentSource(tmp_path).seek(position)
    for number in (0, 2):
        write_segment(tmp_path / f"{number}.parquet", pl.DataFrame(rows(90, 95)))
    with pytest.raises(DataError, match=r"before '3.parquet' were published .* after it had been read"):
        SegmentSource(tmp_path).seek(position)
    SegmentSource(tmp_path).seek({name: position[name] for name in ("segment", "row")})  # of an earlier version


@pytest.mark.parametrize("value", ["u1", '"u1"'])
def test_a_byte_order_mark_is_not_part_of_a_name(tmp_path: Path, value: str) -> None:
    (tmp_path / "0.csv").write_bytes(b"\xef\xbb\xbfuser,click\n" + f"{value},1\n".encode())
    events = read_segment(tmp_path / "0.csv")
    assert (events.to_dicts() if isinstance(events, pl.DataFrame) else events) == [{"user": "u1", "click": "1"}]


def test_a_value_that_is_too_long_for_csv_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text('user,click\n"' + 200_000 * "x" + '",1\n')
    with pytest.raises(DataError, match=r"cannot read the segment .*field"):
        read_segment(tmp_path / "0.csv")


def test_hidden_files_are_not_segments(tmp_path: Path) -> None:
    (tmp_path / ".0123.new").write_text("half")
    (tmp_path / "_part.csv").write_text("half")
    assert len(SegmentSource(tmp_path).poll(5)) == 0


def test_deleted_offsets_are_an_error() -> None:
    pytest.importorskip("confluent_kafka")
    with MockCluster() as cluster, closing(open_source(f"kafka://{cluster.address}/clicks")) as source:
        cluster.send("clicks", rows(0, 20))
        source.seek(None)
        assert read(source, 10) == list(range(10))
        position = source.position()
        filler = [json.dumps({"event": 0, "text": "x" * 100_000}).encode()] * 120  # the mock keeps about 5 MB
        cluster.send("clicks", filler)
        with (
            closing(open_source(f"kafka://{cluster.address}/clicks")) as other,
            pytest.raises(DataError, match="not available"),
        ):
            other.seek(position)
        with pytest.raises(DataError, match="no longer has the partition 7"):
            source.seek({"7": 0})


def test_trimmed_and_lost_entries_are_errors(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    if redis_program() is None:
        pytest.skip("redis-server is not installed")
    with RedisServer(tmp_path) as server:
        server.send("clicks", rows(0, 20))
        source = open_source(f"redis://127.0.0.1:{server.port}/clicks")
        source.seek(None)
        assert read(source, 5) == list(range(5))
        server.client().xtrim("clicks", maxlen=10, approximate=False)
        with pytest.raises(DataError, match="no longer has the entry 5-0"):
            source.seek(source.position())
        with pytest.raises(DataError, match="no longer has the entry 25-0"):
            source.seek({"id": "25-0"})
        server.client().delete("clicks")
        with pytest.raises(DataError, match="no longer has the entry"):
            source.seek(source.position())


def test_redis_killed_during_reads_is_waited_for(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    if redis_program() is None:
        pytest.skip("redis-server is not installed")
    with RedisServer(tmp_path) as server:
        server.send("clicks", rows(0, 20))
        source = open_source(f"redis://127.0.0.1:{server.port}/clicks")
        source.seek(None)
        assert read(source, 5) == list(range(5))
        server.kill()
        server.start()
        assert read(source, 15) == list(range(5, 20))


@pytest.mark.parametrize("url", ["kafka://host:1", "redis://host:1"])
def test_incomplete_addresses(url: str) -> None:
    with pytest.raises((InputError, MissingPackageError)):
        open_source(url)
