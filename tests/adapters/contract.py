"""What every adapter has to show on every model: one Case a model, one check a column of docs/adapters.md.

A test file makes Cases and runs the checks over them (see test_plain.py)::

    @pytest.mark.parametrize("check", CHECKS)
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
    def test_the_contract(case, check):
        prove("plain", case, check)

Each check returns the words that stand in the table. They are compared with tests/adapters/results/<package>.json,
so that the table cannot say what no test has seen; ``LPFS_ADAPTERS=write`` writes that file anew.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import set_gates

import lpfs
from lpfs.adapters.base import Adapter
from lpfs.errors import ExactnessError, InputError, LeakError
from lpfs.gates.logits import logits_of, max_change, rounding_bound

RESULTS = Path(__file__).parent / "results"
FIELDS = tuple(f"f{n}" for n in range(8))
TRUE = FIELDS[:3]
VALUES = 10  # ids of a field: 0 … 9
NUMBERS = 4


class Log:
    """Clicks that f0, f1 and f2 decide; f3 is a copy of f0 with 30 % of its values replaced; the rest is noise."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        effects = torch.randn(len(TRUE), VALUES, generator=self.random)
        self.effects = 1.5 * (effects - effects.mean(1, keepdim=True)) / effects.std(1, keepdim=True)

    def rows(self, count: int = 256) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids (B, 8) int64, numbers (B, 4) that say nothing, and labels (B,)."""
        ids = torch.randint(VALUES, (count, len(FIELDS)), generator=self.random)
        replaced = torch.rand(count, generator=self.random) < 0.3
        ids[:, 3] = torch.where(replaced, ids[:, 3], ids[:, 0])
        numbers = torch.randn(count, NUMBERS, generator=self.random)
        logit = sum(self.effects[n][ids[:, n]] for n in range(len(TRUE)))
        return ids, numbers, (torch.rand(count, generator=self.random) < torch.sigmoid(logit)).float()


@dataclass(frozen=True)
class Case:
    """One model under the contract.

    Args:
        model: its name in the table.
        make: makes it; called with torch's seed set.
        adapter: makes its adapter.
        feed: ids (B, 8) and numbers (B, 4) -> the batch that the adapter's ``call`` takes. Fields must be called
            f0 … f7; others may stand beside them (a dense part, say).
        lr: learning rate of Adagrad before and in the search.
        pretrain: steps before the search.
        steps: steps of the search.
        keep: fields that the search keeps: the true ones by default, and what must stay beside them.
        must_keep: fields that the search may not drop.

    """

    model: str
    make: Callable[[], nn.Module]
    adapter: Callable[[], Adapter]
    feed: Callable[[Tensor, Tensor], Any]
    lr: float = 0.05
    pretrain: int = 200
    steps: int = 500
    keep: int = len(TRUE)
    must_keep: tuple[str, ...] = ()

    def fresh(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make()

    def batch(self, count: int = 64) -> Any:
        ids, numbers, _ = Log(7).rows(count)
        return self.feed(ids, numbers)


# ------------------------------------------------------------------------------------------- checks


def attach(case: Case) -> str:
    """Predictions are bit-identical right after attach, every gate is heard, and detach restores the model."""
    model, adapter, batch = case.fresh(), case.adapter(), case.batch()
    before = logits_of(model, batch, adapter.call)
    keys = list(model.state_dict())
    gates = adapter.attach(model)
    assert set(FIELDS) <= set(gates.names)
    after = logits_of(model, batch, adapter.call)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [key for key in model.state_dict() if not key.startswith("lpfs_gates")] == keys
    gates.refuse_idle()
    for output in _outputs(adapter.call(model.eval(), batch)):
        output.sum().backward(retain_graph=True)
    assert gates.x.grad is not None
    assert bool((gates.x.grad != 0).all()), "a gate has no gradient"
    set_gates(gates, [0.5] * len(gates.names))
    assert max_change(before, logits_of(model, batch, adapter.call)) > 0
    lpfs.detach(model)
    assert max_change(before, logits_of(model, batch, adapter.call)) == 0.0
    return "bit-equal"


def leak(case: Case) -> str:
    """Where a field enters in several places and only the first is gated, the leak check names the field."""
    adapter, batch = case.adapter(), case.batch()
    sites = adapter.sites(case.fresh())
    several = {name: len(places) for name, places in sites.items() if len(places) > 1}
    for name in several:
        model = case.fresh()
        first = {each: places[:1] if each == name else places for each, places in sites.items()}
        gates = lpfs.attach(model, first)
        set_gates(gates, [0.0 if each == name else 1.0 for each in gates.names])
        selection = lpfs.absorb(model)
        with pytest.raises(LeakError, match=repr(name)):
            adapter.prune(model, selection, batch=batch)
    for name in sites:  # and with all places gated nothing comes through
        model = case.fresh()
        gates = adapter.attach(model)
        set_gates(gates, [0.0 if each == name else 1.0 for each in gates.names])
        found = adapter.prune(model, adapter.absorb(model), batch=batch).certificate
        assert found.checked == (name,)
    if not several:
        return "no ungated part"
    return f"found and gated: {sum(several.values()) - len(several)} further parts of {len(several)} fields"


def truth(case: Case) -> str:
    """A short search finds the fields that decide, not their copy and not the noise."""
    model, adapter, log = case.fresh(), case.adapter(), Log()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=case.lr)

    def batches() -> Any:
        while True:
            ids, numbers, labels = log.rows()
            yield case.feed(ids, numbers), labels

    stream = batches()
    for _ in range(case.pretrain):
        batch, labels = next(stream)
        optimizer.zero_grad()
        adapter.loss(adapter.call(model, batch), labels).backward()
        optimizer.step()
    selection = adapter.search(
        model, stream, optimizer, steps=case.steps, keep=case.keep, must_keep=case.must_keep
    )
    assert set(selection.kept) == {*TRUE, *case.must_keep}, selection.kept
    gated = logits_of(model, case.batch(), adapter.call)
    selection = adapter.absorb(model, optimizer, batch=case.batch())
    pruned = adapter.prune(model, selection, batch=case.batch(), optimizer=optimizer)
    assert pruned.certificate.certified
    absorbed = logits_of(model, case.batch(), adapter.call)
    assert max_change(gated, absorbed) <= rounding_bound(gated)
    return f"{len(TRUE)} of {len(FIELDS)} fields"


def absorb(case: Case) -> str:
    """Gates go into the weights: bit-equal for powers of two, as promised for any other number; or a reason."""
    adapter, batch = case.adapter(), case.batch()
    for values in (POWERS, ODD):
        model = case.fresh()
        gates = adapter.attach(model)
        _set(gates, [values[n % len(values)] for n in range(len(gates.names))])
        before = logits_of(model, batch, adapter.call)
        try:
            selection = adapter.absorb(model, batch=batch)
        except ExactnessError as error:
            return _refused(error)
        after = logits_of(model, batch, adapter.call)
        exact = values is POWERS or selection.made["exact"]
        assert max_change(before, after) <= (0.0 if exact else rounding_bound(before))
        assert not any(name.startswith("lpfs_gates") for name, _ in model.named_parameters())
    how = sorted(set(selection.made["absorbed"].values()))
    return f"{'bit-equal' if selection.made['exact'] else 'rounding'} ({', '.join(how)})"


def prune(case: Case) -> str:
    """The smaller model predicts the same, bit for bit, with zeros where fields were; it reads none of them."""
    return _pruned(case, cut=False)


def cut(case: Case) -> str:
    """The smaller model without the dense columns predicts the same to rounding; or a reason why not."""
    return _pruned(case, cut=True)


CHECKS = (attach, leak, truth, absorb, prune, cut)
POWERS = (0.5, 1.0, 0.0, 2.0, -1.0, 0.0, -0.5, 4.0)
ODD = (0.7, 1.0, 0.0, 1.3, 0.9, 0.0, 1.1, 0.0)


def _pruned(case: Case, cut: bool) -> str:
    adapter, batch, model = case.adapter(), case.batch(), case.fresh()
    gates = adapter.attach(model)
    set_gates(gates, [1.0 if name in TRUE or name not in FIELDS else 0.0 for name in gates.names])
    optimizer = torch.optim.Adagrad(gates.model_parameters(), lr=0.01)
    selection = adapter.absorb(model, optimizer, batch=batch)
    before = logits_of(model, batch, adapter.call)
    try:
        done = adapter.prune(model, selection, batch=batch, optimizer=optimizer, cut=cut)
    except (ExactnessError, InputError) as error:
        return _refused(error)
    assert done.certificate.certified, str(done.certificate)
    assert set(done.certificate.checked) == set(FIELDS) - set(TRUE)
    narrow = getattr(adapter, "narrow", None)
    narrowed = batch if narrow is None else narrow(model, batch, done.model)
    after = logits_of(done.model, narrowed, adapter.call)
    change = max_change(before, after)
    assert change <= (rounding_bound(before) if cut else 0.0)
    sizes = [sum(each.numel() for each in one.parameters()) for one in (model, done.model)]
    held = {id(each) for group in done.optimizer.param_groups for each in group["params"]}
    assert held == {id(each) for each in done.model.parameters() if each.requires_grad}
    if sizes[1] == sizes[0]:
        return "nothing to remove"
    assert sizes[1] < sizes[0]
    return "rounding" if cut else "bit-equal"


def _set(gates: lpfs.Gates, values: list[float]) -> None:
    """Give the gates values near these: exactly these where they are powers of two."""
    rounded = [value if value in POWERS else 0.0 for value in values]
    if rounded == values:
        set_gates(gates, values)
        return
    with torch.no_grad():
        gates.x.copy_(torch.tensor(values).sign())
        gates.norm /= torch.tensor([abs(value) or 1.0 for value in values])
    assert torch.allclose(gates.values, torch.tensor(values))


def _refused(error: Exception) -> str:
    words = re.sub(r" by [\d.e+-]+", "", str(error))  # how far an output would move depends on the machine
    return f"refused: {words.partition('; ')[0].partition(' (')[0]}"


def _outputs(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [each for value in values for each in _outputs(value)]


# ------------------------------------------------------------------------------------------ results


def real(module: str) -> Any:
    """Return a package that the tests need: skip them where it is not, but not in make test-adapters.

    What it warns of when it is imported is its own affair.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module) if os.environ.get("LPFS_ADAPTERS") else pytest.importorskip(module)


def complete(package: str, cases: Sequence[Case]) -> None:
    """Refuse rows of models that are no longer tested."""
    rows = json.loads((RESULTS / f"{package}.json").read_text("utf-8"))
    assert list(rows) == [case.model for case in cases]


def prove(package: str, case: Case, check: Callable[[Case], str]) -> None:
    """Run one check on one model, and compare its words with those that the table shows."""
    said = check(case)
    path = RESULTS / f"{package}.json"
    rows = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if os.environ.get("LPFS_ADAPTERS") == "write":
        rows.setdefault(case.model, {})[check.__name__] = said
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8")
        return
    shown = rows.get(case.model, {}).get(check.__name__)
    assert said == shown, (
        f"the test found {said!r}, {path.name} shows {shown!r}; LPFS_ADAPTERS=write, then the docs"
    )
