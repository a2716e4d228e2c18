"""Only what a run has made is ever replaced, and only once the new one is known to begin."""

from __future__ import annotations

import json

import pytest

from lpfs.errors import InputError
from lpfs.pipeline.run_dir import is_run, starting_run
from lpfs.pipeline.settings import Settings

WANTED = Settings(source=("clicks.csv",), label="click", keep=3)


def begin(folder, wanted=WANTED, **how):
    with starting_run(folder, wanted, **{"resume": False, "replace": False, **how}):
        pass


def test_a_run_is_begun_once_and_gone_on_with_under_the_same_settings(tmp_path):
    begin(tmp_path / "run")
    assert is_run(tmp_path / "run")
    assert Settings.load(tmp_path / "run") == WANTED
    (tmp_path / "run" / "pretrain").mkdir()
    with pytest.raises(InputError, match="holds a run already"):
        begin(tmp_path / "run")
    begin(tmp_path / "run", resume=True)
    with pytest.raises(InputError, match="begun with keep=3 and cannot go on with 4"):
        begin(tmp_path / "run", WANTED.updated(keep=4), resume=True)


@pytest.mark.parametrize("config", ["{}", "[]", "no JSON", json.dumps({"keep": 3})])
@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path, config, replace):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / ".git").mkdir()
    with pytest.raises(InputError, match="is not empty and holds no run"):
        begin(tmp_path, replace=replace)
    assert (tmp_path / "config.json").read_text() == config


def test_replacing_removes_what_a_run_made_and_nothing_else(tmp_path):
    begin(tmp_path)
    (tmp_path / "search-3").mkdir()
    (tmp_path / "selection.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    begin(tmp_path, WANTED.updated(keep=5), replace=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.json", "notes.txt"]
    assert Settings.load(tmp_path).keep == 5


def fail_in(folder):
    with starting_run(folder, WANTED.updated(label="clik"), resume=False, replace=True):
        (folder / "data").mkdir()
        raise RuntimeError("no such label")


def test_a_run_that_fails_to_begin_leaves_the_old_one(tmp_path):
    begin(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "kept_fields.txt").write_text("a\n")
    with pytest.raises(RuntimeError, match="no such label"):
        fail_in(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.json", "kept_fields.txt", "model"]
    assert Settings.load(tmp_path) == WANTED


def test_a_source_inside_the_folder_is_not_replaced(tmp_path):
    begin(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(InputError, match="is inside"):
        begin(tmp_path, replace=True, sources=[str(tmp_path / "data")])
    assert (tmp_path / "data").is_dir()


def test_a_new_wish_takes_the_place_of_the_old():
    assert Settings(max_auc_loss=0.1).updated(keep=4) == Settings(keep=4)
