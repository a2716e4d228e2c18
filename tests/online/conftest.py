"""A small simulated stream and the Dataset whose encoding it is read with."""

from __future__ import annotations

from pathlib import Path

import pytest

from lpfs.data.prepare import prepare
from lpfs.data.simulate_stream import StreamSpec, simulate_events, write_stream

EVENTS = 6000
SPEC = StreamSpec(12, 4, 20, 0.8, dies=3000, wakes=3000, drifts=3000, duplicates=0.01, malformed=0.01)


@pytest.fixture(scope="session")
def stream_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``segments`` and the Dataset ``like``."""
    folder = tmp_path_factory.mktemp("stream")
    write_stream(folder / "segments", SPEC, events=EVENTS, segment=1700)
    prepare(simulate_events(SPEC, 0, 2000).drop("event"), folder / "like", label="click", quiet=True)
    return folder
