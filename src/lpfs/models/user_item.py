"""UserItem: the paper's industrial network, every user field times every item field."""

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


class UserItem(Model):
    r"""Products of all user with all item fields, the other fields, a shared bottom, and a head for each task.

    .. math:: z = \mathrm{top}([g_u e_u \odot g_i e_i \;\forall u, i;\; g_c e_c;\; g_n e_n]), \qquad
              y_t = \mathrm{head}_t(z)

    Gates stand right after the embeddings, so that a field that is dropped takes its crosses with it. A field's
    ``group`` says where it enters: ``user`` and ``item``, of any kind, are crossed; of the others (``combine``,
    ``context``), those with ids and the numbers stand beside the crosses, each kind in a width of its own.

    Args:
        schema: the fields, label and tasks.
        dim: width of the embeddings that are crossed.
        other_dim: width of the embeddings of the other fields with ids.
        number_dim: width of the embeddings of the other numeric fields.
        hidden: widths of the shared layers, the last of which the heads read.
        head: widths of the hidden layers of each head.
        pooling: a bag is the ``mean`` or the ``sum`` of its rows.
        silent: parts that read as zeros (see :class:`Model`).

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
            raise InputError("hidden needs at least one width: the heads read the last shared layer")
        crossed, others, numbers = self._shares(schema)
        groups = [schema[name].group for name in crossed]
        users = [number for number, group in enumerate(groups) if group == "user"]
        items = [number for number, group in enumerate(groups) if group == "item"]
        if bool(users) != bool(items):
            found, absent = ("user", "item") if users else ("item", "user")
            raise InputError(
                f"the schema has fields of group {found} and none of group {absent}, so nothing would read them; "
                "give both groups, or none"
            )
        self.inputs = self._inputs(crossed, dim, pooling)
        self.others = self._inputs(others, other_dim, pooling)
        self.numbers = self._inputs(numbers, number_dim, pooling)
        self.crosses = Crosses([(user, item) for user in users for item in items], dim)
        self.pairs = [(crossed[user], crossed[item]) for user in users for item in items]
        width = sum(size for _, size in self._columns())
        *shared, last = hidden
        self.top = dense_layers(width, shared, last).append(nn.ReLU())
        self.heads = nn.ModuleList(dense_layers(last, head, 1) for _ in range(self.outputs_count))

    def _inputs(self, names: Sequence[str], dim: int, pooling: Pooling) -> Inputs:
        silent = set(self.silent)
        read = [name for name in names if name not in silent]
        return Inputs(self.reads, read, dim, pooling=pooling, slots=names)

    @staticmethod
    def _shares(schema: Schema) -> tuple[list[str], list[str], list[str]]:
        """Return the fields that are crossed, the others with ids, and the other numbers."""
        ids, bags, dense = fields_by_kind(schema)
        crossed, others, numbers = [
            [each.name for each in kind if (each.group in ("user", "item")) == both]
            for kind, both in (((*ids, *bags, *dense), True), ((*ids, *bags), False), (dense, False))
        ]
        return crossed, others, numbers

    def outputs(self, batch: Batch) -> Tensor:
        """Return logits (B, 1 + tasks)."""
        pieces = [each(batch).flatten(1) for each in (self.others, self.numbers) if each.slots]
        beside = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0] if pieces else None
        shared = self.top(self.crosses(self.inputs(batch), beside) if self.pairs else beside)
        return torch.cat([head(shared) for head in self.heads], 1)

    def sites(self) -> dict[str, Site | list[Site]]:
        """Return where every field enters: right after its embedding."""
        found = {
            name: Site(path, index=part)
            for path in ("inputs", "others", "numbers")
            for part, name in enumerate(getattr(self, path).names)
        }
        return {name: found[name] for name in self.names}

    def layout(self) -> Layout:
        """Say which rows belong to which field, and which columns to which field or cross."""
        rows = {**prefixed("others", self.others.layout()), **prefixed("numbers", self.numbers.layout())}
        return {**super().layout(), **rows, "top.0.weight": {1: self._columns()}}

    def _columns(self) -> Segments:
        return [
            *((pair, self.inputs.dim) for pair in self.pairs),
            *((name, self.others.dim) for name in self.others.slots),
            *((name, self.numbers.dim) for name in self.numbers.slots),
        ]

    def cut(self, kept: Sequence[str]) -> UserItem:
        """Return a fresh model of the kept fields; with the last item go all users, which nothing would read."""
        groups = {self.schema[name].group for name in kept}
        alone = {"user", "item"} - groups
        lost = {"user", "item"} if alone else set()
        left = [name for name in kept if self.schema[name].group not in lost]
        if kept and not left:
            raise InputError(
                f"of group {min(alone)} no field is kept, and the {len(kept)} kept ones ({', '.join(kept[:5])}"
                f"{' …' if len(kept) > 5 else ''}) are read only as products with one: keep more, name one with "
                "must_keep, or take another model"
            )
        return super().cut(left)
