"""The mathematics of each mask against numpy, number by number."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from lpfs.methods.leap import LeAP
from lpfs.methods.masks import MEAN_DECAY
from lpfs.methods.optfs import OptFS, OptFSOptions
from lpfs.methods.row_weights import AdaFS, ColdSE
from lpfs.methods.shufflegate import ShuffleGate, ShuffleGateOptions
from lpfs.methods.stochastic_gates import (
    FSCD,
    PUBLIC_STEPS,
    STG,
    AutoField,
    AutoFieldOptions,
    FSCDOptions,
    HardConcrete,
    HardConcreteOptions,
    STGOptions,
    VariationalDropout,
    VariationalDropoutOptions,
)

NAMES = tuple("abcde")
N, B, D = 5, 7, 3
X = torch.tensor([-1.7, -0.4, 0.0, 0.6, 2.3])
SEED = 4


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def logit(p):
    return np.log(p) - np.log1p(-p)


def softmax(x, axis=-1):
    raised = np.exp(x - x.max(axis, keepdims=True))
    return raised / raised.sum(axis, keepdims=True)


def uniform(*shape):
    """What a mask of this seed draws first."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(SEED)).double().numpy()


def with_values(mask, name, values):
    getattr(mask, name).data.copy_(values)
    return mask


def tokens_of():
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(1))


def near(found, expected):
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=2e-5, atol=2e-6)


def slope(mask, parameter, of):
    """Central differences of a sum over the mask, by each number of a parameter."""
    result = []
    for number in range(parameter.numel()):
        two = []
        for step in (1e-2, -1e-2):
            mask.draw.manual_seed(SEED)
            parameter.data[number] += step
            two.append(float(of().detach().double().sum()))
            parameter.data[number] -= step
        result.append((two[0] - two[1]) / 2e-2)
    return np.array(result)


@pytest.mark.parametrize(("step", "temperature"), [(0, 1.0), (4000, 0.8), (19_900, 0.01), (10**6, 0.01)])
def test_autofield(step, temperature):
    values = torch.stack([X, X.flip(0) * 0.5], 1)
    mask = with_values(AutoField(NAMES, PUBLIC_STEPS, SEED, AutoFieldOptions()), "logits", values)
    mask.set_step(step)
    assert mask.temperature == pytest.approx(temperature, abs=1e-9 + 0.0051 * (step == 19_900))
    keep = softmax(values.double().numpy())
    noise = -np.log(-np.log(uniform(N, 2)))
    near(mask(), softmax((np.log(keep) + noise) / mask.temperature)[:, 1])
    near(mask.scores(), keep[:, 1])
    near(mask.eval()(), keep[:, 1])
    assert mask.penalty(B) is None
    assert mask.selected() is None


def test_fscd():
    options = FSCDOptions(strength=0.3, temperature=0.5)
    mask = with_values(FSCD(NAMES, 100, SEED, options, costs=[1.0, 2.0, 3.0, 4.0, 0.0]), "logit", X)
    assert mask.penalty(B) is None  # nothing was drawn yet
    drawn = sigmoid((X.double().numpy() + logit(uniform(N))) / 0.5)
    near(mask(), drawn / sigmoid(X))  # a mean of 1 whatever the keep probability is
    near(mask.penalty(B), 0.3 / B * (np.array([0.5, 1.0, 1.5, 2.0, 0.0]) * drawn).sum())
    near(mask.scores(), sigmoid(X))
    near(mask.eval()(), np.ones(N))
    with_values(mask.train(), "logit", torch.full((N,), -9.0))
    assert float(mask().detach().max()) <= float(mask.sampled.detach().max()) / 0.0099  # clipped: sigmoid(-9) is 0.0001
    plain = FSCD(NAMES, 100, SEED, FSCDOptions(start=0.9))
    near(plain.scores(), np.full(N, 0.9))
    assert plain.costs.tolist() == [1.0] * N
    assert FSCD(NAMES, 100, SEED, options, costs=[0.0] * N).costs.tolist() == [1.0] * N


def test_stg():
    mask = with_values(STG(NAMES, 100, SEED, STGOptions(strength=0.3)), "mu", X)
    noise = torch.randn(N, generator=torch.Generator().manual_seed(SEED)).double().numpy()
    near(mask(), np.clip(X.double().numpy() + 0.5 + 0.5 * noise, 0, 1))
    near(mask.penalty(B), 0.3 * sum(NormalDist().cdf((x + 0.5) / 0.5) for x in X.tolist()))
    near(mask.eval()(), [0.0, 0.1, 0.5, 1.0, 1.0])
    assert mask.selected().tolist() == [False, True, True, True, True]
    assert mask.scores().tolist() == X.tolist()


def test_hard_concrete():
    options = HardConcreteOptions(strength=0.3)
    mask = with_values(HardConcrete(NAMES, 100, SEED, options), "logit", X * 3)
    x = X.double().numpy() * 3
    mask.draw.manual_seed(SEED)  # the start is drawn too
    drawn = sigmoid((x + logit(uniform(N))) * 1.5)
    near(mask(), np.clip(drawn * 1.2 - 0.1, 0, 1))
    near(mask.penalty(B), 0.3 * sigmoid(x - 2 / 3 * math.log(0.1 / 1.1)).sum())
    near(mask.eval()(), np.clip(sigmoid(x) * 1.2 - 0.1, 0, 1))
    assert mask.selected().tolist() == [False, True, True, True, True]


def test_hard_concrete_starts_near_its_probability_and_averages_clamped_logits():
    mask = HardConcrete(NAMES, 100, SEED, HardConcreteOptions())
    start = mask.logit.detach().clone()
    np.testing.assert_allclose(sigmoid(start), 0.8, atol=0.01)
    assert len(set(start.tolist())) == N
    near(mask.scores(), start.double().numpy())
    decay, mean, mass = 0.999, np.zeros(N), 0.0
    for values in (X, X * 100, -X):
        with_values(mask, "logit", values)
        mask.update_means()
        clamped = np.clip(values.double().numpy(), -math.log(100), math.log(100))
        near(mask.logit, clamped)
        mean, mass = decay * mean + (1 - decay) * clamped, decay * mass + 1 - decay
    np.testing.assert_allclose(mask.scores().double().numpy(), mean / mass, rtol=1e-3, atol=1e-4)
    assert mask.selected().tolist() == (sigmoid(mean / mass) * 1.2 - 0.1 > 0).tolist()


def test_hard_concrete_counts_how_often_a_gate_is_not_zero():
    """The penalty is the chance of a gate above zero, here counted in many draws."""
    mask = HardConcrete(NAMES, 100, SEED, HardConcreteOptions(strength=1.0))
    with_values(mask, "logit", X)
    with torch.no_grad():
        open_ = torch.stack([(mask() > 0).double() for _ in range(4000)]).mean(0)
    assert float(open_.sum()) == pytest.approx(float(mask.penalty(B).detach()), abs=0.06)


def test_variational_dropout():
    mask = with_values(VariationalDropout(NAMES, 100, SEED, VariationalDropoutOptions(strength=0.3)), "logit", X)
    near(mask(), 1 - sigmoid((X.double().numpy() + logit(uniform(N))) / 0.1))
    near(mask.penalty(B), 0.3 / B * (1 - sigmoid(X)).sum())
    near(mask.scores(), 1 - sigmoid(X))
    near(mask.eval()(), 1 - sigmoid(X))


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda: STG(NAMES, 100, SEED, STGOptions()), "mu"),
        (lambda: HardConcrete(NAMES, 100, SEED, HardConcreteOptions()), "logit"),
        (lambda: FSCD(NAMES, 100, SEED, FSCDOptions(temperature=1.0)), "logit"),
        (lambda: VariationalDropout(NAMES, 100, SEED, VariationalDropoutOptions(temperature=1.0)), "logit"),
    ],
)
def test_factors_have_the_gradient_of_their_formula(make, parameter):
    mask = make()
    values = getattr(mask, parameter)
    values.data.copy_(X * 0.05)
    weights = torch.arange(1.0, N + 1)

    def weighed():
        return mask() * weights

    mask.draw.manual_seed(SEED)
    (found,) = torch.autograd.grad(weighed().sum(), values)
    np.testing.assert_allclose(found.numpy(), slope(mask, values, weighed), rtol=0.02, atol=2e-3)
    assert bool((found != 0).any())


def test_shufflegate():
    options = ShuffleGateOptions(strength=0.3)
    mask = with_values(ShuffleGate(NAMES, 100, SEED, options), "theta", X)
    tokens, numbers = tokens_of().requires_grad_(), torch.tensor([4, 2, 0, 1, 3])
    out = mask(tokens, numbers, None)
    order = uniform(B, N).argsort(0)
    gates = sigmoid(5 * X.double().numpy())
    rows = tokens.detach().double().numpy()
    expected = np.empty_like(rows)
    for b in range(B):
        for part, number in enumerate(numbers.tolist()):
            gate = gates[number]
            expected[b, part] = gate * rows[b, part] + (1 - gate) * rows[order[b, part], part]
    near(out, expected)
    assert all(sorted(order[:, part]) == list(range(B)) for part in range(N))
    assert len({tuple(order[:, part]) for part in range(N)}) == N  # every field has an order of its own
    (grad,) = torch.autograd.grad(out.sum(), tokens)  # nothing flows to the other rows
    near(grad, np.broadcast_to(gates[numbers][None, :, None], (B, N, D)))
    near(mask.penalty(B), 0.3 * gates.sum())  # the pull on a gate does not shrink with N
    near(mask.scores(), gates)
    assert mask.selected().tolist() == [False, False, False, True, True]
    assert torch.equal(mask.eval()(tokens, numbers, None), tokens)
    near(ShuffleGate(NAMES, 100, SEED, options).scores(), sigmoid([5.0] * N))


def test_leap_weights_the_penalty_by_the_distance_to_shuffled_rows():
    mask = with_values(LeAP(NAMES, 100, SEED, ShuffleGateOptions(strength=0.3)), "theta", X)
    gates = sigmoid(5 * X.double().numpy())
    near(mask.penalty(B), 0.3 * gates.sum())  # nothing was seen yet
    tokens = tokens_of() * torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])[:, None]
    numbers = torch.tensor([4, 2, 0, 1, 3])
    mask(tokens, numbers, None)
    order, rows = uniform(B, N).argsort(0), tokens.double().numpy()
    distance = np.array(
        [np.linalg.norm(rows[:, part] - rows[order[:, part], part], axis=1).mean() for part in range(N)]
    )
    near(mask.penalty(B), 0.3 * gates.sum())  # weights change between steps only
    mask.update_means()
    expected = np.zeros(N)
    expected[numbers.numpy()] = N * distance / distance.sum()
    near(mask.weights(), expected)
    near(mask.penalty(B), 0.3 * (expected * gates).sum())
    assert mask.weights()[4] == 0  # a constant field


def test_cold_se():
    mask = ColdSE(NAMES, 100, SEED, D)
    tokens = tokens_of()
    near(mask(tokens, torch.arange(N), None), tokens.double().numpy())  # a trained model is unchanged
    weight, bias = torch.randn(N, N * D), torch.randn(N)
    mask.linear.weight.data.copy_(weight)
    mask.linear.bias.data.copy_(bias)
    row = tokens.double().numpy()
    weights = 2 * sigmoid(row.reshape(B, -1) @ weight.double().numpy().T + bias.double().numpy())
    near(mask(tokens, torch.arange(N), None), weights[:, :, None] * row)
    mask.update_means()
    near(mask.scores(), weights.mean(0))
    mask(2 * tokens, torch.arange(N), None)
    mask.update_means()
    second = 2 * sigmoid(2 * row.reshape(B, -1) @ weight.double().numpy().T + bias.double().numpy()).mean(0)
    near(mask.scores(), (MEAN_DECAY * weights.mean(0) + second) / (1 + MEAN_DECAY))


@pytest.mark.parametrize("best", [None, 2])
def test_adafs(best):
    mask = AdaFS(NAMES, 100, SEED, D, hidden=6, best=best)
    tokens = tokens_of() * 3 + 1
    found = mask(tokens, torch.arange(N), None)
    rows = tokens.double().numpy()
    flat = rows.reshape(-1, D)
    normed = ((flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5)).reshape(B, -1)
    first, second = (value for value in mask.controller if isinstance(value, torch.nn.Linear))
    w1, b1, w2, b2 = (
        value.detach().double().numpy() for value in (first.weight, first.bias, second.weight, second.bias)
    )
    weights = softmax(np.maximum(normed @ w1.T + b1, 0) @ w2.T + b2) * N
    if best is not None:
        for row in weights:
            row[np.argsort(row)[:-best]] = 0.0
            row *= best / row.sum()
    near(found, weights[:, :, None] * rows)
    mask.update_means()
    near(mask.scores(), weights.mean(0))
    assert weights.sum(1) == pytest.approx(N if best is None else best)


def test_the_controller_depends_on_the_seed_alone():
    before = torch.get_rng_state()
    one, two, other = (AdaFS(NAMES, 100, seed, D, 64, None) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    same = [torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True)]
    assert all(same)
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_optfs():
    sizes = (3, 1, 2, 4)  # the second and the third have one gate, as numbers and bags have
    options = OptFSOptions(strength=0.3, sharpness=100.0)
    mask = OptFS(NAMES[:4], sizes, 100, SEED, options)
    m = np.linspace(-1, 1.3, 10)
    with_values(mask, "m", torch.from_numpy(m))
    numbers = torch.tensor([3, 0, 1])  # as a module has them: two with ids, then others
    ids = torch.tensor([[0, 2], [3, 1], [3, 0], [1, 1]], dtype=torch.int32)
    tokens = torch.randn(4, 3, D)
    mask.set_step(25)
    tau = 100.0**0.25
    assert mask.tau == pytest.approx(tau)
    expected = tokens.double().numpy().copy()
    starts = [0, 3, 4, 6]
    values = [[starts[3] + a, starts[0] + b, starts[1]] for a, b in ids.tolist()]
    for row, own in enumerate(values):
        for part, value in enumerate(own):
            expected[row, part] *= sigmoid(tau * m[value]) / sigmoid(0.5)
    near(mask(tokens, numbers, ids), expected)
    near(mask.penalty(4), 0.3 * sigmoid(tau * m).sum())
    mask.update_means()
    counts = np.bincount(np.ravel(values), minlength=10)
    assert mask.counts.tolist() == counts.tolist()
    scores = []
    for start, size in zip(starts, sizes, strict=True):
        part = slice(start, start + size)
        kept = (counts[part] * ((m[part] > 0) + 0.5 * sigmoid(m[part]))).sum()
        scores.append(kept / 1.5 / max(1, counts[part].sum()))
    near(mask.scores(), scores)
    assert mask.selected().tolist() == [False, False, False, True]  # m > 0 from the sixth value on
    mask.m.data.fill_(1.0)
    assert mask.selected().tolist() == [True, True, False, True]  # of the third no value was seen


def test_optfs_starts_at_one_and_scales_its_penalty_by_the_number_of_values():
    mask = OptFS(NAMES, (2,) * N, 100, SEED, OptFSOptions())
    tokens = tokens_of()
    near(mask(tokens, torch.arange(N), torch.zeros(B, N, dtype=torch.int32)), tokens.double().numpy())
    near(mask.penalty(B), 0.03 / 10**0.5 * sigmoid(0.5) * 10)
