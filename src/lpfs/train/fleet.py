"""Fleet: replicas of a model that are trained together, as one model with stacked parameters.

One lookup serves the tables of all replicas, one batched product their dense layers, and one optimizer step updates
everything, so that a small batch costs the overhead of one step instead of one per replica. See ``fit_fleet``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import accumulate, pairwise, zip_longest
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


class _Tokens(nn.Module):
    """Takes the place of the inputs in the body of a stack, which gets their result instead of a batch."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.dim, self.width, self.slots = inputs.dim, inputs.width, inputs.slots

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


class _Body(nn.Module):
    """A model without its inputs, from embeddings (B, N, D) to logits (B, T).

    If all of it is a plain Sequential, that is ``layers``: it is faster for all replicas without ``vmap``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        inputs = model.inputs
        model.inputs = None  # tables and gates are not copied
        try:
            self.model = copy.deepcopy(model)
        finally:
            model.inputs = inputs
        self.model.inputs = _Tokens(inputs)
        for module in self.model.modules():
            if type(module) is nn.Linear:
                module.__class__ = ReplicaLinear  # the same parameters with another forward
        path = model.dense_path()
        self.layers = () if path is None else tuple(self.model.get_submodule(path))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T) of one replica, under ``vmap``."""
        out: Tensor = self.model.outputs(tokens)
        return out

    def all_replicas(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, R, T) for embeddings (B, R, N, D); the parameters are stacked in dim 0."""
        if not self.layers:
            return over_replicas(self, tokens)
        x = tokens.flatten(2).transpose(0, 1)  # (R, B, N·D)
        for layer, following in zip_longest(self.layers, self.layers[1:]):
            if isinstance(layer, ReplicaLinear):
                x = layer.all_replicas(x, relu=type(following) is nn.ReLU)  # in one function with the Linear layer
            elif type(layer) is not nn.ReLU:
                x = layer(x)
        return x.transpose(0, 1)


def over_replicas(module: nn.Module, *inputs: Tensor | None) -> Tensor:
    """Call a module whose parameters are stacked in dim 0, for inputs and a result (B, R, …)."""
    dims = tuple(None if tensor is None else 1 for tensor in inputs)
    call = vmap(partial(functional_call, module), in_dims=(0, dims), out_dims=1)
    out: Tensor = call(dict(module.named_parameters()), inputs)
    return out


def stack_parameters(module: nn.Module, replicas: Sequence[nn.Module]) -> None:
    """Replace every parameter of a module by those of the replicas, stacked in dim 0."""
    for name, _ in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        stacked = torch.stack([replica.get_parameter(name).detach() for replica in replicas])
        setattr(module.get_submodule(path), leaf, nn.Parameter(stacked))


def supports_fleet(model: nn.Module) -> bool:
    """Return whether replicas of a model can be stacked; the model may be on the meta device.

    Only ``inputs`` may read the batch and have tables, as in most models of ``lpfs.models``, and ``vmap`` must support
    all operations.
    """
    inputs: Any = getattr(model, "inputs", None)
    tables = [module for module in model.modules() if isinstance(module, Table)]
    if not hasattr(model, "dense_path") or not hasattr(inputs, "table") or inputs.id_columns is not None:
        return False
    if any(table is not inputs.table for table in tables):
        return False
    body = _Body(model)
    stack_parameters(body.model, [model])
    try:
        with torch.no_grad():
            body.all_replicas(next(model.parameters()).new_zeros(2, 1, len(inputs.slots), inputs.width))
    except (RuntimeError, AttributeError):  # the second one where the batch is read, which is a tensor here
        return False
    return True


class PlaceParts(torch.autograd.Function):
    """Copy parts (B, P, D) to positions (P,) of a result (B, N, D) that is zero elsewhere; no position is repeated."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, positions: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(positions)
        new = parts.new_empty if count == parts.shape[1] else parts.new_zeros
        return new(len(parts), count, parts.shape[2]).index_copy_(1, positions, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (positions,) = ctx.saved_tensors
        return grad.index_select(1, positions), None, None


def place_parts(parts: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return (B, count, D) with parts (B, P, D) at their positions; see :class:`PlaceParts`."""
    out: Tensor = PlaceParts.apply(parts, positions, count)  # type: ignore[no-untyped-call]
    return out


class StackInputs(nn.Module):
    """The inputs of all replicas of a stack: one table for the fields with ids, one module for the numeric fields.

    The replicas have equally many slots, and fields of their own. All embeddings of one kind are computed together,
    and then copied to the slots of their replicas.

    Args:
        models: the replicas; the parameters of their inputs are copied.
        schema: fields of the batches of one source.
        sources: source of the rows of each replica.
    """

    id_columns: Tensor
    dense_columns: Tensor
    gate_index: Tensor  # (P,) position of the gate of each part among the gates (R, N) of all replicas
    positions: Tensor | None  # (P,) position of each part among the slots of all replicas; None if they are in order

    reads_padded_bags = True  # see can_capture

    def __init__(self, models: Sequence[Any], schema: Schema, sources: Sequence[int]) -> None:
        super().__init__()
        inputs = [model.inputs for model in models]
        self.replicas, self.slots, self.width = len(inputs), len(inputs[0].slots), inputs[0].width
        self.parts = max(single.parts for single in inputs)
        id_names = [field.name for field in schema if field.kind == "categorical"]
        dense_names = [field.name for field in schema if field.kind == "numeric" for _ in range(field.dim)]
        for buffer, names in (("id_columns", id_names), ("dense_columns", dense_names)):
            columns = [
                source * len(names) + position
                for model, source in zip(models, sources, strict=True)
                for position, name in enumerate(names)
                if name in model.reads.names
            ]
            self.register_buffer(buffer, torch.tensor(columns, dtype=torch.long), persistent=False)
        self.bag_keys = [
            bag_key(source, name) for single, source in zip(inputs, sources, strict=True) for name in single.bags
        ]
        bounds = [(0, single.ids, single.ids + len(single.bags), single.parts) for single in inputs]
        kinds = [  # replica and part of all fields with one id, then of all bags, then of all numeric fields
            [(replica, part) for replica, bound in enumerate(bounds) for part in range(bound[kind], bound[kind + 1])]
            for kind in range(3)
        ]
        self.counts = [len(parts) for parts in kinds]
        slots = [range(single.parts) if single.filled is None else single.filled.tolist() for single in inputs]
        places = [replica * self.slots + slots[replica][part] for parts in kinds for replica, part in parts]
        positions = None if places == list(range(self.replicas * self.slots)) else torch.tensor(places)
        gate_index = torch.tensor([replica * self.parts + part for parts in kinds for replica, part in parts])
        self.register_buffer("positions", positions, persistent=False)
        self.register_buffer("gate_index", gate_index, persistent=False)
        tables = [single.table for single in inputs if single.table is not None]
        numbers = [single.numbers for single in inputs if single.numbers is not None]
        self.table = stack_tables(tables) if tables else None
        self.row_ranges = {"table.weight": self._table_ranges(inputs)}
        self.numbers: Any = None
        self.joins_numbers = bool(numbers) and can_join(numbers[0])
        if self.joins_numbers:
            self.numbers = type(numbers[0]).join(numbers)
            widths = [0 if single.numbers is None else sum(single.numbers.widths) for single in inputs]
            ranges = [[rows] for rows in pairwise(accumulate((0, *widths)))]
            self.row_ranges |= {f"numbers.{name}": ranges for name, _ in self.numbers.named_parameters()}
        elif numbers:
            self.numbers = copy.deepcopy(numbers[0])
            stack_parameters(self.numbers, numbers)

    def _table_ranges(self, inputs: Sequence[Any]) -> list[list[tuple[int, int]]]:
        """Return the rows of every replica in the table: those of its ids, then those of its bags."""
        sizes = () if self.table is None else self.table.sizes
        first = list(accumulate((0, *sizes)))
        ids = pairwise(accumulate((0, *(single.ids for single in inputs))))
        bags = pairwise(accumulate((self.counts[0], *(len(single.bags) for single in inputs))))
        return [[(first[start], first[stop]) for start, stop in fields] for fields in zip(ids, bags, strict=True)]

    def forward(self, batch: Batch, gate: Tensor | None) -> Tensor:
        """Return (B, R, N, D) for a batch with the columns of all sources, and gates (R, N) of the parts."""
        gates: Sequence[Tensor | None] = (None, None, None)
        if gate is not None:
            gates = gate.flatten().index_select(0, self.gate_index).split(self.counts)
        pieces = list[Tensor]()
        if self.table is not None:
            if self.counts[0]:
                pieces.append(self.table(batch.ids.index_select(1, self.id_columns), gates[0]))
            if self.counts[1]:
                bags = [batch.bags[key] for key in self.bag_keys]
                pieces.append(self.table.bags(bags, gates[1], padded=batch.padded))
        if self.numbers is not None:
            dense, missing = batch.dense.index_select(1, self.dense_columns), batch.missing
            missing = None if missing is None else missing.index_select(1, self.dense_columns)
            if self.joins_numbers:
                pieces.append(self.numbers(dense, missing, gates[2]))
            else:  # one token of each replica
                split = (self.replicas, -1)
                missing = None if missing is None else missing.unflatten(1, split)
                token_gates = None if gates[2] is None else gates[2].unflatten(0, (1, *split))
                tokens = over_replicas(self.numbers, dense.unflatten(1, split), missing, token_gates)
                pieces.append(tokens.flatten(1, 2))
        if not pieces:
            return batch.dense.new_zeros(len(batch), self.replicas, self.slots, self.width)
        out: Tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        if self.positions is not None:
            out = place_parts(out, self.positions, self.replicas * self.slots)
        return out.reshape(-1, self.replicas, self.slots, self.width)


def stack_tables(tables: Sequence[Table]) -> Table:
    """Return one table with the rows of all tables: first the fields with one id, then the bags."""
    sizes = [size for table in tables for size in table.sizes[: table.fields]]
    fields = len(sizes)
    sizes += [size for table in tables for size in table.sizes[table.fields :]]
    with torch.device("meta"):  # no memory, no random numbers
        stacked = Table(sizes, tables[0].dim, bags=len(sizes) - fields, mean=tables[0].mean)
    rows = [[sum(table.sizes[: table.fields]), sum(table.sizes[table.fields :])] for table in tables]
    weights = [table.weight.detach().split(counts) for table, counts in zip(tables, rows, strict=True)]
    stacked.weight = RowParameter(torch.cat([rows for kind in zip(*weights, strict=True) for rows in kind]))
    stacked.starts = torch.tensor([0, *accumulate(sizes)], device=stacked.weight.device)
    return stacked


def can_join(numbers: Any) -> bool:
    """Return whether the numeric fields of several replicas can be in one module; else their weights are stacked."""
    return hasattr(type(numbers), "join")


class ReplicaStack(nn.Module):
    """Replicas of one class with as many parts: dense parameters stacked in dim 0, and common inputs.

    ``gate`` is the hook for factors on the embeddings: it returns (R, N), one factor for each replica and each part
    in the order of ``inputs.names``, or None. Its gradient is that of gates in the single model. A constant mask of
    zeros and ones removes fields.

    Args:
        models: the replicas; the parameters are copied.
        schema: fields of the batches of one source.
        sources: source of the rows of each replica.
    """

    def __init__(self, models: Sequence[Any], schema: Schema, sources: Sequence[int]) -> None:
        super().__init__()
        self.gate: Callable[[], Tensor | None] | None = None
        self.inputs = StackInputs(models, schema, sources)
        self.body = _Body(models[0])
        stack_parameters(self.body.model, models)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits (B, R, T) for a batch with the columns of all sources."""
        return self.body.all_replicas(self.inputs(batch, None if self.gate is None else self.gate()))

    def replica_state(self, replica: int, value: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Tensor]:
        """Return the parameters of one replica under their names in the single model; views where possible.

        ``value`` returns what is read for a stacked parameter instead: a state of the optimizer.
        """
        state = dict[str, Tensor]()
        for name, weight, ranges in self._stacked(replica):
            if ranges is None:
                state[name] = value(weight)[replica]
            elif any(start < stop for start, stop in ranges):
                rows = [value(weight)[start:stop] for start, stop in ranges if start < stop]
                state[name] = rows[0] if len(rows) == 1 else torch.cat(rows)
        return state

    def load_replica(
        self, replica: int, state: Mapping[str, Tensor], value: Callable[[Tensor], Tensor] = Tensor.detach
    ) -> None:
        """Copy the parameters of a single model into one replica; see :meth:`replica_state`."""
        for name, weight, ranges in self._stacked(replica):
            if ranges is None:
                value(weight)[replica].copy_(state[name])
                continue
            first = 0
            for start, stop in ranges:
                if start < stop:
                    value(weight)[start:stop].copy_(state[name][first : first + stop - start])
                    first += stop - start

    def _stacked(self, replica: int) -> Iterator[tuple[str, nn.Parameter, list[tuple[int, int]] | None]]:
        """Yield the parameters: the name in the single model, and the rows of a replica; None if it has an index."""
        for name, weight in self.inputs.named_parameters():
            ranges = self.inputs.row_ranges.get(name)
            yield f"inputs.{name}", weight, None if ranges is None else ranges[replica]
        for name, weight in self.body.model.named_parameters():
            yield name, weight, None


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
            stack.gate = None if values is None else partial(_rows_of, values, rows, stack.inputs.parts)

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
                values = {  # a parameter that was never updated has no state yet
                    name: state[key] if key in state else torch.zeros_like(model.get_parameter(name))
                    for name, state in states.items()
                }
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
    if key not in state:
        state[key] = torch.zeros_like(weight.detach())
    return state[key]


def _rows_of(values: Callable[[], Tensor], rows: Tensor, columns: int) -> Tensor:
    return values().index_select(0, rows)[:, :columns]


def stack_key(model: Any) -> Hashable:
    """Return what two models must have in common to be stacked: class, settings, number of parts, dense shapes.

    Their fields may differ in number of ids, and in kind if all of the model after its inputs is a Sequential: inputs
    of all replicas are computed together.
    """
    inputs = model.inputs
    together = ("inputs.table.", *(["inputs.numbers."] if can_join(inputs.numbers) else []))
    shapes = [(name, tuple(weight.shape)) for name, weight in model.named_parameters() if not name.startswith(together)]
    buffers = [
        (name, tuple(buffer.shape), () if buffer.is_meta else tuple(buffer.flatten().tolist()))
        for name, buffer in model.named_buffers()
        if not name.startswith("inputs.")
    ]
    # of the model itself, such as whether it has a token of all numeric fields; without numbers of fields by kind
    values = [
        (name, value)
        for name, value in vars(model).items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_")
    ]
    kinds = (inputs.ids, len(inputs.bags)) if model.dense_path() is None else ()  # outputs may depend on them
    return (type(model), repr(model.config), len(inputs.slots), inputs.width, kinds, *shapes, *buffers, *values)


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
