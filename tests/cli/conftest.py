from __future__ import annotations

import random
from pathlib import Path

import pytest

from lpfs import cli
from tests.helpers.commands import run  # noqa: F401 (a fixture)

COLUMNS = ["--label", "click", "--time", "day"]
MODEL_OPTIONS = ["--model-option", "dim=4", "--model-option", "hidden=8"]
TINY = ["--pretrain-steps", "200", "--search-steps", "200", *MODEL_OPTIONS]


def write_log(path: Path, rows: int = 600, days: int = 6, seed: int = 0) -> Path:
    """Write a log in which the click depends on user and ad only."""
    generator = random.Random(seed)
    lines = ["click,day,user,ad,site,noise,price"]
    for row in range(rows):
        user, ad, site, noise = (generator.randrange(size) for size in (6, 5, 4, 8))
        click = generator.random() < 0.05 + 0.45 * (user % 2) + 0.45 * (ad % 2)
        lines.append(f"{int(click)},{row * days // rows},u{user},a{ad},s{site},n{noise},{generator.random():.3f}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def clicks(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("log") / "clicks.csv")


@pytest.fixture(scope="session")
def selected(clicks, tmp_path_factory):
    """The directory of a run that kept two of five fields."""
    out = tmp_path_factory.mktemp("selected") / "run"
    assert cli.run(["select", str(clicks), *COLUMNS, "--keep", "2", *TINY, "--out", str(out), "-q"]) == 0
    return out


@pytest.fixture(scope="session")
def trained(clicks, tmp_path_factory):
    """The directory of a model that was trained on the days before the search."""
    out = tmp_path_factory.mktemp("trained") / "trained"
    options = [*COLUMNS, "--bins", "off", *MODEL_OPTIONS, "--steps", "60", "--rows", "early", "-q"]
    assert cli.run(["train", str(clicks), *options, "--out", str(out)]) == 0
    return out
