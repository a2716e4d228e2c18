"""fit_fleet: train many models together, each as ``fit`` would train it.

    fit_fleet(models, dataset.stream(512), epochs=1, valid=holdout.stream(4096))

Memory is estimated first; replicas that do not fit are trained in further rounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lpfs._fileio import read_json, write_json_atomic
from lpfs._validation import check_keys
from lpfs.data.batch import Batch
from lpfs.errors import DeviceMemoryError, InputError
from lpfs.schema import Schema
from lpfs.train.callbacks import Callback, State
from lpfs.train.checkpoint import Resumable
from lpfs.train.config import Training
from lpfs.train.distributed.group import current_group
from lpfs.train.evaluate import Batches, Metrics, device_of
from lpfs.train.fit import Trained, fit, monitored_value
from lpfs.train.fleet import Fleet, FleetStream, stack_key
from lpfs.train.step import OPTIMIZERS

ROUNDS_FILE = "fleet.json"
MEMORY_FRACTION = {"cuda": 0.8, "cpu": 0.5}  # of the free memory that a round may use
STATES = {"adagrad": 1, "rowwise-adagrad": 1, "adam": 2, "sgd": 0}  # tensors of an optimizer per parameter
ACTIVATION_COPIES = 8  # of every activation: the value, its gradient, workspaces
MAX_FIELDS = 65_535  # fields of one table on a GPU: the size of a grid of blocks


class ReplicaSelection(Callback):
    """Keeps the best or the last parameters of every replica, and stops each replica on its own.

    A replica that is stopped is still computed, but its parameters at that step are restored at the end. Training
    ends when all replicas are stopped. The rules are those of ``fit`` with the settings ``keep``, ``monitor``,
    ``min_delta`` and ``patience``.
    """

    def __init__(self, fleet: Fleet, config: Training) -> None:
        self.fleet, self.config, count = fleet, config, fleet.replicas
        self.metrics: list[Metrics | None] = [None] * count
        self.best: list[Metrics | None] = [None] * count
        self.best_steps: list[int | None] = [None] * count
        self.waiting = [0] * count
        self.stopped: list[int | None] = [None] * count  # step of the stop
        self.kept: list[dict[str, Tensor] | None] = [None] * count

    def on_evaluate(self, state: State) -> None:
        assert state.metrics is not None
        config, patience = self.config, self.config.patience
        for replica, metrics in enumerate(self.fleet.split_metrics(state.metrics)):
            if self.stopped[replica] is not None:
                continue
            best, self.metrics[replica] = self.best[replica], metrics
            if best is None or monitored_value(config, metrics) > monitored_value(config, best) + config.min_delta:
                self.best[replica], self.best_steps[replica], self.waiting[replica] = metrics, state.step, 0
                if config.keep == "best":
                    self._keep(replica)
            else:
                self.waiting[replica] += 1
            if patience is not None and self.waiting[replica] >= patience:
                self.stopped[replica] = state.step
                if config.keep == "last":
                    self._keep(replica)
        if all(step is not None for step in self.stopped):
            state.stop = "all replicas are stopped"

    def _keep(self, replica: int) -> None:
        self.kept[replica] = {name: weight.clone() for name, weight in self.fleet.replica_state(replica).items()}

    def on_end(self, state: State) -> None:
        for replica, kept in enumerate(self.kept):
            if kept is not None:
                self.fleet.load_replica(replica, kept)

    def result(self, replica: int, trained: Trained) -> Trained:
        """Return the result of one replica from that of the fleet."""
        stop = self.stopped[replica]
        reason = "" if stop is None else f"no better {self.config.monitor} in {self.waiting[replica]} evaluations"
        steps = trained.steps if stop is None else stop
        rows = trained.rows * steps // max(1, trained.steps)
        metrics, best = self.metrics[replica], self.best[replica]
        return Trained(steps, rows, metrics, best, self.best_steps[replica], reason, trained.resumed)

    def state_dict(self) -> dict[str, Any]:
        def to_json(values: Iterable[Metrics | None]) -> list[Any]:
            return [None if metrics is None else metrics.to_json() for metrics in values]

        counters = {"best_steps": self.best_steps, "waiting": self.waiting, "stopped": self.stopped}
        return {"metrics": to_json(self.metrics), "best": to_json(self.best), "kept": self.kept, **counters}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        for name in ("metrics", "best"):
            setattr(self, name, [None if entry is None else Metrics.from_json(entry) for entry in values[name]])
        for name in ("best_steps", "waiting", "stopped"):
            setattr(self, name, list(values[name]))
        device = device_of(self.fleet)
        self.kept = [
            None if kept is None else {name: weight.to(device) for name, weight in kept.items()}
            for kept in values["kept"]
        ]


def fit_fleet(
    models: Sequence[nn.Module],
    streams: Batches | Sequence[Batches],
    *,
    schema: Schema | None = None,
    sources: Sequence[int] | None = None,
    rates: Sequence[float | None] | None = None,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    valid: Batches | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    device: torch.device | str | None = None,
    memory: int | None = None,
    callbacks: Sequence[Callback] = (),
    config: Training | None = None,
    **settings: Any,
) -> list[Trained]:
    """Train many models in place, each as ``fit`` would train it; the results are equal up to rounding.

    The models must be replicas of one class; their fields may differ. The directory is that of a single run: a killed
    run resumes bit for bit. If the replicas do not fit into memory together, they are trained in several rounds.
    A loss that is not finite stops all replicas of the round.

    Args:
        models: the replicas, initialized; at the end they have the trained parameters.
        streams: the batches for all replicas, or a list of streams with equally many rows in every batch.
        schema: the fields of the batches; default: that of the streams.
        sources: for several streams, the index of the stream of each replica; default: one stream each.
        rates: learning rate of each replica; default: that of the settings.
        optimizers: optimizer of each model, with one group of parameters, instead of new ones with ``rates``. Training
            starts with their states and learning rates; at the end they have the last states.
        valid: batches for the evaluations of all replicas.
        folder: directory for the log and the checkpoints; without it nothing is written.
        resume: continue from the newest checkpoint in ``folder``; start a new run if there is none.
        device: device to train on; default: that of the models.
        memory: bytes that a round may use; default: a fraction of the free memory.
        callbacks: hooks into the loop of every round; ``state.model`` is the :class:`Fleet`.
        config: the settings, see :class:`Training`; ``clip`` is not supported.
        settings: single settings, which override those of ``config``; an unknown one is an error.
    """
    config = replace(config or Training(), **check_keys(Training, settings))
    several = isinstance(streams, list | tuple) and bool(streams) and not isinstance(streams[0], Batch)
    all_streams: list[Any] = list(streams) if several else [streams]
    if sources is None:
        sources = [0] * len(models) if len(all_streams) == 1 else list(range(len(models)))
    if optimizers is not None:
        if any(type(optimizer) is not OPTIMIZERS[config.optimizer] for optimizer in optimizers):
            raise InputError(f"the optimizers of a fleet must be those of the settings, {config.optimizer!r}")
        if any(len(optimizer.param_groups) != 1 for optimizer in optimizers):
            raise InputError("the optimizers of a fleet must have one group of parameters each")
        rates = [float(optimizer.param_groups[0]["lr"]) for optimizer in optimizers]
    if len(sources) != len(models) or (rates is not None and len(rates) != len(models)):
        raise InputError(f"sources, rates and optimizers must have one entry for each of the {len(models)} models")
    if set(sources) != set(range(len(all_streams))):
        raise InputError(f"sources must name each of the {len(all_streams)} streams, found {sorted(set(sources))}")
    if config.clip is not None:
        raise InputError("a fleet does not support clip, which needs the norm of one replica; leave it out")
    if valid is None and (config.patience is not None or config.keep == "best"):
        raise InputError("early stopping and keep='best' need evaluations; give valid=")
    if current_group().is_distributed:
        raise InputError("a fleet is trained by a single process; leave out torchrun")
    schema = schema or getattr(all_streams[0], "schema", None)
    if schema is None:
        raise InputError("the streams have no schema; give schema=, the fields of their batches")
    target = device_of(models[0]) if device is None else torch.device(device)
    batch_size = getattr(all_streams[0], "batch_size", None) or 1
    rounds = plan_rounds(models, target, config, batch_size, memory)
    if folder is not None:
        rounds = _saved_rounds(Path(folder) / ROUNDS_FILE, rounds, len(models), resume=resume)
    starts = [stream.state_dict() if isinstance(stream, Resumable) else None for stream in all_streams]
    results: dict[int, Trained] = {}
    for number, members in enumerate(rounds):
        used = sorted({sources[replica] for replica in members})
        for source in used:  # every round reads the same batches
            stream, start = all_streams[source], starts[source]
            if number and isinstance(stream, Resumable) and start is not None:
                stream.load_state_dict(start)
        fleet = Fleet(
            [models[replica] for replica in members],
            schema,
            sources=[used.index(sources[replica]) for replica in members],
            rates=None if rates is None else [rates[replica] for replica in members],
        ).to(target)
        fleet.numbers = list(members)
        selection, optimizer = ReplicaSelection(fleet, config), fleet.make_optimizer(config)
        singles = [] if optimizers is None else [(models[replica], optimizers[replica]) for replica in members]
        for number_in_round, single in enumerate(singles):
            fleet.load_optimizer(optimizer, number_in_round, *single)
        trained = fit(
            fleet,
            FleetStream(fleet, [all_streams[source] for source in used]),
            optimizer,
            valid=None if valid is None else FleetStream(fleet, [valid]),
            folder=None if folder is None else Path(folder) / f"round-{number:03d}",
            resume=resume,
            callbacks=[selection, *callbacks],
            config=_fleet_config(config, fleet),
        )
        for number_in_round, replica in enumerate(members):
            models[replica].load_state_dict(fleet.replica_state(number_in_round))
            results[replica] = selection.result(number_in_round, trained)
        for number_in_round, single in enumerate(singles):
            fleet.copy_optimizer(optimizer, number_in_round, *single)
    return [results[replica] for replica in range(len(models))]


def _fleet_config(config: Training, fleet: Fleet) -> Training:
    """Return the settings of the loop: what differs between replicas is done by :class:`ReplicaSelection`."""
    weights = None if config.task_weights is None else config.task_weights * fleet.replicas
    return replace(config, lr=None, keep="last", patience=None, task_weights=weights)


def _saved_rounds(path: Path, rounds: list[list[int]], count: int, *, resume: bool) -> list[list[int]]:
    """Return the rounds with which a run was started, or write those of a new run."""
    if resume and path.exists():
        saved: list[list[int]] = read_json(path)["rounds"]
        if sorted(replica for members in saved for replica in members) != list(range(count)):
            raise InputError(f"{path.parent} contains a run of other replicas; use another directory")
        return saved
    if path.exists():
        raise InputError(f"{path.parent} contains a run; use resume=True to continue it, or another directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"rounds": rounds})
    return rounds


def plan_rounds(
    models: Sequence[Any], device: torch.device, config: Training, batch_size: int, memory: int | None = None
) -> list[list[int]]:
    """Return which replicas are trained together, so that each round fits into memory.

    Replicas of the same shape are in the same round where possible.
    """
    if memory is None:
        memory = free_memory(device)
    keys = list(dict.fromkeys(stack_key(model) for model in models))
    order = sorted(range(len(models)), key=lambda replica: keys.index(stack_key(models[replica])))
    rounds: list[list[int]] = []
    used = fields = 0
    for replica in order:
        size = replica_bytes(models[replica], config, batch_size)
        table = models[replica].inputs.table
        count = 0 if table is None else len(table.sizes)
        if memory is not None and size > memory:
            raise DeviceMemoryError(
                f"one replica needs about {size / 2**20:,.0f} MiB, {memory / 2**20:,.0f} MiB are available; use a "
                "smaller model or batch size"
            )
        if not rounds or (memory is not None and used + size > memory) or fields + count > MAX_FIELDS:
            rounds.append([])
            used = fields = 0
        rounds[-1].append(replica)
        used, fields = used + size, fields + count
    return rounds


def replica_bytes(model: Any, config: Training, batch_size: int) -> int:
    """Return an estimate of the memory of one replica: parameters, gradients, optimizer, kept state, activations."""
    parameters = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    copies = 2 + STATES[config.optimizer] + (config.keep == "best" or config.patience is not None)
    widths = [module.out_features for module in model.modules() if isinstance(module, nn.Linear)]
    width = sum(widths) + len(model.inputs.slots) * model.inputs.width
    total: int = copies * parameters + ACTIVATION_COPIES * 4 * batch_size * width
    return total


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that a round may use on a device; None if they are unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * MEMORY_FRACTION["cuda"])
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(int(line.split()[1]) * 1024 * MEMORY_FRACTION["cpu"])
    return None
