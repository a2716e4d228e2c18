"""A search of a model whose tables TorchRec spreads over processes: what the test starts in each of them.

python tests/adapters/model_parallel.py FOLDER HOW      HOW: plain, table_wise or row_wise
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import lpfs
from lpfs.errors import StateError

NAMES = tuple("abcdef")
VALUES, DIM, BATCH, STEPS, KEEP, RATE = 24, 8, 64, 120, 2, 0.5


class Pick(nn.Module):
    """One field of what an EmbeddingBagCollection returns, (B, D)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, looked_up: dict[str, Tensor]) -> Tensor:
        return looked_up[self.name]


class Net(nn.Module):
    """An EmbeddingBagCollection, then an MLP."""

    def __init__(self, device: str) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=VALUES, feature_names=[name])
            for name in NAMES
        ]
        self.sparse = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        self.fields = nn.ModuleDict({name: Pick(name) for name in NAMES})
        self.top = nn.Sequential(nn.Linear(len(NAMES) * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        looked_up = self.sparse(ids).to_dict()
        logits: Tensor = self.top(torch.cat([pick(looked_up) for pick in self.fields.values()], 1))[:, 0]
        return logits


def rows(step: int) -> tuple[Tensor, Tensor]:
    """The ids (B, F) and clicks (B,) of a global batch; the first two fields tell everything."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(VALUES, (BATCH, len(NAMES)), generator=draw)
    odds = 3.0 * ((ids[:, 0] % 2) * 2 - 1) + 3.0 * ((ids[:, 1] % 3 == 0).float() * 2 - 1)
    return ids, (torch.rand(BATCH, generator=draw) < torch.sigmoid(odds)).float()


def jagged(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(list(NAMES), ids.t().reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.int32))


def sharded(model: Net, start: dict[str, Tensor], how: str, world: int) -> DistributedModelParallel:
    """Spread the tables by hand: the planner has no row-wise option on a CPU, and tables train in 'fused' only."""
    kind = {
        name: table_wise(rank=number % world, compute_kernel="fused") if how == "table_wise"
        else row_wise(compute_kernel="fused")
        for number, name in enumerate(NAMES)
    }  # fmt: skip
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused)]
    plan = construct_module_sharding_plan(
        model.sparse, per_param_sharding=kind, local_size=world, world_size=world, device_type="cpu",
        sharder=sharders[0],
    )  # fmt: skip
    assert torch.distributed.group.WORLD is not None
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(torch.distributed.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"sparse": plan}),
        sharders=sharders,  # type: ignore[arg-type]
    )
    for name, each in parallel.state_dict().items():  # tables are drawn anew where they are spread
        for shard in each.local_shards() if hasattr(each, "local_shards") else ():
            first = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(start[name][first : first + shard.tensor.shape[0]])
    return parallel


def main(folder: Path, how: str) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = Net("cpu")
    start = {name: each.clone() for name, each in model.state_dict().items()}
    gates = lpfs.attach(model, dict(model.fields.items()), steps=STEPS)
    dense = [each for each in gates.model_parameters() if each.shape != (VALUES, DIM)]
    prox = gates.optimizer(keep=KEEP)
    refused = []
    trained: nn.Module = model
    if how == "plain":
        tables = torch.optim.SGD(model.sparse.parameters(), lr=RATE)
    else:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        trained = sharded(model, start, how, world)
        for verb in (lpfs.attach, lpfs.absorb):
            try:
                verb(trained)
            except StateError as error:
                refused.append(str(error))
        tables = None
    moving = torch.optim.SGD(dense, lr=RATE)
    part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    course = []
    for step in range(STEPS):
        ids, clicks = rows(step)
        for each in (moving, prox, *([tables] if tables is not None else [])):
            each.zero_grad()
        logits = trained(jagged(ids[part]))
        binary_cross_entropy_with_logits(logits, clicks[part]).backward()
        moving.step()
        if tables is not None:
            tables.step()
        prox.step()
        gates.step()
        course.append(gates.x.detach().clone())
    torch.save(
        {"course": torch.stack(course), "kept": gates.kept, "refused": refused},
        folder / f"{how}-{rank}.pt",
    )
    if world > 1:
        torch.distributed.barrier()
        os._exit(0)  # threads of gloo can hold up a process that ends in the ordinary way


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
