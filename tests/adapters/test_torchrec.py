"""TorchRec's own models, and models around its collections, under the contract of all adapters."""

from __future__ import annotations

import pytest
import torch
from contract import CHECKS, FIELDS, NUMBERS, VALUES, Case, prove
from torch import Tensor, nn

torchrec = pytest.importorskip("torchrec")

from torchrec.models.deepfm import SimpleDeepFMNN  # noqa: E402
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType  # noqa: E402
from torchrec.modules.embedding_modules import EmbeddingBagCollection  # noqa: E402
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402

from lpfs.adapters import TorchRec  # noqa: E402

D = 4


def collection(dim: int = D, shared: bool = False, prefix: str = "t_") -> EmbeddingBagCollection:
    tables = [[name] for name in FIELDS]
    if shared:  # f0 and f4, f1 and f5 look up one table
        tables = [["f0", "f4"], ["f1", "f5"], ["f2"], ["f3"], ["f6"], ["f7"]]
    configs = [
        EmbeddingBagConfig(
            name=prefix + names[0],
            embedding_dim=dim,
            num_embeddings=VALUES,
            feature_names=names,
            pooling=PoolingType.SUM,
        )
        for names in tables
    ]
    made = EmbeddingBagCollection(tables=configs)
    for each in made.parameters():
        nn.init.normal_(each, std=0.3)
    return made


class Own(nn.Module):
    """What people write around a collection: its values into an MLP, and perhaps a wide collection."""

    def __init__(self, wide: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.ebc = collection(shared=shared)
        self.wide = collection(1, prefix="w_") if wide else None
        self.top = nn.Sequential(nn.Linear(len(FIELDS) * D, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        logits = self.top(self.ebc(features).values())
        return logits if self.wide is None else logits + self.wide(features).values().sum(1, keepdim=True)


def jagged(ids: Tensor) -> KeyedJaggedTensor:
    """Return one id a row and feature."""
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(FIELDS), values=ids.T.reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.int64)
    )


def both(ids: Tensor, numbers: Tensor) -> tuple[Tensor, KeyedJaggedTensor]:
    return numbers, jagged(ids)


def sparse(ids: Tensor, numbers: Tensor) -> tuple[KeyedJaggedTensor]:
    return (jagged(ids),)


CASES = [
    # without the dense token a DLRM has products of two fields alone: f0 by itself could not be heard
    Case(
        "DLRM",
        lambda: DLRM(collection(), NUMBERS, [8, D], [32, 1]),
        TorchRec,
        both,
        keep=4,
        must_keep=("dense",),
    ),
    Case("DLRM_DCN", lambda: DLRM_DCN(collection(), NUMBERS, [8, D], [32, 1], 2, 3), TorchRec, both),
    Case(
        "DLRM_Projection",
        lambda: DLRM_Projection(collection(), NUMBERS, [8, D], [32, 1], [16, 4 * D], [16, 4 * D]),
        TorchRec,
        both,
    ),
    Case(
        "SimpleDeepFMNN",
        lambda: SimpleDeepFMNN(NUMBERS, collection(), 8, 32),
        lambda: TorchRec(probabilities=True),
        both,
    ),
    Case("own model, KeyedTensor into an MLP", Own, lambda: TorchRec(readers={"ebc": "top.0"}), sparse),
    Case(
        "own model, a wide collection beside it",
        lambda: Own(wide=True),
        lambda: TorchRec(readers={"ebc": "top.0", "wide": None}),
        sparse,
    ),
    Case(
        "own model, shared tables",
        lambda: Own(shared=True),
        lambda: TorchRec(readers={"ebc": ("top.0", 0)}),
        sparse,
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_the_contract(case, check):
    prove("torchrec", case, check)
