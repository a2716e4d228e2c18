"""One process of a search whose tables TorchRec shards over processes; started by test_model_parallel.py.

python tests/adapters/model_parallel.py FOLDER SHARDING      SHARDING: plain, table_wise or row_wise
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
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import lpfs
from lpfs.errors import StateError

NAMES = tuple("abcdef")
VALUES, DIM, BATCH, STEPS, KEEP, RATE = 24, 8, 64, 120, 2, 0.5


class Pick(nn.Module):
    """Return one field of the output of an EmbeddingBagCollection, (B, D)."""

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
    """Return ids (B, F) and clicks (B,) of a global batch; clicks depend on the first two fields."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VALUES, (BATCH, len(NAMES)), generator=generator)
    odds = 3.0 * ((ids[:, 0] % 2) * 2 - 1) + 3.0 * ((ids[:, 1] % 3 == 0).float() * 2 - 1)
    return ids, (torch.rand(BATCH, generator=generator) < torch.sigmoid(odds)).float()


def jagged(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(list(NAMES), ids.t().reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.int32))


def shard_model(model: Net, start: dict[str, Tensor], sharding: str, world: int) -> DistributedModelParallel:
    """Shard by an explicit plan: the planner has no row-wise option on a CPU, and only 'fused' tables train."""
    plans = {
        name: table_wise(rank=number % world, compute_kernel="fused") if sharding == "table_wise"
        else row_wise(compute_kernel="fused")
        for number, name in enumerate(NAMES)
    }  # fmt: skip
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused)]
    plan = construct_module_sharding_plan(
        model.sparse, per_param_sharding=plans, local_size=world, world_size=world, device_type="cpu",
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
    for name, tensor in parallel.state_dict().items():  # sharded tables are initialized again
        for shard in tensor.local_shards() if hasattr(tensor, "local_shards") else ():
            first = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(start[name][first : first + shard.tensor.shape[0]])
    return parallel


def main(folder: Path, sharding: str) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = Net("cpu")
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gates = lpfs.attach(model, dict(model.fields.items()), steps=STEPS)
    dense = [weight for weight in gates.model_parameters() if weight.shape != (VALUES, DIM)]
    prox = gates.optimizer(keep=KEEP)
    errors = []
    trained: nn.Module = model
    if sharding == "plain":
        table_optimizer = torch.optim.SGD(model.sparse.parameters(), lr=RATE)
    else:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        trained = shard_model(model, start, sharding, world)
        for function in (lpfs.attach, lpfs.absorb):
            try:
                function(trained)
            except StateError as error:
                errors.append(str(error))
        table_optimizer = None
    dense_optimizer = torch.optim.SGD(dense, lr=RATE)
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    trajectory = []
    for step in range(STEPS):
        ids, clicks = rows(step)
        for optimizer in (dense_optimizer, prox, *([table_optimizer] if table_optimizer is not None else [])):
            optimizer.zero_grad()
        logits = trained(jagged(ids[share]))
        binary_cross_entropy_with_logits(logits, clicks[share]).backward()
        dense_optimizer.step()
        if table_optimizer is not None:
            table_optimizer.step()
        prox.step()
        gates.step()
        trajectory.append(gates.x.detach().clone())
    torch.save(
        {"trajectory": torch.stack(trajectory), "kept": gates.kept, "errors": errors}, folder / f"{sharding}-{rank}.pt"
    )
    if world > 1:
        torch.distributed.barrier()
        os._exit(0)  # threads of gloo can block an ordinary exit


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
