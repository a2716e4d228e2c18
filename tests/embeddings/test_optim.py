from __future__ import annotations

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lpfs.embeddings import optim
from lpfs.embeddings._backends import use_backend
from lpfs.embeddings.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from lpfs.embeddings.row_grad import clear_grads, grad_norm, scale_grads
from lpfs.embeddings.table import Table
from lpfs.errors import InputError, StateError
from lpfs.gates.optimizer_state import GRADIENT_POWERS, check_state, get_powers, transfer_optimizer
from tests.helpers.embeddings import BACKENDS, as_embedding, random_ids, torch_lookup

SIZES = (7, 300, 1, 40)


class RowWise(torch.optim.Optimizer):
    """Row-wise Adagrad with a gradient of the size of the table, as its definition says."""

    def __init__(self, params, lr, eps=1e-10):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                total = self.state.setdefault(weight, {}).setdefault("sum", torch.zeros(len(weight)))
                total += weight.grad.square().mean(1)
                weight -= group["lr"] * (weight.grad / (total.sqrt() + group["eps"])[:, None])


# our class, torch's class for nn.Embedding, whether that needs sparse gradients, settings of both
KINDS = {
    "adagrad": (Adagrad, torch.optim.Adagrad, False, {"lr": 0.0625}),
    "adagrad-sparse": (Adagrad, torch.optim.Adagrad, True, {"lr": 0.0625}),
    "rowwise": (RowWiseAdagrad, RowWise, False, {"lr": 0.0625}),
    "adam": (Adam, torch.optim.SparseAdam, True, {"lr": 0.0625, "betas": (0.5, 0.75)}),
    "sgd": (SGD, torch.optim.SGD, False, {"lr": 0.0625}),
    "sgd-sparse": (SGD, torch.optim.SGD, True, {"lr": 0.0625}),
}
EXACT = ["adagrad", "adagrad-sparse", "rowwise", "sgd", "sgd-sparse"]
PYTHAGORAS = (3, 4, 12)  # 3, then √(3² + 4²) = 5, then √(5² + 12²) = 13


@pytest.fixture(autouse=True)
def _no_sparse_warning():
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns unless this is set


def run(backend: str, kind: str, exact: bool, threads: int = 1) -> tuple[Tensor, Tensor]:
    """Train a table and an nn.Embedding on the same gradients, and return both weights."""
    ours, theirs, sparse, settings = KINDS[kind]
    table = Table(SIZES, 16)
    if exact:
        with torch.no_grad():
            table.weight.mul_(64).round_()
    plain = as_embedding(table, sparse)
    mine, other = ours(table.parameters(), **settings), theirs(plain.parameters(), **settings)
    gate = torch.tensor([1.0, 0.5, 2.0, 1.0])
    torch.set_num_threads(threads)
    whole = torch.randint(-1, 2, (700, 4, 1)).float().repeat(1, 1, 16)
    for number in range(len(PYTHAGORAS) if exact else 6):
        ids = random_ids(SIZES, 700, 0 if exact else number)
        grad = whole * PYTHAGORAS[number] if exact else torch.randn(700, 4, 16)
        for each in (mine, other):
            each.zero_grad()
        with use_backend(backend):
            table(ids, gate).backward(grad)
            assert table.weight.grad is None
            mine.step()
        assert not table.weight.row_grads
        torch_lookup(plain, table, ids, gate).backward(grad)
        other.step()
    return table.weight.detach(), plain.weight.detach()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", EXACT)
def test_integers_give_bitwise_the_result_of_torch(backend, kind):
    """Sums of whole numbers are exact in any order, the roots are whole numbers too (torch's √ of others is not
    always the nearest float), ÷ and the step of w are rounded once, and a rate of 2⁻⁴ rounds nothing.
    """
    mine, theirs = run(backend, kind, exact=True)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", list(KINDS))
def test_updates_agree_with_torch(backend, kind):
    """A sum of n float32 numbers taken in another order differs by about √n · 2⁻²⁴ of their size: here n ≤ 700,
    |g| ≤ 150, so 2e-4 at worst on a gradient, 1e-6 relative. Adagrad and Adam divide by the size of g, so that a
    step moves lr (.06) · 1e-6. SGD moves lr · 2e-4, and torch's sparse one adds to w (up to 30) place by place:
    4,200 roundings of 1e-6, of which √4200 count.
    """
    mine, theirs = run(backend, kind, exact=False)
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=6e-5 if kind.startswith("sgd") else 2e-6)


@pytest.mark.long
@pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")
@pytest.mark.parametrize("kind", ["adagrad", "rowwise", "adam", "sgd"])
def test_the_result_does_not_depend_on_the_number_of_threads(kind, monkeypatch):
    from lpfs.embeddings import _numba

    used, threads = set(), _numba.thread_count
    monkeypatch.setattr(_numba, "MIN_PARALLEL_SIZE", 1)
    monkeypatch.setattr(_numba, "thread_count", lambda numbers: used.add(threads(numbers)) or threads(numbers))
    torch.manual_seed(1)
    one, _ = run("numba", kind, exact=False, threads=1)
    torch.manual_seed(1)
    two, _ = run("numba", kind, exact=False, threads=2)
    assert torch.equal(one, two)
    assert used == {1, min(2, _numba.MAX_THREADS)}


@pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")
@pytest.mark.parametrize("threads", [1, 2])
def test_gate_gradients_do_not_depend_on_the_number_of_threads(threads):
    grads = []
    for number in (1, threads):
        torch.manual_seed(1)
        torch.set_num_threads(number)
        table, gate = Table(SIZES, 16), torch.rand(4).requires_grad_()
        with use_backend("numba"):
            table(random_ids(SIZES, 700), gate).backward(torch.randn(700, 4, 16))
        grads.append((gate.grad, table.weight.row_grads[0]))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1].rows, grads[1][1].rows)
    assert torch.equal(grads[0][1].values, grads[1][1].values)


# ------------------------------------------------------------------------------- as optimizers of torch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table(SIZES, 4)
        self.head = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).flatten(1))[:, 0]


OURS = [Adagrad, RowWiseAdagrad, Adam, SGD]
every = pytest.mark.parametrize("kind", OURS, ids=lambda each: each.__name__)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        (net(random_ids(SIZES, 32, number)) - 1).square().mean().backward()
        optimizer.step()


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "torchs"),
    [
        (Adagrad, torch.optim.Adagrad),
        (RowWiseAdagrad, torch.optim.Adagrad),
        (Adam, torch.optim.Adam),
        (SGD, torch.optim.SGD),
    ],
)
def test_other_parameters_are_updated_bitwise_as_by_torch(kind, torchs):
    nets = [nn.Linear(5, 3) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    mine, theirs = kind(nets[0].parameters(), lr=0.03), torchs(nets[1].parameters(), lr=0.03)
    assert mine.param_groups[0].keys() == theirs.param_groups[0].keys()
    for number in range(5):
        x = torch.randn(7, 5, generator=torch.Generator().manual_seed(number))
        for net, optimizer in zip(nets, (mine, theirs), strict=True):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    assert same(*nets)
    theirs.load_state_dict(mine.state_dict())  # and the state is of the same form


@every
def test_training_resumes_from_a_state_dict(kind):
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1)
    train(net, optimizer, range(3))
    twin = Net()
    twin.load_state_dict(net.state_dict())
    other = kind(twin.parameters(), lr=0.7)
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    train(net, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert same(net, twin)


@every
def test_a_copy_of_net_and_optimizer_is_independent(kind):
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1)
    train(net, optimizer, range(2))
    twin, other = copy.deepcopy((net, optimizer))
    before = copy.deepcopy(net)
    train(twin, other, range(2, 4))
    assert same(net, before)
    train(net, optimizer, range(2, 4))
    assert same(net, twin)


@every
def test_it_can_be_built_again_from_its_defaults(kind):
    net = Net()
    optimizer = kind([{"params": net.table.parameters(), "lr": 0.2}, {"params": net.head.parameters()}], lr=0.1)
    train(net, optimizer, range(2))
    assert get_powers(optimizer) is GRADIENT_POWERS[kind.__name__]
    check_state(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    again = kind(net.parameters(), **{key: value for key, value in optimizer.defaults.items() if key in accepted})
    assert again.defaults == optimizer.defaults
    twin = copy.deepcopy(net)
    other = transfer_optimizer(optimizer, dict(zip(net.parameters(), twin.parameters(), strict=True)), {})
    train(net, optimizer, range(2, 4))
    train(twin, other, range(2, 4))
    assert same(net, twin)


@every
@pytest.mark.parametrize("tensor", [False, True])
def test_a_scheduler_changes_the_rate_of_tables(kind, tensor):
    table = Table((3,), 2)
    optimizer = kind(table.parameters(), lr=torch.tensor(0.5) if tensor else 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.0)
    moved = []
    for _ in range(2):
        before = table.weight.detach().clone()
        table(torch.tensor([[1]])).sum().backward()
        optimizer.step()
        scheduler.step()
        moved.append(not torch.equal(before, table.weight))
    assert moved == [True, False]


@every
def test_rows_without_gradient_and_tables_without_lookup_do_not_change(kind):
    tables = [Table((5,), 3), Table((5,), 3)]
    before = [each.weight.detach().clone() for each in tables]
    optimizer = kind([each.weight for each in tables], lr=0.5)
    for _ in range(2):
        tables[0](torch.tensor([[1], [3]])).sum().backward()
        optimizer.step()
    changed = (tables[0].weight != before[0]).any(1)
    assert changed.tolist() == [False, True, False, True, False]
    assert torch.equal(tables[1].weight, before[1])


def test_the_state_of_a_table():
    table = Table((5,), 3)
    rows = RowWiseAdagrad(table.parameters()).state[table.weight]
    assert rows["sum"].shape == (5,)
    assert Adagrad(table.parameters()).state[table.weight]["sum"].shape == (5, 3)
    adam = Adam(table.parameters())
    table(torch.tensor([[1]])).sum().backward()
    adam.step()
    assert {key: tuple(value.shape) for key, value in adam.state[table.weight].items()} == {
        "step": (),
        "exp_avg": (5, 3),
        "exp_avg_sq": (5, 3),
    }


def test_a_group_added_later_is_trained():
    first, second = Table((5,), 3), Table((5,), 3)
    optimizer = Adagrad(first.parameters())
    optimizer.add_param_group({"params": second.parameters()})
    before = second.weight.detach().clone()
    second(torch.tensor([[1]])).sum().backward()
    optimizer.step()
    assert not torch.equal(second.weight, before)


def test_a_closure_is_called_and_its_loss_returned():
    net = Net()
    optimizer = Adagrad(net.parameters())

    def closure():
        optimizer.zero_grad()
        loss = net(random_ids(SIZES, 8)).sum()
        loss.backward()
        return loss

    before = copy.deepcopy(net)
    expected = net(random_ids(SIZES, 8)).sum()
    assert torch.equal(optimizer.step(closure), expected)
    assert not torch.equal(net.table.weight, before.table.weight)


@every
def test_step_hooks_are_called_once_around_the_whole_step(kind):
    layer = nn.Linear(1, 1)
    kind.dense_optimizer(
        layer.parameters(), lr=0.1
    ).step()  # torch puts hooks around the step of a class once it is used
    table = Table((3,), 2)
    optimizer, seen = kind(table.parameters(), lr=0.5), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(table.weight.detach().clone()))
    optimizer.register_step_post_hook(lambda *_: seen.append(table.weight.detach().clone()))
    table(torch.tensor([[1]])).sum().backward()
    optimizer.step()
    assert len(seen) == 2
    assert not torch.equal(*seen)


@every
def test_options_without_row_updates_are_refused(kind):
    net = Net()
    with pytest.raises(InputError, match="unknown setting 'learning_rate'"):
        kind([{"params": net.parameters(), "learning_rate": 1}])
    with pytest.raises(InputError, match=f"{kind.__name__}.*weight_decay=0.1"):
        kind([{"params": net.parameters(), "weight_decay": 0.1}])
    kind([{"params": net.table.parameters()}, {"params": net.head.parameters(), "weight_decay": 0.1}])


def test_momentum_is_for_other_parameters_only():
    net = Net()
    with pytest.raises(InputError, match="SGD.*momentum=0.9"):
        SGD(net.parameters(), momentum=0.9)
    SGD([{"params": net.table.parameters(), "momentum": 0.0}, {"params": net.head.parameters()}], momentum=0.9)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_without_row_updates_is_refused(kind):
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1)
    net(random_ids(SIZES, 8)).sum().backward()
    before = copy.deepcopy(net)
    with pytest.raises(StateError, match=f"{kind.__name__}.*Table.*lpfs.embeddings"):
        optimizer.step()
    assert same(net, before)
    kind(net.head.parameters(), lr=0.1).step()


# ------------------------------------------------------------------------------------ all gradients


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_norm_of_all_gradients_and_their_scaling(backend):
    net = Net()
    plain = copy.deepcopy(net)
    plain.table = as_embedding(net.table)
    with use_backend(backend):
        for number in range(2):  # accumulated
            ids = random_ids(SIZES, 32, number)
            net(ids).square().sum().backward()
            out = plain.head(torch_lookup(plain.table, net.table, ids).flatten(1))[:, 0]
            out.square().sum().backward()
        norm = grad_norm(net.parameters())
        expected = nn.utils.get_total_norm([each.grad for each in plain.parameters()])
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        scale_grads(net.parameters(), 0.25)
        torch.testing.assert_close(grad_norm(net.parameters()), expected / 4, rtol=1e-6, atol=0)
    clear_grads(net.parameters())
    assert not net.table.weight.row_grads
    assert all(each.grad is None for each in net.parameters())


def test_thousands_of_lookups_before_a_step():
    table = Table((3,), 2)
    optimizer = SGD(table.parameters(), lr=1.0)
    before = table.weight.detach().clone()
    for _ in range(2000):
        table(torch.tensor([[1]])).sum().backward()
    assert len(table.weight.row_grads) < 20
    optimizer.step()
    assert torch.equal(table.weight[1], before[1] - 2000)


@pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")
@pytest.mark.parametrize(("name", "states", "scalars"), [
    ("adagrad", [(5, 2)], (0.5, 1e-10)),
    ("rowwise_adagrad", [(5,)], (0.5, 1e-10)),
    ("adam", [(5, 2), (5, 2)], (0.5, 0.1, 0.01, 1e-8)),
    ("sgd", [], (0.5,)),
])  # fmt: skip
def test_parts_of_a_loop_update_every_row_once(name, states, scalars, monkeypatch):
    """The loops of several threads, as plain Python: three parts give the result of one."""
    from lpfs.embeddings import _numba_loops

    parallel = getattr(_numba_loops, f"{name}_parallel").py_func
    monkeypatch.setattr(_numba_loops, name, getattr(_numba_loops, name).py_func)
    rows, values = np.array([4, 0, 3, 1]), np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    results = []
    for parts in (1, 3):
        arrays = [np.ones(shape, np.float32) for shape in ((5, 2), *states)]
        parallel(parts, *arrays, rows, values, *scalars)
        results.append(arrays)
    assert all(np.array_equal(one, three) for one, three in zip(*results, strict=True))
    assert (results[0][0] != 1).any(1).tolist() == [True, True, False, True, True]


@every
def test_a_refused_group_is_not_added(kind):
    net = Net()
    optimizer = kind(net.head.parameters(), lr=0.1)
    with pytest.raises(InputError, match="weight_decay=0.1"):
        optimizer.add_param_group({"params": net.table.parameters(), "weight_decay": 0.1})
    assert len(optimizer.param_groups) == 1
    train(net, optimizer, range(1))
    optimizer.add_param_group({"params": net.table.parameters()})


@every
def test_zero_grad_removes_gradients_by_default(kind):
    """As in torch: a parameter that the next batch does not use is not updated."""
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1)
    net(random_ids(SIZES, 8)).sum().backward()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not net.table.weight.row_grads


@every
def test_a_step_with_rates_on_the_device_is_the_plain_step(kind, monkeypatch):
    """The updates of a captured graph, on the CPU; parameters without a gradient do not change."""
    nets = [nn.ModuleDict({"net": Net(), "unused": nn.Linear(2, 2)}) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    unused = copy.deepcopy(nets[0]["unused"])
    for net, on_device in zip(nets, (False, True), strict=True):
        monkeypatch.setattr(optim, "rates_on_device", lambda optimizer, on_device=on_device: on_device)
        rate = torch.tensor(0.1) if on_device else 0.1
        train(net["net"], kind(net.parameters(), lr=rate), range(4))
        assert same(net["unused"], unused)
    for mine, theirs in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)  # other orders of multiplication and division
