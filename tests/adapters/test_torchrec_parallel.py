"""Gates on tables that TorchRec shards over two gloo processes, compared with the plain model on the same rows."""

from __future__ import annotations

import os
import socket
import warnings
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.helpers.adapter_contract import FIELDS, Log, require_package

require_package("torchrec")

from lpfs.adapters.torchrec import TorchRec  # noqa: E402
from lpfs.errors import StateError  # noqa: E402
from tests.adapters.test_torchrec import Own, jagged  # noqa: E402

RANKS = 2
X = [1.0, 0.5, 0.0, -1.0, 2.0, 1.0, 0.3, 0.0]


class ByKey(Own):
    """A model that takes its features by name, because sharding changes their order."""

    def forward(self, features: object) -> Tensor:
        values = self.ebc(features)
        return self.top(torch.cat([values[name] for name in FIELDS], 1))


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return ByKey(shared=True)


def rows() -> tuple[Tensor, Tensor]:
    ids, _, labels = Log(5).rows(32)
    return ids, labels[:, None]


def attach_gates(model: nn.Module) -> object:
    gates = TorchRec().attach(model)
    with torch.no_grad():
        gates.x.copy_(torch.tensor([X[FIELDS.index(name)] for name in gates.names]))
    return gates


def run_rank(rank: int, port: int, out: str) -> None:
    """Run one process: shard the tables in mixed ways, so that the order of keys changes; write the results."""
    warnings.simplefilter("ignore")
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torch import distributed
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = make_model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gates = attach_gates(model)
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.0})
    sharding = {
        name: row_wise(compute_kernel="fused") if n % 2 else table_wise(rank=n // 2 % RANKS, compute_kernel="fused")
        for n, name in enumerate(model.ebc.embedding_bags)
    }
    plan = construct_module_sharding_plan(model.ebc, sharding, sharder, RANKS, RANKS, "cpu")
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(distributed.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )
    for name, tensor in parallel.state_dict().items():
        for shard in tensor.local_shards() if hasattr(tensor, "local_shards") else ():
            start = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(state[name][start : start + shard.tensor.shape[0]])
    TorchRec().rehook(parallel)
    ids, labels = rows()
    share = slice(rank * 16, rank * 16 + 16)
    logits = parallel(jagged(ids[share]))
    binary_cross_entropy_with_logits(logits, labels[share]).backward()
    keys = parallel.module.ebc(jagged(ids[share])).keys()
    results = {"logits": logits.detach(), "grad": gates.x.grad, "keys": list(keys)}
    try:
        TorchRec().gather(parallel, make_model())
    except StateError as error:
        results["refused"] = str(error)
    if rank == 0:
        gathered = make_model(seed=1)
        TorchRec().attach(gathered)
        TorchRec().gather(parallel, gathered)
        results["gathered"] = gathered.state_dict()
    else:
        TorchRec().gather(parallel, None)
    torch.save(results, f"{out}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def test_gates_on_sharded_tables(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, (port, str(tmp_path)), nprocs=RANKS)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    plain = make_model()
    gates = attach_gates(plain)
    ids, labels = rows()
    logits = plain(jagged(ids))
    binary_cross_entropy_with_logits(logits, labels).backward()
    # sums over shards and means of two halves have another order: a few roundings of values near 1
    torch.testing.assert_close(torch.cat([result["logits"] for result in results]), logits.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(results[0]["grad"], gates.x.grad, rtol=0, atol=1e-6)
    assert torch.equal(results[0]["grad"], results[1]["grad"])
    assert results[0]["keys"] != list(plain.ebc(jagged(ids)).keys())  # the order has changed
    assert bool((gates.x.grad != 0).all())
    # gathered weights and gates are bit-equal, and the pruned model predicts what the gated one did
    assert [result["refused"][:20] for result in results] == ["gather: rank 0 needs"] * RANKS
    gathered = make_model(seed=1)
    TorchRec().attach(gathered)
    gathered.load_state_dict(results[0]["gathered"])
    for name, value in plain.state_dict().items():
        assert not torch.is_tensor(value) or torch.equal(value, gathered.state_dict()[name]), name
    selection = TorchRec().absorb(gathered, batch=jagged(ids), partial=True)  # no search was made
    assert set(selection.dropped) == {name for name, x in zip(FIELDS, X, strict=True) if x == 0}
    pruned = TorchRec().prune(gathered, selection, batch=jagged(ids))
    with torch.no_grad():
        assert torch.equal(pruned.model(jagged(ids)), gathered(jagged(ids)))
        torch.testing.assert_close(pruned.model(jagged(ids)), logits, rtol=0, atol=1e-6)


def test_rehook_errors():
    with pytest.raises(StateError, match="attach them before DistributedModelParallel"):
        TorchRec().rehook(make_model())
    model = make_model()
    attach_gates(model)
    TorchRec().rehook(model)  # nothing was sharded: no change
    assert len(model.ebc._forward_hooks) == 1
    model.ebc = nn.Identity()
    with pytest.raises(StateError, match="'ebc' is a Identity, not a sharded"):
        TorchRec().rehook(model)
