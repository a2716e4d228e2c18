"""A step captured as a CUDA graph trains as the plain step does."""

from __future__ import annotations

import copy

import pytest
import torch

import lpfs
from lpfs.embeddings.optim import Adagrad
from lpfs.errors import InputError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
SCHEMA = lpfs.Schema(
    (
        lpfs.Field("a", cardinality=50),
        lpfs.Field("b", cardinality=3),
        lpfs.Field("c", cardinality=1000),
        lpfs.Field("n", kind="numeric"),
    )
)


def batches(number: int, rows: int, device: str = "cuda", last: int | None = None) -> list[lpfs.Batch]:
    source = torch.Generator().manual_seed(0)
    made = []
    for at in range(number):
        size = last if last is not None and at == number - 1 else rows
        ids = torch.stack([torch.randint(n, (size,), generator=source) for n in (50, 3, 1000)], 1).int()
        dense = torch.randn(size, 1, generator=source)
        labels = ((ids[:, 1] == 0) ^ (torch.rand(size, generator=source) < 0.2)).float()[:, None]
        made.append(lpfs.Batch(ids, dense, labels).to(device))
    return made


class Drive(lpfs.Callback):
    """Updates gates in ``within_step``."""

    def __init__(self, gates, keep):
        self.gates, self.prox = gates, gates.optimizer(keep=keep)

    def within_step(self, state):
        self.prox.step()
        self.gates.step()

    def state_dict(self):
        return {"prox": self.prox.state_dict()}

    def load_state_dict(self, values):
        self.prox.load_state_dict(values["prox"])


def make(device: str = "cuda") -> lpfs.Model:
    torch.manual_seed(0)
    return lpfs.make_model("mlp", SCHEMA, dim=8, hidden=(16,)).to(device)


@needs_gpu
@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise-adagrad", "adam", "sgd"])
def test_a_graph_trains_as_the_plain_step(optimizer):
    ends = []
    for graph in (False, True):
        model = make()
        done = lpfs.fit(model, batches(9, 64, last=30), optimizer, epochs=3, schedule="rise", graph=graph, quiet=True)
        assert done.steps == 27
        ends.append([each.detach().cpu() for each in model.parameters()])
    # the dense update rounds differently (one rounding more), nothing else does
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-6)


@needs_gpu
def test_the_optimizer_is_restored():
    model = make()
    optimizer = Adagrad(model.parameters(), lr=0.05)
    lpfs.fit(model, batches(6, 64), optimizer, graph=True, quiet=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    moved = [each for each in model.parameters() if each is not model.inputs.numbers.missing]  # nothing is missing
    assert {float(optimizer.state[each]["step"]) for each in moved} == {6.0}
    assert all(each["step"].device.type == "cpu" for each in optimizer.state.values())


@needs_gpu
def test_a_search_in_a_graph_ends_with_exactly_k():
    model = make()
    gates = lpfs.attach(model, steps=300)
    drive = Drive(gates, keep=2)
    lpfs.fit(
        model,
        batches(10, 256),
        parameters=gates.model_parameters(),
        steps=300,
        callbacks=[drive],
        graph=True,
        quiet=True,
    )
    selection = gates.selection()
    assert len(selection.kept) == 2
    assert "b" in selection.kept
    assert all(selection.gates[name] == 0.0 for name in selection.dropped)
    batch = batches(1, 100)[0]
    before = model(batch)
    absorbed = lpfs.absorb(model, batch=batch)
    assert torch.equal(before, model(batch))
    assert lpfs.prune(model, absorbed, batch=batch).certificate.certified


@needs_gpu
def test_training_resumes_bit_for_bit(tmp_path):
    class Stop(lpfs.Callback):
        def after_step(self, state):
            if state.step == 13:
                raise KeyboardInterrupt

    ends = []
    dataset = lpfs.simulate(tmp_path / "log", "small", rows=4000)
    names = [each.name for each in dataset.schema if each.kind != "multi"]
    for broken in (False, True):
        torch.manual_seed(0)
        model = lpfs.make_model("mlp", dataset.schema.subset(names), dim=4, hidden=(8,)).cuda()
        gates = lpfs.attach(model, steps=60)

        def go(resume, callbacks, model=model, gates=gates, broken=broken):
            lpfs.fit(
                model,
                dataset.stream(200, fields=names, device="cuda"),
                parameters=gates.model_parameters(),
                steps=60,
                callbacks=[Drive(gates, keep=10), *callbacks],
                graph=True,
                quiet=True,
                folder=tmp_path / f"run{broken}",
                checkpoint_every=5,
                resume=resume,
            )

        if broken:
            with pytest.raises(KeyboardInterrupt):
                go(False, [Stop()])
            torch.manual_seed(1)
            model = lpfs.make_model("mlp", dataset.schema.subset(names), dim=4, hidden=(8,)).cuda()
            gates = lpfs.attach(model, steps=60)
            go(True, [Quiet()], model, gates)
        else:
            go(False, [Quiet()])
        ends.append({name: each.detach().cpu() for name, each in model.state_dict().items()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


class Quiet(lpfs.Callback):
    """Has the name of Stop in the checkpoint, and does nothing."""


Quiet.__name__ = "Stop"


@needs_gpu
def test_unsupported_options_are_refused():
    model = make()
    with pytest.raises(InputError, match="clip"):
        lpfs.fit(model, batches(2, 16), clip=1.0, graph=True, quiet=True)
    dense = torch.nn.Linear(1, 1).cuda()
    with pytest.raises(InputError, match=r"lpfs.embeddings, found SGD"):
        lpfs.fit(model, batches(2, 16), torch.optim.SGD(dense.parameters(), lr=0.1), graph=True, quiet=True)


def test_a_graph_needs_a_gpu():
    with pytest.raises(InputError, match="graph=True needs a GPU"):
        lpfs.fit(copy.deepcopy(make("cpu")), batches(2, 16, "cpu"), graph=True, quiet=True)
