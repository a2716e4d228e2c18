"""Models as users write them, and gates set to chosen values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import lpfs
from lpfs import Gates

B, D = 12, 4


class Plain(nn.Module):
    """Tables, a bag, a numeric column and a dense branch, concatenated, then an MLP."""

    def __init__(self, branch: nn.Module | None = None, mode: str = "sum", **table) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({name: nn.Embedding(10, D, **table) for name in ("user", "item", "city")})
        self.bag = nn.EmbeddingBag(20, D, mode=mode)
        self.price = nn.Linear(1, D)
        self.dense = branch or nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, D))
        self.top = nn.Sequential(nn.Linear(6 * D, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor, tags: Tensor, price: Tensor, dense: Tensor) -> Tensor:
        parts = [table(ids[:, n]) for n, table in enumerate(self.emb.values())]
        parts += [self.bag(tags), self.price(price), self.dense(dense)]
        return self.top(torch.cat(parts, dim=1)).squeeze(1)

    @property
    def fields(self) -> dict[str, nn.Module]:
        return {**self.emb, "tags": self.bag, "price": self.price, "dense": self.dense}


INPUTS = {"user": (0, 0), "item": (0, 1), "city": (0, 2), "tags": 1, "price": 2, "dense": 3}


def batch(dtype: torch.dtype = torch.float32, whole: bool = False) -> tuple[Tensor, ...]:
    """Inputs of Plain; whole numbers where everything is to be exact."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, (B, 3), generator=generator)
    tags = torch.randint(20, (B, 5), generator=generator)
    if whole:
        numbers = [torch.randint(-3, 4, (B, n), generator=generator).to(dtype) for n in (1, 3)]
    else:
        numbers = [torch.randn(B, n, generator=generator).to(dtype) for n in (1, 3)]
    return ids, tags, *numbers


def whole_weights(model: nn.Module) -> nn.Module:
    """Small whole numbers as weights: sums and products of them are exact in any order."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randint(-3, 4, weight.shape, generator=generator))
    return model


class Stacked(nn.Module):
    """One fused table that returns (B, F, D)."""

    def __init__(self, fields: int = 4, norm: nn.Module | None = None, rows: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.table = Fused(fields, rows)
        self.norm = norm or nn.Identity()
        self.top = nn.Sequential(nn.Linear(fields * D, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.norm(self.table(ids).flatten(1))).squeeze(1)


class Fused(nn.Module):
    """All fields in one table, by offsets."""

    def __init__(self, fields: int, rows: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(fields * rows, D)
        self.register_buffer("offsets", torch.arange(fields) * rows)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids + self.offsets)


def set_gates(gates: Gates, values: list[float]) -> None:
    """Give the gates exactly these values: any sign, zero, or a power of two."""
    with torch.no_grad():
        for n, value in enumerate(values):
            gates.x[n] = 0.0 if value == 0 else float(torch.sign(torch.tensor(value)))
            if value:
                gates.norm[n] /= abs(value)
    assert gates.values.tolist() == values


GATES = [0.0, -2.0, 0.5, 4.0, -0.25, 2.0]


def gated(model: nn.Module, values: list[float] | None = None, **settings) -> nn.Module:
    gates = lpfs.attach(model, model.fields, **settings)
    set_gates(gates, GATES if values is None else values)
    return model


class RowWiseAdagrad(torch.optim.Optimizer):
    """One accumulator a row, as large tables are trained."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                rows = p.grad.reshape(p.shape[0], -1)
                total = self.state[p].setdefault("sum", torch.zeros(p.shape[0], dtype=p.dtype))
                total.add_(rows.square().mean(1))
                p.sub_(group["lr"] * (rows / (total.sqrt() + 1e-10)[:, None]).view_as(p))


OPTIMIZERS = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rowwise": RowWiseAdagrad,
}


def trained(name: str, **settings):
    model = Plain()
    gates = lpfs.attach(model, model.fields, **settings)
    optimizer = OPTIMIZERS[name](gates.model_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(model(*batch()), torch.arange(B) % 2 * 1.0).backward()
        optimizer.step()
    optimizer.zero_grad()
    gates.zero_grad()
    set_gates(gates, GATES)
    return model, optimizer
