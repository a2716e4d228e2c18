"""Two processes that train as one, against one process."""

from __future__ import annotations

import json

import pytest
import torch
from known_truth import known_truth
from ranked import BATCH, ROWS, judged, searched, slope, together, trained

from lpfs.data.dataset import Dataset


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the log, and the first half of a training by one process."""
    folder = tmp_path_factory.mktemp("ranks")
    known_truth(folder / "log")
    trained(Dataset(folder / "log"), folder / "plain-half", steps=16)
    return folder


@pytest.fixture(scope="module")
def seen(place):
    """What two ranks saw in every job."""
    return together(place, "sums", "words", "judged", "fitted", "resumed", "gates")


@pytest.fixture(scope="module")
def log(place):
    return Dataset(place / "log")


def same(one, two):
    assert one.keys() == two.keys()
    for name, each in one.items():
        assert torch.equal(each, two[name]), name


@pytest.mark.parametrize("case", ["even", "uneven", "none"])
def test_gradients_are_weighed_by_rows_and_added_up(seen, case):
    found = [each["sums"][case] for each in seen]
    total = sum(each["rows"] for each in found)
    assert [each["total"] for each in found] == [total, total]
    shares = [each["rows"] / total for each in found]
    assert {each["loss"] for each in found} == {sum(s * (r + 1) for r, s in enumerate(shares))}
    for name in ("dense", "once", "weight", "sparse"):
        expected = sum(share * each["before"][name] for share, each in zip(shares, found, strict=True))
        for each in found:
            assert torch.equal(each["after"][name], expected), name
    for each in found:
        assert float(each["after"]["narrow"][4, 0]) == 8.0 * shares[0]
        assert float(each["after"]["narrow"].sum()) == 8.0 * shares[0]


def test_rank_0_decides_and_its_errors_are_everyones(seen):
    first, second = (each["words"] for each in seen)
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
    for each in seen:
        assert "'bias' is not the same on rank 1 as on rank 0" in each["words"]["difference"]


def test_evaluation_over_ranks_is_that_of_one_process_to_the_bit(seen, log, place):
    plain = judged(place, log)
    for each in seen:
        assert torch.equal(each["judged"]["logits"], plain["logits"])
        for name in ("whole", "weighed", "few"):
            assert each["judged"][name] == plain[name]
    assert len(plain["whole"]["days"]) == 6


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_ranks_stay_equal_to_the_bit_and_near_to_one_process(seen, log, name):
    first, second = (each["fitted"][name] for each in seen)
    same(first["state"], second["state"])
    assert first["auc"] == second["auc"]
    steps = 30 if name == "adagrad" else 12
    plain = trained(log, steps=steps, optimizer=name)
    assert first["rows"] == plain["rows"]
    for key, each in plain["state"].items():
        # both sum the same rows in another order: so many roundings of float32, in so few steps
        torch.testing.assert_close(first["state"][key], each, rtol=2e-4, atol=2e-5, msg=key)
    assert abs(first["auc"] - plain["auc"]) < 1e-3


def test_ranks_draw_each_their_own_and_alike_when_it_is_over(seen, log):
    first, second = (each["fitted"]["adagrad"] for each in seen)
    assert set(first["drawn"]).isdisjoint(second["drawn"])
    assert first["drawn"] == trained(log)["drawn"]
    assert first["after"] == second["after"]


def test_only_rank_0_writes_and_its_log_is_whole(seen, place):
    lines = [json.loads(each) for each in (place / "fit" / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines if each["kind"] == "evaluate"] == [10, 20, 30]
    newest = sorted((place / "fit" / "checkpoints").iterdir())[-1]
    assert newest.name == "step-000000000030"
    files = {each.name for each in newest.iterdir()}
    assert files == {"tensors-00000-of-00002.safetensors", "tensors-00001-of-00002.safetensors", "state.json",
                     "checkpoint.json"}  # fmt: skip


def test_a_checkpoint_of_two_ranks_goes_on_in_two_bit_by_bit(seen):
    """The second half of a training that was left at step 16 ends as the training that was not."""
    for each in seen:
        whole, half = each["fitted"]["adagrad"], each["resumed"]["half"]
        assert half["resumed"] == 16
        same(half["state"], whole["state"])
        assert half["drawn"][16:] == whole["drawn"][16:]  # what callbacks keep is kept by rank 0 for all


def test_a_checkpoint_of_one_process_goes_on_in_two(seen, log):
    first, second = (each["resumed"]["plain"] for each in seen)
    assert first["resumed"] == 16
    same(first["state"], second["state"])
    plain = trained(log)
    for key, each in plain["state"].items():
        torch.testing.assert_close(first["state"][key], each, rtol=2e-4, atol=2e-5, msg=key)


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(seen, log, place):
    found = trained(log, place / "fit", steps=38, resume=True)
    assert found["resumed"] == 30
    plain = trained(log, steps=38)
    for key, each in plain["state"].items():
        torch.testing.assert_close(found["state"][key], each, rtol=2e-4, atol=2e-5, msg=key)


# ------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("name", ["penalty", "keep", "held", "loss"])
def test_gates_are_equal_between_ranks_after_every_step(seen, name):
    first, second = (each["gates"][name] for each in seen)
    assert len(first["course"]) == len(second["course"]) > 0
    for mine, theirs in zip(first["course"], second["course"], strict=True):
        assert torch.equal(mine, theirs)
    same(first["state"], second["state"])
    assert first["kept"] == second["kept"]


def test_one_step_is_off_by_the_rounding_of_a_sum_at_most(seen, log):
    """Any order of a sum of n float32 numbers is within n·2⁻²⁴ of the sum of their magnitudes, to first order.

    The terms are themselves sums over the layers: some dozens of roundings more.
    """
    part = log.part(0, BATCH)
    plain = slope(part)
    rows = torch.stack([slope(part.part(number, number + 1)) for number in range(BATCH)])
    bound = (BATCH + 64) * 2.0**-24 * rows.abs().mean(0)
    for each in seen:
        off = (each["gates"]["slope"] - plain).abs()
        assert bool((off <= bound).all()), (off, bound)
    assert torch.equal(*(each["gates"]["slope"] for each in seen))
    assert bool((plain.abs() > 100 * bound).any())  # the bound says something


@pytest.mark.parametrize(("name", "how"), [("penalty", {"penalty": 0.02}), ("keep", {"keep": 3})])
def test_gates_are_as_near_to_one_process_as_that_is_to_itself(seen, log, name, how):
    """One process whose batches have their rows in another order rounds otherwise, and is no nearer to itself."""
    ranks, plain, turned = seen[0]["gates"][name], searched(log, **how), searched(log, turned=True, **how)
    own = [float((a - b).abs().max()) for a, b in zip(plain["course"], turned["course"], strict=True)]
    far = [float((a - b).abs().max()) for a, b in zip(plain["course"], ranks["course"], strict=True)]
    assert far[0] == own[0] == 0.0
    assert max(far) > 0.0  # they are not the same numbers by accident
    assert max(far) <= 10 * max(own)
    assert ranks["kept"] == plain["kept"] == turned["kept"]


def test_what_cannot_be_shared_is_done_by_rank_0_as_by_one_process(seen, log):
    for name in ("chi2", "stg"):
        first, second = (each["gates"][name] for each in seen)
        same(first["state"], second["state"])
        assert first["kept"] == second["kept"] == searched(log, keep=3, method=name)["kept"]


def test_the_batch_was_shared_unevenly():
    assert BATCH % 2 == 1
    assert ROWS % BATCH
