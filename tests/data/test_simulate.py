import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpfs.data.dataset import Dataset
from lpfs.data.simulate import BestPossibleScores, _binned_auc, simulate
from lpfs.data.simulate_spec import PRESETS, FieldSpec, drift_factors, preset_spec
from lpfs.data.simulate_world import (
    BLOCK,
    Simulator,
    _scrambled_id,
    chunks,
    draw_zipf,
    encoded_bag,
    frequencies,
    sigmoid,
)
from lpfs.errors import DataError, InputError, MissingPackageError


@pytest.fixture(scope="module")
def small() -> tuple[Simulator, list]:
    world = Simulator(preset_spec("small", 200_000, 4, 0), 0)
    return world, [next(chunks(world, day, 50_000, 50_000)) for day in range(4)]


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()


def test_the_seed_decides_everything_and_the_chunk_nothing(tmp_path):
    rows = 2 * BLOCK + 1000
    for name, seed, chunk in (("a", 1, 1), ("b", 1, 10**9), ("c", 2, 1)):
        simulate(tmp_path / name, rows=rows, days=1, seed=seed, chunk=chunk)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_files_do_not_depend_on_the_chunk_either(tmp_path):
    rows = BLOCK + 100
    one = simulate(tmp_path / "one", "small", rows=rows, days=1, format="csv", chunk=1)
    two = simulate(tmp_path / "two", "small", rows=rows, days=1, format="csv", chunk=10**9)
    assert [path.name for path in one] == ["day_00.csv"]
    assert one[0].read_bytes() == two[0].read_bytes()


@pytest.mark.parametrize(
    ("preset", "days", "fields", "tasks"),
    [
        ("small", 10, 31, 0),
        ("terabyte", 24, 39, 0),
        ("industrial-small", 9, 69, 5),
        ("industrial", 9, 417, 5),
    ],
)
def test_presets_have_their_shape(preset, days, fields, tasks):
    made = preset_spec(preset, None, None, 0)
    schema = made.schema()
    assert (made.days, len(schema), len(schema.tasks)) == (days, fields, tasks)
    roles = {spec.role for spec in made.specs}
    assert roles == {"main", "pair", "copy", "correlated", "noise"}
    assert {spec.drift for spec in made.specs if spec.true} == {"steady", "in", "out"}
    for spec in made.specs:
        known = {each.name: each for each in made.specs}
        if spec.role in ("copy", "correlated"):
            assert known[str(spec.source)].role == "main"
        if spec.role == "pair":
            assert known[str(spec.partner)].partner == spec.name
    if preset == "terabyte":
        assert schema.names == (*(f"I{at}" for at in range(1, 14)), *(f"C{at}" for at in range(1, 27)))
        assert 5_000_000 < sum(field.cardinality for field in schema) < 5_200_000
    if preset.startswith("industrial"):
        groups = [sum(field.group == group and field.kind != "numeric" for field in schema) for group in
                  ("user", "item", "combine")]  # fmt: skip
        widths = sorted(field.dim for field in schema if field.kind == "numeric")
        assert (*groups, len(widths)) == ((250, 46, 96, 25) if preset == "industrial" else (40, 8, 16, 5))
        assert (widths[0], widths[-1]) == (1, 128)
        assert any(field.kind == "multi" for field in schema)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_dataset_of_each_preset(tmp_path, preset):
    told: list[tuple[int, int]] = []
    dataset = simulate(
        tmp_path / "log", preset, rows=500, days=2, progress=lambda done, total: told.append((done, total))
    )
    dataset.verify()
    assert (dataset.rows, dataset.days(), told[-1]) == (500, ("day_0", "day_1"), (500, 500))
    (batch,) = dataset.stream(500)
    assert batch.ids.min() >= 0
    truth = dataset.attached("truth.json")
    assert [field["name"] for field in truth["fields"]] == list(dataset.schema.names)
    assert truth["true"] == [field["name"] for field in truth["fields"] if field["true"]]
    assert 0.7 < truth["bayes"]["auc"] < 0.95
    assert set(truth["tasks"]) == set(dataset.schema.tasks)
    assert truth["plan"]["rows"] == 500
    if dataset.schema.tasks:
        purchase = dataset.schema.tasks.index("purchase") + 1
        assert (batch.labels[:, purchase] <= batch.labels[:, 0]).all()


def joined(blocks: list, kind: str, name: str) -> np.ndarray:
    return np.concatenate([getattr(block, kind)[name] for block in blocks])


def test_pairs_have_no_effect_of_their_own(small):
    world, blocks = small
    chance = sigmoid(np.concatenate([block.logit for block in blocks]))
    for spec in world.plan.specs:
        if spec.role != "pair":
            continue
        mine = joined(blocks, "ids", spec.name)
        theirs = joined(blocks, "ids", str(spec.partner))
        count = np.bincount(mine)
        means = np.bincount(mine, chance) / count
        luck = chance.std() / np.sqrt(count.min())
        assert np.abs(means - chance.mean()).max() < 4.5 * luck, "alone: nothing"
        sign = world._tables[spec.name][mine] * world._tables[str(spec.partner)][theirs]
        assert chance[sign > 0].mean() > chance[sign < 0].mean() + 0.05, "together: much"
        signs = world._tables[spec.name]
        assert frequencies(FieldSpec("s", values=spec.values // 2, zipf=spec.zipf)).sum() == pytest.approx(1)
        assert (signs[::2] == -signs[1::2]).all()


def test_main_effects_are_graded_and_noise_has_none(small):
    world, blocks = small
    logit = np.concatenate([block.logit for block in blocks])

    def explained(name: str) -> float:
        values = joined(blocks, "ids", name) + 1
        count = np.maximum(np.bincount(values), 1)
        means = np.bincount(values, logit) / count
        return float((count @ (means - logit.mean()) ** 2) / len(logit))

    for spec in world.plan.specs:
        if spec.kind != "categorical" or spec.values > 1000:
            continue
        if spec.role == "main" and spec.drift == "steady":
            assert explained(spec.name) == pytest.approx(spec.effect**2, rel=0.15, abs=0.01)
        elif spec.role in ("noise", "pair"):
            assert explained(spec.name) < 0.012


def test_copies_and_relatives_follow_their_source(small):
    world, blocks = small
    for spec in world.plan.specs:
        if spec.role == "copy":
            kind = "numbers" if spec.kind == "numeric" else "ids"
            agree = joined(blocks, kind, spec.name) == joined(blocks, kind, str(spec.source))
            assert 0.75 < agree.mean() < 0.95
        elif spec.role == "correlated":
            a, b = joined(blocks, "ids", spec.name), joined(blocks, "ids", str(spec.source))
            ranks = [np.argsort(np.argsort(each)) for each in (a, b)]
            assert np.corrcoef(ranks)[0, 1] > 0.3


def test_missing_values_and_click_rate(small):
    world, blocks = small
    for spec in world.plan.specs:
        if spec.kind == "categorical":
            assert (joined(blocks, "ids", spec.name) < 0).mean() == pytest.approx(spec.missing, abs=0.01)
        elif spec.kind == "numeric":
            missing = np.isnan(joined(blocks, "numbers", spec.name)).mean()
            assert missing == pytest.approx(spec.missing, abs=0.01)
    rates = [block.labels["click"].mean() for block in blocks]
    assert all(abs(rate - 0.2) < 0.035 for rate in rates)


def test_the_schedule_of_the_drift_is_what_happens(small):
    world, blocks = small
    for spec in world.plan.specs:
        if spec.role != "main" or spec.drift == "steady":
            continue
        for block, factor in zip(blocks, world.strength[spec.name], strict=True):
            values = block.ids[spec.name]
            means = np.bincount(values, block.logit) / np.bincount(values)
            found = np.bincount(values) @ (means - block.logit.mean()) ** 2 / len(values)
            assert found == pytest.approx((spec.effect * factor) ** 2, rel=0.25, abs=0.012)


@given(drift=st.sampled_from(["steady", "in", "out"]), days=st.integers(1, 30))
def test_strengths_stay_between_none_and_all(drift, days):
    found = drift_factors(drift, days)
    assert len(found) == days
    assert all(0 <= value <= 1 for value in found)
    assert sorted(found, reverse=drift == "out") == found


def test_the_ceiling_is_the_auc_of_the_known_chances(small):
    _, blocks = small
    ceiling = BestPossibleScores(4)
    for day, block in enumerate(blocks):
        ceiling.add(day, block.logit)
    logit = np.concatenate([block.logit for block in blocks])
    clicks = joined(blocks, "labels", "click")
    ranks = np.empty(len(logit))
    ranks[np.argsort(logit)] = np.arange(1, len(logit) + 1)
    ones = clicks.sum()
    observed = (ranks[clicks].sum() - ones * (ones + 1) / 2) / (ones * (len(clicks) - ones))
    found = ceiling.to_json()
    assert found["auc"] == pytest.approx(observed, abs=0.004)
    losses = np.where(clicks, np.logaddexp(0, -logit), np.logaddexp(0, logit))
    assert found["logloss"] == pytest.approx(losses.mean(), abs=0.004)
    assert len(found["auc_by_day"]) == 4


def test_auc_of_certain_and_of_useless_scores():
    assert _binned_auc(np.array([0.0, 1.0]), np.array([1.0, 0.0])) == 1.0
    assert _binned_auc(np.array([1.0, 1.0]), np.array([1.0, 1.0])) == 0.5


@given(values=st.integers(1, 5000), exponent=st.sampled_from([0.6, 0.9, 1.1, 1.5]))
def test_values_come_as_often_as_they_should(values, exponent):
    spec = FieldSpec("s", values=values, zipf=exponent)
    weight = frequencies(spec)
    assert weight.sum() == pytest.approx(1)
    assert (np.diff(weight) <= 1e-12).all()
    uniform = (np.arange(20_000) + 0.5) / 20_000
    drawn = np.bincount(draw_zipf(uniform, spec), minlength=values) / 20_000
    assert len(drawn) == values
    assert np.abs(drawn - weight).max() < 2e-4


def test_different_values_have_different_names():
    assert len(np.unique(_scrambled_id(FieldSpec("C1"), np.arange(300_000)))) == 300_000


def test_empty_bags_hold_a_missing_value():
    values, lengths = encoded_bag(np.array([5, 6, 7]), np.array([0, 2, 0, 1, 0]))
    assert values.tolist() == [0, 7, 8, 0, 9, 0]
    assert lengths.tolist() == [1, 2, 1, 1, 1]


def test_the_same_dataset_is_kept_and_another_one_is_not_overwritten(tmp_path):
    first = simulate(tmp_path / "log", rows=100, days=2)
    stamp = (first.path / "dataset.json").stat().st_mtime_ns
    simulate(tmp_path / "log", rows=100, days=2)
    assert (first.path / "dataset.json").stat().st_mtime_ns == stamp
    with pytest.raises(DataError, match="not empty"):
        simulate(tmp_path / "log", rows=101, days=2)
    assert simulate(tmp_path / "log", rows=101, days=2, replace=True).rows == 101
    paths = simulate(tmp_path / "log", rows=100, days=2, replace=True, format="parquet")
    assert [path.name for path in paths] == ["day_00.0000.parquet", "day_01.0000.parquet"]
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("form", ["dataset", "csv"])
def test_breaking_off_leaves_nothing(tmp_path, form):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(tmp_path / "log", rows=100, format=form, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_the_terabyte_layout(tmp_path):
    paths = simulate(tmp_path / "log", "terabyte", rows=60, days=3, format="csv")
    assert [path.name for path in paths] == ["day_0", "day_1", "day_2"]
    lines = paths[0].read_text().splitlines()
    assert len(lines) == 20
    for line in lines:
        label, *values = line.split("\t")
        assert label in ("0", "1")
        assert len(values) == 39
        assert all(value == "" or int(value) >= 0 for value in values[:13])
        assert all(value == "" or (len(value) == 8 and int(value, 16) >= 0) for value in values[13:])
    assert json.loads((tmp_path / "log" / "truth.json").read_text())["rows"] == 60


@pytest.mark.parametrize(
    "wrong",
    [
        {"preset": "huge"},
        {"rows": 0},
        {"rows": 1.5},
        {"days": 0},
        {"seed": -1},
        {"chunk": 0},
        {"format": "xlsx"},
    ],
)
def test_wrong_arguments_are_refused(tmp_path, wrong):
    with pytest.raises(InputError):
        simulate(tmp_path / "log", **wrong)
    assert list(tmp_path.iterdir()) == []


def test_fewer_rows_than_days(tmp_path):
    dataset = simulate(tmp_path / "log", rows=1)
    assert (dataset.rows, dataset.days()) == (1, ("day_0",))


def test_a_dataset_needs_no_polars(tmp_path):
    code = (
        "import sys; sys.modules['polars'] = None; from lpfs.data.simulate import simulate\n"
        f"simulate({str(tmp_path / 'log')!r}, rows=50)\n"
        "from lpfs.errors import MissingPackageError\n"
        f"try: simulate({str(tmp_path / 'csv')!r}, rows=50, format='csv')\n"
        "except MissingPackageError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install polars" in done.stdout
    assert Dataset(tmp_path / "log").rows == 50
    assert not (tmp_path / "csv").exists()
    assert issubclass(MissingPackageError, ImportError)
