from __future__ import annotations

import json

import pytest

from lpfs.train.loggers import JsonLinesLogger, LoggerList


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_cut_where_the_checkpoint_was(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = JsonLinesLogger(path)
    log({"step": 1})
    position = log.position()
    log({"step": 2})
    assert lines(path) == [{"step": 1}, {"step": 2}]  # without closing: a kill loses no line
    log.close()
    again = JsonLinesLogger(path, position)
    again({"step": 2, "again": True})
    again.close()
    assert lines(path) == [{"step": 1}, {"step": 2, "again": True}]


def test_lines_of_unknown_length_are_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    log = JsonLinesLogger(path, None)
    log({"step": 2})
    log.close()
    assert lines(path) == [{"step": 1}, {"step": 2}]


def test_a_failing_logger_is_left_out_and_the_others_go_on(tmp_path):
    seen = []

    def broken(record):
        raise ConnectionError("no server")

    log = LoggerList([broken, seen.append], JsonLinesLogger(tmp_path / "metrics.jsonl"))
    with pytest.warns(UserWarning, match=r"logger function failed and is left out.*no server"):
        log.write({"step": 1})
    log.write({"step": 2})
    assert seen == lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert log.position() == (tmp_path / "metrics.jsonl").stat().st_size
    log.close()


def test_a_file_that_fails_has_no_position(tmp_path):
    log = LoggerList([], JsonLinesLogger(tmp_path / "metrics.jsonl"))
    log.lines.file.close()
    with pytest.warns(UserWarning, match="JsonLines failed"):
        log.write({"step": 1})
    assert log.position() is None
    log.close()
    assert LoggerList([]).position() is None


def test_many_numbers_at_once_are_no_part_of_a_line(tmp_path):
    log = JsonLinesLogger(tmp_path / "metrics.jsonl")
    log({"step": 1, "alive": 3, "values": {"gates": [0.5, 1.0]}})
    log.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "alive": 3}]
