"""prepare on tables as people have them: what is understood, what --dry-run says, and the flags that it proposes."""

import json
import random
import shlex

import polars as pl
import pytest
import torch

from lpfs.data.dataset import Dataset
from lpfs.models import MODELS
from lpfs.pipeline.plan import check_backbone
from lpfs.pipeline.settings import Settings


def write(path, header, rows, separator=","):
    """Write a text table, with a byte order mark if the header has one."""
    path.write_text("\n".join([header, *(separator.join(map(str, row)) for row in rows)]) + "\n", "utf-8")
    return path


@pytest.fixture
def messy(tmp_path):
    """A table from a spreadsheet: a byte order mark, semicolons, blanks, money, percent, dates, yes and no."""
    generator = random.Random(0)
    rows = []
    for row in range(2400):
        user, amount = generator.randrange(30), generator.randrange(100_000, 999_999)
        rows.append(
            (
                "yes" if generator.random() < 0.2 + 0.5 * (user % 2) else "no",
                f" u{user} ",
                f"${amount // 100:,}.{amount % 100:02d}",
                f"{generator.random() * 100:.1f}%",
                f"{1 + row // 100:02d}/03/2026",
                f"{generator.randrange(1000)},{generator.randrange(100):02d}",
                "#N/A" if row % 10 == 0 else f"{generator.random():.4f}",
                "?" if row % 20 == 0 else generator.randrange(10_000),
                f"x{generator.randrange(10**6)}",
            )
        )
    header = "\ufeffclick; user ;price;rate;when;sales;score;age;noise"
    return write(tmp_path / "my table.csv", header, rows, ";")


def dry_run(run, path, *options):
    """Return {column: row of the table of fields} and {column: [(finding, flag)]}."""
    code, out, err = run("prepare", path, "--label", "click", *options, "--dry-run", "--json", "-q")
    assert code == 0, err
    rows = {row["column"]: row for row in json.loads(out)}
    return rows, {name: [(one["text"], one["flag"]) for one in row["findings"]] for name, row in rows.items()}


def test_a_dry_run_examines_the_table(run, messy):
    rows, findings = dry_run(run, messy)
    assert findings["click"] == [("45.50% of 2,400 rows are positive: 'no' 1,308, 'yes' 1,092", "")]
    assert findings["when"] == [("24 days, 2026-03-01 to 2026-03-24, 100 rows each", "")]
    assert ("blanks around the name", "--strip") in findings[" user "]
    assert ("blanks around 2,400 of 2,400 values", "--strip") in findings[" user "]
    kinds = {name: row["kind"] for name, row in rows.items()}
    assert kinds["price"] == kinds["rate"] == kinds["sales"] == kinds["score"] == "numeric"
    assert [flag for _, flag in findings["price"]] == ["--kind price=categorical"]
    assert findings["sales"][0][0].startswith("numbers in text: ")
    assert rows["score"]["missing"] == 0.1
    assert ("numbers, but also '?'", "--missing '?'") in findings["age"]
    assert any(text.startswith("near-unique: 2,39") for text, _ in findings["noise"])
    assert findings["noise"][-1][1] == "--kind noise=ignore"
    code, out, err = run("prepare", messy, "--label", "click", "--dry-run")
    assert (code, out) == (0, "")
    for text in ("Missing values", "Findings", "--missing '?'", "--kind noise=ignore", "24 days"):
        assert text in err


def test_the_flags_of_a_dry_run_can_be_pasted(run, messy, tmp_path):
    _, findings = dry_run(run, messy)
    flags = dict.fromkeys(flag for column in findings.values() for _, flag in column if flag)
    words = [word for flag in flags if "categorical" not in flag for word in shlex.split(flag)]
    rows, findings = dry_run(run, messy, *words)
    left = [flag for column in findings.values() for _, flag in column if flag]
    assert [flag for flag in left if "categorical" not in flag] == []
    assert rows["noise"]["kind"] == "ignore"
    assert rows["age"]["kind"] == "numeric"
    code, _, err = run("prepare", messy, "--label", "click", *words, "--out", tmp_path / "out")
    assert code == 0, err
    dataset = Dataset(tmp_path / "out")
    assert dataset.schema.names == ("user", "price", "rate", "sales", "score", "age")
    assert set(dataset.vocabulary("user")) == {f"u{number}" for number in range(30)}
    assert sum(day.positives for day in dataset.table) == 1092
    fields = dataset.settings["fields"]
    assert fields["sales"]["decimal"] == ","
    code, _, err = run("prepare", messy, "--like", tmp_path / "out", "--out", tmp_path / "again")
    assert code == 0, err
    assert run("prepare", messy, "--like", tmp_path / "out", "--dry-run")[0] == 0
    first, again = (next(iter(Dataset(tmp_path / name).stream(2400))) for name in ("out", "again"))
    assert first.dense.equal(again.dense)
    assert first.ids.equal(again.ids)


def test_numbers_in_text_are_read_exactly(run, tmp_path):
    texts = ["$2,641.21", "$1.50", "-$3", "$1,000,000", "#N/A", "n/a", " $7 ", "$0"]
    rows = [(row % 2, f'"{text}"', f"{row}.5") for row, text in enumerate(texts)]
    log = write(tmp_path / "log.csv", "click,price,x", rows)
    options = ["--label", "click", "--parts", "1", "--bins", "2", "--out", tmp_path / "out", "-q"]
    assert run("prepare", log, *options)[0] == 0
    assert Dataset(tmp_path / "out").settings["fields"]["price"]["edges"] == [7.0]  # the median of six numbers
    ids = next(iter(Dataset(tmp_path / "out").stream(8))).ids[:, 0].tolist()
    assert ids == [3, 2, 2, 3, 0, 0, 3, 2]


@pytest.mark.parametrize(
    ("texts", "decimal", "numbers"),
    [
        (("3,14", "2,5", "1.234,56"), None, [3.14, 2.5, 1234.56]),
        (("1,234", "2,500", "7"), None, [1234, 2500, 7]),  # a thousands separator unless a row says otherwise
        (("1,234", "2,500", "7"), ",", [1.234, 2.5, 7]),
        (("12%", "81.1%", "7%"), None, [12, 81.1, 7]),
        (("€ 12", "1 €", "£7"), None, [12, 1, 7]),
    ],
)
def test_formats_of_numbers(run, tmp_path, texts, decimal, numbers):
    rows = [(row % 2, texts[row % 3], f"u{row % 2}") for row in range(60)]
    log, out = write(tmp_path / "log.csv", "click;amount;user", rows, ";"), tmp_path / "out"
    flags = ["--kind", "amount=numeric", *(["--decimal", decimal] if decimal else [])]
    fields = tmp_path / "fields.toml"
    fields.write_text('[amount]\ntransform = "none"\n')
    arguments = ["--label", "click", "--parts", "1", "--fields", fields, "--out", out, "-q"]
    code, _, err = run("prepare", log, *flags, *arguments)
    assert code == 0, err
    mean = sum(numbers) / 3
    assert Dataset(out).settings["fields"]["amount"]["mean"] == pytest.approx([mean])


@pytest.mark.parametrize(
    ("positive", "negative"),
    [("yes", "no"), ("True", "False"), ("T", "F"), ("Y", "N"), ("clicked", "not clicked"), ("click", "no_click")],
)
def test_words_of_labels(run, tmp_path, positive, negative):
    rows = [(positive if row % 4 == 0 else negative, f"u{row % 3}") for row in range(40)]
    log = write(tmp_path / "log.csv", "click,user", rows)
    code, _, err = run("prepare", log, "--label", "click", "--parts", "1", "--out", tmp_path / "out")
    assert code == 0, err
    assert "40 rows, 10 positive (25.00%)" in err


def test_other_labels_are_listed(run, tmp_path):
    words = ["50000+.", "- 50000.", "- 50000."]
    log = write(tmp_path / "log.csv", "income,user", [(words[row % 3], f"u{row % 4}") for row in range(60)])
    code, _, err = run("prepare", log, "--label", "income", "--parts", "1", "--out", tmp_path / "out", "-q")
    assert code == 1
    assert "its values are '- 50000.', '50000+.'; say which one counts as 1, as in --positive 50000+." in err
    rows = json.loads(run("prepare", log, "--label", "income", "--dry-run", "--json", "-q")[1])
    [finding] = [one for one in rows[0]["findings"] if one["flag"].startswith("--positive")]
    assert finding == {"text": "not a label of 0 and 1: '- 50000.' 40, '50000+.' 20", "flag": "--positive 50000+."}
    options = ["--label", "income", *shlex.split(finding["flag"]), "--parts", "1", "--out", tmp_path / "out"]
    code, _, err = run("prepare", log, *options)
    assert code == 0
    assert "20 positive" in err


def test_a_label_that_is_missing_in_one_row(run, tmp_path):
    labels = ["NA" if row == 7 else int(row % 4 == 0) for row in range(60)]
    log = write(tmp_path / "log.csv", "click,user", [(label, f"u{row % 3}") for row, label in enumerate(labels)])
    advice = "the label is missing where it is 'NA': remove these rows, or count them as 0 with --positive 1"
    options = ["--label", "click", "--parts", "1", "--out", tmp_path / "out"]
    code, _, err = run("prepare", log, *options, "-q")
    assert code == 1
    assert err.endswith(f"{advice}\n")
    rows = json.loads(run("prepare", log, "--label", "click", "--dry-run", "--json", "-q")[1])
    [finding] = [one for one in rows[0]["findings"] if advice in one["text"]]
    assert finding["flag"] == ""
    code, _, err = run("prepare", log, *options, "--positive", "1")
    assert code == 0
    assert "15 positive" in err


def test_columns_without_values_are_named_as_dropped(run, tmp_path):
    nan, rows = float("nan"), 60
    columns = {"all_nan": [nan] * rows, "mixed": [None, nan] * 30, "none": [None] * rows, "empty": [""] * rows}
    columns["amount"] = [float("inf"), nan, None, *(row / 7 for row in range(rows - 3))]
    table = pl.DataFrame({"click": [0, 0, 1] * 20, "user": ["a", "b"] * 30, **columns, "day": ["2026-01-01"] * rows})
    table.write_parquet(tmp_path / "log.parquet")
    rows, findings = dry_run(run, tmp_path / "log.parquet")
    for name in ("all_nan", "mixed", "none"):
        assert findings[name] == [("no value in any row; it is dropped", "--keep-all")]
    assert findings["empty"] == [("the same value in every row; it is dropped", "--keep-all")]
    assert findings["amount"] == [("1 infinite value, counted as missing", "")]
    assert rows["amount"]["missing"] == 0.05
    assert findings["day"] == [("1 day, 2026-01-01, 60 rows", "")]
    code, _, err = run("prepare", tmp_path / "log.parquet", "--label", "click", "--out", tmp_path / "out")
    assert code == 0, err
    assert "'all_nan', 'mixed', 'none', 'empty'" in err
    assert "a leak?" not in err


def dates(tmp_path, texts, rows=600):
    return write(
        tmp_path / "log.csv",
        "click,user,when",
        [(row % 2, f"u{row % 7}", texts[row * len(texts) // rows]) for row in range(rows)],
    )


@pytest.mark.parametrize(
    ("texts", "days"),
    [
        (["01/02/2026", "02/02/2026", "13/02/2026"], ("2026-02-01", "2026-02-02", "2026-02-13")),
        (["2/1/2026", "2/2/2026", "2/13/2026"], ("2026-02-01", "2026-02-02", "2026-02-13")),
        (["01.02.2026 10:30", "28.02.2026 9:05"], ("2026-02-01", "2026-02-28")),
        (["2026/02/01", "2026/02/03"], ("2026-02-01", "2026-02-03")),
        (["1/31/2026 1:05 PM", "2/1/2026 12:00 AM"], ("2026-01-31", "2026-02-01")),
    ],
)
def test_the_order_of_day_and_month_is_decided_by_any_row(run, tmp_path, texts, days):
    code, _, err = run("prepare", dates(tmp_path, texts), "--label", "click", "--out", tmp_path / "out", "-q")
    assert code == 0, err
    assert Dataset(tmp_path / "out").days() == days
    assert Dataset(tmp_path / "out").schema.names == ("user",)


def test_a_row_after_the_sample_decides(run, tmp_path, monkeypatch):
    monkeypatch.setattr("lpfs.data.infer.SAMPLE_ROWS", 50)
    log = dates(tmp_path, ["01/02/2026", "02/02/2026", "13/02/2026"])
    assert run("prepare", log, "--label", "click", "--out", tmp_path / "out", "-q")[0] == 0
    assert Dataset(tmp_path / "out").days() == ("2026-02-01", "2026-02-02", "2026-02-13")


@pytest.mark.parametrize(
    "texts", [["01/02/2026", "02/03/2026"], ["Jan 31 2026", "Feb 1 2026"], ["31-Jan-2026", "soon", "01-Feb-2026"]]
)
def test_dates_that_cannot_be_read_are_no_feature(run, tmp_path, texts):
    log = dates(tmp_path, texts)
    assert run("prepare", log, "--label", "click", "--out", tmp_path / "out", "-q")[0] == 0
    dataset = Dataset(tmp_path / "out")
    assert dataset.schema.names == ("user",)
    assert "dates in a format that is not known" in dataset.settings["ignored"]["when"]
    _, findings = dry_run(run, log)
    [(text, flag)] = findings["when"]
    assert text.startswith("dates, ")
    assert flag.startswith("--time when --time-format ")
    if texts[0].endswith("2026") and "/" in texts[0]:
        assert text == "dates, no row decides between %d/%m/%Y and %m/%d/%Y"
        assert run("prepare", log, "--label", "click", *shlex.split(flag), "--out", tmp_path / "two", "-q")[0] == 0
        assert Dataset(tmp_path / "two").days() == ("2026-02-01", "2026-03-02")


def test_one_text_among_dates_is_named_with_its_row(run, tmp_path):
    texts = [f"2026-01-{1 + row // 30:02d}" for row in range(600)]
    texts[17] = "soon"
    log = dates(tmp_path, texts)
    _, findings = dry_run(run, log)
    assert findings["when"] == [
        (f"dates, in the format iso, but 'soon' ({log}, line 19) is not; repair it", "--time when --time-format iso")
    ]
    code, _, err = run("prepare", log, "--label", "click", "--out", tmp_path / "out")
    assert code == 0
    assert f"but 'soon' ({log}, line 19) is not" in err
    assert "does not order the rows (--time when --time-format iso)" in err
    code, _, err = run("prepare", log, "--label", "click", "--time", "when", "--out", tmp_path / "two")
    assert "'soon' is not one of the format iso" in err
    text = log.read_text().replace("soon", "2026-01-01")
    log.write_text(text)
    assert run("prepare", log, "--label", "click", "--out", tmp_path / "two", "-q")[0] == 0
    assert len(Dataset(tmp_path / "two").days()) == 20


def test_one_text_among_dates_is_an_error(run, tmp_path):
    log = dates(tmp_path, ["31-01-2026", "soon", "01-02-2026"])
    code, _, err = run("prepare", log, "--label", "click", "--time", "when", "--out", tmp_path / "out", "-q")
    assert code == 1
    assert "the other rows are dates, but 'soon' is not" in err


def test_text_of_typed_tables_is_categorical(run, tmp_path):
    codes = [str(1000 + row * 7 % 400) for row in range(1600)]
    clicks = random.Random(5).choices([0, 1], k=1600)
    frame = pl.DataFrame({"click": clicks, "city": codes, "price": [f"{row}.5" for row in range(1600)]})
    frame.write_parquet(tmp_path / "log.parquet")
    frame.write_csv(tmp_path / "log.csv")
    rows, findings = dry_run(run, tmp_path / "log.parquet")
    assert (rows["city"]["kind"], rows["price"]["kind"]) == ("categorical", "ignore")
    assert findings["city"] == [("text that holds numbers, used as categories", "--kind city=numeric")]
    assert dry_run(run, tmp_path / "log.parquet", "--kind", "city=numeric")[0]["city"]["kind"] == "numeric"
    rows, _ = dry_run(run, tmp_path / "log.csv")
    assert (rows["city"]["kind"], rows["price"]["kind"]) == ("numeric", "numeric")


def integers(tmp_path, rows=6000):
    """A table in which the click depends on the identity of ``shop``, and on the size of ``spent``."""
    generator = random.Random(3)
    rates = [generator.random() for _ in range(200)]
    table = []
    for row in range(rows):
        shop, spent = generator.randrange(200), generator.randrange(2000)
        click = generator.random() < (0.8 * rates[shop] + 0.2 * (spent > 1000))
        table.append((int(click), shop, spent, row * 10 // rows))
    return write(tmp_path / "log.csv", "click,shop,spent,day", table)


def test_the_label_decides_whether_integers_are_ids(run, tmp_path):
    log = integers(tmp_path)
    arguments = ["prepare", log, "--label", "click", "--time", "day", "--replace", "--out", tmp_path / "out"]
    code, _, err = run(*arguments)
    assert code == 0, err
    assert "column 'shop': ids, not an amount: logloss on " in err
    assert "to overrule: --kind shop=numeric" in err
    assert "integers kept as amounts, ids do not predict the label better: 'spent'" in err
    dataset = Dataset(tmp_path / "out")
    assert (dataset.schema["shop"].kind, dataset.schema["spent"].kind) == ("categorical", "numeric")
    assert len(dataset.vocabulary("shop")) == 200
    rows, findings = dry_run(run, log, "--time", "day")
    assert (rows["shop"]["kind"], rows["spent"]["kind"]) == ("categorical", "numeric")
    assert findings["shop"][0][1] == "--kind shop=numeric"
    assert "reused" in run(*arguments)[2]
    code, _, err = run(*arguments, "--kind", "shop=numeric")
    assert code == 0
    assert "column 'shop'" not in err
    assert Dataset(tmp_path / "out").schema["shop"].kind == "numeric"


def test_only_training_rows_decide(run, tmp_path):
    """In the last day, which is the test day, the label is the parity of ``shop``."""
    lines = integers(tmp_path).read_text().splitlines()
    rows = [line.split(",") for line in lines[1:]]
    generator = random.Random(4)
    rows = [
        (int(shop) % 2 if day == "9" else generator.randrange(2), shop, spent, day) for _, shop, spent, day in rows * 3
    ]
    log = write(tmp_path / "log.csv", lines[0], sorted(rows, key=lambda row: row[3], reverse=True))
    assert run("prepare", log, "--label", "click", "--time", "day", "--out", tmp_path / "out", "-q")[0] == 0
    assert Dataset(tmp_path / "out").schema["shop"].kind == "numeric"


def test_a_near_unique_column_is_named_and_does_not_get_an_id_for_every_value(run, tmp_path):
    generator = random.Random(1)
    noise = [f"n{generator.randrange(20_000)}" for _ in range(4000)]
    rows = [(generator.randrange(2), name, f"u{row // 2}", f"v{row % 50}") for row, name in enumerate(noise)]
    log = write(tmp_path / "log.csv", "click,noise,pairs,few", rows)
    options = ["--label", "click", "--parts", "1", "--replace", "--out", tmp_path / "out"]
    code, _, err = run("prepare", log, *options)
    assert code == 0, err
    assert "near-unique: 'noise': " in err
    assert "leave it out with --kind noise=ignore" in err
    repeated = {name for name in noise if noise.count(name) > 1}
    dataset = Dataset(tmp_path / "out")
    assert set(dataset.vocabulary("noise")) == repeated
    assert len(dataset.vocabulary("pairs")) == 2000  # two rows for each value
    assert "'pairs'" not in err
    assert len(dataset.vocabulary("few")) == 50
    assert run("prepare", log, *options, "--min-count", "1")[0] == 0
    assert len(Dataset(tmp_path / "out").vocabulary("noise")) == len(set(noise))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "price"], "COLUMN=KIND"),
        (["--kind", "price=numerical"], "did you mean 'numeric'?"),
        (["--decimal", ";"], "decimal must be"),
        (["--separator", "ab"], "separator must be"),
        (["--time", "day", "--time-format", "day"], "time_format must be"),
        (["--time", "day", "--time-format", "%Q"], "time_format"),
    ],
)
def test_options_are_checked_before_data_are_read(run, tmp_path, options, message):
    code, _, err = run("prepare", tmp_path / "none.csv", "--label", "click", "--out", tmp_path / "out", *options)
    assert code == 1
    assert message in err
    assert "none.csv" not in err


def test_a_name_with_blanks(run, tmp_path):
    log = write(tmp_path / "log.csv", " click , user", [(row % 2, f"u{row % 3}") for row in range(20)])
    arguments = ["prepare", log, "--label", "click", "--parts", "1", "--out", tmp_path / "out", "-q"]
    code, _, err = run(*arguments)
    assert code == 1
    assert "--strip" in err
    assert run(*arguments, "--strip")[0] == 0
    assert Dataset(tmp_path / "out").schema.names == ("user",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "0"], "keep must be an integer >= 1"),
        (["--keep", "1", "--must-keep", "a,b"], "2 fields must be kept"),
        (["--keep", "2", "--penalty", "0.1"], "give one of"),
        (["--budget", "3"], "needs the cost of each field"),
        (["--budget", "3", "--costs", "none.toml"], "none.toml"),
        (["--max-auc-loss", "-1"], "max_auc_loss must be"),
        (["--penalty", "nan"], "penalty must be"),
        (["--batch-size", "0"], "batch_size must be"),
        (["--search-steps", "0"], "search_steps must be"),
        (["--device", "gpu"], "unknown device"),
        (["--model-option", "dim=0"], "dim must be"),
        (["--model-option", "hidden=0"], "hidden widths must be"),
        (["--kind", "a=number"], "COLUMN=KIND"),
        (["--min-count", "0"], "min_count must be"),
    ],
)
def test_options_of_select_are_checked_before_data_are_read(run, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("select", "none.csv", "--label", "click", "--out", tmp_path / "out", *options)
    assert code == 1
    assert message in err.splitlines()[-1]
    assert "none.csv" not in err


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_checked_without_data(model):
    check_backbone(Settings(model=model))


def test_a_run_prints_its_threads_and_resumes_with_them(run, tmp_path, clicks):
    options = ["--label", "click", "--time", "day", "--keep", "2", "--finish", "none", "--search-steps", "50"]
    options += ["--pretrain-steps", "50", "--model-option", "dim=2", "--model-option", "hidden=4"]
    code, _, err = run("select", clicks, *options, "--out", tmp_path / "run")
    assert code == 0, err
    assert "training on 1 CPU thread on " in err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["threads"] == 1
    torch.set_num_threads(2)
    assert run("select", "--resume", "--out", tmp_path / "run", "-q")[0] == 0
    assert torch.get_num_threads() == 1
    speeds = json.loads((tmp_path / "run" / "selection.json").read_text())["savings"]["kept"]
    assert speeds["rows_per_second_low"] <= speeds["rows_per_second"] <= speeds["rows_per_second_high"]
