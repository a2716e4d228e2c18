"""TorchRec's own models, and models with its collections, under the contract of all adapters."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.adapter_contract import (
    CHECKS,
    FIELDS,
    NUMBERS,
    VALUES,
    Case,
    Log,
    check_complete,
    require_package,
    run_check,
)
from tests.helpers.zoo import set_gates

torchrec = require_package("torchrec")

from torchrec.datasets.utils import Batch as RecBatch  # noqa: E402
from torchrec.models.deepfm import SimpleDeepFMNN  # noqa: E402
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType  # noqa: E402
from torchrec.modules.embedding_modules import EmbeddingBagCollection  # noqa: E402
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402

import lpfs  # noqa: E402
from lpfs.adapters.torchrec import TorchRec  # noqa: E402
from lpfs.adapters.torchrec_batches import inputs_of  # noqa: E402
from lpfs.data.batch import Batch  # noqa: E402
from lpfs.errors import AbsenceError, InputError, StateError  # noqa: E402
from lpfs.schema import Field, Schema  # noqa: E402

D = 4


def collection(dim: int = D, shared: bool = False, prefix: str = "t_") -> EmbeddingBagCollection:
    tables = [[name] for name in FIELDS]
    if shared:  # f0 and f4 share a table, f1 and f5 too
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
    bags = EmbeddingBagCollection(tables=configs)
    for weight in bags.parameters():
        nn.init.normal_(weight, std=0.3)
    return bags


class Own(nn.Module):
    """A hand-written model: a collection, an MLP, and optionally a wide collection."""

    def __init__(self, wide: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.ebc = collection(shared=shared)
        self.wide = collection(1, prefix="w_") if wide else None
        self.top = nn.Sequential(nn.Linear(len(FIELDS) * D, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        logits = self.top(self.ebc(features).values())
        return logits if self.wide is None else logits + self.wide(features).values().sum(1, keepdim=True)


def jagged(ids: Tensor) -> KeyedJaggedTensor:
    """Return one id per row and feature."""
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(FIELDS), values=ids.T.reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.int64)
    )


def both(ids: Tensor, numbers: Tensor) -> tuple[Tensor, KeyedJaggedTensor]:
    return numbers, jagged(ids)


def sparse(ids: Tensor, numbers: Tensor) -> tuple[KeyedJaggedTensor]:
    return (jagged(ids),)


def untied(model: nn.Module) -> nn.Module:
    TorchRec().untie(model)
    return model


CASES = [
    # without the dense token a DLRM has products of two fields alone: f0 by itself could not be heard
    Case("DLRM", lambda: DLRM(collection(), NUMBERS, [8, D], [32, 1]), TorchRec, both, keep=4, must_keep=("dense",)),
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
    Case("own model, shared tables", lambda: Own(shared=True), lambda: TorchRec(readers={"ebc": ("top.0", 0)}), sparse),
    Case(
        "own model, shared tables, untied",
        lambda: untied(Own(shared=True)),
        lambda: TorchRec(readers={"ebc": "top.0"}),
        sparse,
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_contract(case, check):
    run_check("torchrec", case, check)


def test_results_have_exactly_these_models():
    check_complete("torchrec", CASES)


def test_example_runs(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "torchrec_model.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "predictions bit-identical: True" in out
    assert "pruned: certified" in out
    assert re.search(r"stay: \['t_feature_00', 't_feature_01', 't_feature_02', 't_feature_03'\]", out)


# ------------------------------------------------------------------------------- beyond the contract


def set_alive(model: nn.Module, adapter: TorchRec, *kept: str, gate: float = 1.0) -> lpfs.Gates:
    """Put gates on: those named at a value, the others at zero."""
    gates = adapter.attach(model)
    set_gates(gates, [gate if name in kept else 0.0 for name in gates.names])
    return gates


def bags(weighted: bool = False, rows: int = 12) -> KeyedJaggedTensor:
    """Return bags of 0 to 3 ids."""
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 4, (len(FIELDS) * rows,), generator=random)
    total = int(lengths.sum())
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(FIELDS),
        values=torch.randint(VALUES, (total,), generator=random),
        weights=torch.rand(total, generator=random) if weighted else None,
        lengths=lengths,
    )


@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [(PoolingType.SUM, False), (PoolingType.SUM, True), (PoolingType.MEAN, False)],  # weights are for sums alone
)
def test_bags_of_any_length_weighted_or_not(pooling, weighted):
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=D, num_embeddings=VALUES, feature_names=[name], pooling=pooling
        )
        for name in FIELDS
    ]
    model = Own()
    model.ebc = EmbeddingBagCollection(tables=configs, is_weighted=weighted)
    adapter, data = TorchRec(readers={"ebc": "top.0"}), (bags(weighted),)
    before = model(*data)
    gates = adapter.attach(model)
    assert torch.equal(model(*data), before)
    set_gates(gates, [0.5, 1.0, 0.0, 2.0, -1.0, 0.0, -0.5, 4.0])
    gated = model(*data)
    selection = adapter.absorb(model, batch=data)
    assert torch.equal(model(*data), gated)
    for cut in (False, True):
        pruned = adapter.prune(model, selection, batch=data, cut=cut)
        assert pruned.certificate.certified
        assert pruned.model.ebc.is_weighted() is weighted
        assert {config.pooling for config in pruned.model.ebc.embedding_bag_configs()} == {pooling}


def test_model_built_from_the_smaller_configuration_loads_the_checkpoint():
    """The pruned model is a plain DLRM; one built from its configurations loads its checkpoint."""
    adapter, data = TorchRec(dense=None), both(*Log(1).rows(12)[:2])
    model = DLRM(collection(), NUMBERS, [8, D], [32, 1])
    set_alive(model, adapter, "f1", "f4", "f6", gate=0.5)
    selection = adapter.absorb(model)
    pruned = adapter.prune(model, selection, batch=data, cut=True)
    configs = pruned.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    assert [config.feature_names for config in configs] == [["f1"], ["f4"], ["f6"]]
    assert type(pruned.model) is DLRM
    assert type(pruned.model.sparse_arch.embedding_bag_collection) is EmbeddingBagCollection
    rebuilt = DLRM(EmbeddingBagCollection(tables=list(configs)), NUMBERS, [8, D], [32, 1])
    rebuilt.load_state_dict(pruned.model.state_dict())
    numbers, features = adapter.narrow(model, data, pruned.model)
    assert features.keys() == ["f1", "f4", "f6"]
    assert torch.equal(rebuilt(numbers, features), pruned.model(numbers, features))
    assert torch.equal(rebuilt(*data), pruned.model(*data))  # unused features may stay in the batch


@pytest.mark.parametrize("case", [case for case in CASES if case.feed is both], ids=lambda case: case.model)
@pytest.mark.parametrize("cut", [False, True])
def test_dense_branch_can_be_dropped(case, cut):
    model, adapter, data = case.new_model(), case.adapter(), case.batch()
    set_alive(model, adapter, "f0", "f1", "f5")
    selection = adapter.absorb(model, batch=data)
    assert selection.dropped[0] == "dense"
    pruned = adapter.prune(model, selection, batch=data, cut=cut)
    assert pruned.certificate.certified
    assert "dense" in pruned.certificate.checked
    assert not any("dense_arch" in name for name, _ in pruned.model.named_parameters())
    assert "dense" not in adapter.sites(pruned.model)


def test_pruned_model_can_be_pruned_again():
    adapter, data = TorchRec(readers={"ebc": "top.0"}), (jagged(Log(2).rows(12)[0]),)
    model = Own(shared=True)
    set_alive(model, adapter, "f0", "f1", "f3", "f4", gate=0.5)
    one = adapter.prune(model, adapter.absorb(model), batch=data).model
    assert list(adapter.sites(one)) == ["f0", "f4", "f1", "f3"]
    assert "t_f2" not in one.ebc.embedding_bags
    set_alive(one, adapter, "f1", "f4", gate=2.0)
    gated = one(*data)
    selection = adapter.absorb(one)
    assert torch.equal(one(*data), gated)
    for cut in (False, True):
        two = adapter.prune(one, selection, batch=data, cut=cut)
        assert two.certificate.certified
        assert set(two.certificate.checked) == {"f0", "f3"}
        assert list(two.model.ebc.embedding_bags) == ["t_f0", "t_f1"]
        assert [config.feature_names for config in two.model.ebc.embedding_bag_configs()] == [["f4"], ["f1"]]


def test_one_feature_in_two_tables_has_one_gate():
    tables = [("one", ["f0", "f1"]), ("two", ["f0"]), ("three", ["f2"])]
    configs = [EmbeddingBagConfig(name=n, embedding_dim=D, num_embeddings=VALUES, feature_names=f) for n, f in tables]
    model = Own()
    model.ebc = EmbeddingBagCollection(tables=configs)
    model.top = nn.Linear(4 * D, 1)
    adapter, data = TorchRec(readers={"ebc": "top"}), (jagged(Log(2).rows(12)[0]),)
    assert model.ebc(data[0]).keys() == ["f0@one", "f1", "f0@two", "f2"]
    assert {name: len(sites) for name, sites in adapter.sites(model).items()} == {"f0": 2, "f1": 1, "f2": 1}
    set_alive(model, adapter, "f1", "f2", gate=0.5)
    selection = adapter.absorb(model, batch=data)
    zeros = adapter.prune(model, selection, batch=data)
    assert zeros.certificate.certified
    assert zeros.model.ebc(data[0]).keys() == ["f0@one", "f1", "f0@two", "f2"]
    cut = adapter.prune(model, selection, batch=data, cut=True)
    assert cut.certificate.certified
    assert cut.model.top.in_features == 2 * D


def test_untied_tables_keep_weights_and_columns():
    model, data = Own(shared=True), (jagged(Log(2).rows(12)[0]),)
    before, keys = model(*data), model.ebc(*data).keys()
    weights = {name: bag.weight for name, bag in model.ebc.embedding_bags.items()}
    untied(model)
    assert torch.equal(model(*data), before)
    assert model.ebc(*data).keys() == keys == ["f0", "f4", "f1", "f5", "f2", "f3", "f6", "f7"]
    assert list(model.ebc.embedding_bags) == ["t_f0", "t_f0_f4", "t_f1", "t_f1_f5", "t_f2", "t_f3", "t_f6", "t_f7"]
    for name in ("t_f0", "t_f0_f4"):
        weight = model.ebc.embedding_bags[name].weight
        assert torch.equal(weight, weights["t_f0"])
        assert weight is not weights["t_f0"]
    bags = model.ebc
    untied(model)
    assert model.ebc is bags  # nothing is left to untie
    TorchRec().attach(model)
    with pytest.raises(StateError, match="untie its tables before attach"):
        untied(model)


def test_names_of_untied_tables_do_not_collide():
    tables = [("t", ["a", "b"]), ("t_b", ["c"])]
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=D, num_embeddings=VALUES, feature_names=features)
        for name, features in tables
    ]
    model = nn.ModuleDict({"one": EmbeddingBagCollection(tables=configs)})
    model["again"] = model["one"]
    untied(model)
    assert list(model["one"].embedding_bags) == ["t", "t_b_", "t_b"]
    assert model["again"] is model["one"]
    configs[1] = replace(configs[1], feature_names=["a"])
    with pytest.raises(InputError, match="'one' has a feature in several tables"):
        untied(nn.ModuleDict({"one": EmbeddingBagCollection(tables=configs)}))


def test_inputs_of_converts_a_batch():
    schema = Schema(
        (
            Field("a", cardinality=9),
            Field("n", "numeric", dim=2),
            Field("tags", "multi", cardinality=9),
            Field("b", cardinality=9),
        )
    )
    batch = Batch(
        ids=torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
        dense=torch.arange(6.0).reshape(3, 2),
        labels=torch.ones(3, 1),
        bags={"tags": (torch.tensor([7, 8, 7], dtype=torch.int32), torch.tensor([0, 2, 2], dtype=torch.int32))},
    )
    numbers, features = inputs_of(batch, schema)
    assert torch.equal(numbers, batch.dense)
    assert features.keys() == ["a", "tags", "b"]
    values = {key: [row.tolist() for row in jagged.to_dense()] for key, jagged in features.to_dict().items()}
    assert values == {"a": [[1], [3], [5]], "tags": [[7, 8], [], [7]], "b": [[2], [4], [6]]}


def test_every_feature_of_a_collection_can_be_dropped():
    adapter, data = TorchRec(readers={"ebc": "top.0"}), (jagged(Log(2).rows(12)[0]),)
    model = Own()
    set_alive(model, adapter)
    selection = adapter.absorb(model)
    pruned = adapter.prune(model, selection, batch=data)
    assert pruned.certificate.certified
    assert not list(pruned.model.ebc.parameters())
    with pytest.raises(AbsenceError, match="every feature of 'ebc' is dropped"):
        adapter.prune(model, selection, batch=data, cut=True)


def test_model_inside_another_model():
    adapter = TorchRec()
    ids, numbers, labels = Log(2).rows(12)
    data = RecBatch(dense_features=numbers, sparse_features=jagged(ids), labels=labels)
    model = DLRMTrain(DLRM(collection(), NUMBERS, [8, D], [32, 1]))
    inside = "model.sparse_arch.embedding_bag_collection"
    table = f"{inside}.embedding_bags.t_f0"
    assert adapter.sites(model)["f0"] == [lpfs.Site(inside, index=slice(0, D), table=table)]
    set_alive(model, adapter, "dense", "f0", "f2")
    pruned = adapter.prune(model, adapter.absorb(model), batch=data, cut=True)
    assert pruned.certificate.certified
    assert pruned.model.model.sparse_arch.sparse_feature_names == ["f0", "f2"]


@pytest.mark.parametrize("cut", [False, True])
def test_next_step_equals_that_of_the_absorbed_model(cut):
    adapter, data = TorchRec(), both(*Log(2).rows(32)[:2])
    model = DLRM_DCN(collection(), NUMBERS, [8, D], [32, 1], 2, 3)
    gates = adapter.attach(model)
    optimizer = torch.optim.Adagrad(gates.model_parameters(), lr=0.1)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        adapter.loss(net(*data), torch.arange(32) % 2 * 1.0).backward()
        optimizer.step()

    for _ in range(3):
        step(model, optimizer)
    set_gates(gates, [1.0, 2.0, 0.0, 0.5, *[0.0] * 5])
    pruned = adapter.prune(model, adapter.absorb(model, optimizer), batch=data, optimizer=optimizer, cut=cut)
    step(model, optimizer)
    step(pruned.model, pruned.optimizer)
    for path in ("embedding_bags.t_f0.weight", "embedding_bags.t_f2.weight"):
        inside = f"sparse_arch.embedding_bag_collection.{path}"
        before, after = (net.get_parameter(inside) for net in (model, pruned.model))
        if cut:  # sums of 12 instead of 36 terms
            torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(after, before)


def test_errors():
    with pytest.raises(InputError, match="has no EmbeddingBagCollection"):
        TorchRec().attach(nn.Linear(1, 1))
    model, data = Own(), (jagged(Log(2).rows(12)[0]),)
    set_alive(model, TorchRec(), "f0")
    selection = lpfs.absorb(model)
    with pytest.raises(InputError, match="the layer after 'ebc' is unknown; .*TorchRec"):
        TorchRec().prune(model, selection, batch=data, cut=True)
    with pytest.raises(AbsenceError, match="'top' is a Sequential, not an nn.Linear"):
        TorchRec(readers={"ebc": "top"}).prune(model, selection, batch=data, cut=True)
    with pytest.raises(InputError, match="no field 'x'"):
        TorchRec().attach(Own(), ["f0", "x"])

    class Other(EmbeddingBagCollection):
        pass

    model = Own()
    model.ebc = Other(tables=collection().embedding_bag_configs())
    set_alive(model, TorchRec(), "f0")
    with pytest.raises(InputError, match="'ebc' is a Other"):
        TorchRec().prune(model, lpfs.absorb(model), batch=data)


def test_search_raises_on_other_settings_than_those_of_attach():
    model = Own()
    TorchRec().attach(model, steps=300)
    optimizer = torch.optim.SGD(model.lpfs_gates.model_parameters(), lr=0.1)
    for steps, settings in ((200, {}), (300, {"gate": "lpfs"})):
        with pytest.raises(InputError, match="has gates already, attached for 300 steps"):
            TorchRec().search(model, [], optimizer, steps=steps, keep=2, **settings)


def test_search_needs_one_batch_per_step():
    ids, _, labels = Log(2).rows(12)
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="found 2 batches for a search of 300 steps"):
        TorchRec().search(model, [((jagged(ids),), labels[:, None])] * 2, optimizer, steps=300, keep=2)
