"""The gates of a step on a CPU as three numba loops: value and slope, the proximal step, the control of λ.

The arithmetic is that of ``functions``, ``ProxSGD`` and :mod:`~lpfs.gates.steer`, number for number in float32 or
float64 as there; only arctan and the root of ε may differ in the last bit. :mod:`~lpfs.gates.compiled` calls them.
"""

# ruff: noqa: D103 - one line above each loop says what it does
# mypy: disable-error-code="call-overload,import-untyped,no-untyped-call,unused-ignore,untyped-decorator"
from __future__ import annotations

import math
from typing import Any

import numpy as np

from lpfs.jit import Array, compiled

# What a search never changes, in one array of float64
NUMBERS = 31
ALPHA, POWER, ODD, STEPS, RESCALE, REFRESH, RESCALED_UNTIL, EPSILON = range(8)
LR = EPSILON + 4
STEERED, KEEP, BEGIN, END, FREEZE, HURRY, GAIN, WIDTH, LEAST, MOST, CUT, FADE, CLEAR, BASE, AHEAD, LAG = range(
    LR + 4, NUMBERS
)
# ε and η take four each: start, log of the rate, every, floor
START, RATE, EVERY, FLOOR = range(4)
# what ``advance`` found
FINE, ASK, ALL_ZERO, ENDED = range(4)

PARTS = 1 << 24
ONE, TWO, FLAT = np.float32(1), np.float32(2), np.float32(1e15)


# α·ε^(1/τ)
@compiled
def weight_of(epsilon: Any, numbers: Array) -> Any:
    return np.float32(numbers[ALPHA]) * np.float32(math.pow(epsilon, numbers[POWER]))


# g(x) and g'(x), as functions.lpfs and functions.plusplus have them
@compiled
def gate(x: Any, epsilon: Any, weight: Any, odd: Any) -> tuple[Any, Any]:
    if x > FLAT:
        x = FLAT
    elif x < -FLAT:
        x = -FLAT
    square = x * x
    below = square + epsilon
    value = square / below
    slope = TWO * (x / below) * (epsilon / below)
    if odd:
        if x < 0:
            value = -value
        value = value + weight * np.float32(np.arctan(x))
        slope = abs(slope) + weight * (ONE / (ONE + square))
    return value, slope


# both[0] = g(x) / (norm · scale), both[1] = its slope
@compiled
def values(x: Array, epsilon: Array, norm: Array, scale: Array, numbers: Array, both: Array) -> None:
    small, odd = epsilon[0], numbers[ODD] != 0
    weight = weight_of(small, numbers)
    for n in range(x.shape[0]):
        value, slope = gate(x[n], small, weight, odd)
        below = norm[n] * scale[0]
        both[0, n] = value / below
        both[1, n] = slope / below


# v = βv + grad, x = soft(x - ηv, t), not below ``low`` unless its weight is 0; t is ``reach``, times ``levels``
# and ``weights`` where they are not empty. Return whether grad was finite; if not, nothing has moved.
@compiled
def move(
    x: Array,
    grad: Array,
    velocity: Array,
    weights: Array,
    levels: Array,
    lr: float,
    momentum: float,
    reach: float,
    low: float,
) -> bool:
    for n in range(x.shape[0]):
        if not np.isfinite(grad[n]):
            return False
    rate, fade, limit = np.float32(-lr), np.float32(momentum), np.float32(reach)
    for n in range(x.shape[0]):
        v = velocity[n] * fade + grad[n]
        velocity[n] = v
        # one rounding, as in the fused x.add_(v, alpha=-lr)
        moved = np.float32(np.float64(x[n]) + np.float64(rate) * np.float64(v))
        bound = limit
        if levels.shape[0]:
            bound = levels[n] * bound
        if weights.shape[0]:
            bound = weights[n] * bound
        moved = moved - min(max(moved, -bound), bound)
        free = weights.shape[0] and weights[n] == 0
        x[n] = moved if moved > low or free else np.float32(low)
    return True


# schedule.Decay
@compiled
def decayed(step: Any, numbers: Array, at: int) -> Any:
    start, rate, every, floor = numbers[at], numbers[at + RATE], numbers[at + EVERY], numbers[at + FLOOR]
    return max(floor, start * math.exp((step // np.int64(every)) * rate))


# control.Keep.growth
@compiled
def growth(u: float, total: Any, alive: Any, numbers: Array) -> Any:
    left = min(1.0, max(0.0, (numbers[END] - u) / (numbers[END] - numbers[BEGIN])))
    target = numbers[KEEP] + (total - numbers[KEEP]) * left * left
    excess = alive - target
    if u < numbers[BEGIN] or excess <= 0:
        return 0.0
    if u >= numbers[HURRY]:
        return numbers[GAIN] * (1 + 100 * (u - numbers[HURRY]) / (1 - numbers[HURRY]))
    width = max(1.0, numbers[WIDTH] * min(target, total - numbers[KEEP]))
    gone = 1 - left
    limit = numbers[LEAST] + (numbers[MOST] - numbers[LEAST]) * gone * gone
    return numbers[GAIN] * min(limit, excess / width)


# control.Keep.expected
@compiled
def expected(u: float, alive: Any, wide: Any, smooth: Any, numbers: Array) -> Any:
    if numbers[AHEAD] == 0 or u >= numbers[HURRY]:
        return np.float64(alive)
    left = min(1.0, max(0.0, (numbers[END] - u) / (numbers[END] - numbers[BEGIN])))
    counted = (1 - left) ** 4
    return counted * alive + (1 - counted) * (wide + numbers[AHEAD] / numbers[LAG] * (wide - smooth))


# steer.openness
@compiled
def openness(x: Array, epsilon: Any, weight: Any, odd: Any, norm: Array, scale: Any) -> Any:
    top, parts = np.float32(1e-30), np.int64(0)
    for n in range(x.shape[0]):
        top = max(top, abs(gate(x[n], epsilon, weight, odd)[0] / (norm[n] * scale)))
    for n in range(x.shape[0]):
        size = abs(gate(x[n], epsilon, weight, odd)[0] / (norm[n] * scale))
        parts += np.int64(size / top * np.float32(PARTS))
    return parts / np.float64(PARTS)


@compiled
def alive_in(x: Array) -> Any:
    alive = 0
    for each in x:
        alive += each != 0
    return alive


# steer._hold
@compiled
def hold(x: Array, velocity: Array, before: Array, most: Any) -> None:
    for _ in range(np.int64(most)):
        farthest, top = -1, np.float32(0)
        for n in range(x.shape[0]):
            if x[n] == 0 and abs(before[n]) > top:
                farthest, top = n, abs(before[n])
        if farthest < 0:
            return
        x[farthest], velocity[farthest] = before[farthest], 0


# steer.steer, but for what the optimizer is told
@compiled
def steer(
    x: Array,
    velocity: Array,
    before: Array,
    dead: Array,
    control: Array,
    done: Any,
    epsilon: Any,
    scale: Any,
    norm: Array,
    numbers: Array,
) -> None:
    total, steps = x.shape[0], numbers[STEPS]
    penalty, caution, frozen, u = control[0], control[1], control[2], done / steps
    weight, odd = weight_of(epsilon, numbers), numbers[ODD] != 0
    alive, smooth = alive_in(x), control[3]
    held = alive < numbers[KEEP]
    if held:
        hold(x, velocity, before, numbers[KEEP] - alive if u >= numbers[HURRY] else total)
        alive = alive_in(x)
        penalty = max(penalty * numbers[CUT], 0.0 if frozen else min(penalty, numbers[BASE]))
        caution = max(0.01, caution * 0.5)
    wide = openness(x, epsilon, weight, odd, norm, scale) if numbers[AHEAD] != 0 else 0.0
    smooth = smooth + (wide - smooth) / max(1.0, numbers[LAG] * steps) if smooth != 0 else wide
    if frozen and not held:
        penalty *= math.exp(-numbers[FADE] / steps)
    elif not held:
        count = expected(u, alive, wide, smooth, numbers)
        penalty *= math.exp(min(20.0, caution * growth(u, total, count, numbers) / steps))
        caution = min(1.0, caution * 1.1)
    if frozen:
        near = np.float32(1.5 * numbers[CLEAR])
        way = TWO * np.sqrt(epsilon) / np.float32(min(max(1.0, steps - done), 100.0))
        for n in range(total):
            if x[n] != 0 and abs(gate(x[n], epsilon, weight, odd)[0] / (norm[n] * scale)) < near:
                x[n] += way if x[n] > 0 else -way
    if not frozen and alive == numbers[KEEP] and u >= numbers[FREEZE]:
        smallest = np.float32(np.inf)
        for n in range(total):
            if x[n] != 0:
                smallest = min(smallest, abs(gate(x[n], epsilon, weight, odd)[0] / (norm[n] * scale)))
        if smallest >= numbers[CLEAR] or u >= numbers[HURRY]:
            for n in range(total):
                dead[n] = x[n] == 0
            frozen = 1.0
    control[0], control[1], control[2], control[3] = penalty, caution, frozen, smooth
    before[:] = x


# Gates.fresh_scale
@compiled
def fresh_scale(x: Array, epsilon: Any, norm: Array, numbers: Array) -> Any:
    weight, odd = weight_of(epsilon, numbers), numbers[ODD] != 0
    if numbers[RESCALE] == 1:
        return gate(ONE, epsilon, weight, odd)[0] / norm[0]
    squares, alive = np.float32(0), 0
    for n in range(x.shape[0]):
        if x[n] != 0:
            value = gate(x[n], epsilon, weight, odd)[0] / norm[n]
            squares += value * value
            alive += 1
    return np.sqrt(squares / np.float32(alive))


# Gates.step: return what was found, and η, λ and whether the dead set is frozen. ASK: nothing has moved, and the
# caller has to look for idle fields first.
@compiled
def advance(
    x: Array,
    velocity: Array,
    before: Array,
    dead: Array,
    control: Array,
    steps_done: Array,
    epsilon: Array,
    scale: Array,
    norm: Array,
    numbers: Array,
    asked: bool,
) -> tuple[Any, Any, Any, Any]:
    done, steps = steps_done[0] + 1, np.int64(numbers[STEPS])
    if done == min(100, steps) and not asked:
        return ASK, 0.0, 0.0, False
    if numbers[STEERED]:
        steer(x, velocity, before, dead, control, done, epsilon[0], scale[0], norm, numbers)
    lr = decayed(done, numbers, LR)
    if alive_in(x) == 0:
        return ALL_ZERO, lr, control[0], control[2] != 0
    steps_done[0] = done
    epsilon[0] = np.float32(decayed(done, numbers, EPSILON))
    due = numbers[RESCALE] == 1 or (numbers[RESCALE] == 2 and done <= numbers[RESCALED_UNTIL])
    if due and done % np.int64(numbers[REFRESH]) == 0:
        scale[0] = fresh_scale(x, epsilon[0], norm, numbers)
    found = ENDED if numbers[STEERED] and done == steps else FINE
    return found, lr, control[0], control[2] != 0
