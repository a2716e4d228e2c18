"""Two ranks compared with one process."""

from __future__ import annotations

import json

import pytest
import torch

from lpfs.data.dataset import Dataset
from tests.helpers.known_truth import known_truth
from tests.helpers.ranked import BATCH, ROWS, judged, searched, slope, together, trained

pytestmark = pytest.mark.long  # whole runs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the log, and the first half of a training by one process."""
    folder = tmp_path_factory.mktemp("ranks")
    known_truth(folder / "log")
    trained(Dataset(folder / "log"), folder / "plain-half", steps=16)
    return folder


@pytest.fixture(scope="module")
def seen(place):
    """The results of two ranks in every job."""
    return together(place, "sums", "words", "judged", "fitted", "resumed", "gates")


@pytest.fixture(scope="module")
def log(place):
    return Dataset(place / "log")


def same(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


@pytest.mark.parametrize("case", ["even", "uneven", "none"])
def test_gradients_are_summed_weighted_by_rows(seen, case):
    results = [rank["sums"][case] for rank in seen]
    total = sum(result["rows"] for result in results)
    assert [result["total"] for result in results] == [total, total]
    shares = [result["rows"] / total for result in results]
    assert {result["loss"] for result in results} == {sum(s * (r + 1) for r, s in enumerate(shares))}
    for name in ("dense", "once", "weight", "sparse"):
        expected = sum(share * result["before"][name] for share, result in zip(shares, results, strict=True))
        for result in results:
            assert torch.equal(result["after"][name], expected), name
    for result in results:
        assert float(result["after"]["narrow"][4, 0]) == 8.0 * shares[0]
        assert float(result["after"]["narrow"].sum()) == 8.0 * shares[0]


def test_rank_0_decides_and_its_errors_are_raised_everywhere(seen):
    first, second = (rank["words"] for rank in seen)
    assert first["agreed"] == second["agreed"] == {"by": [1, (1, float("inf"))]}
    assert first["input"] == second["input"] == ["InputError", "no such field"]
    assert first["odd"] == ["ZeroDivisionError", "odd"]
    assert second["odd"] == ["RankError", "rank 0 failed: ZeroDivisionError: odd"]
    assert (first["second"], first["there"]) == (False, False)
    assert (second["second"], second["there"]) == (True, True)
    assert torch.equal(first["joined"], torch.full((1, 2), 5.0))
    assert torch.equal(second["joined"], first["joined"])
    assert first["collected"] == second["collected"] == [{"rank": 0}, {"rank": 1}]


def test_parameters_that_differ_are_refused(seen):
    for rank in seen:
        assert "'bias' differs between rank 1 and rank 0" in rank["words"]["difference"]


def test_evaluation_over_ranks_is_bitwise_that_of_one_process(seen, log, place):
    plain = judged(place, log)
    for rank in seen:
        assert torch.equal(rank["judged"]["logits"], plain["logits"])
        for name in ("whole", "weighed", "few"):
            assert rank["judged"][name] == plain[name]
    assert len(plain["whole"]["days"]) == 6


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_ranks_are_bitwise_equal_and_close_to_one_process(seen, log, name):
    first, second = (rank["fitted"][name] for rank in seen)
    same(first["state"], second["state"])
    assert first["auc"] == second["auc"]
    steps = 30 if name == "adagrad" else 12
    plain = trained(log, steps=steps, optimizer=name)
    assert first["rows"] == plain["rows"]
    for key, tensor in plain["state"].items():
        # both sum the same rows in another order: float32 rounding over a few steps
        torch.testing.assert_close(first["state"][key], tensor, rtol=2e-4, atol=2e-5, msg=key)
    assert abs(first["auc"] - plain["auc"]) < 1e-3


def test_ranks_use_different_random_numbers_during_training_only(seen, log):
    first, second = (rank["fitted"]["adagrad"] for rank in seen)
    assert set(first["drawn"]).isdisjoint(second["drawn"])
    assert first["drawn"] == trained(log)["drawn"]
    assert first["after"] == second["after"]


def test_only_rank_0_writes_the_log(seen, place):
    lines = [json.loads(line) for line in (place / "fit" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "evaluate"] == [10, 20, 30]
    newest = sorted((place / "fit" / "checkpoints").iterdir())[-1]
    assert newest.name == "step-000000000030"
    files = {path.name for path in newest.iterdir()}
    assert files == {"tensors-00000-of-00002.safetensors", "tensors-00001-of-00002.safetensors", "state.json",
                     "checkpoint.json"}  # fmt: skip


def test_two_ranks_resume_their_checkpoint_bit_for_bit(seen):
    """A training resumed at step 16 ends like an uninterrupted one."""
    for rank in seen:
        whole, half = rank["fitted"]["adagrad"], rank["resumed"]["half"]
        assert half["resumed"] == 16
        same(half["state"], whole["state"])
        assert half["drawn"][16:] == whole["drawn"][16:]  # the state of callbacks is saved by rank 0


def test_two_ranks_resume_a_checkpoint_of_one_process(seen, log):
    first, second = (rank["resumed"]["plain"] for rank in seen)
    assert first["resumed"] == 16
    same(first["state"], second["state"])
    plain = trained(log)
    for key, tensor in plain["state"].items():
        torch.testing.assert_close(first["state"][key], tensor, rtol=2e-4, atol=2e-5, msg=key)


def test_one_process_resumes_a_checkpoint_of_two_ranks(seen, log, place):
    result = trained(log, place / "fit", steps=38, resume=True)
    assert result["resumed"] == 30
    plain = trained(log, steps=38)
    for key, tensor in plain["state"].items():
        torch.testing.assert_close(result["state"][key], tensor, rtol=2e-4, atol=2e-5, msg=key)


# ------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("name", ["penalty", "keep", "holdout", "loss"])
def test_gates_are_equal_between_ranks_after_every_step(seen, name):
    first, second = (rank["gates"][name] for rank in seen)
    assert len(first["course"]) == len(second["course"]) > 0
    for one, other in zip(first["course"], second["course"], strict=True):
        assert torch.equal(one, other)
    same(first["state"], second["state"])
    assert first["kept"] == second["kept"]


def test_one_step_differs_at_most_by_the_rounding_of_a_sum(seen, log):
    """Any order of a sum of n float32 numbers is within n·2⁻²⁴ of the sum of their magnitudes, to first order.

    The terms are themselves sums over the layers: some dozens of roundings more.
    """
    part = log.part(0, BATCH)
    plain = slope(part)
    rows = torch.stack([slope(part.part(number, number + 1)) for number in range(BATCH)])
    bound = (BATCH + 64) * 2.0**-24 * rows.abs().mean(0)
    for rank in seen:
        off = (rank["gates"]["slope"] - plain).abs()
        assert bool((off <= bound).all()), (off, bound)
    assert torch.equal(*(rank["gates"]["slope"] for rank in seen))
    assert bool((plain.abs() > 100 * bound).any())  # the bound is not trivial


@pytest.mark.parametrize(("name", "target"), [("penalty", {"penalty": 0.02}), ("keep", {"keep": 3})])
def test_gates_differ_from_one_process_by_rounding_only(seen, log, name, target):
    """One process with the rows of its batches in another order rounds differently by as much."""
    ranks, plain, turned = seen[0]["gates"][name], searched(log, **target), searched(log, reverse=True, **target)
    reference = [float((a - b).abs().max()) for a, b in zip(plain["course"], turned["course"], strict=True)]
    distance = [float((a - b).abs().max()) for a, b in zip(plain["course"], ranks["course"], strict=True)]
    assert distance[0] == reference[0] == 0.0
    assert max(distance) > 0.0  # the comparison is not trivial
    assert max(distance) <= 10 * max(reference)
    assert ranks["kept"] == plain["kept"] == turned["kept"]


def test_methods_that_run_on_rank_0_only_give_the_result_of_one_process(seen, log):
    for name in ("chi2", "stg"):
        first, second = (rank["gates"][name] for rank in seen)
        same(first["state"], second["state"])
        assert first["kept"] == second["kept"] == searched(log, keep=3, method=name)["kept"]


def test_the_batches_are_split_unevenly():
    assert BATCH % 2 == 1
    assert ROWS % BATCH
