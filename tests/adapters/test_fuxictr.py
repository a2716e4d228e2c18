from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fuxictr")

import fuxi_zoo
from contract import CHECKS, FIELDS, NUMBERS, VALUES, Case, prove
from loud import loud
from torch import Tensor

from lpfs.adapters.fuxictr import FuxiCTR

IDS = {name: {"type": "categorical", "vocab_size": VALUES} for name in FIELDS}
COLUMNS = {f"n{n}": {"type": "numeric"} for n in range(NUMBERS)}


def feed(ids: Tensor, numbers: Tensor) -> dict[str, Tensor]:
    columns = {f"n{n}": numbers[:, n] for n in range(NUMBERS)}
    return {name: ids[:, n] for n, name in enumerate(FIELDS)} | columns


def case(name: str) -> Case:
    make: Any = getattr(fuxi_zoo, name)
    return Case(name, lambda: loud(make(fuxi_zoo.feature_map(IDS | COLUMNS))), lambda: FuxiCTR(make), feed)


CASES = [case(name) for name in ("DNN", "DeepFM", "DCNv2", "AutoInt", "FinalMLP")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_the_contract(case: Case, check: Any) -> None:
    prove("fuxictr", case, check)
