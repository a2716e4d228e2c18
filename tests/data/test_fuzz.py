"""The fuzzing campaign of benchmarks/fuzz_prepare.py, at a small size: no findings, and it can be continued."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_prepare.py"


@pytest.mark.long
def test_a_small_campaign_has_no_findings_and_continues(tmp_path):
    out = tmp_path / "fuzz.json"
    for inputs, done in ((1000, 1000), (2000, 2000)):
        command = [sys.executable, str(SCRIPT), "--jobs", "1", "--inputs", str(inputs), "--out", str(out)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        assert run.returncode == 0, run.stdout + run.stderr
        result = json.loads(out.read_text())
        assert result["inputs"] == sum(result["kinds"].values()) == done
        assert result["findings"] == []
        assert set(result["kinds"]) == set(result["weights"])
    assert result["prepare_runs"] == 60
