"""A FuxiCTR model: gates on its DeepFM, search, gates off, a smaller DeepFM and FuxiCTR's feature_map for it.

    python examples/fuxictr_model.py        # needs fuxictr: pip install 'lpfs[fuxictr]'

FuxiCTR's wheel has the layers; models such as this one are copied from its model zoo. The log is made up, so that
the truth is known: of 16 fields only the first 4 decide about a click, 4 more are noisy copies of them, the rest
is noise.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel
from torch import Tensor

from lpfs.adapters.fuxictr import FuxiCTR
from lpfs.gates.prune import Pruned

FIELDS, TRUE, COPIES, VALUES, DIM = 16, 4, 4, 20, 8
NAMES = [f"field_{n:02d}" for n in range(FIELDS)]

# ------------------------------------------------------------------------- a model and its data


class DeepFM(BaseModel):  # type: ignore[misc]
    """FM and an MLP beside it, as in FuxiCTR's model zoo."""

    def __init__(self, feature_map: FeatureMap, folder: str) -> None:
        super().__init__(feature_map, model_id="DeepFM", model_root=folder, metrics=["AUC", "logloss"], verbose=0)
        self.embedding_layer = FeatureEmbedding(feature_map, DIM)
        self.fm = FactorizationMachine(feature_map)
        self.mlp = MLP_Block(feature_map.sum_emb_out_dim(), hidden_units=[64], output_dim=1)
        self.compile("adam", "binary_crossentropy", 0.003)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        columns = self.get_inputs(inputs)
        embedded = self.embedding_layer(columns)
        logits = self.fm(columns, embedded) + self.mlp(embedded.flatten(start_dim=1))
        return {"y_pred": self.output_activation(logits)}


def describe(folder: str) -> FeatureMap:
    """Return what FuxiCTR's preprocessing leaves in feature_map.json."""
    feature_map = FeatureMap("clicks", folder)
    feature_map.features = OrderedDict(
        (name, {"source": "", "type": "categorical", "vocab_size": VALUES}) for name in NAMES
    )
    feature_map.labels, feature_map.default_emb_dim = ["click"], DIM
    feature_map.num_fields, feature_map.total_features = FIELDS, FIELDS * VALUES
    feature_map.set_column_index()
    return feature_map


class Log:
    """Batches as FuxiCTR's data loaders give them: a dict of columns, the label among them."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.effects = 1.5 * torch.randn(TRUE, VALUES, generator=self.random)

    def batch(self, rows: int = 256) -> dict[str, Tensor]:
        ids = torch.randint(VALUES, (rows, FIELDS), generator=self.random)
        copied = torch.rand(rows, COPIES, generator=self.random) < 0.7
        ids[:, TRUE : TRUE + COPIES] = torch.where(copied, ids[:, :COPIES], ids[:, TRUE : TRUE + COPIES])
        chance = torch.sigmoid(self.effects[torch.arange(TRUE), ids[:, :TRUE]].sum(1))
        click = (torch.rand(rows, generator=self.random) < chance).float()
        return {**{name: ids[:, n] for n, name in enumerate(NAMES)}, "click": click}


# ---------------------------------------------------------------------------------------- lpfs


def main(folder: str, steps: int = 600) -> Pruned:
    torch.manual_seed(0)
    started = time.perf_counter()

    def make(feature_map: FeatureMap) -> DeepFM:
        return DeepFM(feature_map, folder)

    model, log, adapter = make(describe(folder)), Log(), FuxiCTR(make)
    Path(folder, "clicks").mkdir()
    held_out, loader = log.batch(20_000), [log.batch() for _ in range(steps)]
    model.fit(loader, validation_data=[held_out])  # the training you have already done
    print(f"trained on all {FIELDS} fields: {told(model, held_out)}")

    before = model(held_out)["y_pred"]
    gates = adapter.attach(model, steps=steps)
    places = sum(map(len, gates.places.values()))
    same = torch.equal(before, model(held_out)["y_pred"])
    print(f"gates on {len(gates.names)} fields in {places} places: predictions bit-identical: {same}")

    adapter.search(model, adapter.batches(model, loader), model.optimizer, steps=steps, keep=TRUE)
    selection = adapter.absorb(model, batch=held_out)
    print(f"gates absorbed: max |Δlogit| {selection.made['max_logit_change']:.2g}")

    pruned = adapter.prune(model, selection, batch=held_out, cut=True)
    print(f"pruned: {pruned.certificate}")
    counts = [sum(each.numel() for each in one.parameters()) for one in (model, pruned.model)]
    narrow = adapter.narrow(model, held_out, pruned.model)
    print(f"parameters {counts[0]:,} -> {counts[1]:,}; {told(pruned.model, narrow)}")

    kept = Path(folder, "kept", "feature_map.json")
    adapter.feature_map(model, selection).save(str(kept))
    names = [name for each in json.loads(kept.read_text("utf-8"))["features"] for name in each]
    print(f"FuxiCTR's feature_map now has {names}; truth: {NAMES[:TRUE]}")
    print(f"{time.perf_counter() - started:.0f} seconds. Next: docs/adapters.md")
    return pruned


def told(model: Any, batch: dict[str, Tensor]) -> str:
    found = model.evaluate([batch])
    return f"held-out log loss {found['logloss']:.4f}, AUC {found['AUC']:.4f}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(place)
