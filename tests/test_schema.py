from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from lpfs.errors import FieldError, InputError
from lpfs.schema import Field, Schema, Selection

names = st.text(min_size=1, max_size=12)
fields = st.builds(
    Field,
    name=names,
    kind=st.sampled_from(["categorical", "numeric", "multi", "cross"]),
    cardinality=st.integers(0, 2**40),
    dim=st.integers(1, 128),
    group=st.sampled_from(["user", "item", "combine", "context"]),
    cost=st.floats(0, 1e9),
)


@given(st.lists(fields, max_size=6, unique_by=lambda field: field.name), names, st.lists(names, max_size=2))
def test_a_schema_can_be_saved_as_json(several, label, tasks):
    schema = Schema(tuple(several), label, tuple(tasks))
    assert Schema.from_json(schema.to_json()) == schema
    assert len(schema) == len(several)


def test_fields_and_subsets_of_a_schema():
    schema = Schema((Field("a"), Field("b"), Field("c")), label="click")
    assert schema["b"] == Field("b")
    assert schema.subset(["c", "a"]).names == ("a", "c")
    with pytest.raises(FieldError, match="no field 'x'"):
        schema.subset(["x"])


def test_the_repr_of_a_selection_omits_its_history():
    history = [{"step": step, "values": [0.5] * 100} for step in range(200)]
    selection = Selection(("a",), ("b",), {"a": 1.0, "b": 0.0}, history=history, made={"curve": history})
    assert repr(selection) == "Selection(kept=('a',), dropped=('b',), gates={'a': 1.0, 'b': 0.0})"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "needs a name"),
        ({"name": "a", "kind": "category"}, "kind must be one of"),
        ({"name": "a", "group": "users"}, "group must be one of"),
        ({"name": "a", "cardinality": -1}, "cardinality must be an integer from 0"),
        ({"name": "a", "cardinality": 1e30}, "cardinality must be an integer"),
        ({"name": "a", "cardinality": 10**30}, "cardinality must be an integer"),
        ({"name": "a", "cardinality": True}, "cardinality must be an integer"),
        ({"name": "a", "dim": 0}, "dim must be an integer from 1"),
        ({"name": "a", "cost": "1"}, "cost must be"),
        ({"name": "a", "cost": float("nan")}, "cost must be"),
        ({"name": "a", "cost": -1.0}, "cost must be"),
    ],
)
def test_invalid_fields_raise(arguments, message):
    with pytest.raises(FieldError, match=message):
        Field(**arguments)


def test_names_are_unique():
    with pytest.raises(FieldError, match="field 'a' occurs twice"):
        Schema((Field("a"), Field("a")))
    with pytest.raises(FieldError, match="either kept or dropped.*'a'"):
        Selection(("a",), ("a",))


def test_an_unknown_key_is_an_error():
    with pytest.raises(InputError, match="unknown key 'labels'"):
        Schema.from_json({"fields": [], "labels": "click"})
    with pytest.raises(InputError, match="unknown key 'fields'"):
        Selection.from_json({"kept": [], "dropped": [], "fields": []})
    with pytest.raises(InputError, match="Selection needs the key 'dropped'"):
        Selection.from_json({"kept": []})
    with pytest.raises(InputError, match="Schema needs the key 'fields'"):
        Schema.from_json({})


def test_a_selection_can_be_saved_and_loaded(tmp_path):
    selection = Selection(("ü ser",), ("b",), {"ü ser": 0.9, "b": 0.0}, {"b": [{"module": "emb.b"}]}, (), {"seed": 1})
    selection.save(tmp_path / "selection.json")
    assert Selection.load(tmp_path / "selection.json") == selection
    assert selection.names == ("ü ser", "b")


def test_a_selection_file_needs_its_keys(tmp_path):
    (tmp_path / "other.json").write_text('{"kept": []}')
    with pytest.raises(InputError, match=r"other\.json is not a selection.*'dropped'.*selection\.json of a run"):
        Selection.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept": "ab"}, "'kept' must be a list, found 'ab'"),
        ({"kept": [["a"]]}, r"'kept\[0\]' must be text"),
        ({"gates": None}, "'gates' must be an object, found None"),
        ({"gates": {"a": "1"}}, r"'gates\.a' must be a number, found '1'"),
        ({"sites": {"a": [3]}}, r"'sites\.a\[0\]' must be an object, found 3"),
        ({"history": [1]}, r"'history\[0\]'"),
        ({"made": []}, "'made'"),
        ({"kept": ["b"]}, "either kept or dropped"),
    ],
)
def test_a_selection_of_another_type_is_one_line(tmp_path, changes, message):
    path = tmp_path / "selection.json"
    path.write_text(json.dumps({"kept": ["a"], "dropped": ["b"], **changes}))
    with pytest.raises(InputError, match=rf"selection\.json is not a selection: .*{message}") as caught:
        Selection.load(path)
    assert "\n" not in str(caught.value)


def test_a_damaged_selection_is_refused(tmp_path):
    path = tmp_path / "selection.json"
    Selection(("a",), ("b",), {"a": 0.9, "b": 0.0}).save(path)
    path.write_text(path.read_text().replace("0.9", "0.8"))
    with pytest.raises(InputError, match=r"selection\.json.*damaged.*checksum"):
        Selection.load(path)
    for content in ("3", "{", "[" * 100_000, ""):
        path.write_text(content)
        with pytest.raises(InputError, match=r"selection\.json"):
            Selection.load(path)


@pytest.mark.parametrize(
    "field", [{"name": 1}, {"cardinality": 1e30}, {"cardinality": 10**30}, {"dim": "4"}, {"cost": None}]
)
def test_a_schema_of_another_type_is_an_error(field):
    (name,) = field
    with pytest.raises(InputError, match=rf"'fields\[0\]\.{name}' must be"):
        Schema.from_json({"fields": [{"name": "a", **field}]})


def test_in_order_reorders_gates_and_history():
    history = ({"step": 1, "gates": [1.0, 2.0, 3.0]}, {"step": 2})
    selection = Selection(("c", "a"), ("b",), {"c": 1.0, "a": 2.0, "b": 0.0}, history=history)
    ordered = selection.in_order(["a", "b"])
    assert (ordered.kept, list(ordered.gates)) == (("a", "c"), ["a", "b", "c"])
    assert ordered.history == ({"step": 1, "gates": [2.0, 3.0, 1.0]}, {"step": 2})
