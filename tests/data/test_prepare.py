"""prepare: the resulting Dataset for every kind of source, field and time."""

import gzip
from itertools import pairwise

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import zstandard

from lpfs.data.dataset import Dataset
from lpfs.data.prepare import prepare
from lpfs.data.sources.blocks import LineBlocks
from lpfs.errors import DataError, FieldError, InputError

CSV = """click,ad,price,tags,day
1,a,1.5,x|y,1
0,b,2.5,y,1
0,a,,,2
1,a,4.5,x|x|z,2
0,c,3.5,z,3
1,,2.0,w,3
"""
FIELDS = {"ad": "categorical", "price": "numeric", "tags": {"kind": "multi", "separator": "|"}}


def write(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def log(tmp_path, text=CSV, **options):
    source = write(tmp_path / "log.csv", text)
    options = {"label": "click", "time": "day", "fields": FIELDS, "quiet": True, **options}
    return prepare(source, tmp_path / "out", **options)


def rows(dataset):
    """All rows in order: ids (n, F), numbers (n, C), missing, bags as lists, labels (n, T)."""
    batch = next(iter(dataset.stream(dataset.rows)))
    bags = {}
    for name, (values, offsets) in batch.bags.items():
        ends = [*offsets.tolist(), len(values)][: dataset.rows + 1]
        bags[name] = [values[a:b].tolist() for a, b in pairwise(ends)]
    return batch, bags


def test_ids_numbers_bags_and_days(tmp_path):
    dataset = log(tmp_path)
    assert dataset.days() == ("1", "2", "3")
    assert [(day.rows, day.positives) for day in dataset.table] == [(2, 1), (2, 1), (2, 1)]
    batch, bags = rows(dataset)
    # training days are 1 and 2: a is seen three times, b once, c never; the last ad is missing
    assert batch.ids[:, 0].tolist() == [2, 3, 2, 2, 1, 0]
    assert dataset.schema["ad"].cardinality == 4
    # x three times, y twice, z once; w unseen; no tags at all is one missing value
    assert bags["tags"] == [[2, 3], [3], [0], [2, 2, 4], [4], [1]]
    log1p = np.log1p([1.5, 2.5, 4.5, 3.5, 2.0])
    expected = (log1p - log1p[:3].mean()) / log1p[:3].std()
    np.testing.assert_allclose(batch.dense[[0, 1, 3, 4, 5], 0].numpy(), expected, rtol=1e-6)
    assert batch.missing[:, 0].tolist() == [False, False, True, False, False, False]
    assert batch.dense[2, 0] == 0.0
    assert batch.labels[:, 0].tolist() == [1, 0, 0, 1, 0, 1]


def write_source(tmp_path, form):
    tsv = CSV.replace(",", "\t")
    frame = pl.read_csv(CSV.encode())
    if form == "gz":
        return write(tmp_path / "log.csv.gz", gzip.compress(CSV.encode()))
    if form == "zst":
        return write(tmp_path / "log.csv.zst", zstandard.compress(CSV.encode()))
    if form == "two zst frames":
        return write(tmp_path / "l.zst", zstandard.compress(CSV[:40].encode()) + zstandard.compress(CSV[40:].encode()))
    if form == "tsv":
        return write(tmp_path / "log.tsv", tsv)
    if form == "crlf":
        return write(tmp_path / "log.csv", CSV.replace("\n", "\r\n"))
    if form == "bom":
        return write(tmp_path / "log.csv", b"\xef\xbb\xbf" + CSV.encode())
    if form == "no last line end":
        return write(tmp_path / "log.csv", CSV.rstrip("\n"))
    if form == "blank lines":
        return write(tmp_path / "log.csv", CSV.replace("\n0,c", "\n\n0,c") + "\n\n")
    if form == "quoted":
        return write(tmp_path / "log.csv", '"' + CSV.strip().replace(",", '","').replace("\n", '"\n"') + '"\n')
    if form == "parquet":
        frame.write_parquet(tmp_path / "log.parquet")
        return tmp_path / "log.parquet"
    if form == "folder":
        lines = CSV.splitlines()
        (tmp_path / "parts").mkdir()
        write(tmp_path / "parts" / "p2.csv", "\n".join(lines[:3]) + "\n")
        write(tmp_path / "parts" / "p10.csv", "\n".join([lines[0], *lines[3:]]) + "\n")
        write(tmp_path / "parts" / "_SUCCESS", "")
        return tmp_path / "parts"
    if form == "glob":
        return str(write_source(tmp_path, "folder")) + "/p*.csv"
    if form == "list":
        folder = write_source(tmp_path, "folder")
        return [folder / "p2.csv", folder / "p10.csv"]
    if form == "other order":
        folder = write_source(tmp_path, "folder")
        pl.read_csv(folder / "p10.csv").select("tags", "day", "click", "price", "ad").write_csv(folder / "p10.csv")
        return folder
    if form == "polars":
        return frame
    if form == "lazy":
        return frame.lazy()
    if form == "pandas":
        return pd.DataFrame(frame.to_dict(as_series=False))
    if form == "arrow":
        return pa.table(frame.to_dict(as_series=False))
    return frame.to_dict(as_series=False)


FORMS = ["gz", "zst", "two zst frames", "tsv", "crlf", "bom", "no last line end", "blank lines", "quoted", "parquet"]
FORMS += ["folder", "glob", "list", "other order", "polars", "lazy", "pandas", "arrow", "dict"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_source_gives_the_same_dataset(tmp_path, form):
    (tmp_path / "plain").mkdir()
    expected, bags = rows(log(tmp_path / "plain"))
    source = write_source(tmp_path, form)
    dataset = prepare(source, tmp_path / "out", label="click", time="day", fields=FIELDS, quiet=True)
    batch, batch_bags = rows(dataset)
    assert batch.ids.equal(expected.ids)
    assert batch.dense.equal(expected.dense)
    assert batch.labels.equal(expected.labels)
    assert batch_bags == bags


@pytest.mark.parametrize("block", [16, 64, 100_000])
def test_the_block_size_does_not_matter(tmp_path, monkeypatch, block):
    rng = np.random.default_rng(0)
    lines = [f'{rng.integers(2)},"v{rng.integers(40)},\n""{rng.integers(3)}",{rng.normal():.3f}' for _ in range(300)]
    source = write(tmp_path / "log.csv", "click,ad,price\n" + "\n".join(lines) + "\n")
    options = {"label": "click", "quiet": True, "negatives": 0.5, "seed": 3, "fields": {"ad": "categorical"}}
    whole = prepare(source, tmp_path / "whole", **options)
    original = LineBlocks.__init__
    monkeypatch.setattr(LineBlocks, "__init__", lambda self, *a, **k: original(self, *a, **{**k, "size": block}))
    chunked = prepare(source, tmp_path / "chunked", **options)
    assert chunked.fingerprint == whole.fingerprint
    assert rows(chunked)[0].ids.equal(rows(whole)[0].ids)
    np.testing.assert_allclose(rows(chunked)[0].dense, rows(whole)[0].dense, atol=1e-6)


def test_parquet_in_small_chunks_keeps_the_row_order(tmp_path, monkeypatch):
    monkeypatch.setattr("lpfs.data.sources.parquet.ROWS", 7)
    frame = pl.DataFrame({"click": [0, 1] * 50, "n": [f"v{i % 30}" for i in range(100)], "day": sorted([1, 2] * 50)})
    frame.write_parquet(tmp_path / "log.parquet", row_group_size=13)
    options = {"label": "click", "time": "day", "train": 2, "quiet": True, "fields": {"n": "categorical"}}
    batch, _ = rows(prepare(tmp_path / "log.parquet", tmp_path / "out", **options))
    values = prepare(frame, tmp_path / "memory", **options)
    assert batch.ids.equal(rows(values)[0].ids)
    assert batch.labels[:, 0].tolist() == frame["click"].to_list()


def test_threshold_cap_and_order_of_ids(tmp_path):
    ads = ["d"] * 4 + ["a"] * 3 + ["c"] * 3 + ["b"] * 2 + ["e"]
    frame = pl.DataFrame({"click": [0, 1] * 6 + [0], "ad": ads})
    options = {"label": "click", "quiet": True, "parts": 1}
    every = prepare(frame, tmp_path / "1", **options)
    assert list(every.vocabulary("ad")) == ["d", "a", "c", "b", "e"]
    assert list(prepare(frame, tmp_path / "2", min_count=3, **options).vocabulary("ad")) == ["d", "a", "c"]
    capped = prepare(frame, tmp_path / "3", max_values=2, **options)
    assert list(capped.vocabulary("ad")) == ["d", "a"]
    assert rows(capped)[0].ids[:, 0].tolist() == [2] * 4 + [3] * 3 + [1] * 6


def test_vocabularies_come_from_the_training_days_only(tmp_path):
    frame = pl.DataFrame({"click": [0, 1, 0, 1], "ad": ["a", "b", "c", "d"], "day": [1, 1, 2, 3]})
    options = {"label": "click", "time": "day", "quiet": True}
    assert list(prepare(frame, tmp_path / "a", **options).vocabulary("ad")) == ["a", "b", "c"]
    assert list(prepare(frame, tmp_path / "b", train=1, **options).vocabulary("ad")) == ["a", "b"]


def test_hashing(tmp_path):
    frame = pl.DataFrame({"click": [0, 1, 0, 1], "ad": ["a", None, "c", "a"], "n": [7, 12, -1, None]})
    fields = {"ad": {"kind": "categorical", "hash": 5}, "n": {"kind": "categorical", "hash": 5}}
    dataset = prepare(frame, tmp_path / "out", label="click", fields=fields, quiet=True, parts=1)
    ids = rows(dataset)[0].ids
    assert [field.cardinality for field in dataset.schema] == [7, 7]
    assert ids[0, 0] == ids[3, 0] >= 2
    assert ids[1, 0] == 0
    assert ids[:2, 1].tolist() == [2 + 7 % 5, 2 + 12 % 5]
    assert ids[3, 1] == 0


def test_bins(tmp_path):
    frame = pl.DataFrame({"click": [0, 1] * 50, "n": [*range(99), None]})
    dataset = prepare(frame, tmp_path / "out", label="click", bins=4, parts=1, fields={"n": "numeric"}, quiet=True)
    ids = rows(dataset)[0].ids[:, 0]
    assert dataset.schema["n"].kind == "categorical"
    assert dataset.schema["n"].cardinality == 6
    missing, unseen, *filled = np.bincount(ids.numpy()).tolist()
    assert (missing, unseen) == (1, 0)
    assert sorted(filled) == [24, 25, 25, 25]
    assert ids[:99].tolist() == sorted(ids[:99].tolist())


def test_negative_numbers_and_plain_scaling(tmp_path):
    frame = pl.DataFrame({"click": [0, 1, 0, 1], "n": [-3.0, 0.0, 3.0, 8.0], "m": [1.0, 2.0, 3.0, 4.0]})
    fields = {"n": "numeric", "m": {"kind": "numeric", "transform": "none"}}
    dataset = prepare(frame, tmp_path / "out", label="click", fields=fields, parts=1, quiet=True)
    dense = rows(dataset)[0].dense.numpy()
    n = np.array([-np.log1p(3.0), 0.0, np.log1p(3.0), np.log1p(8.0)])
    np.testing.assert_allclose(dense[:, 0], (n - n.mean()) / n.std(), rtol=1e-6)
    np.testing.assert_allclose(dense[:, 1], (np.arange(4) - 1.5) / np.arange(4).std(), rtol=1e-6)
    assert dataset.settings["fields"]["n"]["signed"] is True


def test_list_columns_and_vectors(tmp_path):
    frame = pl.DataFrame(
        {
            "click": [0, 1, 1],
            "bag": [["a", "b"], [], None],
            "codes": [[3, 3], [4], [3]],
            "vector": [[1.0, 2.0], [3.0, None], None],
        }
    )
    dataset = prepare(frame, tmp_path / "out", label="click", parts=1, quiet=True)
    assert [(field.kind, field.dim) for field in dataset.schema] == [("multi", 1), ("multi", 1), ("numeric", 2)]
    batch, bags = rows(dataset)
    assert bags["bag"] == [[2, 3], [], [0]]
    assert bags["codes"] == [[2, 2], [3], [2]]
    assert batch.missing.tolist() == [[False, False], [False, True], [True, True]]


def test_constant_and_duplicate_columns_are_dropped_and_reported(tmp_path, capsys):
    frame = pl.DataFrame(
        {
            "click": [0, 1, 0, 1],
            "one": ["x"] * 4,
            "none": pl.Series([None] * 4, dtype=pl.String),
            "ad": ["a", "b", None, "b"],
            "again": ["a", "b", None, "b"],
            "n": [1.5, 2.5, 3.5, 0.5],
            "n2": [1.5, 2.5, 3.5, 0.5],
        }
    )
    dataset = prepare(frame, tmp_path / "out", label="click", parts=1)
    assert dataset.schema.names == ("ad", "n")
    assert set(dataset.settings["dropped"]) == {"one", "none", "again", "n2"}
    output = capsys.readouterr().err
    assert "dropped, constant in the training days: 'one', 'none'" in output
    assert "dropped, the same as 'ad' in the training days: 'again'" in output
    kept = prepare(frame, tmp_path / "all", label="click", parts=1, keep_all=True, quiet=True)
    assert len(kept.schema) == 6


TIMES = {
    "date": pl.Series(["2020-02-28", "2020-02-29"]).str.to_date(),
    "datetime": pl.Series(["2020-02-28T10:00:00", "2020-02-29T00:00:01"]).str.to_datetime(),
    "iso": ["2020-02-28 23:59:59.5+00:00", "2020-02-29 00:00:00+00:00"],
    "unix": [1582898399, 1582934400],
    "milliseconds": [1582898399000, 1582934400000],
    "yyyymmdd": [20200228, 20200229],
}


@pytest.mark.parametrize("form", TIMES)
def test_times_become_days(tmp_path, form):
    frame = pl.DataFrame({"click": [0, 1], "ad": ["a", "b"], "when": TIMES[form]})
    dataset = prepare(frame, tmp_path / "out", label="click", time="when", keep_all=True, quiet=True)
    assert dataset.days() == ("2020-02-28", "2020-02-29")
    assert dataset.schema.names == ("ad",)


def test_time_formats_day_names_and_unsorted_rows(tmp_path):
    frame = pl.DataFrame({"click": [0, 1, 0], "ad": ["a", "b", "c"], "hour": [14102200, 14102101, 14102123]})
    options = {"label": "click", "keep_all": True, "quiet": True}
    dataset = prepare(frame, tmp_path / "h", time="hour", time_format="%y%m%d%H", train=2, **options)
    assert dataset.days() == ("2014-10-21", "2014-10-22")
    assert rows(dataset)[0].ids[:, 0].tolist() == [3, 4, 2]  # by day, row order kept inside
    named = pl.DataFrame({"click": [0, 1, 0], "ad": ["a", "b", "c"], "split": ["train", "train", "test"]})
    assert prepare(named, tmp_path / "s", time="split", **options).days() == ("train", "test")


def test_a_single_timestamp_column_orders_the_rows(tmp_path):
    frame = pl.DataFrame({"click": [0, 1], "ad": ["a", "b"], "at": ["2020-01-01 10:00", "2020-01-02 10:00"]})
    assert prepare(frame, tmp_path / "a", label="click", keep_all=True, quiet=True).days()[0] == "2020-01-01"
    by_row = prepare(frame, tmp_path / "b", label="click", parts=2, keep_all=True, quiet=True)
    assert by_row.days() == ("part_0", "part_1")


def test_row_order_is_split_into_equal_parts(tmp_path):
    frame = pl.DataFrame({"click": [0, 1] * 50, "ad": [str(i % 7) for i in range(100)]})
    dataset = prepare(frame, tmp_path / "out", label="click", parts=3, quiet=True)
    assert [day.rows for day in dataset.table] == [33, 33, 34]


def test_negatives_are_sampled_by_day_and_the_rate_is_stored(tmp_path):
    rng = np.random.default_rng(1)
    frame = pl.DataFrame(
        {"click": (rng.random(20_000) < 0.1).astype(int), "ad": rng.integers(0, 9, 20_000), "day": [0, 1] * 10_000}
    )
    options = {"label": "click", "time": "day", "quiet": True, "fields": {"ad": "categorical"}}
    dataset = prepare(frame, tmp_path / "a", negatives=0.125, **options)
    for index, day in enumerate(dataset.table):
        of_day = frame.filter(pl.col("day") == index)["click"]
        assert day.positives == of_day.sum()
        assert abs((day.rows - day.positives) / (len(of_day) - day.positives) - 0.125) < 0.02
        assert day.negative_rate == 0.125
    other = prepare(frame, tmp_path / "b", negatives=0.125, seed=1, **options)
    assert other.rows != dataset.rows
    by_day = prepare(frame, tmp_path / "c", negatives={"1": 0.5}, **options)
    assert [day.negative_rate for day in by_day.table] == [1.0, 0.5]


def test_the_same_fingerprint_is_reused_and_another_is_an_error(tmp_path, capsys):
    first = log(tmp_path)
    stamp = (tmp_path / "out" / "dataset.json").stat().st_mtime_ns
    again = log(tmp_path, quiet=False)
    assert "reused" in capsys.readouterr().err
    assert again.fingerprint == first.fingerprint
    assert (tmp_path / "out" / "dataset.json").stat().st_mtime_ns == stamp
    with pytest.raises(DataError, match="not empty"):
        log(tmp_path, min_count=2)
    assert log(tmp_path, min_count=2, replace=True).fingerprint != first.fingerprint
    with pytest.raises(DataError, match="not empty"):
        log(tmp_path, CSV.replace("1,a,1.5", "0,a,1.5"))


def test_tasks_and_a_named_positive(tmp_path):
    text = CSV.replace("click,", "like,click,", 1).replace("\n1,", "\n1,yes,").replace("\n0,", "\n0,no,")
    dataset = log(tmp_path, text, label="click", tasks=["like"], positive="yes")
    assert dataset.schema.tasks == ("like",)
    labels = rows(dataset)[0].labels
    assert labels[:, 0].equal(labels[:, 1])
    assert labels[:, 0].tolist() == [1, 0, 0, 1, 0, 1]


def test_texts_for_missing_values(tmp_path):
    frame = pl.DataFrame({"click": [0, 1, 0], "ad": ["?", "a", "b"], "n": ["1", "?", "3"]})
    dataset = prepare(frame, tmp_path / "o", label="click", missing=["?"], fields={"n": "numeric"}, parts=1, quiet=True)
    batch, _ = rows(dataset)
    assert batch.ids[:, 0].tolist() == [0, 2, 3]
    assert batch.missing[:, 0].tolist() == [False, True, False]


def criteo_rows(count, seed=0):
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        numbers = [str(v) if v > -3 else "" for v in rng.integers(-3, 100, 13)]
        codes = [f"{v * 2654435761 % 2**32:08x}" if v else "" for v in rng.integers(0, 20, 26)]
        lines.append("\t".join([str(int(rng.random() < 0.3)), *numbers, *codes]))
    return "\n".join(lines) + "\n"


def test_criteo_terabyte(tmp_path):
    (tmp_path / "raw").mkdir()
    for day in (0, 1, 2, 10):
        write(tmp_path / "raw" / f"day_{day}", criteo_rows(60, day))
    dataset = prepare(tmp_path / "raw", tmp_path / "out", preset="criteo-terabyte", min_count=1, quiet=True)
    assert dataset.days() == ("day_0", "day_1", "day_2", "day_10")
    assert [field.kind for field in dataset.schema] == ["numeric"] * 13 + ["categorical"] * 26
    raw = [line.split("\t") for line in criteo_rows(60, 0).splitlines()]
    ids = rows(dataset.days(0, 1))[0].ids
    words = dataset.vocabulary("C1")
    back = [f"{int(words[i - 2]):08x}" if i >= 2 else "" for i in ids[:, 0].tolist()]
    assert back == [row[14] for row in raw]


def test_criteo_kaggle_and_avazu(tmp_path):
    kaggle = write(tmp_path / "train.txt", criteo_rows(70))
    dataset = prepare(kaggle, tmp_path / "k", preset="criteo-kaggle", quiet=True, min_count=2)
    assert [day.rows for day in dataset.table] == [10] * 7
    header = "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,"
    header += "device_id,device_ip,device_model,device_type,device_conn_type," + ",".join(
        f"C{i}" for i in range(14, 22)
    )
    lines = [
        f"{i},{i % 3 == 0:d},141021{i % 24:02d},{i % 2}," + ",".join(f"{i % 5}ab" for _ in range(20)) for i in range(48)
    ]
    avazu = write(tmp_path / "train.csv", "\n".join([header, *lines]) + "\n")
    dataset = prepare(avazu, tmp_path / "a", preset="avazu", quiet=True, keep_all=True)
    assert dataset.days() == ("2014-10-21",)
    assert "id" not in dataset.schema.names
    assert len(dataset.schema) == 21
    with pytest.raises(DataError, match="not the layout of avazu"):
        prepare(write(tmp_path / "other.csv", "click,hour\n1,14102100\n"), tmp_path / "x", preset="avazu", quiet=True)


def test_fields_from_toml(tmp_path):
    toml = write(
        tmp_path / "fields.toml",
        'price = "categorical"\n[ad]\ngroup = "item"\ncost = 2.5\n["tags"]\nseparator = "|"\n[day]\nkind = "ignore"\n',
    )
    dataset = log(tmp_path, fields=toml)
    assert dataset.schema["ad"].group == "item"
    assert dataset.schema["ad"].cost == 2.5
    assert dataset.schema["price"].kind == "categorical"
    assert dataset.schema["tags"].kind == "multi"


def test_a_small_vocabulary_is_reported(tmp_path, capsys):
    frame = pl.DataFrame({"click": [0, 1] * 10, "ad": [f"v{i}" for i in range(20)]})
    prepare(frame, tmp_path / "out", label="click", max_values=2, parts=1)
    assert "'ad' (2 of 20 values, 10% of rows); raise max_values" in capsys.readouterr().err


def test_wrong_arguments(tmp_path):
    frame = pl.DataFrame({"click": [0, 1], "ad": ["a", "b"]})
    for options, message in [
        ({"label": "clik"}, "did you mean 'click'"),
        ({"label": "click", "time": "dya"}, "time: no column 'dya'"),
        ({"label": "click", "min_cuont": 3}, "did you mean 'min_count'"),
        ({"label": "click", "preset": "criteo"}, "no preset 'criteo'"),
        ({}, "say which column is the label.*; the columns are "),
        ({"lable": "click"}, "no option 'lable'.*label"),
        ({"label": "click", "negatives": 0.0}, "negatives must be"),
        ({"label": "click", "negatives": {"9": 0.5}}, "no such day '9'"),
        ({"label": "click", "max_values": 0}, "keeps no value"),
        ({"label": "click", "parts": 0}, "parts must be"),
        ({"label": "click", "train": 0}, "train must be"),
        ({"label": "click", "seed": "x"}, "seed must be"),
        ({"label": "click", "ordered": True}, "ordered must be used together"),
        ({"label": "click", "time_format": "when"}, "time_format must be"),
        ({"label": "click", "tasks": ["click"]}, "tasks must be"),
        ({"label": "click", "fields": {"adz": "numeric"}}, "no column 'adz' \\(did you mean 'ad'"),
        ({"label": "click", "fields": {"ad": "numerical"}}, "did you mean 'numeric'"),
        ({"label": "click", "fields": {"ad": {"bin": 3}}}, "did you mean 'bins'"),
        ({"label": "click", "fields": {"ad": 3}}, "table of options"),
        ({"label": "click", "fields": {"click": "numeric"}}, "cannot be a field too"),
        ({"label": "click", "fields": {"ad": "ignore"}}, "no field is left"),
        ({"label": "click", "fields": 3}, "a dict or the path"),
    ]:
        with pytest.raises(InputError, match=message):
            prepare(frame, tmp_path / "out", quiet=True, **options)
    with pytest.raises(FieldError):
        prepare(frame, tmp_path / "out", label="nothing", quiet=True)
    with pytest.raises(InputError, match="found int"):
        prepare(3, tmp_path / "out", label="click", quiet=True)
    assert list(tmp_path.iterdir()) == []
    assert isinstance(prepare(frame, tmp_path / "out", label="click", parts=1, quiet=True), Dataset)


def test_parquet_files_of_different_types(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    first = pl.DataFrame({"click": [0, 1], "n": [3, 4], "text": ["a", "b"], "gap": [None, None]})
    first.write_parquet(folder / "a.parquet")
    second = pl.DataFrame({"click": [True, False], "n": [4.0, 5.5], "text": ["b", "c"], "gap": [7, 8]})
    second.with_columns(pl.col("click").cast(pl.Int8)).write_parquet(folder / "b.parquet")
    fields = dict.fromkeys(("n", "text", "gap"), "categorical")
    options = {"label": "click", "parts": "files", "train": 2, "fields": fields, "quiet": True}
    dataset = prepare(folder, tmp_path / "out", **options)
    assert rows(dataset)[0].ids.tolist() == [[3, 3, 0], [2, 2, 0], [2, 2, 2], [4, 4, 3]]
    second.write_parquet(folder / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet: column 'click' is Boolean here and Int64 in"):
        prepare(folder, tmp_path / "other", **options)


def test_a_wide_numeric_column_of_text(tmp_path):
    text = "click,v\n1,0.5;2\n0,1.5;3\n1,\n"
    fields = {"v": {"kind": "numeric", "width": 2, "separator": ";", "transform": "none"}}
    dataset = log(tmp_path, text, time=None, parts=1, fields=fields)
    batch, _ = rows(dataset)
    assert batch.dense.tolist() == [[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]
    assert batch.missing.tolist() == [[False, False], [False, False], [True, True]]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_ids_are_never_converted_to_floats(tmp_path, form):
    ids = [2**53 + at % 40 for at in range(400)]  # as floats, pairs of them would be equal
    frame = pl.DataFrame({"click": [0, 1] * 200, "user": ids, "zip": [f"{at % 30:05d}" for at in range(400)]})
    path = tmp_path / f"log.{form}"
    frame.write_csv(path) if form == "csv" else frame.write_parquet(path)
    dataset = prepare(path, tmp_path / "out", label="click", parts=1, quiet=True)
    assert sorted(map(int, dataset.vocabulary("user"))) == sorted(set(ids))
    assert "00007" in dataset.vocabulary("zip")


def test_a_float_is_not_rounded_to_an_integer_id(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    pl.DataFrame({"click": [0, 1, 0], "ad": [0, 5, 5]}).write_parquet(folder / "day_0.parquet")
    pl.DataFrame({"click": [0] * 4, "ad": [5.0, 5.5, None, 0.0]}).write_parquet(folder / "day_1.parquet")
    fields = {"ad": "categorical"}
    dataset = prepare(folder, tmp_path / "out", label="click", parts="files", fields=fields, quiet=True)
    batch = next(iter(dataset.days(1).stream(4)))
    assert dataset.vocabulary("ad").tolist() == [5, 0]
    assert batch.ids[:, 0].tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("words", [("true", "false"), ("True", "FALSE"), ("1", "0"), ("1.0", " 0")])
def test_notations_of_a_label(tmp_path, words):
    (tmp_path / "log.csv").write_text(f"click,ad\n{words[0]},a\n{words[1]},b\n{words[0]},a\n")
    dataset = prepare(tmp_path / "log.csv", tmp_path / "out", label="click", parts=1, quiet=True)
    assert next(iter(dataset.stream(3))).labels[:, 0].tolist() == [1, 0, 1]


def test_a_positive_value_that_never_occurs(tmp_path):
    frame = pl.DataFrame({"click": ["yes", "no"] * 5, "ad": list("abcdefghij")})
    with pytest.raises(DataError, match="label 'click': no row of the training days holds 'Yes'; .* 'yes', 'no'"):
        prepare(frame, tmp_path / "out", label="click", positive="Yes", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_labels_that_are_all_equal_are_reported(tmp_path, capsys):
    frame = pl.DataFrame({"click": [0] * 10, "ad": list("abcdefghij")})
    prepare(frame, tmp_path / "out", label="click")
    assert "label 'click' is 0 in every training row" in capsys.readouterr().err


def test_train_comes_before_test_in_any_row_order(tmp_path):
    frame = pl.DataFrame({"click": [0, 1, 0, 1], "split": ["Test", "valid", "train", "train"], "ad": list("abcd")})
    dataset = prepare(frame, tmp_path / "out", label="click", time="split", train=1, quiet=True)
    assert dataset.days() == ("train", "valid", "Test")
    assert dataset.vocabulary("ad") == ["c", "d"]


def test_an_ambiguous_date_is_an_error(tmp_path):
    frame = pl.DataFrame({"click": [0, 1, 0], "date": ["01/02/2024", "02/01/2024", "01/02/2024"], "ad": list("aab")})
    with pytest.raises(DataError, match=r"'01/02/2024' may be a date, .* give time_format"):
        prepare(frame, tmp_path / "out", label="click", time="date", quiet=True)
    options = {"label": "click", "time": "date", "time_format": "%d/%m/%Y", "train": 2, "quiet": True}
    assert prepare(frame, tmp_path / "out", **options).days() == ("2024-01-02", "2024-02-01")


def test_a_file_given_twice_is_an_error(tmp_path):
    (tmp_path / "log.csv").write_text("click,ad\n0,a\n1,b\n")
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress((tmp_path / "log.csv").read_bytes()))
    for source in (tmp_path, [tmp_path / "log.csv"] * 2, f"{tmp_path}/log*"):
        with pytest.raises(DataError, match="the same log as .* would count twice"):
            prepare(source, tmp_path / "out", label="click", quiet=True)


def test_explicit_kinds_equal_to_the_inferred_ones_give_the_same_fingerprint(tmp_path, capsys):
    frame = pl.DataFrame({"click": [0, 1] * 20, "price": [at / 7 for at in range(40)], "ad": list("abcd") * 10})
    first = prepare(frame, tmp_path / "out", label="click", quiet=True)
    fields = {"price": "numeric", "ad": "categorical"}
    again = prepare(frame, tmp_path / "out", label="click", fields=fields)
    assert again.fingerprint == first.fingerprint
    assert "reused" in capsys.readouterr().err


def test_columns_with_dots_need_quotes_in_toml(tmp_path):
    (tmp_path / "fields.toml").write_text('[emp.rate]\nkind = "numeric"\n')
    frame = pl.DataFrame({"click": [0, 1], "emp.rate": [1.5, 2.5]})
    with pytest.raises(FieldError, match=r"a column name with a dot needs quotes, as \[\"emp.rate\"\]"):
        prepare(frame, tmp_path / "out", label="click", fields=tmp_path / "fields.toml", quiet=True)
    (tmp_path / "fields.toml").write_text('["emp.rate"]\nkind = "nummeric"\n')
    with pytest.raises(FieldError, match=r"fields.toml: field 'emp.rate': kind must be one of"):
        prepare(frame, tmp_path / "out", label="click", fields=tmp_path / "fields.toml", quiet=True)


def test_an_output_in_use_is_an_error_before_the_source_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("lpfs.data.prepare.fingerprint", lambda *_: pytest.fail("the source was read"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for replace in (False, True):
        with pytest.raises(DataError, match=r"not empty; .*--replace|is not replaced"):
            prepare(
                pl.DataFrame({"click": [0, 1]}).with_columns(ad="click"),
                tmp_path / "out",
                label="click",
                replace=replace,
                quiet=True,
            )
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_decimal_ids_stay_exact(tmp_path):
    ids = pl.Series([str(10**20 + at % 40) for at in range(400)]).cast(pl.Decimal(38, 0))
    frame = pl.DataFrame({"click": [0, 1] * 200, "user": ids})
    dataset = prepare(frame, tmp_path / "out", label="click", parts=1, quiet=True)
    assert sorted(dataset.vocabulary("user")) == [str(10**20 + at) for at in range(40)]


def test_columns_that_determine_the_label_are_reported(tmp_path, capsys):
    click = [0, 1, 1, 0, 1] * 30
    columns = {
        "copy": click,
        "flag": ["no" if label else "yes" for label in click],
        "gap": [label or None for label in click],
    }
    columns |= {"near": [*click[:-1], 0], "one": [7] * 150, "tags": [[label] for label in click]}
    prepare(pl.DataFrame({"click": click, **columns}), tmp_path / "out", label="click", train=10)
    lines = capsys.readouterr().err.splitlines()
    reported = [line.split("'")[1] for line in lines if "determines the label" in line]
    assert reported == ["copy", "flag", "gap"]


def test_an_invalid_date_is_a_data_error(tmp_path):
    dates = pl.Series([2**31 - 1, -(2**31)] * 5, dtype=pl.Int32).cast(pl.Date)
    frame = pl.DataFrame({"click": [0, 1] * 5, "ad": list("abcde") * 2, "since": dates})
    fields = {"since": "categorical"}
    with pytest.raises(DataError, match="since"):
        prepare(frame, tmp_path / "out", label="click", fields=fields, quiet=True)
