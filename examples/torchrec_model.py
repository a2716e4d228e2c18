"""A TorchRec model: gates on its DLRM, search, gates off, a DLRM with a smaller EmbeddingBagCollection.

    python examples/torchrec_model.py        # needs torchrec: see docs/adapters.md

The log is made up, so that the truth is known: of 16 features only the first 4 decide about a click, 4 more are
noisy copies of them, the rest is noise, and so are the numbers that the dense branch reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from lpfs.adapters.torchrec import TorchRec
from lpfs.gates.prune import Pruned

FEATURES, TRUE, COPIES, VALUES, NUMBERS = 16, 4, 4, 20, 5
NAMES = [f"feature_{n:02d}" for n in range(FEATURES)]

# ------------------------------------------------------------------------- a model and its data


def make_model() -> DLRM:
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=8, num_embeddings=VALUES, feature_names=[name])
        for name in NAMES
    ]
    return DLRM(EmbeddingBagCollection(tables=tables), NUMBERS, [16, 8], [64, 1])


def log(rows: int, seed: int) -> Iterator[tuple[tuple[Tensor, KeyedJaggedTensor], Tensor]]:
    """Yield ((numbers, features), clicks) without end."""
    effects = torch.randn(TRUE, VALUES, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(VALUES, (rows, FEATURES), generator=random)
        copied = torch.rand(rows, COPIES, generator=random) < 0.7
        ids[:, TRUE : TRUE + COPIES] = torch.where(copied, ids[:, :COPIES], ids[:, TRUE : TRUE + COPIES])
        chance = torch.sigmoid(1.5 * effects[torch.arange(TRUE), ids[:, :TRUE]].sum(1))
        features = KeyedJaggedTensor.from_lengths_sync(
            keys=NAMES, values=ids.T.reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.int64)
        )
        numbers = torch.randn(rows, NUMBERS, generator=random)
        yield (numbers, features), (torch.rand(rows, generator=random) < chance).float()


# ---------------------------------------------------------------------------------------- lpfs


def main(steps: int = 600) -> Pruned:
    torch.manual_seed(0)
    started = time.perf_counter()
    model, stream, adapter = make_model(), log(512, seed=1), TorchRec()
    held_out, clicks = next(log(20_000, seed=2))

    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)
    for _ in range(steps):  # the training you have already done
        batch, labels = next(stream)
        optimizer.zero_grad()
        adapter.loss(model(*batch), labels).backward()
        optimizer.step()
    print(f"trained on all {FEATURES} features: held-out log loss {adapter.loss(model(*held_out), clicks):.4f}")

    before = model(*held_out)
    gates = adapter.attach(model, steps=steps)
    print(f"gates on {len(gates.names)} fields: predictions bit-identical: {torch.equal(before, model(*held_out))}")

    # products of pairs are all that a DLRM reads: the dense token has to stay, so that one feature alone is heard
    adapter.search(model, stream, optimizer, steps=steps, keep=TRUE + 1, must_keep=["dense"])
    selection = adapter.absorb(model, optimizer, batch=held_out)
    print(f"gates absorbed: max |Δlogit| {selection.made['max_logit_change']:.2g}")

    pruned = adapter.prune(model, selection, batch=held_out, optimizer=optimizer, cut=True)
    print(f"pruned: {pruned.certificate}")
    counts = [sum(each.numel() for each in one.parameters()) for one in (model, pruned.model)]
    narrow = adapter.narrow(model, held_out, pruned.model)
    loss = adapter.loss(pruned.model(*narrow), clicks)
    print(f"parameters {counts[0]:,} -> {counts[1]:,}; held-out log loss {loss:.4f}")
    print(f"tables that stay: {tables_of(pruned.model)}; truth: {NAMES[:TRUE]}")
    print(f"{time.perf_counter() - started:.0f} seconds. Next: docs/adapters.md")
    return pruned


def tables_of(model: nn.Module) -> list[str]:
    found = [each for each in model.modules() if isinstance(each, EmbeddingBagCollection)]
    return [config.name for each in found for config in each.embedding_bag_configs()]


if __name__ == "__main__":
    main()
