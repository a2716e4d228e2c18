"""keep=K ends with exactly K alive and clear of zero, whatever the fields are like."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lpfs import FUNCTIONS, Gates, Keep, gate_function
from lpfs.errors import InputError
from lpfs.gates.controller import FAST_DESCENT, TableRow, control_table
from lpfs.gates.schedule import make_schedule
from tests.helpers.surrogate import Surrogate


def check(gates, keep: int) -> None:
    values = gates.values
    alive = values[values != 0].abs()
    assert alive.numel() == keep == len(gates.kept)
    assert int((values == 0.0).sum()) == len(gates.names) - keep == len(gates.dropped)
    assert 0.2 <= float(alive.min()) <= float(alive.max()) <= 5
    assert bool((gates.x[values == 0] == 0).all())


@pytest.mark.long
@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
@pytest.mark.parametrize("prox", ["l1", "positive"])
@pytest.mark.parametrize("kind", ["graded", "tied", "useless", "duplicates", "few", "strong", "harmful"])
@pytest.mark.parametrize(("size", "keep"), [(5, 1), (5, 4), (60, 1), (60, 15), (60, 59)])
def test_exactly_k_for_any_kind_of_fields(gate, prox, kind, size, keep):
    check(Surrogate(kind, size, keep, 600, gate, prox=prox).run(), keep)


def test_no_gate_crosses_zero_where_x_is_not_negative():
    """Half of the fields do harm: with l1 some live on with their sign turned, with x >= 0 none does."""
    lowest = {}
    for prox in ("l1", "positive"):
        search = Surrogate("harmful", 60, 45, 600, "lpfs++", prox=prox)
        lowest[prox] = min(float(search.run(1).x.detach().min()) for _ in range(600))
    assert lowest["l1"] < 0 == lowest["positive"]


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
def test_the_penalty_does_not_fall_below_its_beginning_before_the_dead_are_frozen(gate):
    """Many fields are alike, so that too many would die at once, again and again; then λ fades, and not before."""
    search = Surrogate("useless", 60, 30, 600, gate)
    seen = []
    for _ in range(600):
        penalty, frozen, _ = search.run(1).control.tolist()
        seen.append((penalty, frozen))
    before = [penalty for penalty, frozen in seen if not frozen]
    assert any(later < earlier for earlier, later in pairwise(before))  # a step zeroed too many gates
    assert min(before) >= search.gates.controller.base_penalty > 0
    assert seen[-1][0] == 0


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
@pytest.mark.parametrize(("size", "keep"), [(1, 1), (2, 1), (60, 3), (60, 59)])
def test_exactly_k_in_the_shortest_search(gate, size, keep):
    for kind in ("graded", "useless", "strong"):
        check(Surrogate(kind, size, keep, 50, gate).run(), keep)


@pytest.mark.parametrize("gate", sorted(FUNCTIONS))
def test_exactly_k_for_every_gate_function(gate):
    check(Surrogate("graded", 30, 7, 600, gate).run(), 7)


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
def test_exactly_k_for_many_fields(gate):
    check(Surrogate("graded", 500, 100, 600, gate).run(), 100)


@pytest.mark.long
@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
def test_the_same_answer_at_600_and_12000_steps(gate):
    """Two groups of clear importance: which fields stay does not depend on how long the search is."""
    answers = []
    for steps in (600, 12_000):
        search = Surrogate("few", 20, 10, steps, gate)
        search.importance[:10], search.importance[10:] = 0.05, 0.002
        search.noise = 0.005
        check(search.run(), 10)
        answers.append(search.gates.kept)
    assert answers[0] == answers[1] == [f"f{n}" for n in range(10)]


@pytest.mark.long
@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
def test_a_fixed_penalty_means_the_same_at_any_length(gate):
    answers = []
    for steps in (600, 6_000):
        search = Surrogate("few", 20, None, steps, gate, penalty=0.15)
        search.importance[:10], search.importance[10:] = 0.05, 0.0
        answers.append(search.run().kept)
    assert answers[0] == answers[1] == [f"f{n}" for n in range(10)]


def test_the_important_ones_stay():
    gates = Surrogate("graded", 60, 15, 2_000, "lpfs++").run()
    ranks = [int(name[1:]) for name in gates.kept]
    assert sum(rank >= 40 for rank in ranks) >= 14  # 45 to 59 are the best 15; neighbours differ by 2 %


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
def test_must_keep_counts_within_k(gate):
    gates = Surrogate("graded", 30, 5, 600, gate, must_keep=["f0", "f1"]).run()
    check(gates, 5)
    assert {"f0", "f1"} <= set(gates.kept)


def test_keep_all_drops_nothing():
    check(Surrogate("graded", 8, 8, 600, "lpfs++").run(), 8)


def test_a_dear_field_has_to_earn_its_place():
    costs = [1.0] * 20
    costs[:10] = [20.0] * 10
    gates = Surrogate("tied", 20, 10, 600, "lpfs++", costs=costs).run()
    assert sum(int(name[1:]) < 10 for name in gates.kept) == 0


@pytest.mark.long
@pytest.mark.parametrize("gate", ["lpfs", "lpfs++", "lpfs-noise"])
@pytest.mark.parametrize("stop", [1, 150, 340, 500])
def test_a_search_stopped_in_the_middle_continues_bit_identically(gate, stop):
    whole, first, second = (Surrogate("graded", 20, 6, 600, gate) for _ in range(3))
    whole.run()
    first.run(stop)
    second.gates.load_state_dict(first.gates.state_dict())
    second.prox.load_state_dict(first.prox.state_dict())
    second.run(600 - stop)
    assert torch.equal(second.gates.x, whole.gates.x)
    assert torch.equal(second.gates.values, whole.gates.values)
    assert torch.equal(second.gates.control, whole.gates.control)


def test_the_target_falls_from_n_to_k():
    keep = Keep(15)
    path = [keep.target(u / 100, 60) for u in range(101)]
    assert path[0] == 60
    assert path[-1] == 15
    assert all(a >= b for a, b in zip(path, path[1:], strict=False))


def test_lambda_grows_only_with_an_excess():
    keep = Keep(15)
    assert keep.growth_rate(0.05, 60, 60) == 0
    assert keep.growth_rate(0.4, 60, int(keep.target(0.4, 60))) == 0
    assert 0 < keep.growth_rate(0.7, 60, 17) < keep.growth_rate(0.7, 60, 30) < keep.growth_rate(0.9, 60, 30)
    assert keep.growth_rate(0.2, 60, 60) < keep.growth_rate(0.7, 60, 60)  # slow at first


def test_the_prediction_is_replaced_by_the_number_of_alive_gates():
    keep = Keep(15, ahead=0.2)
    assert keep.alive_weight(0.1) == 0
    assert 0 < keep.alive_weight(0.3) < keep.alive_weight(0.4) < 1
    assert keep.alive_weight(0.5) == keep.alive_weight(0.9) == 1
    assert Keep(15, ahead=0.0).alive_weight(0.3) == 1


def test_the_table_is_that_of_single_steps():
    keep, schedule = Keep(4), make_schedule("scaled", gate_function("lpfs++"), 200)
    table = control_table(schedule, keep, 12, 200, 190.0)
    for step in (0, 19, 20, 100, 170, 200):
        row, u = TableRow(*table[step].tolist()), step / 200
        assert row.epsilon == schedule.epsilon(step)
        assert row.lr == schedule.lr(step)
        assert row.target == keep.target(u, 12)
        assert row.max_growth == keep.max_growth(u)
        assert row.alive_weight == keep.alive_weight(u)
        assert (row.freeze, row.hurry) == (u >= 0.75, u >= 0.85)


def test_lambda_does_not_run_away_from_gates_that_sink():
    """Few are needed: looking ahead, λ grows less than if it counts who is alive."""
    most = []
    for ahead in (0.2, 0.0):
        search = Surrogate("few", 60, 8, 600, "lpfs++", control=Keep(8, ahead=ahead))
        most.append(max(float(search.run(1).control[0]) for _ in range(450)))
    assert most[0] < 0.85 * most[1]


@pytest.mark.parametrize("wrong", [{"least": 0.0}, {"least": 5.0}, {"ahead": -0.1}, {"lag": 0.0}])
def test_a_control_that_cannot_be_is_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Keep(15, **wrong)


def test_control_for_another_k_is_refused():
    with pytest.raises(InputError, match="control is for keep=3"):
        Surrogate("graded", 8, 4, 600, "lpfs++", control=Keep(3))


def test_defaults_of_the_law_are_those_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "method.md").read_text("utf-8")
    text = text.partition("## Control of λ")[2].partition("\n## ")[0]

    def numbers(pattern: str) -> list[float]:
        match = re.search(pattern, text)
        assert match, pattern
        return [float(number) for number in match.groups()]

    number = r"(\d+(?:\.\d+)?)"
    keep = Keep(15)
    assert "λ starts at 1/Ση" in text
    assert keep.first_penalty(32.0) == 1 / 32
    assert [keep.begin, keep.end] == numbers(f"From u = {number} to {number} a target")
    growth = numbers(rf"e\^\({number}·Δu\) at u = {number} and e\^\({number}·Δu\) at u = {number}")
    assert [keep.gain * keep.least, keep.begin, keep.gain * keep.most, keep.end] == growth
    assert "extrapolated by a fifth of the search from its change over the last twentieth" in text
    assert (keep.ahead, keep.lag) == (1 / 5, 1 / 20)
    assert [keep.cut] == numbers(f"λ is multiplied by {number}")
    assert [100 * keep.tie_spread] == numbers(f"separated by up to {number} %")
    assert [keep.freeze, keep.clear] == numbers(f"From u = {number}, once .* at least {number},")
    assert [keep.hurry] == numbers(f"From u = {number} only as many") == numbers(f"From u = {number} λ grows faster")
    assert [FAST_DESCENT["travel"]] == numbers(rf"λ starts at 1/\({number}·Ση\)")
    assert FAST_DESCENT["least"] == keep.most  # "grows at its full rate immediately"


def test_lambda_grows_in_proportion_to_the_excess_until_a_limit():
    keep = Keep(15)
    for excess in (1.5, 3.0, 6.0):  # 10, 20 and 40 % of K
        assert keep.growth_rate(0.6, 60, 15 + excess) == pytest.approx(excess / 3 * 10)
    assert keep.growth_rate(0.6, 60, 60) == 40
    for u, largest in ((0.85, 10), (0.925, 510), (1.0, 1010)):  # reaching K has priority
        assert keep.growth_rate(u, 9000, 9000) == pytest.approx(largest)


def test_the_dead_set_is_frozen_once_the_smallest_gate_is_clear():
    def run(clear: float) -> tuple[int, float]:
        """Return the step that freezes the dead set, and the smallest gate before it; x does not move."""
        gates = Gates(["a", "b"], gate_function("lpfs++"), 100, rescale="off")
        gates.optimizer(keep=2, must_keep=["a", "b"], control=Keep(2, clear=clear))
        smallest = 0.0
        while not gates.control[1]:  # frozen
            smallest = float(gates.values.min())
            gates.step()
        return int(gates.steps_done), smallest

    step, smallest = run(clear=0.0)
    assert step == 75
    assert run(clear=smallest) == (75, smallest)  # "at least"
    assert run(clear=1.001 * smallest)[0] == 85
