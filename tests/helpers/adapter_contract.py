"""The contract of all adapters: one Case per model, one check per column of the table in docs/adapters.md.

A test file defines Cases and runs the checks on them (see test_plain.py)::

    @pytest.mark.parametrize("check", CHECKS)
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
    def test_contract(case, check):
        run_check("plain", case, check)

Each check returns the text of a cell. It is compared with tests/adapters/results/<package>.json, so that the table
shows only tested results; ``LPFS_ADAPTERS=write`` rewrites that file.
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

import lpfs
from lpfs.adapters.base import Adapter
from lpfs.errors import ExactnessError, InputError, LeakError
from lpfs.gates.stepping import check_all_used
from lpfs.gates.verification import compute_logits, max_abs_difference, rounding_bound
from tests.helpers.zoo import set_gates

RESULTS = Path(__file__).parents[1] / "adapters" / "results"
FIELDS = tuple(f"f{n}" for n in range(8))
TRUE = FIELDS[:3]
VALUES = 10  # ids per field: 0 … 9
NUMBERS = 4  # numeric columns
POWERS = (0.5, 1.0, 0.0, 2.0, -1.0, 0.0, -0.5, 4.0)  # gates that change no mantissa
ODD = (0.7, 1.0, 0.0, 1.3, 0.9, 0.0, 1.1, 0.0)


class Log:
    """Clicks depend on f0, f1 and f2; f3 is a copy of f0 with 30 % of its values replaced; others are noise."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        effects = torch.randn(len(TRUE), VALUES, generator=self.generator)
        self.effects = 1.5 * (effects - effects.mean(1, keepdim=True)) / effects.std(1, keepdim=True)

    def rows(self, count: int = 256) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids (B, 8) int64, random numbers (B, 4) and labels (B,)."""
        ids = torch.randint(VALUES, (count, len(FIELDS)), generator=self.generator)
        replaced = torch.rand(count, generator=self.generator) < 0.3
        ids[:, 3] = torch.where(replaced, ids[:, 3], ids[:, 0])
        numbers = torch.randn(count, NUMBERS, generator=self.generator)
        logit = sum(self.effects[n][ids[:, n]] for n in range(len(TRUE)))
        return ids, numbers, (torch.rand(count, generator=self.generator) < torch.sigmoid(logit)).float()


@dataclass(frozen=True)
class Case:
    """One model under the contract.

    Args:
        model: its name in the table.
        make: function that builds it; called with torch's seed set.
        adapter: function that returns its adapter.
        feed: function from ids (B, 8) and numbers (B, 4) to the batch for the adapter's ``call``. Fields must be
            named f0 … f7; there may be others (for example a dense part).
        lr: learning rate of Adagrad before and in the search.
        pretrain: steps before the search.
        steps: steps of the search.
        keep: number of fields that the search keeps: the true ones and ``must_keep``.
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

    def new_model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make()

    def batch(self, count: int = 64) -> Any:
        ids, numbers, _ = Log(7).rows(count)
        return self.feed(ids, numbers)


def randomize(model: nn.Module) -> nn.Module:
    """Draw every weight again, biases too, in place.

    Both libraries start with tables near 1e-4, where rounding would hide a wrong model.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in dict.fromkeys(model.parameters()):
            weight.copy_(0.25 * torch.randn(weight.shape, generator=generator))
    return model


# ------------------------------------------------------------------------------------------- checks


def attach(case: Case) -> str:
    """Predictions are bit-identical after attach, every gate has a gradient, and detach restores the model."""
    model, adapter, batch = case.new_model(), case.adapter(), case.batch()
    before = compute_logits(model, batch, adapter.call)
    keys = list(model.state_dict())
    gates = adapter.attach(model)
    assert set(FIELDS) <= set(gates.names)
    after = compute_logits(model, batch, adapter.call)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [key for key in model.state_dict() if not key.startswith("lpfs_gates")] == keys
    check_all_used(gates)
    for output in _outputs(adapter.call(model.eval(), batch)):
        output.sum().backward(retain_graph=True)
    assert gates.x.grad is not None
    assert bool((gates.x.grad != 0).all()), "a gate has no gradient"
    set_gates(gates, [0.5] * len(gates.names))
    assert max_abs_difference(before, compute_logits(model, batch, adapter.call)) > 0
    lpfs.detach(model)
    assert max_abs_difference(before, compute_logits(model, batch, adapter.call)) == 0.0
    return "bit-equal"


def leak(case: Case) -> str:
    """If a field enters at several sites and only the first is gated, the leak check names the field."""
    adapter, batch = case.adapter(), case.batch()
    sites = adapter.sites(case.new_model())
    counts = {name: len(field_sites) for name, field_sites in sites.items() if len(field_sites) > 1}
    for name in counts:
        model = case.new_model()
        first = {field: found[:1] if field == name else found for field, found in sites.items()}
        gates = lpfs.attach(model, first)
        set_gates(gates, [0.0 if field == name else 1.0 for field in gates.names])
        selection = lpfs.absorb(model)
        with pytest.raises(LeakError, match=repr(name)):
            adapter.prune(model, selection, batch=batch)
    for name in sites:  # with all sites gated the field has no influence
        model = case.new_model()
        gates = adapter.attach(model)
        set_gates(gates, [0.0 if field == name else 1.0 for field in gates.names])
        certificate = adapter.prune(model, adapter.absorb(model), batch=batch).certificate
        assert certificate.checked == (name,)
    if not counts:
        return "no ungated part"
    return f"found and gated: {sum(counts.values()) - len(counts)} further parts of {len(counts)} fields"


def truth(case: Case) -> str:
    """A short search keeps the true fields, not the copy and not the noise."""
    model, adapter, log = case.new_model(), case.adapter(), Log()
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
    selection = adapter.search(model, stream, optimizer, steps=case.steps, keep=case.keep, must_keep=case.must_keep)
    assert set(selection.kept) == {*TRUE, *case.must_keep}, selection.kept
    gated = compute_logits(model, case.batch(), adapter.call)
    selection = adapter.absorb(model, optimizer, batch=case.batch())
    pruned = adapter.prune(model, selection, batch=case.batch(), optimizer=optimizer)
    assert pruned.certificate.certified
    absorbed = compute_logits(model, case.batch(), adapter.call)
    assert max_abs_difference(gated, absorbed) <= rounding_bound(gated)
    return f"{len(TRUE)} of {len(FIELDS)} fields"


def absorb(case: Case) -> str:
    """Absorbing is bit-equal for powers of two and within rounding for other gates; else return the error."""
    adapter, batch = case.adapter(), case.batch()
    for values in (POWERS, ODD):
        model = case.new_model()
        gates = adapter.attach(model)
        _set_approximately(gates, [values[n % len(values)] for n in range(len(gates.names))])
        before = compute_logits(model, batch, adapter.call)
        try:
            selection = adapter.absorb(model, batch=batch)
        except ExactnessError as error:
            return _refused(error)
        after = compute_logits(model, batch, adapter.call)
        exact = values is POWERS or selection.made["exact"]
        assert max_abs_difference(before, after) <= (0.0 if exact else rounding_bound(before))
        assert not any(name.startswith("lpfs_gates") for name, _ in model.named_parameters())
    locations = sorted(set(selection.made["absorbed"].values()))
    return f"{'bit-equal' if selection.made['exact'] else 'rounding'} ({', '.join(locations)})"


def prune(case: Case) -> str:
    """The smaller model with zeros for dropped fields is bit-equal and does not depend on them."""
    return _pruned(case, cut=False)


def cut(case: Case) -> str:
    """The smaller model without the dense columns is equal up to rounding; else return the error."""
    return _pruned(case, cut=True)


CHECKS = (attach, leak, truth, absorb, prune, cut)


def _pruned(case: Case, cut: bool) -> str:
    adapter, batch, model = case.adapter(), case.batch(), case.new_model()
    gates = adapter.attach(model)
    set_gates(gates, [1.0 if name in TRUE or name not in FIELDS else 0.0 for name in gates.names])
    optimizer = torch.optim.Adagrad(gates.model_parameters(), lr=0.01)
    selection = adapter.absorb(model, optimizer, batch=batch)
    before = compute_logits(model, batch, adapter.call)
    try:
        pruned = adapter.prune(model, selection, batch=batch, optimizer=optimizer, cut=cut)
    except (ExactnessError, InputError) as error:
        return _refused(error)
    assert pruned.certificate.certified, str(pruned.certificate)
    assert set(pruned.certificate.checked) == set(FIELDS) - set(TRUE)
    narrow = getattr(adapter, "narrow", None)
    narrowed = batch if narrow is None else narrow(model, batch, pruned.model)
    after = compute_logits(pruned.model, narrowed, adapter.call)
    change = max_abs_difference(before, after)
    assert change <= (rounding_bound(before) if cut else 0.0)
    optimized = {id(weight) for group in pruned.optimizer.param_groups for weight in group["params"]}
    assert optimized == {id(weight) for weight in pruned.model.parameters() if weight.requires_grad}
    size_before, size_after = (sum(weight.numel() for weight in net.parameters()) for net in (model, pruned.model))
    if size_after == size_before:
        return "nothing to remove"
    assert size_after < size_before
    return "rounding" if cut else "bit-equal"


def _set_approximately(gates: lpfs.Gates, values: list[float]) -> None:
    """Set the gates to these values; exactly, if all of them are powers of two."""
    rounded = [value if value in POWERS else 0.0 for value in values]
    if rounded == values:
        set_gates(gates, values)
        return
    with torch.no_grad():
        gates.x.copy_(torch.tensor(values).sign())
        gates.norm /= torch.tensor([abs(value) or 1.0 for value in values])
    assert torch.allclose(gates.values, torch.tensor(values))


def _refused(error: Exception) -> str:
    text = re.sub(r" by [\d.e+-]+", "", str(error))  # the size of a change depends on the machine
    return f"refused: {text.partition('; ')[0].partition(' (')[0]}"


def _outputs(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [tensor for value in values for tensor in _outputs(value)]


# ------------------------------------------------------------------------------------------ results


def require_package(module: str) -> Any:
    """Import a package without its warnings; skip the tests if it is missing, except in make test-adapters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module) if os.environ.get("LPFS_ADAPTERS") else pytest.importorskip(module)


def check_complete(package: str, cases: Sequence[Case]) -> None:
    """Check that the results have exactly these models."""
    rows = json.loads((RESULTS / f"{package}.json").read_text("utf-8"))
    assert list(rows) == [case.model for case in cases]


def run_check(package: str, case: Case, check: Callable[[Case], str]) -> None:
    """Run one check on one model, and compare its result with that of the table."""
    result = check(case)
    path = RESULTS / f"{package}.json"
    rows = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if os.environ.get("LPFS_ADAPTERS") == "write":
        rows.setdefault(case.model, {})[check.__name__] = result
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8")
        return
    recorded = rows.get(case.model, {}).get(check.__name__)
    assert result == recorded, (
        f"found {result!r}, {path.name} has {recorded!r}; use LPFS_ADAPTERS=write, then tests/adapters/table.py"
    )
