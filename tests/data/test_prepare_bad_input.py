"""Bad input: the error names the file, the line or column, the value and what to do; nothing is written."""

import gzip
import os
import re
import resource
import subprocess
import sys

import polars as pl
import pytest

from lpfs._console import Console
from lpfs.data.diagnose import diagnose
from lpfs.data.prepare import plan_source, prepare
from lpfs.errors import DataError, InputError

GOOD = "click,ad,price\n1,a,1.5\n0,b,2.5\n0,a,3.5\n"


@pytest.fixture
def attempt(tmp_path):
    """Prepare bytes, expect an error, and check that nothing was written."""

    def attempt(data, match, *, name="log.csv", **options):
        source = tmp_path / name
        source.write_bytes(data.encode() if isinstance(data, str) else data)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(DataError, match=match) as caught:
            prepare(source, tmp_path / "out", quiet=True, **{"label": "click", "parts": 1, **options})
        assert str(caught.value).count("\n") == 0
        assert sorted(tmp_path.rglob("*")) == before
        return str(caught.value)

    return attempt


BAD = {
    "label not 0 or 1": (GOOD.replace("0,b", "2,b"), "log.csv, line 3: label 'click' must be 0 or 1, found '2'"),
    "label is text": (
        GOOD.replace("0,b", "maybe,b"),
        "line 3: label 'click' must be 0 or 1, found 'maybe'; its values are '0', '1', 'maybe'",
    ),
    "label missing": (GOOD.replace("0,b", ",b"), "line 3: label 'click' is missing; .*; remove these rows"),
    "label missing as text": (
        GOOD.replace("0,b", "NA,b"),
        "line 3: .* missing where it is 'NA': remove these rows, or count them as 0 with --positive 1$",
    ),
    "short row": (GOOD.replace("0,b,2.5", "0,b"), "log.csv, line 3: 2 columns, expected 3: '0,b'"),
    "long row": (GOOD.replace("0,b,2.5", "0,b,2.5,9"), "log.csv, line 3: 4 columns, expected 3"),
    "two bad rows": (GOOD.replace("0,b,2.5\n0,a,3.5", "0,b,2.5,9\n0,a"), "log.csv, line 3: 4 columns"),
    "not UTF-8": (GOOD.encode().replace(b"b,2", b"\xe9,2"), "log.csv, line 3: b'\\\\xe9.* is not UTF-8"),
    "header not UTF-8": (GOOD.encode().replace(b"ad", b"\xe9"), "log.csv, line 1: .* is not UTF-8"),
    "UTF-16": (GOOD.encode("utf-16"), "UTF-16 text; convert it"),
    "empty": ("", "log.csv: the file is empty"),
    "only line ends": ("\n\n\n", "log.csv: the file is empty"),
    "header only": ("click,ad,price\n", "log.csv: the file has a header and no rows"),
    "two names": (GOOD.replace("price", "ad"), "log.csv, line 1: two columns are named 'ad' \\(numbers 2 and 3\\)"),
    "open quote": (GOOD + '1,"x,2.5\n', "line 5: a quote is opened and never closed: .*; close it; a quote inside"),
    "text after quote": (GOOD + '1,"x"y,2.5\n', "log.csv, line 5: "),
    "not a number": (GOOD.replace("2.5", "cheap"), "line 3: column 'price': 'cheap' is not a number"),
    "old line ends": (GOOD.replace("\n", "\r"), "log.csv"),
    "damaged gzip": (gzip.compress(GOOD.encode())[:-9], "log.csv: damaged gzip"),
    "damaged zstd": (b"\x28\xb5\x2f\xfd" + b"x" * 50, "log.csv: damaged zstd"),
    "damaged Parquet": (b"PAR1" + b"x" * 50 + b"PAR1", "log.csv: cannot be read as Parquet"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(attempt, case):
    data, match = BAD[case]
    attempt(data, match, fields={"price": "numeric"} if case == "not a number" else None)


@pytest.mark.parametrize(
    ("labels", "advice", "flag"),
    [
        ([0.0, 1.0, float("nan")], "where it is 'NaN': remove these rows, or count them as 0 with --positive 1.0", ""),
        ([0, 1, 2], "say which one counts as 1, and all others as 0, with --positive VALUE", ""),
        ([-1, -1, 1], "as in --positive 1, or repair", "--positive 1"),
        (["-", "-", "+"], "as in --positive +, or repair", "--positive +"),
        ([row / 100 for row in range(100)], "100 different numbers are no label of clicks: give another column", ""),
        ([f"word {row}" for row in range(100)], "100 different values are no label of clicks", ""),
    ],
)
def test_the_advice_about_a_label_is_right(tmp_path, labels, advice, flag):
    frame = pl.DataFrame({"click": labels, "ad": [f"a{row % 2}" for row in range(len(labels))]})
    with pytest.raises(DataError, match=re.escape(advice)):
        prepare(frame, tmp_path / "out", label="click", parts=1, quiet=True)
    plan = plan_source(frame, label="click", parts=1)
    findings = diagnose(plan, Console(quiet=True)).findings
    [finding] = [found for found in findings if found.text.startswith("not a label")]
    assert finding.flag == flag
    assert bool(flag) != (advice in finding.text)


def test_lines_are_counted_through_quotes_blocks_and_blank_lines(attempt):
    rows = '1,"a\nb",1.5\n' * 3 + "\n" + '0,"c""d",2.5\n' * 2 + "7,e,1\n"
    message = attempt("click,ad,price\n" + rows, "label 'click' must be 0 or 1, found '7'")
    assert "line 11:" in message
    attempt("click,ad,price\n" + '1,"a\nb",1.5\n' * 3 + "7,e,1\n", "line 8: label 'click' must be 0 or 1")


def test_an_error_in_the_last_day_leaves_nothing(attempt):
    rows = "".join(f"{i % 2},v{i % 3},{i}.5\n" for i in range(40))
    attempt("click,ad,price\n" + rows + "5,a,1\n", "line 42: label 'click' must be 0 or 1, found '5'", parts=4)
    late = "click,ad,price\n" + rows + "1,a,cheap\n"
    fields = {"price": "numeric"}
    attempt(late, "line 42: column 'price': 'cheap' is not a number", parts=4, fields=fields)


def test_hexadecimal(attempt):
    fields = {"ad": {"kind": "categorical", "hexadecimal": True}}
    attempt(GOOD.replace("0,b,", "0,xyz,"), "line 3: column 'ad': 'xyz' is not a hexadecimal", fields=fields)


def test_layout_of_criteo(attempt):
    attempt(GOOD, "line 1: 1 columns, expected 40", preset="criteo-kaggle", label="label")
    row = "\t".join(["1"] * 40)
    attempt(f"{row}\n{row}\t5\n", "line 2: 41 columns, expected 40", preset="criteo-kaggle", label="label")


def test_time(attempt):
    log = "click,ad,day\n1,a,2020-01-02\n0,b,2020-01-01\n"
    attempt(log, "line 3: column 'day': time goes backwards, '2020-01-01' after '2020-01-02'", time="day", ordered=True)
    attempt(log.replace("2020-01-01", ""), "line 3: column 'day': the time is missing", time="day")
    attempt(log, "line 2: .* cannot be read as a time", time="day", time_format="%d/%m/%Y")
    with pytest.raises(InputError, match="time_format must be a strptime format with known codes"):
        prepare("none.csv", "never", label="click", time="day", time_format="%Q %")
    many = "click,day\n" + "".join(f"0,d{i}\n" for i in range(5000))
    attempt(many, "more than 4000 days", time="day", fields={"day": "categorical"})


def test_time_goes_backwards_between_blocks(attempt, monkeypatch):
    monkeypatch.setattr("lpfs.data.sources.base.ROWS", 2)
    frame = pl.DataFrame({"click": [0, 1, 0], "ad": ["a", "b", "c"], "day": [1, 3, 2]})
    with pytest.raises(DataError, match="the table, row 3: column 'day': time goes backwards, 2 after 3"):
        prepare(frame, "never", label="click", time="day", ordered=True, quiet=True)


def test_files_with_different_columns_or_formats(tmp_path):
    directory = tmp_path / "log"
    directory.mkdir()
    (directory / "a.csv").write_text(GOOD)
    (directory / "b.csv").write_text(GOOD.replace("price", "cost"))
    with pytest.raises(DataError, match=r"b.csv, line 1: column 'cost' is new here, compared with .*a.csv"):
        prepare(directory, tmp_path / "out", label="click", quiet=True)
    pl.read_csv(directory / "a.csv").write_parquet(directory / "b.csv")
    with pytest.raises(DataError, match=r"b.csv: text and Parquet files are mixed"):
        prepare(directory, tmp_path / "out", label="click", quiet=True)
    (directory / "b.csv").write_text("")
    with pytest.raises(DataError, match=r"b.csv: the file is empty"):
        prepare(directory, tmp_path / "out", label="click", quiet=True)
    assert not (tmp_path / "out").exists()


def test_missing_sources(tmp_path):
    for source, match in [
        (tmp_path / "none.csv", "no such file"),
        (str(tmp_path / "*.csv"), "no file matches"),
        (tmp_path, "no CSV, TSV or Parquet file in this directory"),
        ([], "no file given"),
        (pl.DataFrame(), "the table is empty"),
        (pl.DataFrame({"click": []}), "the table is empty"),
    ]:
        with pytest.raises(DataError, match=match):
            prepare(source, tmp_path / "out", label="click", quiet=True)
    with pytest.raises(InputError):
        prepare("", tmp_path / "out", label="click", quiet=True)
    with pytest.raises(InputError):
        prepare("a\0b", tmp_path / "out", label="click", quiet=True)


def test_bad_fields_toml(tmp_path):
    (tmp_path / "log.csv").write_text(GOOD)
    toml = tmp_path / "fields.toml"
    for text, match in [
        ("[ad", "fields.toml: not valid TOML"),
        ('[adz]\nkind = "numeric"', "no column 'adz' .did you mean 'ad'"),
        ('[ad]\nkind = "number"', "kind must be one of"),
        ("[ad]\nsize = 3", "no option 'size'"),
        ("[ad]\nmax_values = 0", "max_values must be an integer from 1"),
        ("[ad]\nhash = 1.5", "hash must be an integer"),
        ("[ad]\ncost = nan", "cost must be a number"),
        ('[ad]\nseparator = ""', "separator must be the text"),
        ("ad = 3", "must be a table of options"),
    ]:
        toml.write_text(text)
        with pytest.raises(InputError, match=match):
            prepare(tmp_path / "log.csv", tmp_path / "out", label="click", fields=toml, quiet=True)
    toml.write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        prepare(tmp_path / "log.csv", tmp_path / "out", label="click", fields=toml, quiet=True)
    with pytest.raises(DataError, match="cannot be read"):
        prepare(tmp_path / "log.csv", tmp_path / "out", label="click", fields=tmp_path / "no.toml", quiet=True)
    assert not (tmp_path / "out").exists()


def test_columns_of_the_wrong_type(tmp_path):
    frame = pl.DataFrame(
        {
            "click": [0, 1],
            "ad": ["a", "b"],
            "when": pl.Series(["2020-01-01", "2020-01-02"]).str.to_date(),
            "struct": [{"x": 1}, {"x": 2}],
            "blob": [b"1", b"2"],
            "ragged": [[1.0], [1.0, 2.0]],
        }
    )
    for fields, match in [
        ({"when": "numeric"}, "column 'when': Date is not a number"),
        ({"struct": "categorical"}, "column 'struct': Struct.* cannot be categorical"),
        ({"blob": "numeric"}, "column 'blob': Binary is not a number"),
        ({"ad": "multi"}, "column 'ad' is multi but holds String, not lists"),
        ({"ragged": {"kind": "numeric", "width": 2}}, "the table, row 1: column 'ragged': 1 numbers, expected 2"),
        ({"ad": {"kind": "numeric", "width": 2}}, "column 'ad' holds String, not lists of 2 numbers"),
        ({"ad": {"kind": "numeric", "bins": 3}}, "row 1: column 'ad': 'a' is not a number"),
    ]:
        with pytest.raises(DataError, match=match):
            prepare(frame, tmp_path / "out", label="click", fields=fields, parts=1, quiet=True)
    with pytest.raises(DataError, match="label 'ad' must be 0 or 1, found 'a'"):
        prepare(frame, tmp_path / "out", label="ad", parts=1, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_every_column_constant(attempt):
    attempt("click,ad\n1,a\n0,a\n", "every column is constant in the training days")


def test_a_day_without_rows_is_an_error(tmp_path):
    frame = pl.DataFrame({"click": [1, 0, 0, 0], "ad": ["a", "b", "a", "b"], "day": [0, 0, 1, 1]})
    with pytest.raises(DataError, match="day '1': no row is left; keep a larger share"):
        prepare(frame, tmp_path / "out", label="click", time="day", negatives=1e-9, keep_all=True, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_an_output_path_that_cannot_be_written(tmp_path):
    frame = pl.DataFrame({"click": [0, 1], "ad": ["a", "b"]})
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataError, match="file"):
            prepare(frame, out, label="click", parts=1, quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match="mine"):
        prepare(frame, tmp_path / "mine", label="click", parts=1, quiet=True, replace=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on file sizes")
def test_disk_full(tmp_path):
    script = (
        "import resource, signal, sys, polars as pl\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "frame = pl.DataFrame({'click': [0, 1] * 5000, 'n': [float(i) for i in range(10000)]})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "from lpfs.data.prepare import prepare\n"
        "from lpfs.errors import DataError\n"
        "try:\n"
        "    prepare(frame, sys.argv[1], label='click', parts=1, quiet=True)\n"
        "except DataError as error:\n"
        "    print(error)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert "cannot write" in process.stdout
    assert "free some space" in process.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.xlsx", b"PK\x03\x04rest", "a zip archive or an Excel file; save it as CSV"),
        ("x.csv", "click,ad\n0,a\n".encode("utf-16"), "UTF-16 text; convert it"),
        ("x.json", b'[{"click": 1}]\n', "JSON; write it as Parquet or CSV"),
        ("x.csv", b"BZh91AY", "compressed with bzip2"),
    ],
)
def test_files_of_another_format(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name} is not a text table or Parquet but {message}"):
        prepare(tmp_path / name, tmp_path / "out", label="click", quiet=True)


def test_a_header_may_start_with_a_bracket(tmp_path):
    (tmp_path / "x.csv").write_text("[click],{ad}\n0,a\n1,b\n")
    assert prepare(tmp_path / "x.csv", tmp_path / "out", label="[click]", parts=1, quiet=True).rows == 2


def test_the_error_suggests_that_a_header_is_missing(tmp_path):
    (tmp_path / "x.csv").write_text("0,a,1.5\n1,b,2.5\n")
    with pytest.raises(InputError, match="is its first line a header\\? if not: --no-header"):
        prepare(tmp_path / "x.csv", tmp_path / "out", label="click", quiet=True)
