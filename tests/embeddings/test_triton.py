"""The Triton backend gives the results of the torch backend. Needs only pytest and torch."""

from __future__ import annotations

import pytest
import torch

import lpfs
from lpfs.embeddings import _torch
from lpfs.embeddings.optim import Adagrad
from lpfs.embeddings.table import Table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

# rows, sizes of the fields, width: runs inside a chunk, over many chunks, of one row, and of one position
SHAPES = [
    (300, [2, 1, 50], 5),
    (64, [3, 200], 16),
    (1, [4], 3),
    (0, [4, 2], 8),
    (5000, [1, 2, 3], 16),
    (129, [1000, 7], 33),
    (512, [3, 4_000_000], 4),  # keys and positions together need 64 bits
    (700, [50, 5], 16),
]


def make(rows, sizes, width, kind=torch.int32):
    source = torch.Generator().manual_seed(rows)
    starts = torch.tensor([0, *sizes]).cumsum(0).cuda()
    weight = torch.randn(sum(sizes), width, generator=source).cuda()
    ids = torch.stack([torch.randint(n, (rows,), generator=source) for n in sizes], 1).to("cuda", kind)
    grad = torch.randint(-4, 5, (rows, len(sizes), width), generator=source).float().cuda()
    gate = torch.rand(len(sizes), generator=source).cuda()
    gate[0] = 0
    return weight, starts, ids, gate, grad


@pytest.fixture(scope="module")
def cuda():
    pytest.importorskip("triton")
    from lpfs.embeddings import _triton

    return _triton


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gated", [False, True])
def test_lookup_and_sums_to_the_last_bit(cuda, shape, gated, kind):
    weight, starts, ids, gate, grad = make(*shape, kind)
    gate = gate if gated else None
    assert torch.equal(_torch.gather(weight, starts, ids, gate), cuda.gather(weight, starts, ids, gate))
    strided = torch.cat([ids, ids], 1)[:, : ids.shape[1]]
    assert torch.equal(cuda.gather(weight, starts, strided, gate), cuda.gather(weight, starts, ids, gate))
    (expected, expected_gate), (result, gate_grad) = (
        backend.reduce(weight, starts, ids, gate, grad) for backend in (_torch, cuda)
    )
    wide = torch.cat([grad, grad], 1)[:, : grad.shape[1]]  # not contiguous
    assert torch.equal(cuda.reduce(weight, starts, ids, gate, wide)[0].values, result.values)
    compact = result.compact()
    assert torch.equal(compact.rows.long(), expected.rows)
    assert torch.equal(compact.values, expected.values)  # sums of integers are exact in any order
    assert not result.values[result.rows < 0].any()
    again = cuda.reduce(weight, starts, ids, gate, grad)
    assert torch.equal(again[0].values, result.values)
    if gated:
        torch.testing.assert_close(gate_grad, expected_gate, rtol=1e-4, atol=1e-3)  # a sum of up to 240,000 products
        assert torch.equal(gate_grad, again[1])


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("update", ["adagrad", "rowwise_adagrad", "adam", "sgd"])
def test_updates_of_rows(cuda, update, as_tensor):
    weight, starts, ids, gate, grad = make(300, [2, 40, 500], 16)
    rows = [backend.reduce(weight, starts, ids, gate, grad)[0] for backend in (_torch, cuda)]
    lr = torch.tensor(0.25, device="cuda") if as_tensor else 0.25
    results = []
    for backend, row_grad, rate in ((_torch, rows[0], 0.25), (cuda, rows[1], lr)):
        updated = weight.clone()
        sums, squares, of_rows = torch.ones_like(weight), torch.ones_like(weight), weight.new_ones(len(weight))
        for step in (1, 2, 3):
            if update == "adagrad":
                backend.adagrad(updated, sums, row_grad, rate, 1e-10)
            elif update == "rowwise_adagrad":
                backend.rowwise_adagrad(updated, of_rows, row_grad, rate, 1e-10)
            elif update == "adam":
                done = torch.tensor(float(step), device="cuda") if as_tensor and backend is cuda else step
                backend.adam(updated, sums, squares, row_grad, rate, (0.9, 0.999), 1e-8, done)
            else:
                backend.sgd(updated, row_grad, rate)
        results.append((updated, sums, squares, of_rows))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-6, atol=1e-6)  # one rounding difference per step


def test_an_id_outside_its_field_gives_nan(cuda):
    weight, starts, ids, _, _ = make(8, [3, 5], 4)
    ids[2, 1] = 5
    ids[3, 0] = -1
    out = cuda.gather(weight, starts, ids, None)
    assert out[2, 1].isnan().all()
    assert out[3, 0].isnan().all()
    assert int(out.isnan().any(2).sum()) == 2


def test_training_follows_the_cpu():
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        table, head = Table([50, 7, 3], 8, bags=1), torch.nn.Linear(24, 1)
        table, head = table.to(device), head.to(device)
        optimizer = Adagrad([*table.parameters(), *head.parameters()], lr=0.05)
        source = torch.Generator().manual_seed(1)
        for _ in range(20):
            ids = torch.stack([torch.randint(n, (40,), generator=source) for n in (50, 7)], 1).int().to(device)
            bag = torch.randint(3, (60,), generator=source).int().to(device)
            offsets = torch.arange(0, 60, 1.5).int().to(device)
            tokens = torch.cat([table(ids).flatten(1), table.bag(0, bag, offsets)], 1)
            torch.nn.functional.softplus(head(tokens)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert table.weight.grad is None
        ends.append(table.weight.detach().cpu())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
def test_gates_in_three_kernels_follow_the_plain_steps(gate):
    """While few gates are zero both agree to rounding; later a last bit may decide the order."""
    torch.manual_seed(0)
    runs = []
    for plain_steps in (False, True):
        gates = lpfs.Gates([f"f{n}" for n in range(40)], lpfs.gate_function(gate), 800).cuda()
        if plain_steps:
            gates._kernels = lambda: None
            gates._normalise()
        assert torch.equal(gates().detach(), torch.ones(40, device="cuda"))
        runs.append((gates, gates.optimizer(keep=10)))
    strength = torch.linspace(0, 2, 40, device="cuda")
    for _ in range(150):
        for gates, prox in runs:
            gates.x.grad = None
            ((1 - gates()).square() * strength).sum().backward()
            prox.step()
            gates.step()
    (one, _), (other, _) = runs
    assert one.kept == other.kept
    assert len(one.kept) > 30
    torch.testing.assert_close(one.x, other.x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.control, other.control, rtol=1e-6, atol=1e-9)
    assert float(one.epsilon) == float(other.epsilon)
