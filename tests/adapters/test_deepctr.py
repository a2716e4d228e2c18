from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("deepctr_torch")

import torch
from contract import CHECKS, FIELDS, NUMBERS, VALUES, Case, prove
from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
from deepctr_torch.models import DIN, MMOE, DCNMix, DeepFM, xDeepFM
from loud import loud
from torch import Tensor

from lpfs.adapters.deepctr import DeepCTR

DIM = 4
IDS = [SparseFeat(name, VALUES, DIM) for name in FIELDS]
COLUMNS = [DenseFeat(f"n{n}", 1) for n in range(NUMBERS)]
# what the user did before, in four events, of which the last may be missing; it decides nothing
HISTORY = VarLenSparseFeat(
    SparseFeat("hist_f0", VALUES, DIM, embedding_name="f0"), maxlen=4, length_name="hist_length"
)


def feed(ids: Tensor, numbers: Tensor) -> Tensor:
    return torch.cat([ids.float(), numbers], dim=1)


def feed_history(ids: Tensor, numbers: Tensor) -> Tensor:
    length = 3 + ids[:, 7:] % 2
    history = ids[:, 4:] * (torch.arange(4) < length)
    return torch.cat([ids, history, length], dim=1).float()


class BothTasks(DeepCTR):
    """The second task is the opposite of the first."""

    def loss(self, output: Any, labels: Tensor) -> Tensor:
        return super().loss(output, torch.stack([labels, 1 - labels], dim=1))


def deepfm(linear: list[Any], dnn: list[Any]) -> DeepFM:
    return DeepFM(linear, dnn, dnn_hidden_units=(32,))


def xdeepfm(linear: list[Any], dnn: list[Any]) -> xDeepFM:
    return xDeepFM(linear, dnn, dnn_hidden_units=(32,), cin_layer_size=(8, 6))


def dcnmix(linear: list[Any], dnn: list[Any]) -> DCNMix:
    return DCNMix(linear, dnn, dnn_hidden_units=(32,), low_rank=4, num_experts=2)


def mmoe(linear: list[Any], dnn: list[Any]) -> MMOE:
    return MMOE(dnn, num_experts=2, expert_dnn_hidden_units=(32,), tower_dnn_hidden_units=(16,))


def din(linear: list[Any], dnn: list[Any]) -> DIN:
    return DIN(dnn, ["f0"], dnn_hidden_units=(32,), att_hidden_size=(8,))


def case(name: str, make: Any, columns: list[Any], feed: Any = feed, adapter: Any = DeepCTR) -> Case:
    made = adapter(make, untie=True)
    return Case(name, lambda: loud(made.prepare(make(columns, columns))), lambda: made, feed)


CASES = [
    case("DeepFM", deepfm, IDS + COLUMNS),
    case("xDeepFM", xdeepfm, IDS + COLUMNS),
    case("DCNMix", dcnmix, IDS + COLUMNS),
    case("DIN", din, [*IDS, HISTORY], feed_history),
    case("MMOE", mmoe, IDS + COLUMNS, adapter=BothTasks),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_the_contract(case: Case, check: Any) -> None:
    prove("deepctr", case, check)
