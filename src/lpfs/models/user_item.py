"""UserItem: the industrial network of the paper, with products of all user and item fields."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.gates.sites import Site
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
from lpfs.models.inputs import Inputs, Pooling, fields_by_kind
from lpfs.models.layers import Layout, Segments, dense_layers, prefixed
from lpfs.schema import Schema

CROSSED_GROUPS = {"user", "item"}


class UserItem(Model):
    r"""Products of all user and item fields, the other fields, shared dense layers, and one head per task.

    .. math:: z = \mathrm{top}([g_u e_u \odot g_i e_i \;\forall u, i;\; g_c e_c;\; g_n e_n]), \qquad
              y_t = \mathrm{head}_t(z)

    Gates are applied directly after the embeddings, so dropping a field drops its crosses. The ``group`` of a
    field decides how it is used: ``user`` and ``item`` fields of any kind are crossed; the others (``combine``,
    ``context``) are concatenated with the crosses, with separate widths for fields with ids and numeric fields.

    Args:
        schema: the fields, label and tasks.
        dim: width of the embeddings that are crossed.
        other_dim: width of the embeddings of the other fields with ids.
        number_dim: width of the embeddings of the other numeric fields.
        hidden: widths of the shared layers; the last one is the input of the heads.
        head: widths of the hidden layers of each head.
        pooling: a bag is the ``mean`` or the ``sum`` of its embeddings.
        silent: parts replaced by zeros (see :class:`Model`).
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        other_dim: int = 16,
        number_dim: int = 4,
        hidden: Sequence[int] = (256, 128),
        head: Sequence[int] = (32,),
        pooling: Pooling = "mean",
        silent: Sequence[str] = (),
    ) -> None:
        config = {"dim": dim, "other_dim": other_dim, "number_dim": number_dim, "hidden": hidden, "head": head}
        super().__init__(schema, silent, {**config, "pooling": pooling})
        if not hidden:
            raise InputError("hidden is empty; it needs at least one width: the heads use the last shared layer")
        ids, bags, dense = fields_by_kind(schema)
        crossed = [field.name for field in (*ids, *bags, *dense) if field.group in CROSSED_GROUPS]
        others = [field.name for field in (*ids, *bags) if field.group not in CROSSED_GROUPS]
        numbers = [field.name for field in dense if field.group not in CROSSED_GROUPS]
        users = [number for number, name in enumerate(crossed) if schema[name].group == "user"]
        items = [number for number, name in enumerate(crossed) if schema[name].group == "item"]
        if bool(users) != bool(items):
            present, absent = ("user", "item") if users else ("item", "user")
            raise InputError(
                f"the schema has fields of group {present} but none of group {absent}, so they would not be used; "
                "give fields of both groups, or of none"
            )
        self.inputs = self._inputs(crossed, dim, pooling)
        self.others = self._inputs(others, other_dim, pooling)
        self.numbers = self._inputs(numbers, number_dim, pooling)
        self.crosses = Crosses([(user, item) for user in users for item in items], dim)
        self.pairs = [(crossed[user], crossed[item]) for user in users for item in items]
        *shared, last = hidden
        self.top = dense_layers(sum(size for _, size in self._columns()), shared, last).append(nn.ReLU())
        self.heads = nn.ModuleList(dense_layers(last, head, 1) for _ in range(self.outputs_count))

    def _inputs(self, names: Sequence[str], dim: int, pooling: Pooling) -> Inputs:
        used = [name for name in names if name not in self.silent]
        return Inputs(self.reads, used, dim, pooling=pooling, slots=names)

    def outputs(self, batch: Batch) -> Tensor:
        pieces = [inputs(batch).flatten(1) for inputs in (self.others, self.numbers) if inputs.slots]
        beside = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0] if pieces else None
        shared = self.top(self.crosses(self.inputs(batch), beside) if self.pairs else beside)
        return torch.cat([head(shared) for head in self.heads], 1)

    def sites(self) -> dict[str, Site | list[Site]]:
        sites = {
            name: Site(path, index=part)
            for path in ("inputs", "others", "numbers")
            for part, name in enumerate(getattr(self, path).names)
        }
        return {name: sites[name] for name in self.names}

    def layout(self) -> Layout:
        rows = {**prefixed("others", self.others.layout()), **prefixed("numbers", self.numbers.layout())}
        return {**super().layout(), **rows, "top.0.weight": {1: self._columns()}}

    def _columns(self) -> Segments:
        return [
            *((pair, self.inputs.dim) for pair in self.pairs),
            *((name, self.others.dim) for name in self.others.slots),
            *((name, self.numbers.dim) for name in self.numbers.slots),
        ]

    def cut(self, kept: Sequence[str]) -> UserItem:
        """Return a new, untrained model of the kept fields; without an item, all user fields are dropped."""
        absent = CROSSED_GROUPS - {self.schema[name].group for name in kept}
        fields = [name for name in kept if not absent or self.schema[name].group not in CROSSED_GROUPS]
        if kept and not fields:
            raise InputError(
                f"no field of group {min(absent)} is kept, and the {len(kept)} kept fields ({', '.join(kept[:5])}"
                f"{' …' if len(kept) > 5 else ''}) are used only in products with one; keep more fields, name one "
                "with must_keep, or choose another model"
            )
        return super().cut(fields)
