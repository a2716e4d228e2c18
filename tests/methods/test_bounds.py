"""The floor and the ceiling of comparisons: random, all, oracle."""

from __future__ import annotations

import pytest

from lpfs.data.simulate import simulate
from lpfs.errors import InputError
from lpfs.methods.registry import check_search
from lpfs.methods.search import search
from lpfs.methods.wish import Wish
from lpfs.models import make_model

SMALL = {"dim": 2, "hidden": (4,)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("made") / "log", "small", rows=400, seed=3)


def test_random_draws_by_seed(looked):
    kept = [looked("random", keep=3, seed=seed)[1].kept for seed in range(20)]
    assert {len(each) for each in kept} == {3}
    assert {name for each in kept for name in each} == set(looked("random", keep=1)[0].names)
    assert kept[0] == looked("random", keep=3, seed=0)[1].kept
    assert "slot" in looked("random", keep=1, must_keep=("slot",))[1].kept


def test_all_keeps_every_field_whatever_is_asked_for(looked):
    for wish in ({"keep": 2}, {"penalty": 0.1}, {"max_auc_loss": 0.1}, {"keep": 1, "must_keep": ("slot",)}):
        model, found = looked("all", **wish)
        assert found.dropped == ()
        assert set(found.kept) == set(found.made["scores"]) == set(model.names)
    check_search("all", {}, Wish(), ("a", "b"), 1)


def test_the_oracle_knows_the_true_fields(made):
    truth = made.attached("truth.json")
    model = make_model("mlp", made.schema, **SMALL)
    found = search(model, made.stream(64), "oracle", keep=len(truth["true"]))
    assert set(found.kept) == set(truth["true"])
    by_name = {each["name"]: each for each in truth["fields"]}
    for name, score in found.made["scores"].items():
        field = by_name[name]
        if not field["true"]:
            assert score == 0
        elif field["strength_by_day"][-1]:
            assert score == pytest.approx(field["effect"] * field["strength_by_day"][-1])
        else:
            assert 0 < score < 0.01
    assert any(each["drift"] == "out" for each in truth["fields"])
    best = search(model, made.stream(64), "oracle", keep=1).kept[0]
    assert by_name[best]["effect"] == max(each["effect"] for each in truth["fields"])


def test_the_oracle_of_tokens_and_crosses(made):
    truth = made.attached("truth.json")
    scores = search(make_model("mlp", made.schema, **SMALL), made.stream(64), "oracle", keep=1).made["scores"]
    numbers = [each.name for each in made.schema if each.kind == "numeric"]
    tokens = search(make_model("dlrm", made.schema, **SMALL), made.stream(64), "oracle", keep=1).made["scores"]
    assert tokens["dense"] == pytest.approx(sum(scores[name] ** 2 for name in numbers) ** 0.5)
    crossed = search(make_model("dlrm_cross", made.schema, **SMALL), made.stream(64), "oracle", keep=1)
    pairs = {frozenset(each["fields"]) for each in truth["pairs"]}
    crosses = {name: set(name.split("*")) for name in crossed.made["scores"] if "*" in name}
    for name, fields in crosses.items():
        assert (crossed.made["scores"][name] > 0) == (fields in pairs)
    assert sum(fields in pairs for fields in crosses.values()) == len(pairs) == 2


def test_refusals(log, looked):
    with pytest.raises(InputError, match="simulated logs only; .* has no truth.json"):
        looked("oracle", keep=2)
    model = make_model("mlp", log.schema, **SMALL)
    with pytest.raises(InputError, match="the stream given is not one of a Dataset"):
        search(model, list(log.part(0, 100).stream(50)), "oracle", keep=2)
    for method in ("random", "oracle"):
        with pytest.raises(InputError, match=f"{method} ranks fields.*say keep=K"):
            check_search(method, {}, Wish(penalty=0.1), ("a", "b"), 100)
