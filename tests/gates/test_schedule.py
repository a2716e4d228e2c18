from __future__ import annotations

import pytest

from lpfs import Decay, Schedule, gate_function
from lpfs.errors import InputError
from lpfs.gates.schedule import make_schedule

PLUS, PLAIN = gate_function("lpfs++"), gate_function("lpfs")


def test_the_terabyte_preset_is_the_papers():
    schedule = make_schedule("terabyte", PLUS, 1)
    assert schedule.epsilon(0) == pytest.approx(0.1)
    assert schedule.epsilon(99) == schedule.epsilon(0)
    assert schedule.epsilon(100) == pytest.approx(0.1 * 0.9978)
    assert schedule.epsilon(1_000) == pytest.approx(0.1 * 0.9978**10)
    assert schedule.epsilon(10**7) == pytest.approx(1e-5)
    assert schedule.lr(0) == 0.01
    assert schedule.lr(250) == pytest.approx(0.01 * 0.9991**2)
    assert schedule.lr(10**7) == 5e-4
    assert make_schedule("terabyte", PLAIN, 1).lr(0) == 0.005
    assert schedule.refresh == 100


def test_the_industrial_preset_is_the_papers():
    schedule = make_schedule("industrial", PLUS, 1)
    assert schedule.epsilon(499) == pytest.approx(0.1)
    assert schedule.epsilon(500) == pytest.approx(0.1 * 0.986)
    assert schedule.epsilon(10**7) == pytest.approx(1e-4)


@pytest.mark.parametrize("gate", [PLUS, PLAIN, gate_function("gaussian")])
def test_the_default_is_the_same_curve_for_every_length(gate):
    schedules = {steps: make_schedule("scaled", gate, steps) for steps in (600, 6_000, 60_000)}
    totals = [schedule.total_lr(steps) for steps, schedule in schedules.items()]
    assert totals == pytest.approx([totals[0]] * 3, rel=0.01)
    for part in (0.0, 0.25, 0.5, 1.0):
        values = [schedule.epsilon(int(part * steps)) for steps, schedule in schedules.items()]
        assert values == pytest.approx([values[0]] * 3)
    shrink = 1e-3 if gate.square else 1e-3**0.5
    assert schedules[600].epsilon(600) == pytest.approx(gate.epsilon * shrink)
    assert schedules[600].epsilon(10_000) == pytest.approx(gate.epsilon * shrink)
    assert make_schedule("scaled", gate, 10_000).lr(0) == pytest.approx(gate.lr)


def test_total_lr_is_the_sum_over_the_steps():
    for schedule in (make_schedule("terabyte", PLUS, 1), make_schedule("scaled", PLUS, 350)):
        assert schedule.total_lr(350) == pytest.approx(sum(schedule.lr(step) for step in range(350)))


def test_a_learning_rate_by_hand_and_a_schedule_of_ones_own():
    assert make_schedule("scaled", PLUS, 123, lr=0.02).lr(0) == 0.02
    assert make_schedule("terabyte", PLUS, 123, lr=1e-4).lr(10**6) == 1e-4
    own = Schedule(Decay(0.1, 0.5, floor=1e-4), Decay(0.01, 1.0))
    assert make_schedule(own, PLUS, 5) is own


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Decay(0.0, 0.5), "start .* > 0, found 0"),
        (lambda: Decay(0.1, 0.0), "rate .* found"),
        (lambda: Decay(0.1, 1.5), "rate .* found"),
        (lambda: Decay(0.1, 0.5, every=0), "every .* found 0"),
        (lambda: Decay(0.1, 0.5, floor=0.2), "floor .* found 0.2"),
        (lambda: Schedule(Decay(0.1, 0.5), Decay(0.01, 1.0)), "needs a floor"),
        (lambda: make_schedule("scaled", PLUS, 0), "steps .* found 0"),
        (lambda: make_schedule("kuaishou", PLUS, 10), "schedule 'kuaishou'"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
