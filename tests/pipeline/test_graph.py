"""``select`` on a GPU captures its steps; what that gives is what the steps one by one give."""

from __future__ import annotations

import json

import pytest
import torch

import lpfs
from lpfs.errors import InputError
from lpfs.methods.registry import METHODS
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.stages import method_supports_cuda_graph

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
SHORT = {"model_options": {"dim": 4, "hidden": (16,)}, "pretrain_steps": 300, "search_steps": 400}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return lpfs.simulate(tmp_path_factory.mktemp("graph") / "log", "small", rows=20_000)


@needs_gpu
@pytest.mark.parametrize("method", ["lpfs++", "lpfs"])
@pytest.mark.parametrize("batch_size", [64, 16])  # rows of the search come again, and not
def test_a_captured_run_is_as_good_as_a_plain_one(tmp_path, log, method, batch_size):
    found = {}
    for graph in (None, False):
        place = tmp_path / str(graph)
        how = {**SHORT, "graph": graph, "batch_size": batch_size, "device": "cuda", "quiet": True}
        found[graph] = lpfs.select(log, keep=8, method=method, out=place, **how)
        written = json.loads((place / "selection.json").read_text())
        assert len(written["kept"]) == 8
        assert all(written["gates"][name] == 0.0 for name in written["dropped"])
        assert written["max_logit_change"] <= 1e-4
    captured, plain = (json.loads((tmp_path / str(each) / "selection.json").read_text()) for each in found)
    assert len(set(captured["kept"]) & set(plain["kept"])) >= 6
    for stage in ("all_fields", "retrained"):
        assert captured["metrics"][stage]["auc"] == pytest.approx(plain["metrics"][stage]["auc"], abs=0.02)


@needs_gpu
def test_gates_with_rows_of_their_own_move_alike(log):
    """Captured or not, the gates see the same held-out rows: they agree until rounding has grown."""
    names = [each.name for each in log.schema if each.kind != "multi"]
    ends, rows = [], []
    for graph in (False, True):
        torch.manual_seed(0)
        model = lpfs.make_model("mlp", log.schema.subset(names), dim=4, hidden=(16,)).cuda()
        how = {"fields": names, "device": "cuda", "shuffle": True}
        config = lpfs.Training(quiet=True, graph=graph, lr=0.01)
        held = log.part(12_000, 16_030).stream(512, seed=2, **how)  # its last batch is a small one
        stream, valid = log.part(0, 12_000).stream(64, seed=1, **how), log.part(16_030, 20_000).stream(4096, **how)
        found = lpfs.search(model, stream, penalty=1e-4, steps=60, held=held, valid=valid, config=config)
        ends.append(torch.tensor([found.gates[name] for name in names]))
        rows.append(found.made["forwards"])
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)
    assert rows[0] == rows[1] > 60 * (64 + 450)
    assert len(set(ends[0].tolist())) > len(names) // 2  # they have moved


def test_a_cpu_cannot_capture(tmp_path, log):
    with pytest.raises(InputError, match="on the CPU; leave it out"):
        lpfs.select(log, keep=8, out=tmp_path / "run", graph=True, device="cpu", quiet=True, **SHORT)
    assert not (tmp_path / "run").exists()


def test_the_command_line_says_so(tmp_path):
    from lpfs.cli.options import build_settings

    for word, meant in (("auto", None), ("on", True), ("off", False), (None, None)):
        assert build_settings(["log.csv"], tmp_path, resume=False, graph=word).graph is meant
    with pytest.raises(InputError, match="graph must be true, false or left out"):
        Settings(graph="off")


def test_a_run_may_go_on_where_steps_cannot_be_captured():
    """What a step computes is the same."""
    begun = lpfs.Training(graph=True, lr=0.1).to_json()
    lpfs.Training(graph=False, lr=0.1).check_same(begun)
    with pytest.raises(InputError, match="lr"):
        lpfs.Training(graph=False, lr=0.2).check_same(begun)


def test_noise_on_the_gates_is_drawn_by_the_host():
    assert method_supports_cuda_graph("lpfs++", {})
    assert not method_supports_cuda_graph("lpfs++", {"noise": 0.1})
    assert not method_supports_cuda_graph("lpfs", {"gate": "lpfs-noise"})
    assert {name for name in METHODS if method_supports_cuda_graph(name, {})} == {"lpfs", "lpfs++"}
