"""methods, completion and doctor: list the methods, complete words in a shell, check this machine."""

from __future__ import annotations

import os
import platform
import textwrap
from importlib import util
from pathlib import Path
from typing import Any

import click

import lpfs
from lpfs._console import print_lines
from lpfs.cli.app import SuggestingChoice, cli, print_json
from lpfs.cli.options import JSON
from lpfs.methods.registry import METHODS

# package -> what needs it
NEEDED = {
    "torch": "everything",
    "numpy": "everything",
    "click": "the command line",
    "polars": "prepare and select",
    "rich": "tables and progress bars on a terminal",
    "jinja2": "reports",
    "numba": "fast embedding tables and crosses on the CPU",
}
OPTIONAL = {
    "triton": "fast embedding tables and crosses on a GPU",
    "zstandard": "logs compressed as .zst (before Python 3.14)",
    "tensorboard": "--tensorboard: curves and gate histograms",
    "mlflow": "--mlflow: parameters, metrics, files, the model",
    "matplotlib": "selection.plot() and lpfs reproduce",
    "onnx": "lpfs export --format onnx",
    "onnxruntime": "verifying an exported ONNX file",
    "sklearn": "the scikit-learn selector; the methods gbdt, random_forest, lasso_logistic",
    "pandas": "pandas tables as a source",
    "pyarrow": "Arrow tables as a source",
}
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # package -> its name on PyPI, if that differs
PIP_NAMES = {**DISTRIBUTIONS, "mlflow": "'lpfs[mlflow]'"}  # what to give to pip install
BACKENDS = {"torch": "any device", "numba": "CPU", "triton": "GPU"}  # of embedding tables -> device


@cli.command(
    short_help="List the search methods.",
    examples=["lpfs methods", "lpfs methods --json", "lpfs select clicks.csv --label click --keep 10 --method lpfs"],
)
@JSON
def methods(as_json: bool) -> None:
    """List the values of --method, with the paper that proposed each method."""
    entries = [
        {"name": name, "summary": entry.summary, "reference": entry.reference} for name, entry in METHODS.items()
    ]
    if as_json:
        print_json(entries)
        return
    for entry in entries:
        texts = [textwrap.indent(textwrap.fill(entry[key], 96), "    ") for key in ("summary", "reference")]
        print_lines(entry["name"], *"\n".join(texts).split("\n"))


@cli.command(
    short_help="Print a completion script for your shell.",
    examples=[
        "lpfs completion fish > ~/.config/fish/completions/lpfs.fish      # once",
        'eval "$(lpfs completion bash)"                                   # in ~/.bashrc',
        'eval "$(lpfs completion zsh)"                                    # in ~/.zshrc',
    ],
)
@click.argument("shell", metavar="SHELL", type=SuggestingChoice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print a script for bash, zsh or fish that completes commands, options and their values with the tab key."""
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    print_lines(*completion_class(cli, {}, "lpfs", "_LPFS_COMPLETE").source().split("\n"))


@cli.command(short_help="Check what works on this machine.", examples=["lpfs doctor", "lpfs doctor --json"])
@JSON
def doctor(as_json: bool) -> None:
    """Print versions, devices, the backends in use, and missing packages."""
    info = collect_info()
    if as_json:
        print_json(info)
        return
    machine, torch, cache = info["machine"], info["torch"], info["kernel_cache"]
    print_lines(f"lpfs {info['lpfs']}, Python {info['python']}, {machine['system']}")
    memory = "unknown" if machine["memory_gb"] is None else f"{machine['memory_gb']:.1f} GB"
    print_lines(f"machine      {machine['cores']} CPU cores, {memory} of memory")
    if torch is None:
        print_lines("torch        missing; install it with: pip install torch")
    else:
        print_lines(f"torch        {torch['version']}, {torch['threads']} threads")
        gpus = [f"{gpu['name']} ({gpu['memory_gb']:.0f} GB)" for gpu in torch["gpus"]]
        print_lines(f"GPUs         {', '.join(gpus) or 'none that torch can use'}")
    for backend in info["backends"]:
        print_lines(f"{backend['name']:<12} {backend['device']}: {backend['state']}")
    hint = "" if cache["writable"] else " (not writable, so kernels are compiled in every process)"
    print_lines(f"kernel cache {cache['directory']}{hint}")
    for name, version in info["packages"].items():
        if version is None:
            purpose, pip_name = (NEEDED | OPTIONAL)[name], PIP_NAMES.get(name, name)
            print_lines(f"missing      {name}, for {purpose}; install it with: pip install {pip_name}")
    installed = [f"{name} {version}" for name, version in info["packages"].items() if version is not None]
    print_lines(*textwrap.wrap(f"packages     {', '.join(installed)}", 110, subsequent_indent=" " * 13))


def collect_info() -> dict[str, Any]:
    """Return what doctor prints, as plain values."""
    has_torch = util.find_spec("torch") is not None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (AttributeError, ValueError, OSError):  # not on every system
        memory = None
    # compiled kernels are cached here
    directory = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(lpfs.__file__).parent)
    is_writable = os.access(directory, os.W_OK) or not directory.exists()
    return {
        "lpfs": lpfs.__version__,
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "cores": cores, "memory_gb": memory},
        "torch": _torch_info() if has_torch else None,
        "backends": _backend_states() if has_torch else [],
        "kernel_cache": {"directory": str(directory), "writable": is_writable},
        "packages": {name: _installed_version(name) for name in NEEDED | OPTIONAL},
    }


def _torch_info() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [{"name": gpu.name, "memory_gb": gpu.total_memory / 1e9} for gpu in gpus],
    }


def _backend_states() -> list[dict[str, str]]:
    return [{"name": name, "device": device, "state": _try_backend(name, device)} for name, device in BACKENDS.items()]


def _try_backend(name: str, device_label: str) -> str:
    """Look up some rows with a backend; return "works", or why it does not."""
    import torch

    from lpfs.embeddings import _torch
    from lpfs.embeddings._backends import backend_for, use_backend
    from lpfs.errors import MissingPackageError

    if device_label == "GPU" and not torch.cuda.is_available():
        return "not used: no GPU"
    device = "cuda" if device_label == "GPU" else "cpu"
    weight = torch.arange(12.0, device=device).reshape(6, 2)
    starts, ids = torch.tensor([0, 3, 6], device=device), torch.tensor([[0, 1], [2, 0]], device=device)
    try:
        with use_backend(name):
            rows = backend_for(weight).gather(weight, starts, ids, None)
        return "works" if torch.equal(rows, _torch.gather(weight, starts, ids, None)) else "returns wrong numbers"
    except MissingPackageError:
        return f"missing; install it with: pip install {name}"
    except Exception as error:  # a broken installation fails in many ways
        lines = str(error).strip().splitlines() or [""]
        return f"does not work, plain torch is used: {type(error).__name__}: {lines[0]}"


def _installed_version(name: str) -> str | None:
    if util.find_spec(name) is None:
        return None
    from importlib import metadata  # slow to import, and not needed for --help

    try:
        return metadata.version(DISTRIBUTIONS.get(name, name))
    except metadata.PackageNotFoundError:
        return "(unknown version)"
