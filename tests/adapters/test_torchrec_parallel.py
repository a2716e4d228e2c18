"""Gates on tables that TorchRec shards over two gloo processes, against the plain model on the same rows."""

from __future__ import annotations

import os
import socket
import warnings
from datetime import timedelta

import pytest
import torch
from contract import FIELDS, Log, real
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of

real("torchrec")

from test_torchrec import Own, jagged  # noqa: E402

from lpfs.adapters.torchrec import TorchRec  # noqa: E402
from lpfs.errors import StateError  # noqa: E402

RANKS = 2
X = [1.0, 0.5, 0.0, -1.0, 2.0, 1.0, 0.3, 0.0]


class ByKey(Own):
    """A model that reads its features by name, as a model on shards must."""

    def forward(self, features: object) -> Tensor:
        found = self.ebc(features)
        return self.top(torch.cat([found[name] for name in FIELDS], 1))


def made(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return ByKey(shared=True)


def rows() -> tuple[Tensor, Tensor]:
    ids, _, labels = Log(5).rows(32)
    return ids, labels[:, None]


def gates_of(model: nn.Module) -> object:
    return TorchRec().attach(model)


def gated(model: nn.Module) -> object:
    gates = gates_of(model)
    with torch.no_grad():
        gates.x.copy_(torch.tensor([X[FIELDS.index(name)] for name in gates.names]))
    return gates


def rank_of_two(rank: int, port: int, out: str) -> None:
    """One of the processes: shard by hand, mixed, so that keys change their order; write what came out."""
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
    model = made()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    gates = gated(model)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.0}
    )
    ways = {
        name: row_wise(compute_kernel="fused")
        if n % 2
        else table_wise(rank=n // 2 % RANKS, compute_kernel="fused")
        for n, name in enumerate(model.ebc.embedding_bags)
    }
    plan = construct_module_sharding_plan(model.ebc, ways, sharder, RANKS, RANKS, "cpu")
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(distributed.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )
    for name, each in parallel.state_dict().items():
        for shard in each.local_shards() if hasattr(each, "local_shards") else ():
            start = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(state[name][start : start + shard.tensor.shape[0]])
    TorchRec().rehook(parallel)
    ids, labels = rows()
    mine = slice(rank * 16, rank * 16 + 16)
    logits = parallel(jagged(ids[mine]))
    loss_of(logits, labels[mine]).backward()
    keys = parallel.module.ebc(jagged(ids[mine])).keys()
    found = {"logits": logits.detach(), "grad": gates.x.grad, "keys": list(keys)}
    try:
        TorchRec().gather(parallel, made())
    except StateError as error:
        found["refused"] = str(error)
    if rank == 0:
        back = made(seed=1)
        gates_of(back)
        TorchRec().gather(parallel, back)
        found["back"] = back.state_dict()
    else:
        TorchRec().gather(parallel, None)
    torch.save(found, f"{out}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def test_gates_are_heard_on_sharded_tables(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_of_two, (port, str(tmp_path)), nprocs=RANKS)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    plain = made()
    gates = gated(plain)
    ids, labels = rows()
    logits = plain(jagged(ids))
    loss_of(logits, labels).backward()
    # sums over the shards of a row, and means of two halves: some roundings of numbers of about 1
    torch.testing.assert_close(torch.cat([each["logits"] for each in found]), logits.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(found[0]["grad"], gates.x.grad, rtol=0, atol=1e-6)
    assert torch.equal(found[0]["grad"], found[1]["grad"])
    assert found[0]["keys"] != list(plain.ebc(jagged(ids)).keys())  # otherwise nothing had to be arranged
    assert bool((gates.x.grad != 0).all())
    # the way back: weights and gates to the bit, then the pruned model predicts what the gated one did
    assert [each["refused"][:20] for each in found] == ["gather: rank 0 needs"] * RANKS
    back = made(seed=1)
    gates_of(back)
    back.load_state_dict(found[0]["back"])
    for name, each in plain.state_dict().items():
        assert not torch.is_tensor(each) or torch.equal(each, back.state_dict()[name]), name
    selection = TorchRec().absorb(back, batch=jagged(ids))
    assert set(selection.dropped) == {name for name, x in zip(FIELDS, X, strict=True) if x == 0}
    pruned = TorchRec().prune(back, selection, batch=jagged(ids))
    with torch.no_grad():
        assert torch.equal(pruned.model(jagged(ids)), back(jagged(ids)))
        torch.testing.assert_close(pruned.model(jagged(ids)), logits, rtol=0, atol=1e-6)


def test_what_cannot_be_hooked_again_is_said():
    with pytest.raises(StateError, match="attach them before DistributedModelParallel"):
        TorchRec().rehook(made())
    model = made()
    gated(model)
    TorchRec().rehook(model)  # nothing was sharded: nothing is to be done
    assert len(model.ebc._forward_hooks) == 1
    model.ebc = nn.Identity()
    with pytest.raises(StateError, match="'ebc' is a Identity now"):
        TorchRec().rehook(model)
