"""Unusual but valid input."""

import polars as pl
import pytest

from lpfs.data.dataset import Dataset
from lpfs.data.prepare import prepare

NAMES = ["with space", 'quo"te', "../../escape", "ünïcødé 日本", "a,b", "line\nend", "/abs", "", "'", "%s{}", "con"]


def test_hostile_column_names(tmp_path):
    frame = pl.DataFrame({"click": [0, 1, 0], **{name: ["a", "b", str(i)] for i, name in enumerate(NAMES)}})
    frame.write_csv(tmp_path / "log.csv")
    before = set(tmp_path.parent.iterdir())
    dataset = prepare(tmp_path / "log.csv", tmp_path / "out", label="click", parts=1, quiet=True)
    assert dataset.schema.names == tuple(name or "column_9" for name in NAMES)
    assert set(tmp_path.parent.iterdir()) == before
    assert {path.name for path in tmp_path.iterdir()} == {"log.csv", "out"}
    assert Dataset(tmp_path / "out").schema == dataset.schema


def test_hostile_values_and_day_names(tmp_path):
    values = ["../x", "\0", "日本", "a\nb", '"', "'", " ", "\u202e", "🙂"]
    frame = pl.DataFrame({"click": [0, 1] * 9, "v": values * 2, "day": sorted(["../../up", "/etc/x"] * 9)})
    dataset = prepare(frame, tmp_path / "out", label="click", time="day", keep_all=True, quiet=True)
    assert dataset.days() == ("../../up", "/etc/x")
    assert set(dataset.vocabulary("v")) == set(values)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_500_columns(tmp_path):
    names = [f"c{i}" for i in range(500)]
    lines = [",".join(["click", *names])]
    lines += [",".join([str(r % 2), *(str((r * (i + 3)) % (i + 7)) for i in range(500))]) for r in range(40)]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    dataset = prepare(tmp_path / "log.csv", tmp_path / "out", label="click", parts=1, quiet=True, keep_all=True)
    assert len(dataset.schema) == 500


def test_one_row(tmp_path):
    (tmp_path / "log.csv").write_text("click,ad,n\n1,a,2.5\n")
    dataset = prepare(tmp_path / "log.csv", tmp_path / "out", label="click", quiet=True)
    assert dataset.rows == 1
    assert dataset.schema.names == ("ad", "n")


def test_one_class_in_a_day_and_all_null_columns(tmp_path):
    (tmp_path / "log.csv").write_text("click,ad,nothing,day\n1,a,,1\n1,b,,1\n0,a,,2\n")
    dataset = prepare(tmp_path / "log.csv", tmp_path / "out", label="click", time="day", quiet=True)
    assert [day.positives for day in dataset.table] == [2, 0]
    assert "nothing" in dataset.settings["dropped"]
    kept = prepare(tmp_path / "log.csv", tmp_path / "all", label="click", time="day", quiet=True, keep_all=True)
    assert kept.schema["nothing"].cardinality == 2


@pytest.mark.parametrize(
    "column",
    [
        pl.Series("x", [True, False, None]),
        pl.Series("x", ["a", "b", None], pl.Categorical),
        pl.Series("x", ["a", "b", None], pl.Enum(["a", "b"])),
        pl.Series("x", [1.5, float("nan"), float("inf")]),
        pl.Series("x", [2**63, 1, 0], pl.UInt64),
        pl.Series("x", [-(2**63), 2**63 - 1, 0], pl.Int64),
        pl.Series("x", [1e308, -1e308, 0.0]),
        pl.Series("x", ["1.5", "2", None]).cast(pl.Decimal(10, 2)),
        pl.Series("x", [[1, None], [], None], pl.List(pl.Int64)),
        pl.Series("x", [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pl.Array(pl.Float64, 2)),
        pl.Series("x", [None, None, None], pl.Null),
        pl.Series("x", [None, None, None], pl.List(pl.String)),
    ],
    ids=str,
)
def test_every_type_of_column(tmp_path, column):
    frame = pl.DataFrame({"click": [0, 1, 1], "x": column})
    for kind in ("inferred", "categorical", "numeric"):
        fields = None if kind == "inferred" else {"x": kind}
        if kind != "inferred" and column.dtype.is_nested():
            continue
        if kind == "numeric" and column.dtype in (pl.Categorical, pl.Enum):
            continue
        options = {"label": "click", "parts": 1, "keep_all": True, "quiet": True, "fields": fields}
        assert prepare(frame, tmp_path / kind, **options).rows == 3
        if column.dtype not in (pl.Categorical, pl.Enum, pl.Null):
            frame.write_parquet(tmp_path / "log.parquet")
            assert prepare(tmp_path / "log.parquet", tmp_path / f"{kind} p", **options).rows == 3


def test_stray_quotes(tmp_path):
    (tmp_path / "log.csv").write_text('click,size,ad\n1,5" pipe,a\n0,6 pipe,b\n1,7",a\n0,"8""",b\n')
    dataset = prepare(tmp_path / "log.csv", tmp_path / "out", label="click", parts=1, quiet=True)
    assert sorted(dataset.vocabulary("size")) == ['5" pipe', "6 pipe", '7"', '8"']
    (tmp_path / "log.tsv").write_text('click\tsize\n1\t5" x\n0\ty\n')
    dataset = prepare(tmp_path / "log.tsv", tmp_path / "tab", label="click", parts=1, quiet=True)
    assert sorted(dataset.vocabulary("size")) == ['5" x', "y"]


@pytest.mark.parametrize("parts", [2, 4])
def test_stray_quotes_in_a_column_that_is_not_read(tmp_path, parts):
    (tmp_path / "log.csv").write_text('click,ad,size\n1,a,5" pipe\n0,b,6 pipe\n1,a,7"\n0,b,"8"""\n')
    options = {"label": "click", "parts": parts, "quiet": True, "fields": {"size": "ignore"}, "train": parts}
    dataset = prepare(tmp_path / "log.csv", tmp_path / "out", **options)
    assert [day.rows for day in dataset.table] == [4 // parts] * parts
    assert next(iter(dataset.stream(4))).labels[:, 0].tolist() == [1, 0, 1, 0]


def test_common_notations_of_numbers(tmp_path):
    (tmp_path / "log.csv").write_text("click,n\n1, 5\n0,NA\n1,1e3\n0,-\n0,+7.25 \n")
    fields = {"n": "numeric"}
    dataset = prepare(tmp_path / "log.csv", tmp_path / "out", label="click", parts=1, quiet=True, fields=fields)
    batch = next(iter(dataset.stream(10)))
    assert batch.missing[:, 0].tolist() == [False, True, False, True, False]


def test_a_file_name_that_is_also_a_glob_pattern(tmp_path):
    path = tmp_path / "log[1]*.csv"
    path.write_text("click,n\n1,a\n0,b\n")
    assert prepare(path, tmp_path / "out", label="click", parts=1, quiet=True).rows == 2
    pl.DataFrame({"click": [1, 0], "n": ["a", "b"]}).write_parquet(tmp_path / "log[2].parquet")
    assert prepare(tmp_path / "log[2].parquet", tmp_path / "p", label="click", parts=1, quiet=True).rows == 2
