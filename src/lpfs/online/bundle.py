"""Bundles: immutable folders with all that serving needs, and the file CURRENT that names the one to serve.

    bundles/000007/bundle.json       the manifest: fields, certificate, logits of stored rows, digests
                   model/            the pruned model (``lpfs.load``)
                   encoder/          from raw values of all fields to ids (``RawRowEncoder``), a Dataset of one row
                   samples.json      raw rows on which every server compares its logits with those of the manifest
    bundles/CURRENT                  "000007": written last, by rename

A bundle is complete or absent: it is written under a temporary name, synced and renamed. Nothing in it is pickled.
``lpfs export bundles/000007 --like bundles/000007/encoder --out model.onnx`` makes an ONNX file that takes raw values.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import lpfs
from lpfs._fileio import (
    StagingDirectory,
    check_regular_file,
    fsync_tree,
    read_json,
    remove_tree,
    safe_child,
    write_json_atomic,
    write_text_atomic,
)
from lpfs._locks import FileLock
from lpfs._validation import check_int
from lpfs.data.dataset import Dataset
from lpfs.data.raw_rows import RawRowEncoder
from lpfs.errors import CheckpointError, DataError, InputError, LpfsError
from lpfs.gates.verification import compute_logits
from lpfs.models.base import Model
from lpfs.serialization import WEIGHTS, save

FORMAT, FORMAT_VERSION = "lpfs-bundle", 1
MANIFEST, SAMPLES, CURRENT = "bundle.json", "samples.json", "CURRENT"
MODEL, ENCODER = "model", "encoder"
VERSION_NAME = re.compile(r"[0-9]{6,12}")
MAX_SAMPLES = 1024  # stored rows
HASH_BYTES = 1 << 16  # larger blocks are new pages each time, which takes as long as hashing them
SCHEMA = {
    **{"format": str, "format_version": int, "lpfs": str, "version": str, "created": str},
    **{"fields": list[str], "certificate": dict, "metadata": dict},
    **{"files": {"*": {"bytes": int, "sha256": str}}, "logits": list[float | list[float]]},
}
ADVICE = "publish the model again, or go back with: lpfs online rollback"


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk, described by its manifest. ``verify_files`` compares every file with its digest."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def version(self) -> str:
        """Name of the folder; a later bundle has a larger number."""
        return str(self.manifest["version"])

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields to fetch for a request."""
        return tuple(self.manifest["fields"])

    @property
    def encoder_files(self) -> dict[str, Any]:
        """The entries of the manifest for the files of the encoder, which bundles of one run share."""
        return {name: entry for name, entry in self.manifest["files"].items() if name.startswith(f"{ENCODER}/")}

    def verify_files(self, *, hash_weights: bool = True) -> None:
        """Raise CheckpointError if a file is missing, damaged, or not in the manifest.

        ``lpfs.load`` compares the weights with the digest in model.json, so that a server need not hash them here too.
        """
        try:
            files = self.manifest["files"]
            paths = [path for path in self.path.rglob("*") if path.is_symlink() or not path.is_dir()]
            present = {path.relative_to(self.path).as_posix() for path in paths} - {MANIFEST}
            if different := sorted(present ^ set(files)):
                raise ValueError(f"{different[0]} is {'not in the manifest' if different[0] in present else 'missing'}")
            for name, entry in files.items():
                path = safe_child(self.path, name)
                check_regular_file(path)
                if (size := path.stat().st_size) != entry["bytes"]:
                    raise ValueError(f"{name} has {size} bytes, expected {entry['bytes']}")
                if (hash_weights or name != f"{MODEL}/{WEIGHTS}") and file_digest(path) != entry["sha256"]:
                    raise ValueError(f"the digest of {name} does not match")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"bundle {self.path} is damaged: {error}; {ADVICE}") from error

    def samples(self) -> list[dict[str, Any]]:
        """Return the stored raw rows, one for each of ``logits`` in the manifest."""
        path, count = safe_child(self.path, SAMPLES), len(self.manifest["logits"])
        try:
            rows: list[dict[str, Any]] = read_json(path, {"rows": [dict]}, verify="required")["rows"]
            if len(rows) != count:
                raise ValueError(f"{SAMPLES} has {len(rows)} rows, the manifest {count} logits")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"bundle {self.path} is damaged: {error}; {ADVICE}") from error
        return rows


def publish(
    bundles: Path,
    model: Model,
    encoder: RawRowEncoder,
    *,
    sample_rows: Sequence[Mapping[str, Any]],
    certificate: Any,
    metadata: Mapping[str, Any],
    keep: int = 5,
) -> Bundle:
    """Write a new bundle, make it the current one, and remove the oldest; servers take it over by themselves.

    Args:
        bundles: folder of all bundles; made if it does not exist.
        model: the pruned model, without gates.
        encoder: from raw rows to batches; it may know more fields than the model reads.
        sample_rows: raw rows as JSON objects, 1 to 1,024. A server that predicts something else refuses the bundle.
        certificate: what ``prune`` certified: a dataclass or JSON values.
        metadata: JSON values, such as the position in the stream and the metrics.
        keep: how many bundles to keep, the new one included. The current one before it is always kept.
    """
    check_int("keep", keep, 1)
    fields = model.reads.names  # that a request must have
    if not 1 <= len(sample_rows) <= MAX_SAMPLES:
        raise InputError(f"sample_rows must have 1 to {MAX_SAMPLES:,} rows, found {len(sample_rows)}")
    values = {
        "certificate": asdict(certificate) if is_dataclass(certificate) else certificate,  # type: ignore[arg-type]
        "metadata": metadata,
        "rows": [{name: row.get(name) for name in fields} for row in sample_rows],
    }
    try:
        values = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"sample rows, certificate and metadata must be plain JSON values: {error}") from error
    with FileLock(bundles / ".lock", bundles):
        previous = current_version(bundles)
        version = f"{max(map(int, versions(bundles)), default=0) + 1:06d}"
        out, rows = bundles / version, values.pop("rows")
        try:
            with StagingDirectory(out) as staging:
                logits = compute_sample_logits(model, encoder.subset(fields), rows)
                write_encoder(encoder, staging / ENCODER, bundles / (previous or version))
                save(model, staging / MODEL)
                write_json_atomic(staging / SAMPLES, {"rows": rows})
                manifest = {
                    **{"format": FORMAT, "format_version": FORMAT_VERSION, "lpfs": lpfs.__version__},
                    **{"version": version, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
                    **{"fields": list(fields), **values, "logits": logits},
                    "files": describe_files(staging),
                }
                write_json_atomic(staging / MANIFEST, manifest)
                fsync_tree(staging)
            write_text_atomic(bundles / CURRENT, f"{version}\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot write bundle {out}: {error.strerror or error}; the current bundle is still {previous}"
            ) from error
        for old in versions(bundles)[:-keep]:
            if old not in (version, previous):
                remove_tree(bundles / old)  # of a process that is killed here the next one removes the rest
    return Bundle(out, manifest)


def write_encoder(encoder: RawRowEncoder, out: Path, before: Path) -> None:
    """Write the encoder of all fields; that of the bundle before is copied if it is the same one and not damaged."""
    try:
        stored, bundle = Dataset(before / ENCODER), open_bundle(before)
        if (stored.fingerprint, stored.schema) == (encoder.like.fingerprint, encoder.schema):
            shutil.copytree(before / ENCODER, out)
            if describe_files(out.parent) == bundle.encoder_files:
                return
    except (LpfsError, OSError):
        pass  # there is none, or it is damaged
    remove_tree(out)
    encoder.save(out)


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and digest of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in files
    }


def compute_sample_logits(model: Model, encoder: RawRowEncoder, rows: list[dict[str, Any]]) -> list[Any]:
    """Return the logits of the stored rows; raise InputError if they cannot be encoded, or are not finite."""
    if encoder.schema.names != model.reads.names:
        raise InputError(f"the encoder has the fields {encoder.schema.names}, the model reads {model.reads.names}")
    batch = encoder.encode(rows).require_all("sample rows")
    [logits] = compute_logits(model, batch.to(next(model.parameters()).device))
    if not bool(logits.isfinite().all()):
        raise InputError("the model's logits of the sample rows are not finite; nothing was published")
    return logits.double().tolist()


def open_bundle(path: Path) -> Bundle:
    """Return the bundle in a folder after its manifest was checked; its other files are not read yet."""
    try:
        manifest = read_json(safe_child(path, MANIFEST), SCHEMA, verify="required")
        if manifest["format"] != FORMAT or manifest["format_version"] != FORMAT_VERSION:
            raise ValueError(f"it does not have the format {FORMAT} {FORMAT_VERSION} of lpfs {lpfs.__version__}")
        if manifest["version"] != path.name:
            raise ValueError(f"it says that it is bundle {manifest['version']!r:.40}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"bundle {path} cannot be used: {error}; {ADVICE}") from error
    return Bundle(path, manifest)


def current(bundles: Path) -> Bundle | None:
    """Return the current bundle; None if nothing has been published."""
    version = current_version(bundles)
    return None if version is None else open_bundle(safe_child(bundles, version))


def current_version(bundles: Path) -> str | None:
    """Return what CURRENT says, without opening the bundle."""
    path = bundles / CURRENT
    try:
        check_regular_file(path)
        with path.open("rb") as file:
            version = file.read(64).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    except (OSError, DataError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {ADVICE}") from error
    if not VERSION_NAME.fullmatch(version):
        raise CheckpointError(f"{path} must hold the name of a bundle, such as 000007, found {version!r}; {ADVICE}")
    return version


def versions(bundles: Path) -> list[str]:
    """Return the names of all bundles, oldest first."""
    if not bundles.is_dir():
        return []
    names = (path.name for path in bundles.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(filter(VERSION_NAME.fullmatch, names), key=int)


def rollback(bundles: Path, version: str | None = None) -> Bundle:
    """Make an older bundle the current one and return it: ``version``, or the newest before the current one.

    The files of the bundle are compared with their digests first.
    """
    with FileLock(bundles / ".lock", bundles):
        known, now = versions(bundles), current_version(bundles)
        before = [name for name in known if now is not None and int(name) < int(now)]
        wanted = f"before {now}" if version is None else repr(version)
        version = (before[-1] if before else "") if version is None else version
        if version not in known:
            raise InputError(f"{bundles} has no bundle {wanted}; it has {', '.join(known) or 'none'}")
        bundle = open_bundle(bundles / version)
        bundle.verify_files()
        write_text_atomic(bundles / CURRENT, f"{version}\n")
    return bundle


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()
