"""Settings: checked, saved, read back; the folder of a run."""

from __future__ import annotations

import json

import pytest

from lpfs.errors import InputError
from lpfs.pipeline.run_dir import open_run_dir
from lpfs.pipeline.settings import Settings


def test_they_are_read_back_as_they_were(tmp_path):
    settings = Settings(
        source=("a.csv", "b.csv"), label="click", keep=3, must_keep="user", options={"alpha": 20},
        model_options={"hidden": [8]}, seeds=2,
    )  # fmt: skip
    assert settings.must_keep == ("user",)
    folder = tmp_path / "run"
    open_run_dir(folder, settings, resume=False, replace=False)
    assert Settings.load(folder) == Settings.load(folder / "config.json") == settings
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        json.dumps({"format": "lpfs-run", **settings.to_json()})
    )
    assert not list(folder.glob("*.new"))


def test_the_backbone():
    assert Settings().backbone == "mlp"
    assert Settings(level="cross").backbone == "dlrm_cross"
    assert Settings(model="fm").backbone == Settings(model="fm", level="field").backbone == "fm"
    assert Settings(model="dlrm_cross").backbone == "dlrm_cross"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kep": 3}, "unknown key 'kep' for Settings"),
        ({"finish": "soon"}, "finish must be one of both, hot, retrain, none; found 'soon'"),
        ({"level": "pair"}, "level must be one of"),
        ({"seed": -1}, "seed must be a whole number >= 0, found -1"),
        ({"seeds": 0}, "seeds must be a whole number >= 1, found 0"),
        ({"seeds": True}, "seeds must be"),
        ({"must_keep": ("a", "b"), "must_drop": ("b",)}, "'b' must be kept and must be dropped"),
        ({"level": "cross", "model": "mlp"}, "gates the crosses of dlrm_cross, not of 'mlp'"),
        ({"level": "field", "model": "dlrm_cross"}, "dlrm is the model with gates on fields alone"),
    ],
)
def test_settings_that_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        Settings.from_json(given)
    with pytest.raises(InputError, match=message):
        Settings().updated(**given)


def test_paths_mean_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(
        source=("a.csv", "days/*.csv"),
        costs="costs.toml",
        checkpoint="model",
        prepare={"fields": "f.toml", "bins": 3},
    )
    found = settings.with_absolute_paths()
    assert found.source == (str(tmp_path / "a.csv"), str(tmp_path / "days" / "*.csv"))
    assert (found.costs, found.checkpoint) == (str(tmp_path / "costs.toml"), str(tmp_path / "model"))
    assert found.prepare == {"fields": str(tmp_path / "f.toml"), "bins": 3}
    assert found.with_absolute_paths() == found
    plain = Settings(costs="complexity", prepare={"fields": {"a": {"kind": "numeric"}}})
    assert plain.with_absolute_paths() == plain


def test_configurations_that_are_none(tmp_path):
    with pytest.raises(InputError, match="there is no configuration"):
        Settings.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        Settings.load(tmp_path)


def test_a_folder_is_begun_once_and_gone_on_with_under_the_same_settings(tmp_path):
    folder, settings = tmp_path / "run", Settings(keep=3, seed=5)
    open_run_dir(folder, settings, resume=True, replace=False)  # nothing to go on with: it begins
    open_run_dir(folder, settings, resume=False, replace=False)  # nothing was trained yet
    (folder / "pretrain").mkdir()
    with pytest.raises(InputError, match="holds a run already; go on with --resume"):
        open_run_dir(folder, settings, resume=False, replace=False)
    open_run_dir(folder, settings, resume=True, replace=False)
    with pytest.raises(InputError, match="was begun with keep=3 and cannot go on with 4"):
        open_run_dir(folder, Settings(keep=4, seed=5), resume=True, replace=False)
    open_run_dir(folder, Settings(keep=4), resume=False, replace=True).forget()
    assert not (folder / "pretrain").exists()
    assert Settings.load(folder).keep == 4


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for replace in (False, True):
        with pytest.raises(InputError, match="is not empty and holds no run"):
            open_run_dir(tmp_path, Settings(), resume=False, replace=replace)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    with pytest.raises(InputError, match="holds no run"):
        open_run_dir(tmp_path / "thesis.txt", Settings(), resume=False, replace=True)
