"""Measure how strong the tests are: make many small changes to the source and count those that a test notices.

    python tools/mutants.py sample             # draw the mutants: the same seed and source give the same sample
    python tools/mutants.py collect --jobs 2   # record which test runs which line; repeats only what has changed
    python tools/mutants.py run --jobs 2       # run each mutant against the tests that run its line
    python tools/mutants.py run --again --budget 600    # run the survivors again, with more or with new tests
    python tools/mutants.py report             # print the table and the survivors; write the committed JSON

``run`` collects first if necessary. An interrupted ``collect`` or ``run`` continues where it stopped. Everything
except the report is written to artefacts/mutants.

A mutant changes one operator, condition, constant, statement or return value. Docstrings, type hints, strings,
decorators, ``if TYPE_CHECKING``, messages to the console or the log, and ``__repr__`` are not changed.
Results: ``killed`` (a test fails), ``timeout`` (counts as caught), ``survived``, ``not covered`` (no test runs the
line, counts as survived). Before a kill counts, the test must pass on the unchanged source.

Each job has its own copy of the repository. It imports torch and other slow packages, but not lpfs, and then forks
one process per mutant, which imports the changed lpfs and runs pytest.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("src/lpfs/gates", "src/lpfs/embeddings", "src/lpfs/methods/base.py", "src/lpfs/pipeline")
EXCLUDED = ("*_triton.py",)  # these files need a GPU
COMPILED = ("*_numba_loops.py",)  # numba compiles these files, so that coverage does not see their lines
# Not polars, pandas and onnxruntime: they start threads, which a forked process does not have.
PRELOADED = ("torch", "torch._dynamo", "numpy", "numba", "hypothesis", "coverage", "xdist.plugin", "pytest_cov.plugin")
QUIET = ("-r", "N", "-W", "ignore::pytest.PytestAssertRewriteWarning")  # of packages imported before pytest starts
PYTEST = ("-n", "0", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=no", *QUIET)
KILLED, SURVIVED, TIMEOUT, NOT_COVERED, ERROR = "killed", "survived", "timeout", "not covered", "error"
CAUGHT = (KILLED, TIMEOUT)
FIRST_BATCH = 5.0  # seconds: the fastest tests run alone first, because they catch most mutants
MEMORY = 12 << 30  # bytes: limit for the data of one test process

# ---------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """One change of the source; ``first`` and ``last`` are the lines whose tests can notice it."""

    file: str  # relative to the root of the repository
    line: int
    column: int  # in characters, from 1
    kind: str
    before: str
    after: str
    start: int  # bytes of the file that are replaced by ``after``
    end: int
    first: int
    last: int
    at_import: bool  # the line runs at import or is compiled, so that coverage knows no test for it

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]

    def is_valid(self, source: bytes) -> bool:
        """Return whether the result is valid Python and differs from the source."""
        with suppress(SyntaxError):
            return ast.dump(ast.parse(self.apply(source))) != ast.dump(ast.parse(source))
        return False


COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: (r"\*\*", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
SWAPPED = {"min": "max", "minimum": "maximum", "amin": "amax"}
SWAPPED |= {after: before for before, after in SWAPPED.items()}
MESSAGES = {"console", "logger", "logging", "log", "print"}
TYPES = {"int", "float", "str", "bool", "bytes", "list", "tuple", "dict", "set", "None"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Finder(ast.NodeVisitor):
    """List every mutant of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.compiled = matches(file, COMPILED)
        self.in_function = False
        self.lines = (1, len(self.starts))  # whose tests can notice a change of the present statement
        self.mutants: list[Mutant] = []
        self.visit(ast.parse(source))

    def offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        position: Any = node
        return (
            self.offset(position.lineno, position.col_offset),
            self.offset(position.end_lineno, position.end_col_offset),
        )

    def add(self, kind: str, start: int, end: int, after: str) -> None:
        """Add the mutant that replaces these bytes."""
        line = self.source.count(b"\n", 0, start) + 1
        column = len(self.source[self.starts[line - 1] : start].decode()) + 1
        at_import = self.compiled or not self.in_function
        before = self.source[start:end].decode()
        first, last = self.lines if self.in_function and not self.compiled else (1, len(self.starts))
        self.mutants.append(Mutant(self.file, line, column, kind, before, after, start, end, first, last, at_import))

    def add_operator(self, kind: str, left: ast.AST, right: ast.AST, pattern: str, after: str) -> None:
        """Add the mutant that replaces the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        bounded = rf"\b{pattern}\b" if pattern[0].isalpha() else pattern
        between = re.sub(rb"#.*", lambda comment: b" " * len(comment[0]), self.source[start:end])
        if found := re.search(bounded.encode(), between):
            self.add(kind, start + found.start(), start + found.end(), after)

    # Statements

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.stmt) or isinstance(node, (*FUNCTION, ast.ClassDef)):
            super().visit(node)
            return
        outer = self.lines
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno
        self.lines = (node.lineno, max(node.lineno, last or 0))
        super().visit(node)
        self.lines = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name == "__repr__" or any("overload" in ast.dump(mark) for mark in node.decorator_list):
            return
        outer, self.lines = self.lines, (node.body[0].lineno, node.end_lineno or 0)
        outside, self.in_function = self.in_function, True
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.in_function, self.lines = outside, outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Call):  # a docstring, a yield or an ellipsis
            if not isinstance(node.value, ast.Constant):
                self.generic_visit(node)
            return
        if MESSAGES.isdisjoint(dotted_names(node.value.func)):
            self.add("removed statement", *self.span(node), "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("removed statement", *self.span(node), "pass")
        pattern, after = ARITHMETIC.get(type(node.op), ("", ""))
        if after and not is_text(node.value):
            self.add_operator("arithmetic", node.target, node.value, pattern, after)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add("return value", *self.span(node.value), "None")
        self.generic_visit(node)

    # Conditions

    def negate(self, test: ast.expr) -> None:
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            start, end = self.span(test)
            self.add("condition", start, end, f"not ({self.source[start:end].decode()})")

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in dotted_names(node.test):
            for statement in node.orelse:
                self.visit(statement)
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While | ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_While  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    # Expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self.add_operator("comparison", left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        pattern, after = ARITHMETIC.get(type(node.op), ("", ""))
        union = isinstance(node.op, ast.BitOr) and (
            not self.in_function or TYPES & {*dotted_names(node.left), *dotted_names(node.right)}
        )
        if after and not union and not is_text(node.left) and not is_text(node.right):
            self.add_operator("arithmetic", node.left, node.right, pattern, after)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.add_operator("and/or", left, right, before, after)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, end = self.span(node.operand)
            self.add("removed not", self.span(node)[0], end, self.source[start:end].decode())
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add("constant", *self.span(node), str(not value))
        elif isinstance(value, int | float):
            for changed in {value + 1, value * 2} - {value}:
                self.add("constant", *self.span(node), repr(changed))

    def visit_Call(self, node: ast.Call) -> None:
        name = (dotted_names(node.func) or [""])[-1]
        if name in SWAPPED and isinstance(node.func, ast.Name | ast.Attribute):
            end = self.span(node.func)[1]
            self.add("min/max", end - len(name), end, SWAPPED[name])
        if name in ("cast", "TypeVar"):
            node = ast.Call(node.func, node.args[1:] if name == "cast" else [], [])
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts unchanged."""


def dotted_names(node: ast.AST) -> list[str]:
    """Return the names of ``a.b.c``; calls and indices in between are left out."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [*dotted_names(node.value), node.attr]
    if isinstance(node, ast.Constant) and node.value is None:
        return ["None"]
    return dotted_names(node.func) if isinstance(node, ast.Call) else []


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)


def target_files(root: Path, targets: Sequence[str]) -> list[str]:
    """Return the source files of the targets, relative to the root."""
    paths = [
        path for name in targets for path in ((root / name).rglob("*.py") if (root / name).is_dir() else [root / name])
    ]
    files = sorted({path.relative_to(root).as_posix() for path in paths})
    return [file for file in files if not matches(file, EXCLUDED)]


def draw_sample(root: Path, targets: Sequence[str], size: int, seed: int) -> list[Mutant]:
    """Return about ``size`` mutants, at least one per file: as many per file as its share of the lines.

    Within a file lines are drawn first, then one mutant of each line; a line is used again only if there are fewer
    lines than mutants to draw. Each file has its own generator: a change of one file keeps most of the others.
    """
    sources = {file: (root / file).read_bytes() for file in target_files(root, targets)}
    lines = {file: len(source.splitlines()) for file, source in sources.items()}
    sample: list[Mutant] = []
    for file, source in sources.items():
        generator = random.Random(f"{seed} {file}")
        quota = -(-size * lines[file] // sum(lines.values()))
        by_line: dict[int, list[Mutant]] = defaultdict(list)
        for mutant in sorted(Finder(file, source).mutants, key=lambda mutant: (mutant.start, mutant.after)):
            by_line[mutant.line].append(mutant)
        chosen: list[Mutant] = []
        while any(by_line.values()) and len(chosen) < quota:
            lines_left = [line for line in sorted(by_line) if by_line[line]]
            for line in generator.sample(lines_left, len(lines_left)):
                mutant = by_line[line].pop(generator.randrange(len(by_line[line])))
                if len(chosen) < quota and mutant.is_valid(source):
                    chosen.append(mutant)
        sample += sorted(chosen, key=lambda mutant: mutant.start)
    return sample


# ---------------------------------------------------------------- one test process


class Recorder:
    """pytest plugin: choose and order the tests; record results, times and, with coverage, the lines of each test.

    The lines that a fixture of wider scope runs belong to every test that uses it, not only to the first.
    """

    def __init__(self, tests: Sequence[str] | None = None, coverage: Any = None) -> None:
        self.order = None if tests is None else {test: index for index, test in enumerate(tests)}
        self.coverage = coverage
        self.context = ""  # the test or the fixture that runs now
        self.failed: list[str] = []
        self.passed: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.users: dict[str, set[str]] = defaultdict(set)  # of a fixture of wider scope: the tests that use it

    def pytest_configure(self) -> None:
        """Do not shrink failing examples: the first failure is enough."""
        with suppress(ImportError):
            from hypothesis import Phase, settings

            settings.register_profile("mutants", settings(), phases=(Phase.explicit, Phase.generate))
            settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = self.order
        if order is not None:
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def switch(self, context: str) -> None:
        self.context = context
        if self.coverage is not None:
            self.coverage.switch_context(context)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.switch(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self.switch("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        outer, started = self.context, time.perf_counter()
        fixture = f"fixture {fixturedef.baseid} {fixturedef.argname}"
        self.users[fixture].add(outer)
        self.switch(fixture)
        try:
            return (yield)
        finally:
            self.switch(outer)
            seconds = time.perf_counter() - started
            self.seconds[fixture] += seconds
            self.seconds[outer] -= seconds

    def pytest_runtest_setup(self, item: Any) -> None:
        for name, definitions in item._fixtureinfo.name2fixturedefs.items():
            for definition in definitions:
                if definition.scope != "function":
                    self.users[f"fixture {definition.baseid} {name}"].add(item.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def tests_of_lines(self, tree: Path) -> Json:
        """Return the passed tests with seconds, and for each line the positions of its tests in that list."""
        passed = [test for test in self.passed if test not in self.failed]
        seconds = {test: max(self.seconds[test], 0.001) for test in passed}
        for fixture, users in self.users.items():
            for test in users & seconds.keys():
                seconds[test] += self.seconds[fixture]
        position = {test: index for index, test in enumerate(passed)}
        lines: dict[str, dict[int, list[int]]] = {}
        data = self.coverage.get_data()
        for path in data.measured_files():
            by_line = {}
            for line, contexts in data.contexts_by_lineno(path).items():
                tests = {test for context in contexts for test in self.users.get(context, {context})}
                by_line[line] = sorted(position[test] for test in tests & position.keys())
            lines[Path(path).relative_to(tree).as_posix()] = {line: tests for line, tests in by_line.items() if tests}
        return {"tests": [[test, round(seconds[test], 4)] for test in passed], "lines": lines, "failed": self.failed}


def folders(tree: Path) -> list[str]:
    return [f"--rootdir={tree}", f"--basetemp={tree.with_suffix('.tmp')}"]


def run_tests(tree: Path, tests: Sequence[str]) -> Json:
    """Run these tests in this order, up to the first failure."""
    recorder = Recorder(tests)
    files = sorted({test.partition("::")[0] for test in tests})
    code = pytest.main([*PYTEST, *folders(tree), "-x", "-m", "", *files], plugins=[recorder])
    return {"code": int(code), "failed": recorder.failed, "passed": len(recorder.passed)}


def run_with_coverage(tree: Path, file: str, markers: str | None, targets: Sequence[str]) -> Json:
    """Run a test file and return which of its tests run which lines of the targets."""
    from coverage import Coverage

    coverage = Coverage(data_file=None, config_file=False, include=[str(tree / name) for name in targets])
    coverage.start()
    recorder = Recorder(coverage=coverage)
    chosen = [] if markers is None else ["-m", markers]
    pytest.main([*PYTEST, *folders(tree), *chosen, file], plugins=[recorder])
    coverage.stop()
    return recorder.tests_of_lines(tree)


def fork(work: Callable[[], Json], tree: Path, timeout: float, numba_cache: Path | None = None) -> Json:
    """Return the result of ``work`` in a forked process that imports from ``tree``; {} if it crashes.

    After ``timeout`` seconds the process and all its children are killed; the result is {"timeout": True}.
    """
    result, log = tree.with_suffix(".json"), tree.with_suffix(".log")
    result.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(tree)
            sys.path[0] = os.environ["PYTHONPATH"] = str(tree / "src")
            if numba_cache is not None:
                os.environ["NUMBA_CACHE_DIR"] = str(numba_cache)
                importlib.import_module("numba").config.CACHE_DIR = str(numba_cache)
            result.write_text(json.dumps(work()), "utf-8")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    deadline = time.monotonic() + timeout
    timed_out = False
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            timed_out = True
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.02)
    with suppress(ProcessLookupError, PermissionError):  # what the tests started and left behind
        os.killpg(child, signal.SIGKILL)
    if timed_out:
        return {"timeout": True}
    with suppress(FileNotFoundError, json.JSONDecodeError):
        values: Json = json.loads(result.read_text("utf-8"))
        return values
    return {}


# ---------------------------------------------------------------- jobs

_tree = Path()  # the copy of the repository that belongs to this job
_broken: set[str] = set()  # tests that fail on the unchanged source when they run alone


def start_job(trees: Any) -> None:
    global _tree
    _tree = Path(trees.get())
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_jobs(root: Path, jobs: int, preload: Sequence[str], tasks: Sequence[Callable[[], Json]]) -> Iterator[Json]:
    """Run the tasks in ``jobs`` processes, each with its own copy of the repository; yield the results."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ[name] = "1"
    context = multiprocessing.get_context("fork")
    trees = context.Queue()
    for number in range(jobs):
        tree = work_dir(root) / f"tree{number}"
        synchronize(root, tree)
        trees.put(str(tree))
    for name in preload:
        with suppress(ImportError):
            importlib.import_module(name)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=start_job, initargs=(trees,)) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def synchronize(root: Path, tree: Path) -> None:
    """Make ``tree`` a copy of the files that git does not ignore; caches in it are kept, times of files too."""
    listing = subprocess.run(
        ["git", "-C", root, "ls-files", "-coz", "--exclude-standard"], capture_output=True, check=True
    )
    files = {name for name in listing.stdout.decode().split("\0") if name and (root / name).is_file()}
    for path in tree.rglob("*"):
        cached = {"__pycache__", ".hypothesis"} & set(path.parts)
        if path.is_file() and not cached and path.relative_to(tree).as_posix() not in files:
            path.unlink()
    for name in files:
        source, copy = (root / name).stat(), tree / name
        if copy.exists() and (copy.stat().st_mtime_ns, copy.stat().st_size) == (source.st_mtime_ns, source.st_size):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, copy)


def collect_file(file: str, digest: str, markers: str | None, targets: Sequence[str]) -> Json:
    started = time.perf_counter()
    result = fork(partial(run_with_coverage, _tree, file, markers, targets), _tree, timeout=1800)
    values = {"tests": [], "lines": {}, "failed": ["the process crashed or ran too long"]} | result
    return {"file": file, "digest": digest, "seconds": round(time.perf_counter() - started, 1), **values}


def run_mutant(mutant: Mutant, tests: dict[str, float], budget: float) -> Json:
    """Run the tests, fastest first, on a copy with the mutant; return the result as a line of the results file."""
    started = time.perf_counter()
    chosen: list[str] = []
    spent = 0.0
    for test in sorted(tests, key=lambda test: (tests[test], test)):
        spent += tests[test]
        if spent <= budget or not chosen:
            chosen.append(test)
    result, by = (SURVIVED, "") if chosen else (NOT_COVERED, "")
    while chosen:
        chosen = [test for test in chosen if test not in _broken]
        result, by, suspects = run_chosen(mutant, {test: tests[test] for test in chosen})
        if result != KILLED or not (broken := failing_unchanged(tuple(suspects))):
            break
        _broken.update(broken)
    return {
        **asdict(mutant),
        "result": result,
        "by": by,
        "tests": len(chosen),
        "left_out": len(tests) - len(chosen),
        "seconds": round(time.perf_counter() - started, 2),
    }


def run_chosen(mutant: Mutant, tests: dict[str, float]) -> tuple[str, str, list[str]]:
    """Return the result, the test that failed, and the tests to check on the unchanged source."""
    path = _tree / mutant.file
    source, times = path.read_bytes(), path.stat()
    slow = matches(mutant.file, COMPILED)
    numba_cache = _tree.with_suffix(".numba") if slow else None
    names = list(tests)
    fast = sum(total <= FIRST_BATCH for total in accumulate(tests.values()))
    try:
        forget(path)
        path.write_bytes(mutant.apply(source))
        for batch in (names[:fast], names[fast:]):
            if not batch:
                continue
            timeout = 30 + 8 * sum(tests[name] for name in batch) + 300 * slow
            outcome = fork(partial(run_tests, _tree, batch), _tree, timeout, numba_cache)
            if "timeout" in outcome:
                return TIMEOUT, "", []
            if not outcome:
                return KILLED, "the process crashed", batch
            if outcome["failed"]:
                by = outcome["failed"][0]
                return KILLED, by, [next((test for test in batch if test.startswith(by)), batch[0])]
            if not outcome["passed"]:
                return ERROR, f"pytest ended with code {outcome['code']} and ran no test", []
        return SURVIVED, "", []
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        forget(path)
        if numba_cache is not None:
            shutil.rmtree(numba_cache, ignore_errors=True)


def forget(path: Path) -> None:
    """Remove the bytecode of a source file: Python compares only its size and the second of its change."""
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


@cache
def failing_unchanged(tests: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first of these tests that fails on the unchanged source, or all of them if the process ends."""
    outcome = fork(partial(run_tests, _tree, tests), _tree, timeout=600)
    if "failed" not in outcome:
        return tests
    return tuple(test for test in outcome["failed"][:1] if test in tests) or (tests if outcome["failed"] else ())


# ---------------------------------------------------------------- files


def work_dir(root: Path) -> Path:
    return root / "artefacts" / "mutants"


def read_lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def append_line(path: Path, values: Json) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values, ensure_ascii=False) + "\n")


def checksum(root: Path, files: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.encode() + b"\0" + (root / file).read_bytes())
    return digest.hexdigest()[:16]


def load_sample(options: argparse.Namespace) -> tuple[Json, list[Mutant]]:
    """Return the drawn sample; its source must be the present one."""
    path = work_dir(options.root) / "sample.json"
    if not path.exists():
        sample(options)
    values: Json = json.loads(path.read_text("utf-8"))
    if values["source"] != checksum(options.root, target_files(options.root, values["targets"])):
        sys.exit("the source changed after the sample was drawn; run: python tools/mutants.py sample")
    return values, [Mutant(**mutant) for mutant in values["mutants"]]


def latest_results(root: Path, source: str) -> dict[tuple[str, int, str], Json]:
    """Return the last result of every mutant of this source; a mutant is known by file, offset and new text."""
    results = (line for line in read_lines(work_dir(root) / "results.jsonl") if line["source"] == source)
    return {(line["file"], line["start"], line["after"]): line for line in results}


def importers(root: Path, file: str) -> list[str]:
    """Return the files of the same package that import this module."""
    module = Path(file).stem
    pattern = re.compile(rf"^\s*(from|import)\b.*\b{module}\b", re.MULTILINE)
    return [
        path.relative_to(root).as_posix()
        for path in sorted((root / file).parent.glob("*.py"))
        if path.stem != module and pattern.search(path.read_text("utf-8"))
    ]


# ---------------------------------------------------------------- commands


def sample(options: argparse.Namespace) -> None:
    """Draw the sample and write it to sample.json."""
    mutants = draw_sample(options.root, options.targets, options.size, options.seed)
    values = {
        "seed": options.seed,
        "size": options.size,
        "targets": list(options.targets),
        "source": checksum(options.root, target_files(options.root, options.targets)),
        "mutants": [asdict(mutant) for mutant in mutants],
    }
    path = work_dir(options.root) / "sample.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n", "utf-8")
    kinds = Counter(mutant.kind for mutant in mutants)
    print(f"{len(mutants)} mutants in {path}")
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))


def collect(options: argparse.Namespace) -> list[Json]:
    """Record which test runs which line, for every test file that has no valid record; return all records."""
    root, path = options.root, work_dir(options.root) / "map.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    every = {file.relative_to(root).as_posix() for file in (root / "tests").rglob("*.py")}
    is_test = {file for file in every if Path(file).name.startswith("test_")}
    test_files = sorted(file for file in is_test if file.startswith(options.tests))
    targets = target_files(root, options.targets)
    common = checksum(root, [*targets, *(every - is_test)]) + str(options.markers)
    digests = {file: f"{common} {checksum(root, [file])}" for file in test_files}
    known = {line["file"]: line for line in read_lines(path) if digests.get(line["file"]) == line["digest"]}
    stale = [file for file in test_files if file not in known]
    tasks = [partial(collect_file, file, digests[file], options.markers, targets) for file in stale]
    for line in run_jobs(root, options.jobs, options.preload, tasks) if tasks else ():
        append_line(path, line)
        known[line["file"]] = line
        failed = f", without {len(line['failed'])} failed: {', '.join(line['failed'][:3])}" if line["failed"] else ""
        print(f"{line['file']}: {len(line['tests'])} tests, {line['seconds']} s{failed}", flush=True)
    return list(known.values())


def tests_by_line(records: Iterable[Json]) -> dict[str, dict[int, dict[str, float]]]:
    """Return for each source file and line the tests that run it, with their seconds."""
    merged: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        for file, lines in record["lines"].items():
            for line, tests in lines.items():
                merged[file][int(line)].update(record["tests"][index] for index in tests)
    return merged


def covering_tests(root: Path, mutant: Mutant, lines: dict[str, dict[int, dict[str, float]]]) -> dict[str, float]:
    """Return the tests that can notice the mutant.

    A line that runs at import or is compiled has no tests of its own: those of its file count, or else those of
    the files that import it.
    """
    tests: dict[str, float] = {}
    for line, runners in lines.get(mutant.file, {}).items():
        if mutant.first <= line <= mutant.last:
            tests.update(runners)
    if not tests and mutant.at_import:
        for file in importers(root, mutant.file):
            for runners in lines.get(file, {}).values():
                tests.update(runners)
    return tests


def run(options: argparse.Namespace) -> None:
    """Run the mutants that have no result yet and append the results to results.jsonl."""
    values, mutants = load_sample(options)
    lines = tests_by_line(collect(options))
    known = latest_results(options.root, values["source"])
    repeated = (ERROR, SURVIVED, NOT_COVERED) if options.again else (ERROR,)
    waiting = [
        mutant
        for mutant in mutants
        if options.only in mutant.file
        and known.get((mutant.file, mutant.start, mutant.after), {"result": ERROR})["result"] in repeated
    ]
    random.Random(0).shuffle(waiting)  # the share so far is then an estimate of the final share
    waiting = waiting[: options.limit]
    tasks = [
        partial(run_mutant, mutant, covering_tests(options.root, mutant, lines), options.budget) for mutant in waiting
    ]
    started, caught = time.perf_counter(), 0
    for count, line in enumerate(run_jobs(options.root, options.jobs, options.preload, tasks) if tasks else (), 1):
        append_line(work_dir(options.root) / "results.jsonl", {"source": values["source"], **line})
        caught += line["result"] in CAUGHT
        print(f"{count}/{len(tasks)} {describe(line)} {line['result']} {line['by']} ({line['seconds']} s)", flush=True)
    minutes = (time.perf_counter() - started) / 60
    if tasks:
        print(f"{caught} of {len(tasks)} caught, {len(tasks) / minutes:.1f} mutants per minute, {options.jobs} jobs")


def describe(line: Json) -> str:
    before, after = (" ".join(line[key].split()) for key in ("before", "after"))
    return f"{line['file']}:{line['line']}:{line['column']} {line['kind']}: {before} -> {after}"


def package(file: str) -> str:
    """Return the package of a file, as in the targets: gates, embeddings, methods/base, pipeline."""
    parts = Path(file).with_suffix("").parts[2:]
    return "/".join(parts) if parts[:-1] == ("methods",) else "/".join(parts[:1])


def report(options: argparse.Namespace) -> None:
    """Print the table and the survivors, and write the committed result."""
    values, mutants = load_sample(options)
    known = latest_results(options.root, values["source"])
    lines = [known.get((mutant.file, mutant.start, mutant.after)) for mutant in mutants]
    done = [line for line in lines if line is not None and line["result"] != ERROR]
    tables: dict[str, Counter[str]] = defaultdict(Counter)
    for line in done:
        for name in (package(line["file"]), "all"):
            tables[name].update([line["result"], "mutants"])
    rows = {}
    for name in [*sorted(tables.keys() - {"all"}), "all"]:
        counts = tables[name]
        share = sum(counts[result] for result in CAUGHT) / max(counts["mutants"], 1)
        rows[name] = {key: counts[key] for key in ("mutants", KILLED, TIMEOUT, SURVIVED, NOT_COVERED)}
        rows[name]["caught"] = round(share, 4)  # type: ignore[assignment]
    print(f"{'':14}" + "".join(f"{key:>13}" for key in rows["all"]))
    for name, row in rows.items():
        print(f"{name:14}" + "".join(f"{row[key]:>13}" for key in row if key != "caught") + f"{row['caught']:>13.1%}")
    survivors = [line for line in done if line["result"] not in CAUGHT]
    for line in survivors:
        print(f"{describe(line)}  {line['result']}, {line['tests']} tests run, {line['left_out']} left out")
    if len(done) < len(mutants):
        missing = len(mutants) - len(done)
        print(f"{missing} of {len(mutants)} mutants have no result; run: python tools/mutants.py run")
    shown = ("file", "line", "column", "kind", "before", "after", "result", "tests", "left_out")
    result = {
        "configuration": {
            "command": "; ".join(f"python tools/mutants.py {name}" for name in ("sample", "run", "report")),
            **{key: values[key] for key in ("seed", "size", "targets", "source")},
            "excluded": EXCLUDED,
            "python": platform.python_version(),
        },
        "mutants": len(mutants),
        "without_result": len(mutants) - len(done),
        "kinds": dict(Counter(mutant.kind for mutant in mutants).most_common()),
        "packages": rows,
        "survivors": [{key: line[key] for key in shown} for line in survivors],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", "utf-8")


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"sample": sample, "collect": collect, "run": run, "report": report}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: this one)")
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="files and folders to change")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--size", type=int, default=400, help="smallest number of mutants (default: 400)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--only", default="", metavar="PACKAGE", help="run only files with this in their path")
    parser.add_argument("--limit", type=int, metavar="N", help="run at most N mutants")
    parser.add_argument("--again", action="store_true", help="run the survivors again")
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds of tests per mutant, the fastest first (default: 60)"
    )
    parser.add_argument("--tests", default="tests", help="use only the test files whose path starts so")
    parser.add_argument("--markers", help="tests to use, as in pytest -m (default: those of make test)")
    parser.add_argument("--preload", nargs="*", default=PRELOADED, help="packages to import before forking")
    parser.add_argument("--out", type=Path, help="the report (default: benchmarks/results/mutants.json)")
    options = parser.parse_args()
    options.root = options.root.resolve()
    options.out = options.out or options.root / "benchmarks" / "results" / "mutants.json"
    commands[options.command](options)


if __name__ == "__main__":
    main()
