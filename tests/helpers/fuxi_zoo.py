"""Models of FuxiCTR's model zoo, built from the layers of its wheel.

The wheel has the layers, but only the models for long histories (model_zoo.LongCTR). DeepFM, DCNv2, DNN, AutoInt
and FinalMLP are in FuxiCTR's repository, from which users copy them; these are the same networks.
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
    """Return a FeatureMap as FuxiCTR's preprocessing writes it."""
    result = FeatureMap("made_up", "")
    result.features = OrderedDict((name, {"source": "", **spec}) for name, spec in features.items())
    result.labels = ["click"]
    result.default_emb_dim = dim
    result.num_fields = result.get_num_fields()
    result.set_column_index()
    return result


class Zoo(BaseModel):
    """Common base: an embedding, then ``logits``."""

    def __init__(self, feature_map: FeatureMap, folder: str = "", **settings: Any) -> None:
        super().__init__(feature_map, model_root=folder, **{**SETTINGS, **settings})
        self.embedding_layer = FeatureEmbedding(feature_map, DIM)
        self.width = feature_map.sum_emb_out_dim()
        self.build()
        self.compile(SETTINGS["optimizer"], SETTINGS["loss"], 1e-3)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        columns = self.get_inputs(inputs)
        return {"y_pred": self.output_activation(self.logits(columns, self.embedding_layer(columns)))}


class DNN(Zoo):
    def build(self) -> None:
        self.mlp = MLP_Block(self.width, hidden_units=[32], output_dim=1)

    def logits(self, inputs: Any, embedded: Tensor) -> Tensor:
        return self.mlp(embedded.flatten(start_dim=1))


class NormedDNN(Zoo):
    """A BatchNorm over the concatenation, for which zero is an ordinary value."""

    def build(self) -> None:
        self.mlp = MLP_Block(self.width, hidden_units=[32], output_dim=1, batch_norm=True, bn_only_once=True)

    def logits(self, inputs: Any, embedded: Tensor) -> Tensor:
        return self.mlp(embedded.flatten(start_dim=1))


class DeepFM(Zoo):
    def build(self) -> None:
        self.fm = FactorizationMachine(self.feature_map)
        self.mlp = MLP_Block(self.width, hidden_units=[32], output_dim=1)

    def logits(self, inputs: Any, embedded: Tensor) -> Tensor:
        logits = self.fm(inputs, embedded)
        logits += self.mlp(embedded.flatten(start_dim=1))
        return logits


class DCNv2(Zoo):
    def build(self) -> None:
        self.crossnet = CrossNetV2(self.width, 2)
        self.parallel_dnn = MLP_Block(self.width, hidden_units=[32])
        self.fc = nn.Linear(self.width + 32, 1)

    def logits(self, inputs: Any, embedded: Tensor) -> Tensor:
        flat = embedded.flatten(start_dim=1)
        return self.fc(torch.cat([self.crossnet(flat), self.parallel_dnn(flat)], dim=-1))


class SelfAttention(nn.Module):
    """One attention head over the fields, with a residual connection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.dot_attention = ScaledDotProductAttention()

    def forward(self, tokens: Tensor) -> Tensor:
        projections = [layer(tokens)[:, None] for layer in (self.W_q, self.W_k, self.W_v)]
        return (self.dot_attention(*projections)[0][:, 0] + tokens).relu()


class AutoInt(Zoo):
    def build(self) -> None:
        self.lr_layer = LogisticRegression(self.feature_map, use_bias=False)
        self.dnn = MLP_Block(self.width, hidden_units=[32], output_dim=1)
        self.self_attention = nn.Sequential(SelfAttention(DIM), SelfAttention(DIM))
        self.fc = nn.Linear(self.feature_map.num_fields * DIM, 1)

    def logits(self, inputs: Any, embedded: Tensor) -> Tensor:
        attended = self.fc(self.self_attention(embedded).flatten(start_dim=1))
        return attended + self.dnn(embedded.flatten(start_dim=1)) + self.lr_layer(inputs)


class Selection(nn.Module):
    """FinalMLP's soft selection: a factor per column, from the embedding of a context field or from a bias."""

    def __init__(self, feature_map: FeatureMap, width: int, context: list[str]) -> None:
        super().__init__()
        if context:
            self.ctx_emb = FeatureEmbedding(feature_map, DIM, required_feature_columns=context)
        else:
            self.ctx_bias = nn.Parameter(torch.zeros(1, DIM))
        self.gate = MLP_Block(
            DIM * max(1, len(context)), hidden_units=[16], output_dim=width, output_activation="Sigmoid"
        )

    def forward(self, inputs: Any, flat: Tensor) -> Tensor:
        context = self.ctx_emb(inputs).flatten(start_dim=1) if hasattr(self, "ctx_emb") else self.ctx_bias
        return flat * self.gate(context) * 2


class FinalMLP(Zoo):
    """Two MLPs, each with its own selection, and a bilinear form of their outputs."""

    contexts: tuple[list[str], list[str]] = (["f1"], [])

    def build(self) -> None:
        self.fs = nn.ModuleList([Selection(self.feature_map, self.width, context) for context in self.contexts])
        self.mlp1 = MLP_Block(self.width, hidden_units=[32])
        self.mlp2 = MLP_Block(self.width, hidden_units=[32])
        self.w_x, self.w_y = nn.Linear(32, 1), nn.Linear(32, 1)
        self.w_xy = nn.Bilinear(32, 32, 1, bias=False)

    def logits(self, inputs: Any, embedded: Tensor) -> Tensor:
        flat = embedded.flatten(start_dim=1)
        first, second = self.mlp1(self.fs[0](inputs, flat)), self.mlp2(self.fs[1](inputs, flat))
        return self.w_x(first) + self.w_y(second) + self.w_xy(first, second)
