"""The floor and the ceiling of comparisons: random, all, oracle."""

from __future__ import annotations

import json

import pytest

from lpfs.data.simulate import simulate
from lpfs.errors import InputError
from lpfs.methods.registry import make_method
from lpfs.methods.search import search
from lpfs.methods.target import SelectionTarget
from lpfs.models import make_model

SMALL = {"dim": 2, "hidden": (4,)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("made") / "log", "small", rows=400, seed=3)


def test_random_depends_on_the_seed(run_search):
    kept = [run_search("random", keep=3, seed=seed)[1].kept for seed in range(20)]
    assert {len(names) for names in kept} == {3}
    assert {name for names in kept for name in names} == set(run_search("random", keep=1)[0].names)
    assert kept[0] == run_search("random", keep=3, seed=0)[1].kept
    assert "slot" in run_search("random", keep=1, must_keep=("slot",))[1].kept


def test_all_keeps_every_field_for_any_target(run_search):
    for target in ({"keep": 2}, {"penalty": 0.1}, {"max_auc_loss": 0.1}, {"keep": 1, "must_keep": ("slot",)}):
        model, found = run_search("all", **target)
        assert found.dropped == ()
        assert set(found.kept) == set(found.made["scores"]) == set(model.names)
    make_method("all", {}).check(SelectionTarget(), ("a", "b"), 1)


def test_the_oracle_keeps_the_true_fields(made):
    truth = made.attached("truth.json")
    model = make_model("mlp", made.schema, **SMALL)
    found = search(model, made.stream(64), "oracle", keep=len(truth["true"]))
    assert set(found.kept) == set(truth["true"])
    by_name = {field["name"]: field for field in truth["fields"]}
    for name, score in found.made["scores"].items():
        field = by_name[name]
        if not field["true"]:
            assert score == 0
        elif field["strength_by_day"][-1]:
            assert score == pytest.approx(field["effect"] * field["strength_by_day"][-1])
        else:
            assert 0 < score < 0.01
    assert any(field["drift"] == "out" for field in truth["fields"])
    best = search(model, made.stream(64), "oracle", keep=1).kept[0]
    assert by_name[best]["effect"] == max(field["effect"] for field in truth["fields"])


def test_the_oracle_of_tokens_and_crosses(made):
    truth = made.attached("truth.json")
    scores = search(make_model("mlp", made.schema, **SMALL), made.stream(64), "oracle", keep=1).made["scores"]
    numbers = [field.name for field in made.schema if field.kind == "numeric"]
    tokens = search(make_model("dlrm", made.schema, **SMALL), made.stream(64), "oracle", keep=1).made["scores"]
    assert tokens["dense"] == pytest.approx(sum(scores[name] ** 2 for name in numbers) ** 0.5)
    crossed = search(make_model("dlrm_cross", made.schema, **SMALL), made.stream(64), "oracle", keep=1)
    pairs = {frozenset(field["fields"]) for field in truth["pairs"]}
    crosses = {name: set(name.split("*")) for name in crossed.made["scores"] if "*" in name}
    for name, fields in crosses.items():
        assert (crossed.made["scores"][name] > 0) == (fields in pairs)
    assert sum(fields in pairs for fields in crosses.values()) == len(pairs) == 2


def test_the_oracle_needs_a_truth(log, run_search):
    with pytest.raises(InputError, match="oracle .*truth.json"):
        run_search("oracle", keep=2)
    model = make_model("mlp", log.schema, **SMALL)
    with pytest.raises(InputError, match="oracle .*truth="):
        search(model, list(log.part(0, 100).stream(50)), "oracle", keep=2)


def test_the_truth_of_another_log_is_an_error(made, log, tmp_path):
    model = make_model("mlp", log.schema, **SMALL)
    path = tmp_path / "truth.json"
    path.write_text(json.dumps(made.attached("truth.json")))
    with pytest.raises(InputError, match=f"the truth has no field '{log.schema.names[0]}'"):
        search(model, log.part(0, 100).stream(50), "oracle", keep=2, truth=str(path))
