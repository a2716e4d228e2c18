"""The command line in tests: a fixture that runs a command in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lpfs import cli


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command and returns its exit code and output."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call
