"""A DeepCTR-Torch model: gates on its xDeepFM, search, gates off, an xDeepFM of the kept feature columns.

    python examples/deepctr_model.py        # needs deepctr-torch: pip install 'lpfs[deepctr]'

The log is made up, so that the truth is known: of 16 fields only the first 4 decide about a click, 4 more are
noisy copies of them, the rest is noise, and so are two of the three numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import xDeepFM
from torch import Tensor

from lpfs.adapters.deepctr import DeepCTR
from lpfs.gates.prune import Pruned

FIELDS, TRUE, COPIES, VALUES, DIM, NUMBERS = 16, 4, 4, 20, 4, 3
NAMES = [f"field_{n:02d}" for n in range(FIELDS)] + [f"number_{n}" for n in range(NUMBERS)]
TRUTH = [*NAMES[:TRUE], "number_0"]
COLUMNS = [SparseFeat(name, VALUES, DIM) if name.startswith("field") else DenseFeat(name, 1) for name in NAMES]

# ------------------------------------------------------------------------- a model and its data


def make(linear: list[Any], dnn: list[Any]) -> xDeepFM:
    model = xDeepFM(linear, dnn, dnn_hidden_units=(32,), cin_layer_size=(8, 4), init_std=0.01)
    model.compile(torch.optim.Adagrad(model.parameters(), lr=0.03), "binary_crossentropy", ["auc"])
    return model


def log(rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (X, clicks) without end: X is the matrix of all columns that DeepCTR-Torch reads."""
    effects = torch.randn(TRUE, VALUES, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(VALUES, (rows, FIELDS), generator=random)
        copied = torch.rand(rows, COPIES, generator=random) < 0.7
        ids[:, TRUE : TRUE + COPIES] = torch.where(copied, ids[:, :COPIES], ids[:, TRUE : TRUE + COPIES])
        numbers = torch.randn(rows, NUMBERS, generator=random)
        logit = 1.5 * effects[torch.arange(TRUE), ids[:, :TRUE]].sum(1) + numbers[:, 0]
        yield torch.cat([ids, numbers], 1), (torch.rand(rows, generator=random) < torch.sigmoid(logit)).float()


# ---------------------------------------------------------------------------------------- lpfs


def main(steps: int = 600) -> Pruned:
    torch.manual_seed(0)
    started = time.perf_counter()
    model, stream, adapter = make(COLUMNS, COLUMNS), log(256, seed=1), DeepCTR(make)
    held_out, clicks = next(log(20_000, seed=2))

    rows, labels = next(log(256 * steps, seed=3))
    given = {name: rows[:, n].numpy() for n, name in enumerate(NAMES)}
    model.fit(given, labels.numpy(), batch_size=256, verbose=0)  # the training you have already done
    loss = adapter.loss(adapter.call(model, held_out), clicks)
    print(f"trained on all {len(NAMES)} fields: held-out log loss {loss:.4f}")

    before = model(held_out)
    gates = adapter.attach(model, steps=steps)
    places = sum(map(len, gates.places.values()))
    same = torch.equal(before, model(held_out))
    print(f"gates on {len(gates.names)} fields in {places} places: predictions bit-identical: {same}")

    adapter.search(model, stream, model.optim, steps=steps, keep=len(TRUTH))
    selection = adapter.absorb(model, batch=held_out)
    print(f"gates absorbed: max |Δlogit| {selection.made['max_logit_change']:.2g}")

    pruned = adapter.prune(model, selection, batch=held_out, cut=True)
    print(f"pruned: {pruned.certificate}")
    counts = [sum(each.numel() for each in one.parameters()) for one in (model, pruned.model)]
    narrow = adapter.narrow(model, held_out, pruned.model)
    loss = adapter.loss(adapter.call(pruned.model, narrow), clicks)
    print(f"parameters {counts[0]:,} -> {counts[1]:,}; held-out log loss {loss:.4f}")
    _, columns = adapter.columns(model, selection)
    print(f"feature columns that stay: {[each.name for each in columns]}; truth: {TRUTH}")
    print(f"{time.perf_counter() - started:.0f} seconds. Next: docs/adapters.md")
    return pruned


if __name__ == "__main__":
    main()
