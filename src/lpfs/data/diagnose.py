"""What ``prepare --dry-run`` says about a table: labels, days, missing values and odd columns, each with its flag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from lpfs._console import Console
from lpfs._text import quote_command
from lpfs.data.days import make_day_assigner
from lpfs.data.encoders.vocabulary import is_near_unique
from lpfs.data.fields import FieldPlan
from lpfs.data.fit_encoders import training_days
from lpfs.data.infer import SAMPLE_ROWS, SPLIT_REASON, TIME_REASON, UNREADABLE_DATES, infer, read_number_text
from lpfs.data.integers import decide_integers
from lpfs.data.parsing import cast_column, most_date_formats, not_of_format, parse_numbers, replace_missing_marks
from lpfs.data.passes import MAX_LABELS, label_advice, read_label
from lpfs.data.planning import PreparePlan
from lpfs.data.reencode import ReencodePlan
from lpfs.data.sources.base import TableSource
from lpfs.errors import DataError

MAX_BYTES = 1 << 30  # of a larger log only the first rows are examined
MIN_NUMBER_SHARE = 0.5  # share of numbers in a text column from which its other texts are reported
MAX_OTHER_TEXTS = 3  # such texts of a column
MAX_LINES = 40  # lines of a table on the console


@dataclass(frozen=True)
class Finding:
    """Something to know about a column, and the option that changes it."""

    column: str
    text: str
    flag: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The plan with all kinds decided, the share of missing values of each column, and the findings."""

    plan: PreparePlan
    missing: dict[str, float]
    findings: tuple[Finding, ...]

    def report(self, console: Console) -> None:
        """Print the shares of missing values, the largest first, and the findings."""
        shares = sorted(((share, name) for name, share in self.missing.items() if share), key=lambda pair: -pair[0])
        self._table(console, "Missing values", ("column", "share"), [(name, f"{share:.1%}") for share, name in shares])
        findings = [(finding.column, finding.text, finding.flag) for finding in self.findings]
        self._table(console, "Findings", ("column", "finding", "flag"), findings)

    @staticmethod
    def _table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if rows:
            console.table(title, header, rows[:MAX_LINES], numeric=False)
        if len(rows) > MAX_LINES:
            console.message(f"  … and {len(rows) - MAX_LINES} more; --json prints all")

    def to_json(self, fields: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of the table of fields with the missing share and the findings of each column."""

        def findings(column: str) -> list[dict[str, str]]:
            mine = [finding for finding in self.findings if finding.column == column]
            return [{"text": finding.text, "flag": finding.flag} for finding in mine]

        return [
            {**row, "missing": self.missing.get(row["column"], 0.0), "findings": findings(row["column"])}
            for row in fields
        ]


def diagnose(plan: PreparePlan, console: Console) -> Diagnosis:
    """Examine the columns of the first rows, and the labels and days of all rows unless the log is large.

    Nothing is found about rows that are encoded like another Dataset: all its decisions are taken.
    """
    if isinstance(plan, ReencodePlan):
        return Diagnosis(plan, {}, ())
    raw = plan.source.sample(SAMPLE_ROWS)
    sample = replace_missing_marks(raw, plan.options.missing)
    examined, findings = plan, []
    if plan.source.size > MAX_BYTES:
        examined = replace(plan, source=TableSource(raw))
        findings.append(
            Finding(plan.options.label, f"a large log: labels and days are those of the first {raw.height:,} rows")
        )
    examined, row_findings = _examine_rows(examined, console)
    findings += row_findings
    plan = replace(examined, source=plan.source)
    for field in plan.plans:
        findings += _examine_column(field, sample[field.name], plan)
    kinds = {field.name: field for field in plan.plans}
    missing = {name: _missing_share(sample[name], kinds.get(name)) for name in sample.columns}
    return Diagnosis(plan, missing, tuple(findings))


def _examine_rows(plan: PreparePlan, console: Console) -> tuple[PreparePlan, list[Finding]]:
    """Return the plan with the kinds of integers decided, and the findings about labels and days."""
    options = plan.options
    columns = [name for name in (options.label, options.time, options.split) if name is not None]
    findings: list[Finding] = []
    counts: Counter[str | None] = Counter()
    days: Counter[int] = Counter()
    assigner, positives, problem = None, 0, ""
    try:
        assigner = make_day_assigner(
            plan.source,
            time=options.time,
            format=options.time_format,
            parts=options.parts,
            ordered=options.ordered,
            progress=lambda chunks: chunks,
            split=options.split,
            shuffle=options.seed if options.shuffle else None,
        )
        assigner.start_at()
    except DataError as error:
        findings.append(Finding(options.time or options.split or options.label, str(error)))
    with console.progress("examining") as update:
        done = 0
        for chunk in plan.source.chunks(columns):
            frame = replace_missing_marks(chunk.frame, options.missing)
            values = cast_column(frame[options.label], pl.String).rename("value").value_counts(name="count")
            counts.update(dict(values.iter_rows()))
            try:
                positives += int(read_label(frame[options.label], options, chunk.locate).sum())
            except DataError as error:
                problem = problem or str(error)
            for day, rows in assigner.assign(chunk) if assigner is not None else ():
                days[day] += chunk.frame.height if rows is None else len(rows)
            done += chunk.consumed
            update(done, plan.source.size, sum(counts.values()))
    findings += _label_findings(plan, counts, positives, problem)
    if assigner is None:
        return plan, findings
    findings.append(_days_finding(plan, assigner.days, days))
    if not problem:
        try:
            train = training_days(assigner, options)
            decided = decide_integers(plan, assigner, set(range(train)), Console(quiet=True))
            for before, after in zip(plan.plans, decided.plans, strict=True):
                if before.kind != after.kind:
                    flag = quote_command("--kind", f"{after.name}={before.kind}")
                    findings.append(Finding(after.name, f"used as ids: {after.why}", flag))
            plan = decided
        except DataError as error:
            findings.append(Finding(options.label, str(error)))
    return plan, findings


def _label_findings(plan: PreparePlan, counts: Counter[str | None], positives: int, problem: str) -> Iterator[Finding]:
    """Yield the values of the label, and what is wrong with them."""
    label, rows, missing = plan.options.label, sum(counts.values()), counts.pop(None, 0)
    common = counts.most_common()
    listed = ", ".join(f"{value!r:.60} {count:,}" for value, count in common[:MAX_LABELS])
    listed += f" and {len(common) - MAX_LABELS} more values" * (len(common) > MAX_LABELS)
    if missing:
        yield Finding(label, f"the label is missing in {missing:,} of {rows:,} rows; remove them")
    elif problem:
        advice, flag = label_advice([str(value) for value, _ in common])
        yield Finding(label, f"not a label of 0 and 1: {listed}" + f"; {advice}" * (not flag), flag)
    elif positives in (0, rows):
        flag = label_advice([str(value) for value, _ in common])[1]
        yield Finding(label, f"{int(positives > 0)} in every row, no model can be trained: {listed}", flag)
    else:
        yield Finding(label, f"{positives / rows:.2%} of {rows:,} rows are positive: {listed}")


def _days_finding(plan: PreparePlan, names: Sequence[str], rows: Counter[int]) -> Finding:
    """Return the number of days, the first and the last, and the rows per day."""
    column = plan.options.time or plan.options.split or plan.options.label
    sizes = [rows[day] for day in range(len(names))]
    unit, by_order = ("day", False) if plan.options.time or plan.options.parts == "files" else ("part", True)
    if len(names) > 1:
        size = " to ".join(dict.fromkeys((f"{min(sizes):,}", f"{max(sizes):,}")))
        text = f"{len(names)} {unit}s, {names[0]} to {names[-1]}, {size} rows each"
    else:
        text = f"1 {unit}, {names[0]}, {sizes[0]:,} rows"
    if by_order and not plan.options.split:
        return Finding(column, f"no time column: the rows make {text}", "--time COLUMN")
    return Finding(column, text)


def _examine_column(field: FieldPlan, values: pl.Series, plan: PreparePlan) -> Iterator[Finding]:
    """Yield the findings about a column of the first rows."""
    name, present, roles = field.name, values.drop_nulls(), (plan.options.time, plan.options.split)

    def as_kind(kind: str) -> str:
        return quote_command("--kind", f"{name}={kind}")

    if name != name.strip():
        yield Finding(name, "blanks around the name", "--strip")
    if field.why == TIME_REASON and name not in roles:
        yield Finding(name, "times, which are not used as a field", quote_command("--time", name))
    if field.why == UNREADABLE_DATES and name not in roles:
        yield _unreadable_dates_finding(present, plan)
    if field.why == SPLIT_REASON:
        yield Finding(name, "names the part of each row", quote_command("--split", name))
    prepared, drops = _as_prepared(values, field), len(values) > 1 and not plan.options.keep_all
    if name in roles:
        return
    if prepared.null_count() == len(values):
        if drops and field.kind != "ignore":
            yield Finding(name, "no value in any row; it is dropped", "--keep-all")
        return
    text_findings = list(_examine_text(field, present, plan)) if present.dtype == pl.String else []
    yield from text_findings
    if any(finding.flag.startswith("--missing") for finding in text_findings):
        return  # it is a column of numbers then
    if present.dtype.is_nested() or field.kind == "ignore":
        return
    distinct = present.n_unique()
    if field.kind == "categorical" and is_near_unique(distinct, len(present)):
        yield Finding(name, f"near-unique: {distinct:,} values in {len(present):,} rows", as_kind("ignore"))
    if field.kind == "numeric":
        numbers = parse_numbers(present, field.decimal or ".") if present.dtype == pl.String else present
        infinite = int(numbers.is_infinite().sum()) if numbers.dtype.is_float() else 0
        if infinite:
            yield Finding(name, f"{infinite:,} infinite value{'s' * (infinite > 1)}, counted as missing")
    if drops and not prepared.null_count() and prepared.n_unique() == 1:
        yield Finding(name, "the same value in every row; it is dropped", "--keep-all")


def find_unreadable_dates(plan: PreparePlan) -> list[Finding]:
    """Return a finding for each column of dates that does not order the rows because they cannot be read."""
    names = [field.name for field in plan.plans if field.why == UNREADABLE_DATES and field.name != plan.options.split]
    if not names or plan.options.time is not None:
        return []
    sample = replace_missing_marks(plan.source.sample(SAMPLE_ROWS), plan.options.missing)
    return [_unreadable_dates_finding(sample[name].drop_nulls(), plan) for name in names]


def _unreadable_dates_finding(dates: pl.Series, plan: PreparePlan) -> Finding:
    """Return why dates of the first rows cannot be read: their format is ambiguous, not known, or not that of all."""
    name, formats = dates.name, most_date_formats(dates)
    problem = "in a format that is not known" if not formats else f"in the format {formats[0]}"
    if len(formats) > 1:
        problem = f"no row decides between {' and '.join(formats)}"
    elif formats and not_of_format(dates, formats[0]).any():
        problem += f", but {_first_other(plan, name, formats[0])} is not; repair it"
    example = formats[0] if formats else "FORMAT"
    return Finding(name, f"dates, {problem}", quote_command("--time", name, "--time-format", example))


def _first_other(plan: PreparePlan, column: str, time_format: str) -> str:
    """Return the first value that does not fit a time format, and where it is."""
    for chunk in plan.source.chunks([column]):
        texts = replace_missing_marks(chunk.frame, plan.options.missing)[column]
        others = not_of_format(texts, time_format)
        if others.any():
            row = int(others.arg_max() or 0)
            return f"{texts[row]!r:.60} ({chunk.locate(row)})"
    return "a value"


def _examine_text(field: FieldPlan, texts: pl.Series, plan: PreparePlan) -> Iterator[Finding]:
    """Yield the findings about a column of text: blanks, numbers, texts among numbers."""
    name, typed = field.name, plan.source.typed
    blanks = int((texts != texts.str.strip_chars()).sum())
    if blanks:
        yield Finding(name, f"blanks around {blanks:,} of {len(texts):,} values", "" if typed else "--strip")
    if field.kind not in ("categorical", "numeric"):
        return
    numbers = read_number_text(texts, plan.options.decimal)
    if numbers is None:
        parsed = parse_numbers(texts, plan.options.decimal or ".")
        others = texts.filter(parsed.is_null()).unique(maintain_order=True)
        if len(others) <= MAX_OTHER_TEXTS and parsed.is_not_null().mean() >= MIN_NUMBER_SHARE:  # type: ignore[operator]
            flags = [word for text in others.to_list() for word in ("--missing", text)]
            yield Finding(name, f"numbers, but also {', '.join(map(repr, others.to_list()))}", quote_command(*flags))
    elif field.kind == "categorical" and typed and infer(texts, typed=False).kind == "numeric":
        yield Finding(name, "text that holds numbers, used as categories", quote_command("--kind", f"{name}=numeric"))
    elif field.kind == "numeric" and numbers.signs.strip():
        example = texts.filter(numbers.numbers.is_not_null()).head(1).item()
        value = numbers.numbers.drop_nulls()[0]
        keep = quote_command("--kind", f"{name}=categorical")
        other_mark = "," if numbers.decimal == "." else "."
        if plan.options.decimal is None and "," in numbers.signs and read_number_text(texts, other_mark) is not None:
            keep = quote_command("--decimal", other_mark)
        yield Finding(name, f"numbers in text: {example!r:.60} is read as {value:g}", keep)


def _as_prepared(values: pl.Series, field: FieldPlan | None) -> pl.Series:
    """Return a column with null for all that counts as missing: NaN, in numbers infinities and texts as well."""
    numeric = field is not None and field.kind == "numeric" and field.width == 1
    if numeric and values.dtype == pl.String:
        values = parse_numbers(values, field.decimal or ".")  # type: ignore[union-attr]
    if values.dtype.is_float():
        values = values.set(~values.is_finite(), None) if numeric else values.fill_nan(None)
    return values


def _missing_share(values: pl.Series, field: FieldPlan | None) -> float:
    """Return the share of missing values."""
    return float(np.round(_as_prepared(values, field).null_count() / max(1, len(values)), 6))
