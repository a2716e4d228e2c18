import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lpfs.data.simulate import is_simulated, simulate, true_probabilities
from lpfs.data.simulate_spec import PRESETS, FieldSpec, drift_factors, preset_spec
from lpfs.data.simulate_world import (
    BLOCK_ROWS,
    BestPossibleScores,
    Simulator,
    _binned_auc,
    bag_to_ids,
    draw_effects,
    draw_zipf,
    frequencies,
    scramble_ids,
    sigmoid,
)
from lpfs.errors import DataError, InputError
from tests.helpers.known_truth import known_truth


@pytest.fixture(scope="module")
def small() -> tuple[Simulator, list]:
    simulator = Simulator(preset_spec("small", 200_000, 4, 0), 0)
    return simulator, [next(simulator.chunks(day, 50_000, 50_000)) for day in range(4)]


def digest(folder: Path) -> str:
    result = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            result.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return result.hexdigest()


def test_rows_depend_on_the_seed_and_not_on_the_chunk(tmp_path):
    rows = 2 * BLOCK_ROWS + 1000
    for name, seed, chunk in (("a", 1, 1), ("b", 1, 10**9), ("c", 2, 1)):
        simulate(tmp_path / name, rows=rows, days=1, seed=seed, chunk=chunk)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_raw_files_do_not_depend_on_the_chunk(tmp_path):
    rows = BLOCK_ROWS + 100
    one = simulate(tmp_path / "one", "small", rows=rows, days=1, format="csv", chunk=1)
    two = simulate(tmp_path / "two", "small", rows=rows, days=1, format="csv", chunk=10**9)
    assert [path.name for path in one] == ["day_00.csv"]
    assert one[0].read_bytes() == two[0].read_bytes()


@pytest.mark.parametrize(
    ("preset", "days", "fields", "tasks"),
    [("small", 10, 31, 0), ("terabyte", 24, 39, 0), ("industrial-small", 9, 69, 5), ("industrial", 9, 417, 5)],
)
def test_presets_have_the_documented_fields(preset, days, fields, tasks):
    spec = preset_spec(preset, None, None, 0)
    schema = spec.schema()
    assert (spec.days, len(schema), len(schema.tasks)) == (days, fields, tasks)
    roles = {field.role for field in spec.specs}
    assert roles == {"main", "pair", "copy", "correlated", "noise"}
    assert {field.drift for field in spec.specs if field.true} == {"steady", "in", "out"}
    by_name = {field.name: field for field in spec.specs}
    for field in spec.specs:
        if field.role in ("copy", "correlated"):
            assert by_name[str(field.source)].role == "main"
        if field.role == "pair":
            assert by_name[str(field.partner)].partner == field.name
    if preset == "terabyte":
        assert schema.names == (*(f"I{index}" for index in range(1, 14)), *(f"C{index}" for index in range(1, 27)))
        assert 5_000_000 < sum(field.cardinality for field in schema) < 5_200_000
    if preset.startswith("industrial"):
        groups = [
            sum(field.group == group and field.kind != "numeric" for field in schema)
            for group in ("user", "item", "combine")
        ]
        widths = sorted(field.dim for field in schema if field.kind == "numeric")
        assert (*groups, len(widths)) == ((250, 46, 96, 25) if preset == "industrial" else (40, 8, 16, 5))
        assert (widths[0], widths[-1]) == (1, 128)
        assert any(field.kind == "multi" for field in schema)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_dataset_of_each_preset(tmp_path, preset):
    calls: list[tuple[int, int]] = []
    dataset = simulate(
        tmp_path / "log", preset, rows=500, days=2, progress=lambda done, total: calls.append((done, total))
    )
    dataset.verify()
    assert (dataset.rows, dataset.days(), calls[-1]) == (500, ("day_0", "day_1"), (500, 500))
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


def test_a_field_of_a_pair_alone_has_no_effect(small):
    simulator, blocks = small
    probability = sigmoid(np.concatenate([block.logit for block in blocks]))
    for field in simulator.spec.specs:
        if field.role != "pair":
            continue
        values = joined(blocks, "ids", field.name)
        partner_values = joined(blocks, "ids", str(field.partner))
        count = np.bincount(values)
        means = np.bincount(values, probability) / count
        error = probability.std() / np.sqrt(count.min())
        assert np.abs(means - probability.mean()).max() < 4.5 * error, "no effect alone"
        sign = simulator.value_effects[field.name][values] * simulator.value_effects[str(field.partner)][partner_values]
        assert probability[sign > 0].mean() > probability[sign < 0].mean() + 0.05, "a large effect in combination"
        signs = simulator.value_effects[field.name]
        assert frequencies(FieldSpec("s", values=field.values // 2, zipf=field.zipf)).sum() == pytest.approx(1)
        assert (signs[::2] == -signs[1::2]).all()


def test_main_effects_have_the_specified_size_and_noise_has_none(small):
    simulator, blocks = small
    logit = np.concatenate([block.logit for block in blocks])

    def explained(name: str) -> float:
        values = joined(blocks, "ids", name) + 1
        count = np.maximum(np.bincount(values), 1)
        means = np.bincount(values, logit) / count
        return float((count @ (means - logit.mean()) ** 2) / len(logit))

    for field in simulator.spec.specs:
        if field.kind != "categorical" or field.values > 1000:
            continue
        if field.role == "main" and field.drift == "steady":
            assert explained(field.name) == pytest.approx(field.effect**2, rel=0.15, abs=0.01)
        elif field.role in ("noise", "pair"):
            assert explained(field.name) < 0.012


def test_copies_and_correlated_fields_follow_their_source(small):
    simulator, blocks = small
    for field in simulator.spec.specs:
        if field.role == "copy":
            kind = "numbers" if field.kind == "numeric" else "ids"
            agree = joined(blocks, kind, field.name) == joined(blocks, kind, str(field.source))
            assert 0.75 < agree.mean() < 0.95
        elif field.role == "correlated":
            a, b = joined(blocks, "ids", field.name), joined(blocks, "ids", str(field.source))
            ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
            assert np.corrcoef(ranks)[0, 1] > 0.3


def test_missing_values_and_click_rate(small):
    simulator, blocks = small
    for field in simulator.spec.specs:
        if field.kind == "categorical":
            assert (joined(blocks, "ids", field.name) < 0).mean() == pytest.approx(field.missing, abs=0.01)
        elif field.kind == "numeric":
            missing = np.isnan(joined(blocks, "numbers", field.name)).mean()
            assert missing == pytest.approx(field.missing, abs=0.01)
    rates = [block.labels["click"].mean() for block in blocks]
    assert all(abs(rate - 0.2) < 0.035 for rate in rates)


def test_effects_drift_as_scheduled(small):
    simulator, blocks = small
    for field in simulator.spec.specs:
        if field.role != "main" or field.drift == "steady":
            continue
        for block, factor in zip(blocks, simulator.drift[field.name], strict=True):
            values = block.ids[field.name]
            means = np.bincount(values, block.logit) / np.bincount(values)
            explained = np.bincount(values) @ (means - block.logit.mean()) ** 2 / len(values)
            assert explained == pytest.approx((field.effect * factor) ** 2, rel=0.25, abs=0.012)


@given(drift=st.sampled_from(["steady", "in", "out"]), days=st.integers(1, 30))
def test_drift_factors_are_monotone_between_0_and_1(drift, days):
    factors = drift_factors(drift, days)
    assert len(factors) == days
    assert all(0 <= factor <= 1 for factor in factors)
    assert sorted(factors, reverse=drift == "out") == factors


def test_best_possible_scores_equal_those_of_the_true_logit(small):
    _, blocks = small
    best = BestPossibleScores(4)
    for day, block in enumerate(blocks):
        best.add(day, block.logit)
    logit = np.concatenate([block.logit for block in blocks])
    clicks = joined(blocks, "labels", "click")
    ranks = np.empty(len(logit))
    ranks[np.argsort(logit)] = np.arange(1, len(logit) + 1)
    positives = clicks.sum()
    observed = (ranks[clicks].sum() - positives * (positives + 1) / 2) / (positives * (len(clicks) - positives))
    scores = best.to_json()
    assert scores["auc"] == pytest.approx(observed, abs=0.004)
    losses = np.where(clicks, np.logaddexp(0, -logit), np.logaddexp(0, logit))
    assert scores["logloss"] == pytest.approx(losses.mean(), abs=0.004)
    assert len(scores["auc_by_day"]) == 4


def test_binned_auc_of_perfect_and_of_random_scores():
    assert _binned_auc(np.array([0.0, 1.0]), np.array([1.0, 0.0])) == 1.0
    assert _binned_auc(np.array([1.0, 1.0]), np.array([1.0, 1.0])) == 0.5


@given(values=st.integers(1, 5000), exponent=st.sampled_from([0.6, 0.9, 1.1, 1.5]))
def test_values_have_the_specified_frequencies(values, exponent):
    field = FieldSpec("s", values=values, zipf=exponent)
    weight = frequencies(field)
    assert weight.sum() == pytest.approx(1)
    assert (np.diff(weight) <= 1e-12).all()
    uniform = (np.arange(20_000) + 0.5) / 20_000
    drawn = np.bincount(draw_zipf(uniform, field), minlength=values) / 20_000
    assert len(drawn) == values
    assert np.abs(drawn - weight).max() < 2e-4


def test_scrambled_ids_are_distinct():
    assert len(np.unique(scramble_ids(FieldSpec("C1"), np.arange(300_000)))) == 300_000


def test_empty_bags_get_the_id_of_a_missing_value():
    values, lengths = bag_to_ids(np.array([5, 6, 7]), np.array([0, 2, 0, 1, 0]))
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


@pytest.mark.parametrize("format", ["dataset", "csv"])
def test_an_interrupted_run_leaves_no_files(tmp_path, format):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(tmp_path / "log", rows=100, format=format, progress=stop)
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
    "arguments",
    [{"preset": "huge"}, {"rows": 0}, {"rows": 1.5}, {"days": 0}, {"seed": -1}, {"chunk": 0}, {"format": "xlsx"}],
)
def test_invalid_arguments_raise(tmp_path, arguments):
    with pytest.raises(InputError):
        simulate(tmp_path / "log", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_fewer_rows_than_days(tmp_path):
    dataset = simulate(tmp_path / "log", rows=1)
    assert (dataset.rows, dataset.days()) == (1, ("day_0",))


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """The rows of a log with ids that turn over, by name, and the truth."""
    dataset = simulate(tmp_path_factory.mktemp("shop") / "log", "turnover", rows=40_000, days=10, seed=70)
    truth = {field["name"]: field for field in dataset.attached("truth.json")["fields"]}
    return dataset, truth


def ids_of(dataset, name, first, stop):
    schema = dataset.schema.subset([name])
    return next(iter(dataset.part(first, stop).stream(stop - first, fields=schema.names))).ids[:, 0].numpy()


def test_a_coarse_field_is_a_function_of_its_source(shop):
    dataset, truth = shop
    coarse = [field for field in truth.values() if field["role"] == "coarse"]
    assert len(coarse) == 3
    for field in coarse:
        fine, group = (ids_of(dataset, name, 0, 20_000) for name in (field["group_of"], field["name"]))
        groups = {}
        for value, of in zip(fine.tolist(), group.tolist(), strict=True):
            assert groups.setdefault(value, of) == of
        assert len(set(groups.values())) < len(groups) / 4


def test_a_coarse_field_carries_a_share_of_the_effect():
    """The means of the groups explain more of the effects than means of random groups do."""
    item = FieldSpec("item", role="main", values=1500, zipf=1.05)
    genre = FieldSpec("genre", role="coarse", values=20, source="item", likeness=0.4)
    explained = {"groups": [], "random": []}
    weight, draw = frequencies(item), np.random.default_rng(0)
    for _ in range(40):
        effects = draw_effects(item, draw, [genre])
        assert float(effects**2 @ weight) == pytest.approx(1.0)
        for name, groups in (("groups", np.arange(1500) % 20), ("random", draw.integers(20, size=1500))):
            means = np.bincount(groups, effects * weight, 20) / np.bincount(groups, weight, 20)
            explained[name].append(float(means[groups] ** 2 @ weight))
    gain = np.mean(explained["groups"]) - np.mean(explained["random"])
    assert 0.15 < gain < 0.5


def test_a_sum_is_the_sum_of_two_numbers():
    spec = preset_spec("catalog", 1000, None, 3)
    block = Simulator(spec, 3).block(0, 0, 500)
    sums = [field for field in spec.specs if field.role == "sum"]
    assert len(sums) == 2
    for field in sums:
        expected = block.numbers[field.source] + block.numbers[field.second]
        np.testing.assert_array_equal(block.numbers[field.name], expected)


def test_ids_turn_over_from_day_to_day(shop):
    dataset, _ = shop
    spec = preset_spec("turnover", 40_000, 10, 70)
    item = max((field for field in spec.specs if field.turnover), key=lambda field: (field.true, field.turnover))
    days = [set(ids_of(dataset, item.name, 4000 * day, 4000 * day + 4000).tolist()) for day in range(10)]
    kept = [len(days[0] & day) / len(days[0]) for day in days]
    assert kept[1] > kept[5] > kept[9]
    assert kept[9] < 0.4
    steady = next(field for field in spec.specs if field.true and field.kind == "categorical" and field.values == 200)
    same = [set(ids_of(dataset, steady.name, 4000 * day, 4000 * day + 4000).tolist()) for day in (0, 9)]
    assert len(same[0] & same[1]) > 0.8 * len(same[0])
    assert max(max(day) for day in days) < dataset.schema[item.name].cardinality


def test_ids_with_thousands_of_values_are_true_fields():
    for preset in ("catalog", "turnover"):
        true = [field for field in preset_spec(preset, 1000, None, 0).specs if field.true and field.values >= 1000]
        assert len(true) == 3
        assert sum(field.effect**2 for field in true) > 0.5 * 1.8**2 * 0.5


@pytest.mark.parametrize("preset", ["small", "turnover"])
def test_true_probabilities_are_those_of_the_rows(tmp_path, preset):
    dataset = simulate(tmp_path / "log", preset, rows=9000, days=6, seed=4)
    rows = dataset.part(2000, 8000)
    found = true_probabilities(rows)
    labels = next(iter(rows.stream(6000))).labels[:, 0].double().numpy()
    spec = preset_spec(preset, 9000, 6, 4)
    blocks = [Simulator(spec, 4).block(day, 0, 1500) for day in range(6)]
    np.testing.assert_allclose(found, sigmoid(np.concatenate([block.logit for block in blocks]))[2000:8000])
    assert labels.mean() == pytest.approx(found.mean(), abs=0.02)
    assert ((labels - found) ** 2).mean() == pytest.approx((found * (1 - found)).mean(), abs=0.01)
    assert is_simulated(rows)


def test_other_datasets_have_no_true_probabilities(tmp_path):
    dataset = known_truth(tmp_path / "log")
    assert true_probabilities(dataset) is None
    assert not is_simulated(dataset)
