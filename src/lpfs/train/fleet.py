"""Fleet: replicas of a model that are trained together, as one model with stacked parameters.

One lookup serves the tables of all replicas, one batched product their dense layers, and one optimizer step updates
everything, so that a small batch costs the overhead of one step instead of one per replica. See ``fit_fleet``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vmap
from torch.nn.functional import linear

from lpfs.data.batch import Batch
from lpfs.embeddings.row_grad import RowParameter
from lpfs.embeddings.table import Table
from lpfs.errors import InputError
from lpfs.schema import Schema
from lpfs.train.checkpoint import Resumable
from lpfs.train.config import Training
from lpfs.train.dense import gpu_kernels
from lpfs.train.evaluate import Batches, Metrics, device_of
from lpfs.train.step import OPTIMIZERS


class _Embeddings(nn.Module):
    """Takes the place of the table in the body of a stack: its input is already looked up, with gates."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().new_empty(0), persistent=False)  # of the dtype for gates

    def forward(self, embeddings: Tensor, gate: Tensor | None) -> Tensor:
        return embeddings

    def bags(self, bags: Sequence[tuple[Tensor, Tensor]], gate: Tensor | None, *, padded: bool) -> Tensor:
        """Return the embeddings (B, F, D) of all bags, which have these in place of their values."""
        return torch.stack([embeddings for embeddings, _ in bags], 1)


class BatchedLinear(torch.autograd.Function):
    """Outputs (R, B, O) of R Linear layers, for inputs (R, B, I), weights (R, O, I) and biases (R, O), then ReLU.

    The gradient of the weights has their memory layout; that of ``torch.bmm`` with a transposed weight is copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        kernels = gpu_kernels(x)
        if bias is None or kernels is not None:
            out = torch.bmm(x, weight.mT)
        else:
            out = torch.baddbmm(bias[:, None], x, weight.mT)
        if bias is not None and kernels is not None:
            kernels.add_bias(out, bias, relu=relu)
        elif relu:
            out.relu_()
        ctx.save_for_backward(x, weight, out if relu else None)
        ctx.has_bias = bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, out = ctx.saved_tensors
        kernels, bias_grad, x_grad = gpu_kernels(grad), None, None
        if kernels is not None and ctx.has_bias:
            grad, bias_grad = kernels.relu_grad(grad, out)
        elif out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        if ctx.needs_input_grad[2] and bias_grad is None:
            bias_grad = grad.sum(1)
        if ctx.needs_input_grad[0]:  # in the layout of x, which is that of a lookup in the first layer
            x_grad = torch.bmm(grad, weight, out=torch.empty_like(x))
        weight_grad = torch.bmm(grad.mT, x) if ctx.needs_input_grad[1] else None  # not for the gradient of gates alone
        return x_grad, weight_grad, bias_grad, None


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool = False) -> Tensor:
    """Apply :class:`BatchedLinear`, with the dtype of autocast where it is enabled."""
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    out: Tensor = BatchedLinear.apply(x, weight, bias, relu)  # type: ignore[no-untyped-call]
    return out


class _ReplicaLinearFunction(torch.autograd.Function):
    """A Linear layer whose ``vmap`` is :class:`BatchedLinear`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: only the batched function has a gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, int]:
        """Return the outputs of all replicas, with the replicas in dim 0."""
        x = x[None].expand(info.batch_size, -1, -1) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        return batched_linear(x, weight, bias), 0


class ReplicaLinear(nn.Linear):
    """The Linear layer of a stack; ``forward`` is that of one replica, under ``vmap``."""

    def all_replicas(self, x: Tensor, *, relu: bool = False) -> Tensor:
        """Return (R, B, O) for inputs (R, B, I), after ReLU if requested."""
        return batched_linear(x, self.weight, self.bias, relu)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _ReplicaLinearFunction.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


class _Body(nn.Module):
    """A model without its table; the inputs are tensors by name, for ``vmap``.

    If the model ends with a plain Sequential, ``layers``, the result is its input instead of the logits: it is faster
    for all replicas without ``vmap``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        table, gate = model.inputs.table, model.inputs.gate
        model.inputs.table = model.inputs.gate = None  # neither is copied
        try:
            self.model = copy.deepcopy(model)
        finally:
            model.inputs.table, model.inputs.gate = table, gate
        if table is not None:
            self.model.inputs.table = _Embeddings(table.weight)
        for module in self.model.modules():
            if type(module) is nn.Linear:
                module.__class__ = ReplicaLinear  # the same parameters with another forward
        path = model.dense_path()
        self.layers = () if path is None else tuple(self.model.get_submodule(path))

    def forward(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return logits (B, T), or the input (B, N, D) of the layers."""
        inputs, gate = self.model.inputs, values.get("gate")
        embeddings = values["bags"].unbind(1) if inputs.bags else ()
        bags = {name: (embedding, embedding) for name, embedding in zip(inputs.bags, embeddings, strict=True)}
        inputs.gate = None if gate is None else lambda: gate
        dense = values["dense"]
        batch = Batch(values.get("ids", dense), dense, dense, values.get("missing"), bags)
        out: Tensor = inputs(batch) if self.layers else self.model.outputs(batch)
        return out

    def all_replicas(self, values: dict[str, Tensor]) -> Tensor:
        """Return the logits (B, R, T) of the replicas: parameters are stacked in dim 0, all values in dim 1."""
        inputs = self.model.inputs
        if self.layers and inputs.ids == inputs.parts and inputs.filled is None:
            out = values["ids"]
        else:
            call = vmap(partial(functional_call, self), in_dims=(0, (1,)), out_dims=1)
            out = call(dict(self.named_parameters()), (values,))
        if not self.layers:
            return out
        x = out.flatten(2).transpose(0, 1)  # (R, B, N·D)
        for layer, following in zip_longest(self.layers, self.layers[1:]):
            if isinstance(layer, ReplicaLinear):
                x = layer.all_replicas(x, relu=type(following) is nn.ReLU)  # in one function with the Linear layer
            elif type(layer) is not nn.ReLU:
                x = layer(x)
        return x.transpose(0, 1)


def supports_fleet(model: nn.Module) -> bool:
    """Return whether replicas of a model can be stacked; the model may be on the meta device.

    It must have all its tables in ``inputs``, as most models of ``lpfs.models``, and no operation that ``vmap`` does
    not support.
    """
    inputs: Any = getattr(model, "inputs", None)
    tables = [module for module in model.modules() if isinstance(module, Table)]
    if not hasattr(model, "dense_path") or not hasattr(inputs, "table") or inputs.id_columns is not None:
        return False
    if any(table is not inputs.table for table in tables):
        return False
    body = _Body(model)
    sizes = {"ids": (inputs.ids, inputs.width), "bags": (len(inputs.bags), inputs.width)}
    like = next(model.parameters())
    values = {name: like.new_zeros(2, 1, *size) for name, size in sizes.items() if size[0]}
    values["dense"] = like.new_zeros(2, 1, dense_width(model))
    stack_parameters(body, [model])
    try:
        with torch.no_grad():
            body.all_replicas(values)
    except RuntimeError:
        return False
    return True


def dense_width(model: Any) -> int:
    """Return the number of columns of numbers that a model reads."""
    return sum(field.dim for field in model.reads if field.kind == "numeric")


def stack_parameters(body: _Body, models: Sequence[nn.Module]) -> None:
    """Replace every parameter of the body by those of the models, stacked in dim 0."""
    for name, _ in list(body.model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        stacked = torch.stack([model.get_parameter(name).detach() for model in models])
        setattr(body.model.get_submodule(path), leaf, nn.Parameter(stacked))


class ReplicaStack(nn.Module):
    """Replicas of the same shape: one table for all of them, and dense parameters stacked in dim 0.

    ``gate`` is the hook for factors on the embeddings: it returns (R, N), one factor for each replica and each part
    in the order of ``inputs.names``, or None. Its gradient is that of gates in the single model. A constant mask of
    zeros and ones removes fields.

    Args:
        models: the replicas; the parameters are copied.
        schema: fields of the batches of one source.
        sources: source of the rows of each replica.
    """

    id_columns: Tensor
    dense_columns: Tensor

    reads_padded_bags = True  # see can_capture

    def __init__(self, models: Sequence[Any], schema: Schema, sources: Sequence[int]) -> None:
        super().__init__()
        inputs = models[0].inputs
        self.replicas, self.ids, self.bags = len(models), inputs.ids, len(inputs.bags)
        self.parts = len(inputs.names)
        self.gate: Callable[[], Tensor | None] | None = None
        self.table = stack_tables([model.inputs.table for model in models]) if inputs.table is not None else None
        self.body = _Body(models[0])
        stack_parameters(self.body, models)
        id_names = [field.name for field in schema if field.kind == "categorical"]
        dense_names = [field.name for field in schema if field.kind == "numeric" for _ in range(field.dim)]
        for name, names in (("id_columns", id_names), ("dense_columns", dense_names)):
            columns = [
                source * len(names) + position
                for model, source in zip(models, sources, strict=True)
                for position, field in enumerate(names)
                if field in model.reads.names
            ]
            self.register_buffer(name, torch.tensor(columns, dtype=torch.long), persistent=False)
        self.bag_keys = [
            bag_key(source, name) for model, source in zip(models, sources, strict=True) for name in model.inputs.bags
        ]

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits (B, R, T) for a batch with the columns of all sources."""
        gate = None if self.gate is None else self.gate()  # (R, N)
        values = {"dense": self._split(batch.dense.index_select(1, self.dense_columns))}
        if batch.missing is not None:
            values["missing"] = self._split(batch.missing.index_select(1, self.dense_columns))
        if gate is not None:
            values["gate"] = gate.t()
        if self.table is not None and self.ids:
            ids = batch.ids.index_select(1, self.id_columns)
            values["ids"] = self._split(self.table(ids, None if gate is None else gate[:, : self.ids].reshape(-1)))
        if self.table is not None and self.bags:
            factor = None if gate is None else gate[:, self.ids : self.ids + self.bags].reshape(-1)
            bags = [batch.bags[key] for key in self.bag_keys]
            values["bags"] = self._split(self.table.bags(bags, factor, padded=batch.padded))
        return self.body.all_replicas(values)

    def _split(self, columns: Tensor) -> Tensor:
        pieces: Tensor = columns.unflatten(1, (self.replicas, columns.shape[1] // self.replicas))
        return pieces

    def replica_state(self, replica: int, value: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Tensor]:
        """Return the parameters of one replica under their names in the single model; views where possible.

        ``value`` returns what is read for a stacked parameter instead: a state of the optimizer.
        """
        state = {name.removeprefix("model."): value(weight)[replica] for name, weight in self._stacked()}
        if self.table is not None:
            rows = [value(self.table.weight)[start:stop] for start, stop in self._row_ranges(replica)]
            state["inputs.table.weight"] = rows[0] if len(rows) == 1 else torch.cat(rows)
        return state

    def load_replica(
        self, replica: int, state: Mapping[str, Tensor], value: Callable[[Tensor], Tensor] = Tensor.detach
    ) -> None:
        """Copy the parameters of a single model into one replica; see :meth:`replica_state`."""
        for name, weight in self._stacked():
            value(weight)[replica].copy_(state[name.removeprefix("model.")])
        first = 0
        for start, stop in self._row_ranges(replica):
            assert self.table is not None
            value(self.table.weight)[start:stop].copy_(state["inputs.table.weight"][first : first + stop - start])
            first += stop - start

    def _stacked(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.body.named_parameters()

    def _row_ranges(self, replica: int) -> list[tuple[int, int]]:
        """Return the rows of a replica in the table: those of its ids, then those of its bags."""
        if self.table is None:
            return []
        first, ids = list(accumulate((0, *self.table.sizes))), self.replicas * self.ids
        starts = (replica * self.ids, ids + replica * self.bags)
        ranges = zip(starts, (self.ids, self.bags), strict=True)
        return [(first[start], first[start + count]) for start, count in ranges if count]


def stack_tables(tables: Sequence[Table]) -> Table:
    """Return one table with the rows of all tables: first the fields with one id, then the bags."""
    fields, bags = tables[0].fields, len(tables[0].sizes) - tables[0].fields
    sizes = [size for table in tables for size in table.sizes[:fields]]
    sizes += [size for table in tables for size in table.sizes[fields:]]
    with torch.device("meta"):  # no memory, no random numbers
        stacked = Table(sizes, tables[0].dim, bags=bags * len(tables), mean=tables[0].mean)
    weights = [table.weight.detach().split([sum(table.sizes[:fields]), sum(table.sizes[fields:])]) for table in tables]
    stacked.weight = RowParameter(torch.cat([rows for part in zip(*weights, strict=True) for rows in part]))
    stacked.starts = torch.tensor([0, *accumulate(sizes)], device=stacked.weight.device)
    return stacked


def bag_key(source: int, name: str) -> str:
    """Return the name of a bag in the batches of a fleet."""
    return f"{source}/{name}"


class Fleet(nn.Module):
    """Replicas of a model as one model from a batch to logits (B, R·T), for ``fit`` and ``evaluate``.

    Replicas of the same shape and learning rate are stacked (:class:`ReplicaStack`). The loss of ``fit`` is the sum of
    the losses of the replicas, so that each gets the gradient that it would get alone, and the optimizers of
    ``lpfs.embeddings`` update every element on its own.

    Args:
        models: the replicas, for example smaller models of different fields; their parameters are copied.
        schema: the fields of the batches, of which every model reads some.
        sources: index of the stream that each replica is trained on; default: the same for all.
        rates: learning rate of each replica; None for the default of the optimizer.
    """

    order: Tensor | None

    def __init__(
        self,
        models: Sequence[nn.Module],
        schema: Schema,
        *,
        sources: Sequence[int] | None = None,
        rates: Sequence[float | None] | None = None,
    ) -> None:
        super().__init__()
        if not models:
            raise InputError("a fleet needs at least one model")
        for model in {type(model): model for model in models}.values():
            if not supports_fleet(model):
                raise InputError(f"replicas of {type(model).__name__} cannot be stacked; train each with lpfs.fit")
        self.replicas = len(models)
        self.numbers = list(range(len(models)))  # of the replicas among all models of ``fit_fleet``
        self.tasks = int(getattr(models[0], "outputs_count", 1))
        self.sources = [0] * len(models) if sources is None else list(sources)
        self.schema = schema
        groups: dict[Hashable, list[int]] = {}
        for replica, model in enumerate(models):
            rate = None if rates is None else rates[replica]
            groups.setdefault((rate, stack_key(model)), []).append(replica)
        self.members = list(groups.values())  # replicas of each stack
        self.rates = [None if rates is None else rates[members[0]] for members in self.members]
        self.stacks = nn.ModuleList(
            ReplicaStack([models[replica] for replica in members], schema, [self.sources[n] for n in members])
            for members in self.members
        )
        flat = [replica for members in self.members for replica in members]
        order = None if flat == sorted(flat) else torch.tensor(flat).argsort()
        self.register_buffer("order", order, persistent=False)
        self.place = {
            replica: (stack, n) for stack, group in enumerate(self.members) for n, replica in enumerate(group)
        }

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits (B, R·T), the tasks of the first replica first."""
        pieces = [stack(batch) for stack in self.stacks]
        logits = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        return (logits if self.order is None else logits.index_select(1, self.order)).flatten(1)

    def set_gates(self, values: Callable[[], Tensor] | None) -> None:
        """Multiply the parts of every replica by factors: masks, or gates with their gradient; None removes them.

        ``values`` returns the factors (R, N) of this step on the device of the fleet: a row for each model in the order
        in which they were given to ``fit_fleet``, with a column for each of its parts in the order of ``inputs.names``;
        a row may be longer than the parts. It is called once for each stack of a step. Call ``set_gates`` in
        ``on_begin`` of a callback of ``fit_fleet``, for example to train each replica on a mask of its own.
        """
        for stack, members in zip(self.stacks, self.members, strict=True):
            assert isinstance(stack, ReplicaStack)
            rows = torch.tensor([self.numbers[member] for member in members], device=device_of(self))
            stack.gate = None if values is None else partial(_rows_of, values, rows, stack.parts)

    def make_optimizer(self, config: Training) -> torch.optim.Optimizer:
        """Return the optimizer of the settings, with the learning rate of each replica."""
        groups: list[dict[str, Any]] = []
        for stack, rate in zip(self.stacks, self.rates, strict=True):
            lr = config.lr if rate is None else rate
            groups.append({"params": list(stack.parameters()), **({} if lr is None else {"lr": lr})})
        # one pass over the parameters, which are too many for the caches of a CPU
        fused = True if device_of(self).type == "cpu" else None
        optimizer: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[config.optimizer]
        return optimizer(groups, fused=fused)

    def replica_state(self, replica: int) -> dict[str, Tensor]:
        """Return the parameters of one replica under their names in the single model."""
        stack, number = self.place[replica]
        return self._stack(stack).replica_state(number)

    def load_replica(self, replica: int, state: Mapping[str, Tensor]) -> None:
        """Copy the parameters of a single model into one replica."""
        stack, number = self.place[replica]
        self._stack(stack).load_replica(number, state)

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, replica: int, model: nn.Module, single: torch.optim.Optimizer
    ) -> None:
        """Copy the state of the optimizer of a single model into that of the fleet."""
        ours, theirs = optimizer.param_groups[0], single.param_groups[0]
        for name in set(ours) - {"params", "lr", "fused", "foreach"}:
            if theirs.get(name) != ours[name]:
                raise InputError(
                    f"the optimizer of a model has {name} {theirs.get(name)!r}, a fleet has {ours[name]!r}"
                )
        number, place = self.place[replica]
        stack = self._stack(number)
        states = {name: single.state.get(weight, {}) for name, weight in model.named_parameters()}
        for key, is_count in _state_keys(states.values()):
            if not is_count:
                weights = dict(model.named_parameters())  # one that was never updated has no state yet
                values = {name: state.get(key, torch.zeros_like(weights[name])) for name, state in states.items()}
                stack.load_replica(place, values, partial(_optimizer_state, optimizer, key))
                continue
            for weight in stack.parameters():  # the number of steps, which is that of all replicas
                count = next(state[key] for state in states.values() if key in state)
                optimizer.state[weight][key] = count.detach().clone()

    def copy_optimizer(
        self, optimizer: torch.optim.Optimizer, replica: int, model: nn.Module, single: torch.optim.Optimizer
    ) -> None:
        """Copy the state of one replica into the optimizer of its single model."""
        number, place = self.place[replica]
        stack, weights = self._stack(number), dict(model.named_parameters())
        for key, is_count in _state_keys(optimizer.state.get(weight, {}) for weight in stack.parameters()):
            read = partial(_optimizer_state, optimizer, key)
            values = dict.fromkeys(weights, read(next(stack.parameters()))) if is_count else None
            for name, value in (values or stack.replica_state(place, read)).items():
                single.state[weights[name]][key] = value.detach().clone().to(weights[name].device)

    def _stack(self, number: int) -> ReplicaStack:
        stack = self.stacks[number]
        assert isinstance(stack, ReplicaStack)
        return stack

    def split_metrics(self, metrics: Metrics) -> list[Metrics]:
        """Return the metrics of every replica from those of the fleet."""
        names = [self.schema.label, *self.schema.tasks][: self.tasks]
        scores = list(metrics.tasks.values())
        return [
            Metrics(dict(zip(names, scores[replica * self.tasks : (replica + 1) * self.tasks], strict=True)))
            for replica in range(self.replicas)
        ]


def _state_keys(states: Iterable[Mapping[str, Tensor]]) -> list[tuple[str, bool]]:
    """Return the keys of the states of an optimizer, and whether each is a number () instead of a value per entry."""
    return list({key: value.ndim == 0 for state in states for key, value in state.items()}.items())


def _optimizer_state(optimizer: torch.optim.Optimizer, key: str, weight: Tensor) -> Tensor:
    """Return a state of a parameter; zeros if the optimizer has taken no step and allocates it later."""
    state: dict[str, Tensor] = optimizer.state[weight]
    return state.setdefault(key, torch.zeros_like(weight.detach()))


def _rows_of(values: Callable[[], Tensor], rows: Tensor, columns: int) -> Tensor:
    return values().index_select(0, rows)[:, :columns]


def stack_key(model: Any) -> Hashable:
    """Return what two models must have in common to be stacked: class, settings, and all shapes except table rows."""
    inputs = model.inputs
    shapes = [(name, tuple(weight.shape)) for name, weight in model.named_parameters() if name != "inputs.table.weight"]
    buffers = [
        (name, tuple(buffer.shape), () if buffer.is_meta else tuple(buffer.flatten().tolist()))
        for name, buffer in model.named_buffers()
        if not name.endswith("table.starts")
    ]
    widths = [field.dim for field in model.reads if field.kind == "numeric"]
    return (type(model), repr(model.config), inputs.ids, len(inputs.bags), *shapes, *buffers, *widths)


class FleetStream:
    """The batches of a fleet: the columns of all sources side by side, and the label of every replica.

    Args:
        fleet: the fleet.
        streams: one stream per source, with the same number of rows in every batch; one alone is used for all.
    """

    def __init__(self, fleet: Fleet, streams: Sequence[Batches]) -> None:
        self.streams, self.sources = list(streams), max(fleet.sources) + 1
        if len(self.streams) not in (1, self.sources):
            raise InputError(f"the fleet needs 1 or {self.sources} streams, found {len(self.streams)}")
        self.repeats = self.sources // len(self.streams)
        if not all(isinstance(stream, Sized) for stream in self.streams):
            raise InputError("the streams of a fleet need a length; use lists of batches or lpfs.Stream")
        self.batch_size = getattr(self.streams[0], "batch_size", None)
        tasks = range(fleet.tasks)
        self._labels = [source * fleet.tasks + task for source in fleet.sources for task in tasks]
        self._label_columns = torch.tensor(self._labels)

    def __len__(self) -> int:
        lengths = {len(stream) for stream in self.streams}  # type: ignore[arg-type]
        if len(lengths) > 1:
            raise InputError(f"the streams of a fleet must have equally many batches, found {sorted(lengths)}")
        return lengths.pop()

    def __iter__(self) -> Iterator[Batch]:
        for batches in zip(*self.streams, strict=True):
            yield self._merge(batches * self.repeats)

    def _merge(self, batches: Sequence[Batch]) -> Batch:
        first, labels = batches[0], batches[0].labels
        if len({len(batch) for batch in batches}) > 1:
            raise InputError(
                f"the streams of a fleet gave batches of {sorted({len(batch) for batch in batches})} rows; give parts "
                "of equally many rows"
            )
        if self._label_columns.device != labels.device:
            self._label_columns = self._label_columns.to(labels.device)
        if len(batches) > 1:
            labels = torch.cat([batch.labels for batch in batches], 1)
        bags = {bag_key(source, name): bag for source, batch in enumerate(batches) for name, bag in batch.bags.items()}
        labels = labels.index_select(1, self._label_columns)
        if len(batches) == 1:
            return Batch(first.ids, first.dense, labels, first.missing, bags)
        ids, dense = (torch.cat([getattr(batch, name) for batch in batches], 1) for name in ("ids", "dense"))
        missing = None
        if any(batch.missing is not None for batch in batches):
            none = torch.zeros_like(first.dense, dtype=torch.bool)
            missing = torch.cat([none if batch.missing is None else batch.missing for batch in batches], 1)
        return Batch(ids, dense, labels, missing, bags)

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all streams."""
        return {"streams": [stream.state_dict() if isinstance(stream, Resumable) else None for stream in self.streams]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved positions."""
        for stream, position in zip(self.streams, state["streams"], strict=True):
            if not isinstance(stream, Resumable) or position is None:
                raise InputError("resume needs streams with state_dict and load_state_dict; use lpfs.Stream")
            stream.load_state_dict(position)
