"""methods and doctor: what there is to choose from, and what works on this machine."""

from __future__ import annotations

import os
import platform
import textwrap
from importlib import util
from pathlib import Path
from typing import Any

import click

import lpfs
from lpfs.cli.app import SuggestingChoice, cli, print_json
from lpfs.cli.options import JSON

# package -> what it is for
NEEDED = {"torch": "everything", "numpy": "everything", "click": "this command", "polars": "prepare and select"}
OPTIONAL = {
    "rich": "tables and progress bars on a terminal",
    "numba": "fast tables and crosses on the CPU",
    "triton": "fast tables and crosses on a GPU",
    "zstandard": "logs packed as .zst (before Python 3.14)",
    "tensorboard": "--tensorboard: curves and gate histograms",
    "mlflow": "--mlflow: parameters, metrics, files, the model",
    "matplotlib": "selection.plot()",
    "onnx": "lpfs export --format onnx",
    "onnxruntime": "checking an exported ONNX file",
    "sklearn": "the scikit-learn selector; the methods gbdt, random_forest, lasso_logistic",
    "pandas": "tables of pandas as a source",
    "pyarrow": "tables of Arrow as a source",
}
INSTALL = {"sklearn": "scikit-learn", "mlflow": "'lpfs[mlflow]'"}


@cli.command(
    short_help="List the search methods.",
    examples=[
        "lpfs methods",
        "lpfs methods --json",
        "lpfs select clicks.csv --label click --keep 10 --method lpfs",
    ],
)
@JSON
def methods(as_json: bool) -> None:
    """List the methods that --method takes, and who proposed them."""
    from lpfs.methods.registry import METHODS

    if as_json:
        print_json(
            [{"name": name, "what": each.summary, "reference": each.reference} for name, each in METHODS.items()]
        )
        return
    for name, each in METHODS.items():
        click.echo(name)
        click.echo(textwrap.indent(textwrap.fill(each.summary, 96), "    "))
        click.echo(textwrap.indent(textwrap.fill(each.reference, 96), "    "))


@cli.command(
    short_help="Print the completion for your shell.",
    examples=[
        "lpfs completion fish > ~/.config/fish/completions/lpfs.fish      # once",
        'eval "$(lpfs completion bash)"                                   # in ~/.bashrc',
        'eval "$(lpfs completion zsh)"                                    # in ~/.zshrc',
    ],
)
@click.argument("shell", metavar="SHELL", type=SuggestingChoice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print a script for bash, zsh or fish that lets the tab key complete commands, options and what they take."""
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(cli, {}, "lpfs", "_LPFS_COMPLETE").source())


@cli.command(short_help="Say what works on this machine.", examples=["lpfs doctor", "lpfs doctor --json"])
@JSON
def doctor(as_json: bool) -> None:
    """Print versions, devices, the kernels in use, and what is missing."""
    found = collect_info()
    if as_json:
        print_json(found)
        return
    machine, torch, cache = found["machine"], found["torch"], found["kernel_cache"]
    click.echo(f"lpfs {found['lpfs']}, Python {found['python']}, {machine['system']}")
    memory = "unknown" if machine["memory_gb"] is None else f"{machine['memory_gb']:.1f} GB"
    click.echo(f"machine      {machine['cores']} CPU cores, {memory} of memory")
    if torch is None:
        click.echo("torch        missing; install: pip install torch")
    else:
        click.echo(f"torch        {torch['version']}, {torch['threads']} threads")
        listed = [f"{each['name']} ({each['memory_gb']:.0f} GB)" for each in torch["gpus"]]
        click.echo(f"GPUs         {', '.join(listed) or 'none that torch can use'}")
    for each in found["engines"]:
        click.echo(f"{each['name']:<12} {each['device']}: {each['state']}")
    hint = "" if cache["writable"] else " (cannot be written: compiled anew every time)"
    click.echo(f"kernel cache {cache['folder']}{hint}")
    for name, version in found["packages"].items():
        if version is None:
            install = INSTALL.get(name, name)
            click.echo(f"missing      {name}, for {(NEEDED | OPTIONAL)[name]}; install: pip install {install}")
    there = [f"{name} {version}" for name, version in found["packages"].items() if version is not None]
    click.echo(textwrap.fill(f"packages     {', '.join(there)}", 110, subsequent_indent=" " * 13))


def collect_info() -> dict[str, Any]:
    """Return what was found, as plain values."""
    return {
        "lpfs": lpfs.__version__,
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "cores": cores(), "memory_gb": memory()},
        "torch": torch_info() if util.find_spec("torch") else None,
        "engines": backends() if util.find_spec("torch") else [],
        "kernel_cache": kernel_cache(),
        "packages": {name: version_of(name) for name in NEEDED | OPTIONAL},
    }


def cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def memory() -> float | None:
    """Return the memory of the machine in GB."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (AttributeError, ValueError, OSError):
        return None


def torch_info() -> dict[str, Any]:
    """Return the version of torch, its threads and GPUs."""
    import torch

    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [{"name": each.name, "memory_gb": each.total_memory / 1e9} for each in gpus],
    }


def backends() -> list[dict[str, str]]:
    """Try every engine of the tables: gather some rows with it, and compare them with plain torch's."""
    import torch

    devices = {"torch": "any device", "numba": "CPU", "triton": "GPU"}
    found = []
    for name, device in devices.items():
        if device == "GPU" and not torch.cuda.is_available():
            state = "not used: no GPU"
        else:
            state = try_backend(name, "cuda" if device == "GPU" else "cpu")
        found.append({"name": name, "device": device, "state": state})
    return found


def try_backend(name: str, device: str) -> str:
    """Return "works", or why an engine does not."""
    import torch

    from lpfs.embeddings import _torch
    from lpfs.embeddings._torch import backend_for, use_backend
    from lpfs.errors import MissingPackageError

    weight = torch.arange(12.0, device=device).reshape(6, 2)
    starts, ids = torch.tensor([0, 3, 6], device=device), torch.tensor([[0, 1], [2, 0]], device=device)
    try:
        with use_backend(name):
            rows = backend_for(weight).gather(weight, starts, ids, None)
        return "works" if torch.equal(rows, _torch.gather(weight, starts, ids, None)) else "gives wrong numbers"
    except MissingPackageError:
        return f"missing; install: pip install {name}"
    except Exception as error:  # a broken installation fails in many ways
        lines = str(error).strip().splitlines() or [""]
        return f"does not work, plain torch is used: {type(error).__name__}: {lines[0]}"


def kernel_cache() -> dict[str, Any]:
    """Return where compiled kernels are kept: in NUMBA_CACHE_DIR, or beside the source."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(lpfs.__file__).parent)
    return {"folder": str(folder), "writable": os.access(folder, os.W_OK) or not folder.exists()}


def version_of(name: str) -> str | None:
    """Return the version of a package, None where it is not there."""
    if util.find_spec(name) is None:
        return None
    from importlib import metadata  # slow to import, and not needed for --help

    try:
        return metadata.version(INSTALL.get(name, name))
    except metadata.PackageNotFoundError:
        return "of unknown version"
