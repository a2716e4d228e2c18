"""The campaign of damaged files: it tells the outcomes apart, and a small one finds no failure."""

from __future__ import annotations

import json
import sys
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from lpfs.errors import DataError

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "damage.py"


@pytest.fixture(scope="module")
def damage():
    spec = spec_from_file_location("benchmarks_damage", SCRIPT)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def room(damage, monkeypatch, tmp_path, consumer, limit=64 << 20):
    """Return a Room whose only folder is data/ with one file of eight bytes, and a case that flips a bit of it."""
    (tmp_path / "originals" / "data").mkdir(parents=True)
    (tmp_path / "originals" / "data" / "values.bin").write_bytes(bytes(8))
    monkeypatch.setattr(damage, "CONSUMERS", {"data": (damage.Consumer("read", consumer),)})
    monkeypatch.setenv("DAMAGE_ORIGINALS", "")
    return damage.Room(tmp_path / "room", tmp_path / "originals", limit), damage.Case("data", "values.bin", 3, 0)


def is_damaged():
    return any(Path("data/values.bin").read_bytes())


def ignore_content():
    return Path("data/values.bin").stat().st_size


def warn_and_repair():
    if is_damaged():
        warnings.warn("data is damaged; a copy is used", stacklevel=2)


def warn_and_continue():
    if is_damaged():
        warnings.warn("data is damaged; it is skipped", stacklevel=2)
    return is_damaged()


def refuse():
    if is_damaged():
        raise DataError("data/values.bin is damaged")


def refuse_in_two_lines():
    if is_damaged():
        raise DataError("data/values.bin\nis damaged")


def divide():
    return 1 / (1 - is_damaged())


def allocate():
    return len(bytearray(200 << 20)) if is_damaged() else 0


@pytest.mark.parametrize(
    ("consumer", "outcome"),
    [
        (ignore_content, "no effect"),
        (warn_and_repair, "detected"),
        (refuse, "detected"),
        (warn_and_continue, "unnoticed"),
        (is_damaged, "unnoticed"),
        (divide, "traceback"),
        (refuse_in_two_lines, "traceback"),
        (allocate, "memory"),
    ],
)
def test_outcomes_are_told_apart(damage, monkeypatch, tmp_path, consumer, outcome):
    place, case = room(damage, monkeypatch, tmp_path, consumer)
    assert [entry["outcome"] for entry in place.play(case)] == [outcome]
    assert (tmp_path / "originals" / "data" / "values.bin").read_bytes() == bytes(8)


def test_a_consumer_that_is_not_deterministic_is_an_error(damage, monkeypatch, tmp_path):
    values = iter(range(9))
    place, case = room(damage, monkeypatch, tmp_path, lambda: next(values))
    with pytest.raises(RuntimeError, match="different results"):
        place.play(case)


def test_cases_cover_every_file_and_repeat(damage, monkeypatch, tmp_path):
    room(damage, monkeypatch, tmp_path, ignore_content)
    root = tmp_path / "originals"
    for number in range(5):
        (root / "data" / f"f{number}.npy").write_bytes(bytes(10))
    cases = damage.make_cases(root, ["data"], 40, seed=0)
    assert cases == damage.make_cases(root, ["data"], 40, seed=0) != damage.make_cases(root, ["data"], 40, seed=1)
    assert {case.file for case in cases} == {path.name for path in (root / "data").iterdir()}
    assert sum(case.bit is None for case in cases) == 20
    assert {case.kind for case in cases} == {"Dataset: fN.npy", "Dataset: values.bin"}


def test_a_truncation_and_a_bit_flip_change_one_file(damage, tmp_path):
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "f.npy"
    path.write_bytes(bytes(4))
    damage.Case("data", "f.npy", 2, 5).apply(tmp_path)
    assert path.read_bytes() == b"\0\0\x20\0"
    damage.Case("data", "f.npy", 1, None).apply(tmp_path)
    assert path.read_bytes() == b"\0"


@pytest.mark.long
@pytest.mark.campaign
def test_a_small_campaign_finds_no_failure(damage, tmp_path, capsys):
    code = damage.main(["--cases", "190", "--seed", "7", "--out", str(tmp_path / "damage.json")])
    result = json.loads((tmp_path / "damage.json").read_text("utf-8"))
    assert result["failures"] == []
    assert (code, result["cases"]) == (0, 190)
    assert {kind.partition(":")[0] for kind in result["kinds"]} == set(damage.TITLES.values())


def test_the_committed_campaign_is_complete_and_has_no_failure():
    result = json.loads((SCRIPT.parent / "results" / "damage.json").read_text("utf-8"))
    assert result["failures"] == []
    assert [sum(counts.values()) >= 1000 for counts in result["outcomes"].values()] == [True, True]
