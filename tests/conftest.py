from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("lpfs", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("lpfs")


@pytest.fixture(autouse=True)
def _quiet_and_repeatable() -> None:
    """One thread a worker (two workers share two cores), one seed a test."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
