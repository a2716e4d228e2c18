"""Settings are checked, saved and read back."""

from __future__ import annotations

import json

import pytest

from lpfs._fileio import is_run, write_json_atomic
from lpfs.errors import InputError
from lpfs.pipeline.settings import Settings


def test_saved_settings_are_read_back_equal(tmp_path):
    settings = Settings(
        source=("a.csv", "b.csv"),
        label="click",
        keep=3,
        must_keep="user",
        options={"alpha": 20},
        model_options={"hidden": [8]},
        seeds=2,
    )
    assert settings.must_keep == ("user",)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"format": "lpfs-run", **settings.to_json()}))
    assert Settings.load(tmp_path) == Settings.load(file) == settings


def test_a_run_has_a_curve_and_refuses_too_few_labels_unless_told_otherwise():
    assert Settings().curve is True
    assert Settings().force is False


def test_default_model_follows_from_the_level():
    assert Settings().backbone == "mlp"
    assert Settings(level="cross").backbone == "dlrm_cross"
    assert Settings(model="fm").backbone == Settings(model="fm", level="field").backbone == "fm"
    assert Settings(model="dlrm_cross").backbone == "dlrm_cross"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kep": 3}, "'kep'.*'keep'"),
        ({"finish": "soon"}, "finish.*both, hot, retrain, none.*'soon'"),
        ({"level": "pair"}, "level.*field, cross.*'pair'"),
        ({"seed": -1}, "seed .*>= 0.*-1"),
        ({"seeds": 0}, "seeds.*>= 1.*0"),
        ({"seeds": True}, "seeds.*True"),
        ({"graph": "off"}, "graph.*'off'"),
        ({"fleet": "on"}, "fleet.*'on'"),
        ({"must_keep": ("a", "b"), "must_drop": ("b",)}, "'b'.*must_keep.*must_drop"),
        ({"level": "cross", "model": "mlp"}, "dlrm_cross.*'mlp'"),
        ({"level": "field", "model": "dlrm_cross"}, "level='cross'.*dlrm"),
    ],
)
def test_invalid_settings_raise_an_error(changes, message):
    with pytest.raises(InputError, match=message):
        Settings.from_json(changes)
    with pytest.raises(InputError, match=message):
        Settings().updated(**changes)


def test_new_target_replaces_the_old_one():
    assert Settings(max_auc_loss=0.1).updated(keep=4) == Settings(keep=4)
    assert Settings(keep=4).updated(seed=1).keep == 4


def test_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(
        source=("a.csv", "days/*.csv"), costs="costs.toml", checkpoint="model", prepare={"fields": "f.toml", "bins": 3}
    )
    absolute = settings.with_absolute_paths()
    assert absolute.source == (str(tmp_path / "a.csv"), str(tmp_path / "days" / "*.csv"))
    assert (absolute.costs, absolute.checkpoint) == (str(tmp_path / "costs.toml"), str(tmp_path / "model"))
    assert absolute.prepare == {"fields": str(tmp_path / "f.toml"), "bins": 3}
    assert absolute.with_absolute_paths() == absolute
    no_paths = Settings(costs="complexity", prepare={"fields": {"a": {"kind": "numeric"}}})
    assert no_paths.with_absolute_paths() == no_paths


def test_missing_or_invalid_configuration_raises_an_error(tmp_path):
    with pytest.raises(InputError, match=r"config\.json.*give the directory of a run"):
        Settings.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json .*not JSON"):
        Settings.load(tmp_path)


@pytest.mark.parametrize(
    "content", ["3", "null", "[" * 100_000, '{"seed": 1, "seed": 2}', '{"lr": NaN}', '{"lr": "x"}']
)
def test_a_configuration_that_is_no_object_of_settings_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json") as caught:
        Settings.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert not is_run(tmp_path)


def test_a_damaged_configuration_is_refused_and_an_edited_one_is_read(tmp_path):
    write_json_atomic(tmp_path / "config.json", {"format": "lpfs-run", **Settings(seed=3).to_json()})
    text = (tmp_path / "config.json").read_text()
    edited = text.replace('"seed": 3', '"seed": 7')
    (tmp_path / "config.json").write_text(edited)
    with pytest.raises(InputError, match=r"config\.json.*damaged.*remove the key 'checksum'"):
        Settings.load(tmp_path)
    values = {name: value for name, value in json.loads(edited).items() if name != "checksum"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert Settings.load(tmp_path).seed == 7


def test_run_without_a_seed_is_that_of_seed_zero():
    assert Settings() == Settings(seed=0, seeds=1)
