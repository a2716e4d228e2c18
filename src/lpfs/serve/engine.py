"""ServedModel: a bundle in memory. ModelStore: the one that answers requests, and the thread that replaces it.

ONNX Runtime answers if it is installed, else the torch model: for few rows it takes a quarter of the time, see
``lpfs.export.session``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lpfs._console import join_lines
from lpfs.data.raw_rows import RawRowEncoder
from lpfs.errors import CheckpointError, ExactnessError, LpfsError
from lpfs.export.session import Predict, RuntimeModel, build_session_graph
from lpfs.online.bundle import CURRENT, ENCODER, MODEL, Bundle, current_version, open_bundle
from lpfs.serialization import load_into

ROUNDING = 1e-5  # of a logit, relative to the largest (at least 1): other kernels and sizes sum in another order
POLL_SECONDS = 0.5
NICE = 5  # of the thread that loads bundles; with more, other programs delay requests while it holds the GIL
GRACE_SECONDS = 300.0  # after a swap, in which requests may still lack the fields that the older model did not need


def ignore_message(text: str) -> None:
    """Do nothing with a line of the log."""


@dataclass(frozen=True)
class ServedModel:
    """A bundle that was checked and can answer. A request takes one reference and uses nothing else."""

    bundle: Bundle
    encoder: RawRowEncoder  # of its fields
    vocabularies: RawRowEncoder  # of all fields, for the next bundle
    logits: Predict  # from a batch to (B,), or (B, 1 + tasks): a RuntimeModel, or the torch model
    reopened: frozenset[str] = frozenset()  # fields that the model before this one did not need
    since: float = field(default_factory=time.time)
    load_seconds: float = 0.0

    @property
    def version(self) -> str:
        """Name of the bundle."""
        return self.bundle.version

    def optional(self) -> Collection[str]:
        """Return the fields that a request may lack now: reopened ones, until clients know the new list."""
        return self.reopened if self.reopened and time.time() - self.since < GRACE_SECONDS else ()


@dataclass(frozen=True)
class RefusedBundle:
    """A bundle that was not taken over, and why."""

    version: str
    reason: str
    time: float = field(default_factory=time.time)


def load_bundle(
    bundle: Bundle,
    before: ServedModel | None = None,
    *,
    allocate: Callable[..., torch.Tensor] = torch.empty,
    build_lookup: bool = True,
) -> ServedModel:
    """Read a bundle, compare every file with its digest and its logits with those of the manifest, and warm it up.

    Raise LpfsError if something differs.

    Args:
        bundle: to load.
        before: the one that is served; its vocabularies are used again if their files are the same.
        allocate: returns the memory of a weight.
        build_lookup: whether requests of few rows shall be encoded fast.
    """
    bundle.verify_files(hash_weights=False)
    model = load_into(bundle.path / MODEL, allocate).eval().requires_grad_(False)
    if model.reads.names != bundle.fields:
        raise CheckpointError(f"bundle {bundle.path}: the model reads other fields than the manifest lists")
    if before is not None and before.bundle.encoder_files == bundle.encoder_files:
        vocabularies = before.vocabularies
    else:
        vocabularies = RawRowEncoder(bundle.path / ENCODER)
        if build_lookup:
            vocabularies.build_lookup()
    encoder = vocabularies.subset(bundle.fields)
    if encoder.schema != model.reads:
        raise CheckpointError(f"bundle {bundle.path}: the encoder has other fields than the model")
    graph = build_session_graph(model)
    logits = torch.inference_mode()(model.forward) if graph is None else RuntimeModel(graph)
    served = ServedModel(bundle, encoder, vocabularies, logits)
    check_samples(served)
    return served


def check_samples(served: ServedModel) -> None:
    """Raise ExactnessError if a logit of a stored row is not what the manifest says, up to rounding."""
    batch = served.encoder.encode(served.bundle.samples()).require_all("stored rows")
    logits = served.logits(batch).double()
    expected = torch.tensor(served.bundle.manifest["logits"], dtype=torch.float64)
    bound = ROUNDING * max(1.0, float(expected.abs().max()))
    change = float((logits - expected).abs().max()) if logits.shape == expected.shape else float("inf")
    if not change <= bound:
        raise ExactnessError(
            f"bundle {served.bundle.path} predicts something else than its manifest says: the logits of "
            f"{len(batch)} stored rows differ by {change:.3g}, rounding explains {bound:.3g}"
        )


def error_text(error: Exception) -> str:
    """Return an error as one line."""
    text = str(error) if isinstance(error, LpfsError) else f"{type(error).__name__}: {error}"
    return join_lines(text)[:1000]


class ModelStore:
    """The model that answers requests. A thread reads CURRENT, loads a new bundle aside and swaps one reference.

    A bundle that is damaged or wrong is refused once, with the reason in ``refused``; the older model stays.

    Args:
        bundles: folder of bundles.
        notify: called with one line for every swap and refusal.
        load: returns the bundle at a path, checked, given the one that is served; by default it is loaded here.
    """

    def __init__(
        self,
        bundles: Path,
        notify: Callable[[str], None] = ignore_message,
        load: Callable[[Path, ServedModel], ServedModel] | None = None,
    ) -> None:
        self.bundles, self._notify, self._load = bundles, notify, load
        self.model: ServedModel | None = None
        self.refused: RefusedBundle | None = None
        self.swaps = self.refusals = 0
        self._seen: tuple[object, ...] | None = None
        self._replaced: ServedModel | None = None  # until the next look at CURRENT: a request would release it slowly
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, poll_seconds: float = POLL_SECONDS) -> None:
        """Load the current bundle, and follow CURRENT in a thread."""

        def follow() -> None:
            if sys.platform == "linux":
                os.nice(NICE)  # of this thread alone: requests come first where cores are scarce
            while not self._stop.wait(poll_seconds):
                self.check()

        self.check()
        self._thread = threading.Thread(target=follow, name="lpfs-bundles", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a bundle that it is loading is finished first."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Take over the current bundle if it is not the served one and was not refused before."""
        with self._lock:
            self._replaced = None
            while (seen := self._read_current()) != self._seen and not self._stop.is_set():
                self._seen = seen
                self._swap()

    def _read_current(self) -> tuple[object, ...]:
        """Return what identifies the content of CURRENT; it is read again only if this changes."""
        try:
            status = (self.bundles / CURRENT).stat()
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _swap(self) -> None:
        """Load and swap; a failure is of no interest if CURRENT changed meanwhile."""
        version: str | None = "?"
        try:
            version = current_version(self.bundles)
            if version is None:
                return
            before, start, path = self.model, time.perf_counter(), self.bundles / version
            if before is None or version != before.version or open_bundle(path).manifest != before.bundle.manifest:
                if self._load is None or before is None:
                    model = load_bundle(open_bundle(path), before)
                else:
                    model = self._load(path, before)
                fields, seconds = model.bundle.fields, time.perf_counter() - start
                reopened = frozenset(fields) - frozenset(before.bundle.fields) if before else frozenset()
                self._replaced = before
                self.model = replace(model, reopened=reopened, since=time.time(), load_seconds=seconds)
                self.swaps += 1
                old = "" if before is None else f", instead of {before.version}"
                self._notify(f"serving bundle {version}{old}: {len(fields)} fields, {seconds:.2f} s")
            self.refused = None
        except Exception as error:  # whatever is wrong with a bundle, the older model answers
            if self._read_current() != self._seen:
                return
            self.refused = RefusedBundle(str(version), error_text(error))
            self.refusals += 1
            kept = "nothing is served" if self.model is None else f"{self.model.version} is still served"
            self._notify(f"refused bundle {version}, {kept}: {self.refused.reason}")
