"""SelectionTarget: which targets are valid. Costs: of sets of fields, and the format of costs.toml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lpfs.errors import DataError, FieldError, InputError
from lpfs.methods.target import DEFAULT_AUC_LOSS, Costs, SelectionTarget, SharedCost, complexity_costs
from lpfs.schema import Field, Schema

SCHEMA = Schema((Field("user", cardinality=10), Field("ad", cardinality=30), Field("price", "numeric", dim=2)))
NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True)


@st.composite
def some_costs(draw):
    """Costs in quarters, so that sums are exact, of fields and of groups of them."""
    names = draw(NAMES)
    number = st.integers(0, 40).map(lambda quarters: quarters / 4)
    groups = draw(st.dictionaries(st.sampled_from("XYZ"), st.tuples(number, st.sets(st.sampled_from(names)))))
    shared = {name: SharedCost(cost, tuple(sorted(fields))) for name, (cost, fields) in groups.items()}
    return names, Costs({name: draw(number) for name in names}, shared)


@given(some_costs(), st.data())
def test_a_cost_grows_with_the_set_and_never_beyond_the_sum_of_its_parts(made, data):
    names, costs = made
    kept = data.draw(st.lists(st.sampled_from(names), unique=True))
    one = data.draw(st.sampled_from(names))
    more = [*kept, *([one] if one not in kept else [])]
    assert costs.total([]) == 0
    assert costs.total(kept) <= costs.total(more) <= costs.total(kept) + costs.total([one])
    assert costs.cheapest(names) == min(costs.total([name]) for name in names)


@given(some_costs(), st.data())
def test_the_weights_of_those_alive_add_up_to_what_they_cost(made, data):
    names, costs = made
    alive = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    weights = dict(zip(names, costs.weights(names, alive), strict=True))
    assert sum(weights[name] for name in alive) == pytest.approx(costs.total(alive))


def test_weights_grow_as_others_of_a_group_are_dropped():
    costs = Costs({"a": 1.0, "b": 0.0, "c": 2.0}, {"call": SharedCost(6.0, ("a", "b"))})
    assert costs.weights("abc", "abc") == [4.0, 3.0, 2.0]
    assert costs.weights("abc", "bc") == [7.0, 6.0, 2.0]


@given(some_costs())
def test_parts_of_one_field_cost_what_the_fields_cost(made):
    names, costs = made
    assert costs.of_parts({name: (name,) for name in names}) is costs


@given(some_costs(), st.data())
def test_a_field_is_paid_once_for_all_parts_that_use_it(made, data):
    names, costs = made
    parts = {f"{a}*{b}": (a, b) for a in names for b in names if a < b} | {f"{a}!": (a,) for a in names}
    kept = data.draw(st.lists(st.sampled_from(sorted(parts)), unique=True))
    read = sorted({name for part in kept for name in parts[part]})
    assert costs.of_parts(parts).total(kept) == pytest.approx(costs.total(read))
    costs.of_parts(parts).check(tuple(parts))


@given(st.floats(0, 5), st.floats(0, 5), st.floats(0, 5))
def test_complexity_is_the_formula(compute, width, keys):
    schema = Schema(
        (
            Field("a", cardinality=10, cost=1.0),
            Field("b", cardinality=30, cost=3.0),
            Field("n", "numeric", dim=4, cost=2.0),
        )
    )
    found = complexity_costs(schema, dim=8, compute=compute, width=width, keys=keys).fields
    o, d, n = 2.0, 20 / 3, 40 / 3  # the means
    for name, cost, dim, ids in (("a", 1.0, 8, 10), ("b", 3.0, 8, 30), ("n", 2.0, 4, 0)):
        assert found[name] == pytest.approx(compute * cost / o + width * dim / d + keys * ids / n)


def test_a_file_of_costs(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text('unit = "ms"\ndefault = 2\n[fields]\nad = 5.5\n[groups.call]\ncost = 3\nfields = ["user", "ad"]\n')
    costs = Costs.load(path, SCHEMA)
    assert costs.fields == {"user": 2, "ad": 5.5, "price": 2}
    assert costs.unit == "ms"
    assert [costs.total(value) for value in (["user"], ["user", "ad"], ["price"])] == [5, 10.5, 2]


def test_the_file_in_the_documentation(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "select.md").read_text("utf-8")
    block = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0]
    schema = Schema(tuple(Field(name, cardinality=3) for name in ("user_history", "age", "city", "income", "ad")))
    (tmp_path / "costs.toml").write_text(block)
    costs = Costs.load(tmp_path / "costs.toml", schema)
    assert costs.unit == "ms"
    assert costs.total(["ad"]) == 1.0
    assert costs.total(["user_history", "age", "income"]) == 8.0 + 1.0 + 1.0 + 5.0


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("fields = 3", InputError, "fields must be a table, found 3"),
        ("field = {}", InputError, "no key 'field'"),
        ("[fields]\nuser = 1", InputError, r"field 'ad' \(and 1 others\) has no cost"),
        ("default = 1\n[fields]\nusr = 1", FieldError, r"no field 'usr' \(did you mean 'user'"),
        ("default = -1", InputError, "'user' must be a number >= 0, found -1"),
        ("default = true", InputError, "must be a number >= 0, found True"),
        ("default = nan", InputError, "must be a number >= 0"),
        ("default = 'x'", InputError, "must be a number >= 0, found 'x'"),
        ("default = 1\n[groups]\nx = 3", InputError, "group 'x' needs the keys cost and fields, found 3"),
        ("default = 1\n[groups.x]\ncost = 3", InputError, "group 'x' needs the keys cost and fields"),
        ("default = 1\n[groups.x]\ncost = 3\nfields = 'user'", InputError, "must be a list, found 'user'"),
        ("default = 1\n[groups.x]\ncost = 3\nfields = []", InputError, "must be a list"),
        ("default = 1\n[groups.x]\ncost = 'y'\nfields = ['ad']", InputError, "'group x' must be a number"),
        ("default = 1\n[groups.x]\ncost = 1\nfields = ['add']", FieldError, r"no field 'add' \(did you mean 'ad'"),
        ("default = = 1", DataError, "costs.toml"),
    ],
)
def test_invalid_files(tmp_path, text, error, message):
    path = tmp_path / "costs.toml"
    path.write_text(text)
    with pytest.raises(error, match=message):
        Costs.load(path, SCHEMA)


FIELDS = ("user", "ad", "site")
COSTS = Costs({"user": 3.0, "ad": 1.0, "site": 2.0})


def test_the_default_target_is_a_small_loss():
    assert SelectionTarget().max_auc_loss == DEFAULT_AUC_LOSS == 0.001
    assert SelectionTarget(keep=2).max_auc_loss is None
    assert SelectionTarget(must_keep=["ad", "ad"]).must_keep == ("ad",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": 2, "budget": 1.0, "costs": COSTS}, "found keep and budget"),
        ({"penalty": 0.1, "max_auc_loss": 0.1}, "found penalty and max_auc_loss"),
        ({"keep": 2.0}, "keep must be an integer, found"),
        ({"keep": True}, "keep must be an integer, found"),
        ({"penalty": -1.0}, "penalty must be a number >= 0, found -1.0"),
        ({"penalty": "0.1"}, "penalty must be a number"),
        ({"max_auc_loss": float("nan")}, "max_auc_loss must be"),
        ({"max_auc_loss": True}, "max_auc_loss must be"),
        ({"max_auc_loss": 5}, "max_auc_loss must be a number below 0.5, found 5"),
        ({"max_auc_loss": 0.5}, "max_auc_loss must be a number below 0.5, found 0.5"),
        ({"budget": float("inf"), "costs": COSTS}, "budget must be"),
        ({"budget": 3.0}, "give costs=, or --costs FILE"),
    ],
)
def test_invalid_targets(given, message):
    with pytest.raises(InputError, match=message):
        SelectionTarget(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"keep": 0}, InputError, "between 1 and the 3 fields, found 0"),
        ({"keep": 4}, InputError, "between 1 and the 3 fields, found 4"),
        ({"keep": 1, "must_keep": ("ad", "user")}, InputError, "keep=1, but 2 fields must be kept"),
        ({"must_keep": ("usr",)}, FieldError, r"no field 'usr' \(did you mean 'user'"),
        ({"must_keep": ("xxxx",)}, FieldError, "user, ad, site"),
        ({"keep": 1, "costs": Costs({"user": 1.0})}, InputError, r"'ad' \(and 1 others\) has no cost"),
        ({"budget": 0.5, "costs": COSTS}, InputError, "cheapest field costs 1"),
        ({"budget": 3.5, "costs": COSTS, "must_keep": FIELDS[:2]}, InputError, "must be kept cost 4"),
        ({"keep": 1, "costs": Costs({"user": 0, "ad": 0, "site": 1})}, InputError, "keep=1, but 2 fields"),
    ],
)
def test_targets_that_cannot_be_reached(given, error, message):
    with pytest.raises(error, match=message):
        SelectionTarget(**given).check(FIELDS)


def test_targets_that_can_be_reached():
    SelectionTarget(keep=3).check(FIELDS)
    SelectionTarget(keep=1, costs=Costs(dict.fromkeys(FIELDS, 0.0))).check(FIELDS)  # all fields are equal
    SelectionTarget(keep=2, must_keep=("site",), costs=COSTS).check(FIELDS)
    SelectionTarget(budget=4.0, costs=COSTS, must_keep=("user", "ad")).check(FIELDS)


def test_kind_and_description():
    targets = {
        "keep": (SelectionTarget(keep=1), "1 field"),
        "penalty": (SelectionTarget(penalty=0.1), "0.1"),
        "budget": (SelectionTarget(budget=4.5, costs=Costs({"ad": 1.0}, unit="ms")), "4.5 ms"),
        "max_auc_loss": (SelectionTarget(), "0.001 of AUC"),
    }
    for kind, (target, text) in targets.items():
        assert target.kind == kind
        assert text in target.describe()
    assert SelectionTarget(keep=2).describe().endswith("2 fields")
