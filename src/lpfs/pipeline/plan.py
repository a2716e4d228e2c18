"""TODO"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path

import torch
from torch import nn

from lpfs.data.dataset import Dataset
from lpfs.data.stream import Stream
from lpfs.embeddings._torch import supports_cuda_graph
from lpfs.errors import DataError, InputError
from lpfs.methods.costs import Costs, complexity
from lpfs.methods.known import known
from lpfs.methods.registry import check_method, check_search
from lpfs.methods.wish import DEFAULT_LOSS, Wish
from lpfs.models import check_model_options, make_model
from lpfs.pipeline.data import (
    settings_for_model,
)
from lpfs.pipeline.settings import TARGET_FIELDS, Settings
from lpfs.pipeline.splits import (
    DataSplits,
    StagePlan,
    auc_standard_error,
    clicks,
    plan_stages,
    split_dataset,
)
from lpfs.pipeline.tell import Console
from lpfs.schema import Schema
from lpfs.serialization import find_model_dir, load
from lpfs.train.config import Training
from lpfs.train.distributed.group import current_group
from lpfs.train.loggers import need_mlflow, need_tensorboard
from lpfs.train.step import make_optimizer

EVAL_BATCH_SIZE = 4096  # rows evaluated at a time
EVALUATIONS = 20  # of a training that goes through its rows several times, and of one that is watched


@dataclass
class RunPlan:
    """One run: its data, its settings, and what it has done so far."""

    settings: Settings
    schema: Schema
    splits: DataSplits
    steps: StagePlan
    target: Wish
    device: torch.device
    run_dir: Path
    resume: bool
    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[None]:
        """Say what begins and note how long it takes."""
        self.console.heading(text)
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def stream(self, part: Dataset, fields: Sequence[str], *, train: bool, seed: int = 0) -> Stream:
        """Return batches of some rows: those to train on are shuffled where they are gone through again."""
        size = self.steps.batch_size if train else EVAL_BATCH_SIZE
        shuffle = train and self.steps.shuffle
        return part.stream(size, shuffle=shuffle, seed=seed, fields=fields, device=self.device)

    def training(
        self, steps: int, seed: int, *, choose: bool, watch: bool = False, calm: bool = False, graph: bool = False
    ) -> Training:
        """Return the settings of the loop.

        ``choose`` keeps the best state where rows are gone through several times; ``watch`` keeps it in any case,
        and the state that training began with counts too. ``calm`` leaves the optimizer as it is in the end, not
        as it was at the best state: Adagrad takes smaller steps then, and a search learns less by heart.
        """
        looks = watch or (choose and self.steps.shuffle)
        return Training(
            optimizer=self.settings.optimizer,  # type: ignore[arg-type]
            steps=steps,
            seed=seed,
            precision=self.settings.precision,  # type: ignore[arg-type]
            keep="best" if looks else "last",
            evaluate_every=max(1, steps // EVALUATIONS) if looks else None,
            evaluate_first=watch,
            keep_optimizer="last" if calm else "best",
            checkpoint_every=max(1, min(steps, max(500, steps // 10))),
            graph=graph,
            check_every=1 if self.device.type == "cpu" else 50,
            tensorboard=self.settings.tensorboard,
            mlflow=self.settings.mlflow,
            quiet=self.console.quiet,
        )

    @property
    def use_cuda_graph(self) -> bool:
        """Whether steps are captured as CUDA graphs: on a GPU in one process, if the settings say nothing."""
        if self.settings.graph is not None:
            return self.settings.graph
        return (
            self.device.type == "cuda" and not current_group().is_distributed and supports_cuda_graph(self.device)
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a fresh optimizer."""
        chosen = Training(optimizer=self.settings.optimizer, lr=self.settings.lr)  # type: ignore[arg-type]
        return make_optimizer(chosen, model.parameters())


AUC_LOSS_PER_SE = 0.25  # of the standard error of an AUC: a loss that is hardly told


def check_settings(wanted: Settings) -> Settings:
    """Return the settings with absolute paths, after a check of all that can be checked without the data."""
    wanted = settings_for_model(wanted).with_absolute_paths()
    check_method(wanted.method, wanted.options)
    check_model_options(wanted.backbone, wanted.model_options)
    if resolve_device(wanted.device).type != "cuda" and wanted.graph:
        raise InputError("graph captures the steps of a GPU, and this run is on the CPU; leave it out")
    if wanted.graph and current_group().is_distributed:
        raise InputError("graph captures the steps of one process, and there are several; leave it out")
    if wanted.tensorboard:
        need_tensorboard()
    if wanted.mlflow:
        need_mlflow()
    Training(optimizer=wanted.optimizer, lr=wanted.lr, precision=wanted.precision)  # type: ignore[arg-type]
    return wanted


def plan_run(wanted: Settings, dataset: Dataset, folder: Path, resume: bool, tell: Console) -> RunPlan:
    """Check everything that can be checked before anything is trained."""
    work = build_plan(wanted, dataset, folder, resume, tell)
    check_search_start(work)
    check_label_classes(work.splits)
    return work


def build_plan(wanted: Settings, dataset: Dataset, folder: Path, resume: bool, tell: Console) -> RunPlan:
    """Return the rows of every stage, how long each takes, and what is wished for."""
    schema = dataset.schema
    if dataset.settings.get("unlabelled"):
        raise DataError(f"{dataset.path} was prepared from rows without a label: nothing can be learned from it")
    for name in wanted.must_drop:
        known(name, schema.names, "must_drop")
    read = schema.names if wanted.checkpoint is None else load(find_model_dir(wanted.checkpoint)).reads.names
    left = [name for name in schema.names if name in read and name not in set(wanted.must_drop)]
    if not left:
        raise InputError("every field must be dropped: nothing is left to select from")
    schema = schema.subset(left)
    parts = split_dataset(dataset)
    ways = {name: getattr(wanted, name) for name in TARGET_FIELDS}
    if all(each is None for each in ways.values()):
        ways["max_auc_loss"] = default_auc_loss(parts.valid)
    wish = Wish(**ways, must_keep=wanted.must_keep, costs=load_costs(wanted, schema))
    steps = plan_stages(
        parts,
        batch_size=wanted.batch_size,
        pretrain_steps=wanted.pretrain_steps,
        search_steps=wanted.search_steps,
    )
    return RunPlan(wanted, schema, parts, steps, wish, resolve_device(wanted.device), folder, resume, tell)


def check_search_start(work: RunPlan) -> None:
    """Refuse a search that could not be begun."""
    wanted, wish = work.settings, work.target
    with torch.device("meta"):  # nothing is allocated for it
        model = make_model(wanted.backbone, work.schema, **wanted.model_options)
    fields = model.fields_of_parts()
    costs = None if wish.costs is None else wish.costs.of_parts({name: fields[name] for name in model.names})
    wish = changed(wish, costs=costs)
    check_search(wanted.method, wanted.options, wish, model.names, work.steps.search, model)


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; ``auto`` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"there is no device {name!r}; auto, cpu, cuda and cuda:1 are ones") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InputError(f"device {name!r}: torch sees {count} GPUs here; lpfs doctor tells more")
    return device


def default_auc_loss(valid: Dataset) -> float:
    """Return the AUC loss that is allowed where nothing is asked for: one that these rows could hardly tell."""
    return max(DEFAULT_LOSS, round(auc_standard_error(valid) * AUC_LOSS_PER_SE, 4))


def check_label_classes(parts: DataSplits) -> None:
    """Refuse rows of one class only, where they have to judge or to choose."""
    for name in ("early", "search", "valid", "test"):
        part = getattr(parts, name)
        positive, _ = clicks(part)
        if positive in (0, part.rows):
            raise InputError(
                f"the {name} rows ({part.rows:,}) hold one class only ({positive:,} positive): nothing can be "
                "learned or judged there. Give more rows, another time column, or a split"
            )


def load_costs(wanted: Settings, schema: Schema) -> Costs | None:
    """Return the costs that the settings name."""
    if wanted.costs is None:
        return None
    if wanted.costs == "complexity":
        return complexity(schema, **{name: value for name, value in wanted.model_options.items() if name == "dim"})
    return Costs.load(wanted.costs, schema)
