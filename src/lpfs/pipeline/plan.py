"""RunPlan: everything that is decided before training, decided once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lpfs._console import Console
from lpfs._validation import check_int, check_name
from lpfs.data.dataset import Dataset
from lpfs.data.fields import load_toml
from lpfs.data.stream import Stream
from lpfs.embeddings._backends import supports_cuda_graph
from lpfs.errors import DataError, FieldError, InputError
from lpfs.methods.base import Method
from lpfs.methods.registry import make_method
from lpfs.methods.target import DEFAULT_AUC_LOSS, Costs, SelectionTarget, complexity_costs
from lpfs.models import check_model_options, make_model
from lpfs.models.base import Model
from lpfs.pipeline.data import check_dataset_fits, settings_for_model
from lpfs.pipeline.settings import TARGET_FIELDS, Settings
from lpfs.pipeline.splits import DataSplits, StagePlan, auc_standard_error, plan_stages, split_dataset
from lpfs.schema import Field, Schema
from lpfs.serialization import SavedModel, find_model_dir, load_saved
from lpfs.train.config import Training
from lpfs.train.distributed.group import current_group
from lpfs.train.fleet import supports_fleet
from lpfs.train.loggers import need_mlflow, need_tensorboard
from lpfs.train.step import make_optimizer
from lpfs.train.threads import choose_threads, describe_threads

EVAL_BATCH_SIZE = 4096  # rows per evaluation batch
LARGE_TABLES = 500_000  # ids; above it models are freed early, short stages have no last checkpoint, no fleet is made
FLEET_BATCH = 256  # largest batch at which models are trained together faster than one by one on a CPU
CHECKPOINT_EVERY = 500  # steps between two moments at which a checkpoint is written if the last one is old enough
EVALUATIONS = 20  # evaluations of a training that selects its best state
AUC_LOSS_PER_SE = 0.25  # default allowed AUC loss, in standard errors of the validation AUC
FIELD_OPTIONS = ("silent", "parts")  # options of models that name fields
EXAMPLE_SCHEMA = Schema(
    (Field("user", cardinality=3, group="user"), Field("item", cardinality=3, group="item"), Field("number", "numeric"))
)


@dataclass(frozen=True)
class RunPlan:
    """One run: settings, data, steps and target."""

    settings: Settings  # checked, with absolute paths
    dataset: Dataset  # all rows
    schema: Schema  # fields to select from
    splits: DataSplits  # rows of every stage
    steps: StagePlan  # number of steps and batch size of every stage
    target: SelectionTarget  # what to search for
    device: torch.device
    run_dir: Path
    resume: bool  # continue stages that were interrupted
    console: Console
    saved_model: SavedModel | None = None  # trained model that the search starts from, instead of pretraining
    # where all searches of a seed find the networks that judge exchanges of fields; None: each search has its own
    judges_dir: Path | None = None

    @property
    def method(self) -> Method:
        """The search method with its options."""
        return make_method(self.settings.method, self.settings.options)

    def for_search(self, run_dir: Path, seed: int, *, resume: bool | None = None, **changes: Any) -> RunPlan:
        """Return the plan of another search on the same rows.

        ``changes`` are settings: method, options, and a new target such as keep; None leaves one as it is.
        """
        changes = {name: value for name, value in changes.items() if value is not None}
        settings, target = self.settings.updated(seed=seed, **changes), self.target
        if changes.keys() & set(TARGET_FIELDS):
            new = {name: getattr(settings, name) for name in TARGET_FIELDS}
            target = SelectionTarget(**new, must_keep=target.must_keep, costs=target.costs)
        resume = self.resume if resume is None else resume
        return replace(self, settings=settings, target=target, run_dir=run_dir, resume=resume)

    def stream(self, rows: Dataset, fields: Sequence[str], *, train: bool, seed: int = 0) -> Stream:
        """Return batches of some rows; training rows are shuffled if they are read more than once."""
        size = self.steps.batch_size if train else EVAL_BATCH_SIZE
        return rows.stream(size, shuffle=train and self.steps.shuffle, seed=seed, fields=fields, device=self.device)

    @property
    def search_lr_factor(self) -> float:
        """Factor on the learning rate during a search: that of the steps, and the end of a rise."""
        return self.steps.lr_factor * (Training().rise if self.settings.lr_schedule == "rise" else 1.0)

    def training(
        self, steps: int, seed: int, *, keep_best: bool, record_auc: bool = False, keep_last_optimizer: bool = False
    ) -> Training:
        """Return the settings of the training loop, without a CUDA graph.

        Args:
            steps, seed: of the training.
            keep_best: keep the state with the best validation AUC if rows are read more than once.
            record_auc: keep it always, and count the initial state as well.
            keep_last_optimizer: keep the last state of the optimizer with the best state of the model. The
                accumulated squares of Adagrad then make smaller steps, and a search overfits less.
        """
        evaluate = record_auc or (keep_best and self.steps.shuffle)
        return Training(
            optimizer=self.settings.optimizer,  # type: ignore[arg-type]
            schedule=self.settings.lr_schedule if keep_best else "constant",  # not in a search
            steps=steps,
            seed=seed,
            precision=self.settings.precision,  # type: ignore[arg-type]
            keep="best" if evaluate else "last",
            evaluate_every=max(1, steps // EVALUATIONS) if evaluate else None,
            evaluate_first=record_auc,
            keep_optimizer="last" if keep_last_optimizer else "best",
            checkpoint_every=min(steps, CHECKPOINT_EVERY),
            checkpoint_seconds=None,
            check_every=1 if self.device.type == "cpu" else 50,
            tensorboard=self.settings.tensorboard,
            mlflow=self.settings.mlflow,
            quiet=self.console.quiet,
        )

    @property
    def use_cuda_graph(self) -> bool:
        """Whether steps are captured as CUDA graphs; by default on a GPU in a single process."""
        if self.settings.graph is not None:
            return self.settings.graph
        is_single = not current_group().is_distributed
        return self.device.type == "cuda" and is_single and supports_cuda_graph(self.device)

    def fleet_obstacle(self) -> str | None:
        """Return why models of this run cannot be trained together; None if they can."""
        if current_group().is_distributed:
            return "several processes share every training, so models are trained one by one"
        if self.settings.lr_schedule != "constant":
            return "models with a schedule of the learning rate are trained one by one"
        model = self.meta_model()
        if not supports_fleet(model):
            return f"models of {type(model).__name__} cannot be trained together; one by one"
        return None

    def uses_fleet(self, message: Callable[[str], None]) -> bool:
        """Return whether models are trained together; ``message`` is called with the reason if they cannot be."""
        obstacle, fleet = self.fleet_obstacle(), self.settings.fleet
        if fleet and obstacle is not None:
            message(obstacle)
        if fleet is None:
            is_faster = self.device.type == "cuda" or self.steps.batch_size <= FLEET_BATCH
            fleet = is_faster and not self.has_large_tables
        return fleet and obstacle is None

    def searches_as_fleet(self, message: Callable[[str], None]) -> bool:
        """Return whether pretraining and gate searches of several seeds and K are fleets, too: on request only.

        They have not been measured on a GPU; on a CPU the gain is small.
        """
        return bool(self.settings.fleet) and self.uses_fleet(message)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a new optimizer of a model."""
        training = Training(optimizer=self.settings.optimizer, lr=self.settings.lr)  # type: ignore[arg-type]
        return make_optimizer(training, model.parameters())

    def meta_model(self) -> Model:
        """Return the model of all fields on the meta device, which allocates nothing."""
        with torch.device("meta"):
            return make_model(self.settings.backbone, self.schema, **self.settings.model_options)

    @property
    def has_large_tables(self) -> bool:
        """Whether a copy of the tables takes much memory, and a checkpoint of them much of the disk."""
        return sum(field.cardinality for field in self.schema) > LARGE_TABLES

    def free_memory(self) -> None:
        """Free the models of earlier stages at once if their tables are large; with gates they refer to themselves."""
        if self.has_large_tables:
            gc.collect()

    def check(self, *, with_curve: bool = False) -> None:
        """Check the search and the labels: everything that can fail before training.

        ``with_curve``: a number of fields that no target fixes comes from the curve, so that any method can search.
        """
        model, method, plan = self.meta_model(), self.method, self
        if with_curve and self.settings.finds_count:
            plan = self.for_search(self.run_dir, self.settings.seed, keep=len(model.names))
        method.check(plan.target.for_model(model), model.names, self.steps.search)
        method.check_model(model)
        self.splits.check_labels(self.settings.force)


class StageTimer:
    """Prints the heading of each stage, calls ``before_stage`` and measures the seconds of the stage."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}
        self.before_stage: Callable[[], None] = lambda: None

    @contextmanager
    def stage(self, name: str, heading: str) -> Iterator[None]:
        """Print a heading; add the seconds of the block to those of the stage."""
        self.console.heading(heading)
        self.before_stage()
        with self.measure(name):
            yield

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to those of a stage."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def check_settings(settings: Settings) -> tuple[Settings, SavedModel | None]:
    """Check everything that does not need the data; return absolute settings and the model they start from."""
    saved = None if settings.checkpoint is None else load_saved(find_model_dir(settings.checkpoint))
    if saved is not None:
        settings = settings_for_model(settings, saved)
    settings = settings.with_absolute_paths()
    make_method(settings.method, settings.options)
    check_backbone(settings)
    check_target(settings)
    device = resolve_device(settings.device)
    if device.type == "cpu":
        choose_threads()
    if settings.graph and device.type != "cuda":
        raise InputError("graph=True captures the steps of a GPU, but this run is on the CPU; leave graph out")
    if settings.graph and current_group().is_distributed:
        raise InputError("graph=True works in a single process, but several were started; leave graph out")
    if settings.tensorboard:
        need_tensorboard()
    if settings.mlflow:
        need_mlflow()
    Training(optimizer=settings.optimizer, lr=settings.lr, precision=settings.precision)  # type: ignore[arg-type]
    return settings, saved


def check_backbone(settings: Settings) -> None:
    """Check the model and those of its options that do not name fields, with a model of other fields."""
    check_model_options(settings.backbone, settings.model_options)
    options = {name: value for name, value in settings.model_options.items() if name not in FIELD_OPTIONS}
    with torch.device("meta"):
        make_model(settings.backbone, EXAMPLE_SCHEMA, **options)


def check_target(settings: Settings) -> None:
    """Check the target and the file of costs, without the fields that they name."""
    if settings.costs not in (None, "complexity"):
        load_toml(Path(str(settings.costs)))
    values = {name: getattr(settings, name) for name in TARGET_FIELDS}
    SelectionTarget(**values, costs=None if settings.costs is None else Costs({}))
    forced = len(set(settings.must_keep))
    if settings.keep is not None and check_int("keep", settings.keep, 1) < forced:
        raise InputError(f"keep={settings.keep}, but {forced} fields must be kept; increase keep")


def build_plan(
    settings: Settings,
    dataset: Dataset,
    run_dir: Path,
    console: Console,
    *,
    saved: SavedModel | None = None,
    resume: bool = False,
) -> RunPlan:
    """Return the rows of every stage, how long each takes, and the target; ``RunPlan.check`` checks the search."""
    if dataset.settings.get("unlabelled"):
        raise DataError(f"{dataset.path} was prepared from rows without a label; nothing can be trained on it")
    for name in settings.must_drop:
        check_name(name, dataset.schema.names, "field", "must_drop", FieldError)
    if saved is not None:
        check_dataset_fits(saved, dataset)
    inputs = dataset.schema.names if saved is None else saved.model.reads.names
    names = [name for name in dataset.schema.names if name in inputs and name not in settings.must_drop]
    if not names:
        raise InputError("must_drop names every field; leave at least one field to select from")
    schema, splits = dataset.schema.subset(names), split_dataset(dataset)
    steps = plan_stages(splits, settings.batch_size, settings.pretrain_steps, settings.search_steps)
    target, device = make_target(settings, schema, splits.valid), resolve_device(settings.device)
    if device.type == "cpu":
        console.message(f"training on {describe_threads()}")
    return RunPlan(settings, dataset, schema, splits, steps, target, device, run_dir, resume, console, saved)


def make_target(settings: Settings, schema: Schema, valid: Dataset) -> SelectionTarget:
    """Return the target of a run; without one, an AUC loss that the validation rows can hardly measure."""
    values = {name: getattr(settings, name) for name in TARGET_FIELDS}
    if all(value is None for value in values.values()):
        values["max_auc_loss"] = max(DEFAULT_AUC_LOSS, round(auc_standard_error(valid) * AUC_LOSS_PER_SE, 4))
    return SelectionTarget(**values, must_keep=settings.must_keep, costs=load_costs(settings, schema))


def load_costs(settings: Settings, schema: Schema) -> Costs | None:
    """Return the costs that the settings name."""
    if settings.costs is None:
        return None
    if settings.costs == "complexity":
        dim = {name: value for name, value in settings.model_options.items() if name == "dim"}
        return complexity_costs(schema, **dim)
    return Costs.load(settings.costs, schema)


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; ``auto`` is the first GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:1") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"device {name!r} does not exist: torch finds {count} GPUs; run lpfs doctor for details")
    return device
