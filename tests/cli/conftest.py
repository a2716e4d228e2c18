from __future__ import annotations

import random
from pathlib import Path

import pytest

from lpfs import cli

TINY = [
    "--pretrain-steps",
    "200",
    "--search-steps",
    "200",
    "--model-option",
    "dim=4",
    "--model-option",
    "hidden=8",
]


def write_log(path: Path, rows: int = 600, days: int = 6, seed: int = 0) -> Path:
    """A log in which user and ad tell everything, and site, noise and price nothing."""
    draw = random.Random(seed)
    lines = ["click,day,user,ad,site,noise,price"]
    for row in range(rows):
        user, ad, site, noise = (draw.randrange(size) for size in (6, 5, 4, 8))
        click = draw.random() < 0.05 + 0.45 * (user % 2) + 0.45 * (ad % 2)
        lines.append(f"{int(click)},{row * days // rows},u{user},a{ad},s{site},n{noise},{draw.random():.3f}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def clicks(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("log") / "clicks.csv")


@pytest.fixture
def run(capsys):
    """Runs a command; gives its exit code and what it printed."""

    def call(*arguments):
        capsys.readouterr()
        code = cli.run([str(each) for each in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def selected(clicks, tmp_path_factory):
    """The folder of a run that kept two of five fields."""
    out = tmp_path_factory.mktemp("selected") / "run"
    assert cli.run(["select", str(clicks), *WANTED, *TINY, "--out", str(out), "-q"]) == 0
    return out


WANTED = ["--label", "click", "--time", "day", "--keep", "2"]


@pytest.fixture(scope="session")
def trained(clicks, tmp_path_factory):
    """The folder of a model that was trained on the days before the search."""
    out = tmp_path_factory.mktemp("trained") / "trained"
    shape = ["--model-option", "dim=4", "--model-option", "hidden=8"]
    columns = ["--label", "click", "--time", "day", "--bins", "off"]
    arguments = ["train", str(clicks), *columns, *shape, "--steps", "60", "--rows", "early", "-q"]
    assert cli.run([*arguments, "--out", str(out)]) == 0
    return out
