"""Training, evaluation and checkpoints work where nothing but torch and numpy is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"rich", "polars", "safetensors", "click", "zstandard", "tomli"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.helpers.tiny import log, tiny
import lpfs

folder = Path(sys.argv[2])
data = log(folder / "log")
options = {"valid": data.stream(64), "folder": folder / "run", "quiet": False, "resume": True}
for steps in (5, 10):
    done = lpfs.fit(tiny(), data.stream(64), steps=steps, **options)
assert lpfs.simulate(folder / "simulated", "small", rows=500).fingerprint
print(done.resumed, done.steps, lpfs.evaluate(tiny(), data.stream(64)).auc)
"""


def test_torch_and_numpy_are_enough(tmp_path):
    command = [sys.executable, "-c", CODE, str(Path(__file__).parents[2]), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("5 10 0.")
