"""tools/mutants.py: the sample is repeatable, mutants are valid Python, a test without assertions kills none."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "mutants.py"
spec = importlib.util.spec_from_file_location("tools_mutants", TOOL)
assert spec is not None
assert spec.loader is not None
mutants = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = mutants  # dataclasses look up their module
spec.loader.exec_module(mutants)

SOURCE = """
def f(λ, flag=True):
    count = λ + 1 if λ < 2.5 and flag else max(λ, 3)
    while not flag:
        count *= 2
        items.append(count)
    return [x for x in items if x]
"""
EXPECTED = {
    ("constant", "True", "False"),
    ("arithmetic", "+", "-"),
    ("constant", "1", "2"),
    ("condition", "λ < 2.5 and flag", "not (λ < 2.5 and flag)"),
    ("comparison", "<", "<="),
    ("constant", "2.5", "3.5"),
    ("constant", "2.5", "5.0"),
    ("and/or", "and", "or"),
    ("min/max", "max", "min"),
    ("constant", "3", "4"),
    ("constant", "3", "6"),
    ("removed not", "not flag", "flag"),
    ("removed statement", "count *= 2", "pass"),
    ("arithmetic", "*", "/"),
    ("constant", "2", "3"),
    ("constant", "2", "4"),
    ("removed statement", "items.append(count)", "pass"),
    ("return value", "[x for x in items if x]", "None"),
    ("condition", "x", "not (x)"),
}
UNCHANGED = '''
"""A docstring with 1 + 2 and max(3, 4)."""
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    limit = 1 + 2


@cache(maxsize=1)
class C:
    size: Annotated[int, 3] | None

    def __repr__(self):
        return str(1 + 2)

    def f(self, x: Annotated[int, 4]) -> int | None:
        logger.info(x + 1)
        self.console.message(f"{x + 1:.3f}" + "text")
'''


def find(source: str) -> list[mutants.Mutant]:
    return mutants.Finder("a.py", source.encode()).mutants


def test_every_kind_of_mutant_is_found_and_is_valid_different_code():
    found = find(SOURCE)
    assert {(mutant.kind, mutant.before, mutant.after) for mutant in found} == EXPECTED
    lines = SOURCE.splitlines()
    for mutant in found:
        assert mutant.is_valid(SOURCE.encode())
        assert lines[mutant.line - 1][mutant.column - 1 :].startswith(mutant.before)


@pytest.mark.parametrize(
    ("before", "after"), [(operator, text) for operator, text in mutants.COMPARISONS.values()], ids=str
)
def test_comparisons_are_replaced(before, after):
    source = f"def f(a, b):\n    return (a) {before.replace(chr(92) + 's+', ' ')} (b)  # < > == in is\n"
    changed = [mutant.apply(source.encode()).decode() for mutant in find(source) if mutant.kind == "comparison"]
    assert changed == [source.replace(f"(a) {before.replace(chr(92) + 's+', ' ')} (b)", f"(a) {after} (b)")]


def test_texts_types_messages_and_decorators_are_not_changed():
    assert find(UNCHANGED) == []


def test_the_sample_depends_only_on_seed_and_source(tmp_path):
    for name, copies in (("short.py", 2), ("long.py", 8)):
        (tmp_path / name).write_text(SOURCE * copies, "utf-8")
    (tmp_path / "loop_triton.py").write_text(SOURCE, "utf-8")
    first, again, other = (mutants.draw_sample(tmp_path, ["."], 30, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert {name: sum(mutant.file == name for mutant in first) for name in ("short.py", "long.py")} == {
        "short.py": 6,
        "long.py": 24,
    }
    assert len(first) == len(set(first)) == 30


@pytest.mark.long
def test_only_a_test_that_asserts_kills_mutants(tmp_path):
    files = {
        "src/tiny/add.py": "def add(a, b):\n    return a + b\n",
        "src/tiny/scale.py": "def scale(a):\n    return a * 3\n",
        "src/tiny/unused.py": "def unused(a):\n    return a - 1\n",
        "tests/test_good.py": "from tiny.add import add\n\ndef test_add():\n    assert add(2, 3) == 5\n",
        "tests/test_bad.py": "from tiny.scale import scale\n\ndef test_scale():\n    scale(2)\n",
        ".gitignore": "artefacts/\n__pycache__/\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    options = ["--root", tmp_path, "--targets", "src/tiny", "--size", "6", "--preload", "hypothesis", "coverage"]
    for command in ("run", "run", "report"):  # the second run has nothing left to do
        subprocess.run([sys.executable, TOOL, command, *options], check=True, capture_output=True)
    results = (tmp_path / "artefacts" / "mutants" / "results.jsonl").read_text("utf-8").splitlines()
    assert len(results) == 6
    report = json.loads((tmp_path / "benchmarks" / "results" / "mutants.json").read_text("utf-8"))
    assert report["packages"]["add"] == {
        "mutants": 2, "killed": 2, "timeout": 0, "survived": 0, "not covered": 0, "caught": 1.0
    }  # fmt: skip
    assert report["packages"]["scale"]["survived"] == 2
    assert report["packages"]["unused"]["not covered"] == 2
    assert {survivor["file"] for survivor in report["survivors"]} == {"src/tiny/scale.py", "src/tiny/unused.py"}
    assert {json.loads(line)["by"] for line in results} == {"", "tests/test_good.py::test_add"}
    assert (tmp_path / "src/tiny/add.py").read_text("utf-8") == files["src/tiny/add.py"]
