"""Models of FuxiCTR's model zoo, made of the layers that its wheel has.

The wheel has the layers, and of the zoo the models of long histories alone (model_zoo.LongCTR). DeepFM, DCNv2,
DNN, AutoInt and FinalMLP are in FuxiCTR's repository, where users copy them from; these are the same networks,
written anew from the same layers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import (
    CrossNetV2,
    FactorizationMachine,
    FeatureEmbedding,
    LogisticRegression,
    MLP_Block,
    ScaledDotProductAttention,
)
from fuxictr.pytorch.models import BaseModel
from torch import Tensor, nn

DIM = 8
SETTINGS = {"optimizer": "adam", "loss": "binary_crossentropy", "verbose": 0, "metrics": ["AUC"]}


def feature_map(features: dict[str, dict[str, Any]], dim: int = DIM) -> FeatureMap:
    """A FeatureMap as FuxiCTR's preprocessing would leave it."""
    result = FeatureMap("made_up", "")
    result.features = OrderedDict((name, {"source": "", **spec}) for name, spec in features.items())
    result.labels = ["click"]
    result.default_emb_dim = dim
    result.num_fields = result.get_num_fields()
    result.set_column_index()
    return result


class Zoo(BaseModel):
    """What all of them have: an embedding, then ``logits``."""

    def __init__(self, feature_map: FeatureMap, folder: str = "", **settings: Any) -> None:
        super().__init__(feature_map, model_root=folder, **{**SETTINGS, **settings})
        self.embedding_layer = FeatureEmbedding(feature_map, DIM)
        self.width = feature_map.sum_emb_out_dim()
        self.build()
        self.compile(SETTINGS["optimizer"], SETTINGS["loss"], 1e-3)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        given = self.get_inputs(inputs)
        return {"y_pred": self.output_activation(self.logits(given, self.embedding_layer(given)))}


class DNN(Zoo):
    def build(self) -> None:
        self.mlp = MLP_Block(self.width, hidden_units=[32], output_dim=1)

    def logits(self, given: Any, embedded: Tensor) -> Tensor:
        return self.mlp(embedded.flatten(start_dim=1))


class NormedDNN(Zoo):
    """A BatchNorm over the concatenation: a zero is a value like any other there."""

    def build(self) -> None:
        self.mlp = MLP_Block(self.width, hidden_units=[32], output_dim=1, batch_norm=True, bn_only_once=True)

    def logits(self, given: Any, embedded: Tensor) -> Tensor:
        return self.mlp(embedded.flatten(start_dim=1))


class DeepFM(Zoo):
    def build(self) -> None:
        self.fm = FactorizationMachine(self.feature_map)
        self.mlp = MLP_Block(self.width, hidden_units=[32], output_dim=1)

    def logits(self, given: Any, embedded: Tensor) -> Tensor:
        found = self.fm(given, embedded)
        found += self.mlp(embedded.flatten(start_dim=1))
        return found


class DCNv2(Zoo):
    def build(self) -> None:
        self.crossnet = CrossNetV2(self.width, 2)
        self.parallel_dnn = MLP_Block(self.width, hidden_units=[32])
        self.fc = nn.Linear(self.width + 32, 1)

    def logits(self, given: Any, embedded: Tensor) -> Tensor:
        flat = embedded.flatten(start_dim=1)
        return self.fc(torch.cat([self.crossnet(flat), self.parallel_dnn(flat)], dim=-1))


class SelfAttention(nn.Module):
    """One head of attention of every field to every other, with the field itself added."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.dot_attention = ScaledDotProductAttention()

    def forward(self, given: Tensor) -> Tensor:
        heads = [each(given)[:, None] for each in (self.W_q, self.W_k, self.W_v)]
        return (self.dot_attention(*heads)[0][:, 0] + given).relu()


class AutoInt(Zoo):
    def build(self) -> None:
        self.lr_layer = LogisticRegression(self.feature_map, use_bias=False)
        self.dnn = MLP_Block(self.width, hidden_units=[32], output_dim=1)
        self.self_attention = nn.Sequential(SelfAttention(DIM), SelfAttention(DIM))
        self.fc = nn.Linear(self.feature_map.num_fields * DIM, 1)

    def logits(self, given: Any, embedded: Tensor) -> Tensor:
        found = self.fc(self.self_attention(embedded).flatten(start_dim=1))
        return found + self.dnn(embedded.flatten(start_dim=1)) + self.lr_layer(given)


class Selection(nn.Module):
    """FinalMLP's own soft selection: a factor a column, from the embedding of a context field or from a bias."""

    def __init__(self, feature_map: FeatureMap, width: int, context: list[str]) -> None:
        super().__init__()
        if context:
            self.ctx_emb = FeatureEmbedding(feature_map, DIM, required_feature_columns=context)
        else:
            self.ctx_bias = nn.Parameter(torch.zeros(1, DIM))
        self.gate = MLP_Block(
            DIM * max(1, len(context)), hidden_units=[16], output_dim=width, output_activation="Sigmoid"
        )

    def forward(self, given: Any, flat: Tensor) -> Tensor:
        context = self.ctx_emb(given).flatten(start_dim=1) if hasattr(self, "ctx_emb") else self.ctx_bias
        return flat * self.gate(context) * 2


class FinalMLP(Zoo):
    """Two MLPs, each with its own selection, and a bilinear form of what they give."""

    contexts: tuple[list[str], list[str]] = (["f1"], [])

    def build(self) -> None:
        self.fs = nn.ModuleList([Selection(self.feature_map, self.width, each) for each in self.contexts])
        self.mlp1 = MLP_Block(self.width, hidden_units=[32])
        self.mlp2 = MLP_Block(self.width, hidden_units=[32])
        self.w_x, self.w_y = nn.Linear(32, 1), nn.Linear(32, 1)
        self.w_xy = nn.Bilinear(32, 32, 1, bias=False)

    def logits(self, given: Any, embedded: Tensor) -> Tensor:
        flat = embedded.flatten(start_dim=1)
        first, second = self.mlp1(self.fs[0](given, flat)), self.mlp2(self.fs[1](given, flat))
        return self.w_x(first) + self.w_y(second) + self.w_xy(first, second)
