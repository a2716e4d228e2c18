"""Bundles loaded in a process of its own: the same predictions, the same refusals, and a process that was killed."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
import weakref
from multiprocessing import Pipe

import numpy as np
import pytest
import torch

from lpfs.data.raw_rows import RawRowEncoder
from lpfs.errors import LpfsError
from lpfs.models import MLP
from lpfs.online.bundle import open_bundle, publish
from lpfs.serve.engine import ModelStore, load_bundle
from lpfs.serve.loader import COMMAND, Loader, LoaderProcess, SharedMemory
from tests.helpers.bundles import make_model, prepare_dataset, publish_model, sample_rows

pytestmark = pytest.mark.skipif(not LoaderProcess.is_supported(), reason="needs memfd_create and ONNX Runtime")


@pytest.fixture
def loader():
    process = LoaderProcess(policy="other")  # tests use all cores
    yield process
    process.stop()


def publish_large(bundles, dataset, seed):
    """Publish a model with a table of more than a MiB, which is handed over in shared memory."""
    torch.manual_seed(seed)
    model = MLP(dataset.schema, dim=1 << 15, hidden=(8,))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.002)
    rows = sample_rows()
    return publish(bundles, model, RawRowEncoder(dataset), sample_rows=rows, certificate={}, metadata={})


def test_the_process_loads_what_the_server_would_load(dataset, tmp_path, loader):
    bundles = tmp_path / "bundles"
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store = ModelStore(bundles, load=loader)
    store.check()
    for seed in (1, 2):
        bundle = publish_large(bundles, dataset, seed)
        held = store.model
        store.check()
        assert store.refused is None
        assert store.model.version == bundle.version
        expected = load_bundle(bundle)
        batch = expected.encoder.encode(sample_rows(count=20)).batch
        assert torch.equal(store.model.logits(batch), expected.logits(batch))
        assert list(store.model.logits.source.weights) == list(expected.logits.source.weights) != []
        for name, weight in store.model.logits.source.weights.items():
            assert not weight.flags.writeable
            assert np.array_equal(weight, expected.logits.source.weights[name])
        assert store.model.vocabularies is held.vocabularies
        assert (store.model.logits._session is held.logits._session) == (seed == 2)  # the graph is the same
    publish_model(bundles, dataset, make_model(dataset, ["text", "age"]), sample_rows())
    store.check()
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store.check()
    assert store.refused is None
    assert store.model.reopened == set(dataset.schema.names) - {"text", "age"}
    assert store.swaps == 5


def test_a_damaged_bundle_is_refused_with_the_reason_and_the_next_one_is_served(dataset, tmp_path, loader):
    bundles = tmp_path / "bundles"
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store = ModelStore(bundles, load=loader)
    store.check()
    bundle = publish_large(bundles, dataset, 1)
    path = bundle.path / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(LpfsError, match="checksum does not match"):
        loader(bundle.path, store.model)
    store.check()
    assert store.model.version == "000001"
    assert "checksum does not match" in store.refused.reason
    assert "\n" not in store.refused.reason
    publish_large(bundles, dataset, 2)
    store.check()
    assert store.model.version == "000003"


def test_a_process_that_was_killed_loses_no_bundle(dataset, tmp_path, loader):
    bundles = tmp_path / "bundles"
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store = ModelStore(bundles, load=loader)
    store.check()
    loader.start()
    first = loader._process
    first.kill()
    bundle = publish_large(bundles, dataset, 1)
    store.check()
    assert store.model.version == bundle.version
    bundle = publish_large(bundles, dataset, 2)
    store.check()
    assert store.model.version == bundle.version
    assert loader._process is not first
    assert loader._process.poll() is None
    loader.stop()
    loader.stop()


CRASH = """
import os
from pathlib import Path
import lpfs.serve.loader as loader
load = loader.load_bundle
def load_or_crash(bundle, *args, **options):
    crashes = Path({crashes!r})
    if bundle.version == "000002" and len(crashes.read_text()) < {count}:
        crashes.write_text(crashes.read_text() + "x")
        os.kill(os.getpid(), {end}) if {end} else os._exit(3)
    return load(bundle, *args, **options)
loader.load_bundle = load_or_crash
main()
"""


@pytest.mark.parametrize(("end", "text"), [(11, "SIGSEGV"), (9, "SIGKILL"), (0, "exit code 3")])
@pytest.mark.parametrize("count", [1, 2])
def test_a_bundle_that_crashes_two_processes_is_refused(dataset, tmp_path, loader, monkeypatch, end, text, count):
    crashes, bundles = tmp_path / "crashes", tmp_path / "bundles"
    crashes.write_text("")
    command = CRASH.format(crashes=str(crashes), count=count, end=end)
    monkeypatch.setattr("lpfs.serve.loader.COMMAND", COMMAND.replace("main()", f"exec({command!r})"))
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store = ModelStore(bundles, load=loader)
    store.check()
    monkeypatch.setattr("lpfs.serve.loader.load_bundle", None)  # this process does not load them
    publish_large(bundles, dataset, 1)
    store.check()
    assert crashes.read_text() == "x" * count
    if count == 2:
        assert store.model.version == "000001"
        assert store.refused.version == "000002"
        assert text in store.refused.reason
        publish_large(bundles, dataset, 2)
        store.check()
    assert store.refused is None
    assert store.model.version == f"00000{count + 1}"


def test_the_server_loads_bundles_if_the_process_cannot_be_started(dataset, tmp_path, loader, monkeypatch):
    monkeypatch.setattr("lpfs.serve.loader.COMMAND", "raise SystemExit(1)")
    bundles = tmp_path / "bundles"
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store = ModelStore(bundles, load=loader)
    store.check()
    for seed in (1, 2):
        bundle = publish_large(bundles, dataset, seed)
        store.check()
        assert store.refused is None
        assert store.model.version == bundle.version
        assert loader._process is None


def test_memory_is_filled_again_once_nothing_uses_it(dataset, tmp_path, loader):
    bundles = tmp_path / "bundles"
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store = ModelStore(bundles, load=loader)
    store.check()

    def swap(seed):
        bundle = publish_large(bundles, dataset, seed)
        store.check()
        store.check()  # releases the replaced model
        assert store.model.version == bundle.version
        return sorted(loader._memories)

    assert swap(1) == [1]
    assert swap(2) == [1, 2]
    assert swap(3) == swap(4) == [1, 2]
    weight = next(iter(store.model.logits.source.weights.values()))
    copy = weight.copy()
    assert swap(5) == [1, 2]
    assert swap(6) == [1, 2, 3]
    assert swap(7) == [1, 2, 3]
    assert np.array_equal(weight, copy)
    del weight
    assert len(swap(8)) == 2
    expected = load_bundle(open_bundle(bundles / store.model.version))
    for name, values in expected.logits.source.weights.items():
        assert np.array_equal(store.model.logits.source.weights[name], values)


def test_a_thread_that_waits_for_a_stopped_process_ends_with_the_server(dataset, tmp_path, loader):
    bundles = tmp_path / "bundles"
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store = ModelStore(bundles, load=loader)
    store.start(0.01)
    loader.start()
    loader._process.send_signal(signal.SIGSTOP)
    publish_model(bundles, dataset, make_model(dataset, seed=1), sample_rows())
    deadline = time.monotonic() + 30
    while not store._lock.locked() and time.monotonic() < deadline:
        time.sleep(0.01)
    loader.closing.set()
    store.stop()
    assert store.model.version == "000001"
    assert loader._process is None


def test_a_reply_that_breaks_off_does_not_disturb_the_next_one(dataset, tmp_path, loader, monkeypatch):
    def fail(connection):
        raise RuntimeError("received 0 items of ancdata")

    bundles = tmp_path / "bundles"
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store = ModelStore(bundles, load=loader)
    store.check()
    with monkeypatch.context() as patch:
        patch.setattr("lpfs.serve.loader.recv_handle", fail)
        publish_large(bundles, dataset, 1)
        store.check()
        assert store.model.version == "000002"
        assert loader._process is None
    publish_large(bundles, dataset, 2)
    store.check()
    assert store.model.version == "000003"
    assert loader._process is not None


def test_at_most_one_replaced_model_is_kept_while_bundles_come_without_a_pause(dataset, tmp_path):
    bundles = tmp_path / "bundles"
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    models, alive = [], []

    def load(path, before):
        alive.append(sum(model() is not None for model in models))
        if len(alive) < 5:
            publish_model(bundles, dataset, make_model(dataset, seed=len(alive)), sample_rows())
        model = load_bundle(open_bundle(path), before)
        models.append(weakref.ref(model.encoder))
        return model

    store = ModelStore(bundles, load=load)
    store.check()
    publish_model(bundles, dataset, make_model(dataset, seed=9), sample_rows())
    store.check()
    assert len(alive) == 5
    assert max(alive) == 2
    store.check()
    assert sum(model() is not None for model in models) == 1


def test_the_process_ends_with_the_server():
    ours, theirs = Pipe()
    command = [sys.executable, "-c", COMMAND, str(theirs.fileno()), "idle", *sys.path]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    theirs.close()
    assert ours.recv_bytes() == b"ready"
    ours.send_bytes(b'{"path": "/nowhere", "used": []}')
    assert "cannot be used" in json.loads(ours.recv_bytes())["error"]
    ours.close()
    assert (process.communicate(timeout=30)[1], process.returncode) == (b"", 0)


def test_the_server_does_not_wait_forever_for_a_process_that_gets_no_time(dataset, tmp_path, loader, monkeypatch):
    monkeypatch.setattr("lpfs.serve.loader.PATIENCE_SECONDS", 0.2)
    bundles = tmp_path / "bundles"
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store = ModelStore(bundles, load=loader)
    store.check()
    loader.start()
    loader._process.send_signal(signal.SIGSTOP)
    publish_model(bundles, dataset, make_model(dataset, seed=1), sample_rows())
    store.check()
    assert store.model.version == "000002"
    assert loader._process is None


def test_a_bundle_with_another_encoder_is_taken_over(dataset, tmp_path, loader):
    bundles = tmp_path / "bundles"
    publish_model(bundles, dataset, make_model(dataset), sample_rows())
    store = ModelStore(bundles, load=loader)
    store.check()
    vocabularies = store.model.vocabularies
    bundle = publish_large(bundles, prepare_dataset(tmp_path / "other", seed=1), 1)
    store.check()
    assert store.refused is None
    assert store.model.version == bundle.version
    assert store.model.vocabularies is not vocabularies
    assert open_bundle(bundle.path).encoder_files == store.model.bundle.encoder_files


def test_arrays_from_elsewhere_are_copied_into_the_shared_memory():
    memory = SharedMemory(4096)
    memory.file.close()
    inside = memory.allocate([3, 5], torch.float32).fill_(2.0)
    outside = np.arange(6, dtype=np.float64).reshape(2, 3)
    assert memory.offset_of(inside.numpy()) == 0
    start = memory.offset_of(outside)
    assert start == 64
    copied = np.frombuffer(memory._map, np.float64, 6, start).reshape(2, 3)
    assert np.array_equal(copied, outside)
    with pytest.raises(ValueError, match="buffer"):
        memory.allocate([4096], torch.float32)


def test_the_process_pauses_only_after_it_has_worked(monkeypatch):
    times, pauses = iter([1.0, 1.0, 2.0, 3.0]), []
    monkeypatch.setattr("lpfs.serve.loader.time.process_time", lambda: next(times))
    monkeypatch.setattr("lpfs.serve.loader.time.sleep", pauses.append)
    process = Loader(None, has_pauses=True)
    process.paced_until = math.inf
    for expected in (1, 1, 2):  # the second time it has not worked
        process.pause()
        assert len(pauses) == expected
    process.paced_until = 0.0
    process.pause()
    assert len(pauses) == 2
