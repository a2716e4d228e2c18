r"""One gradient of the rows of all ranks: what each found on its part of a batch, weighed by its number of rows.

.. math:: \nabla L = \sum_r \frac{B_r}{B} \nabla L_r, \qquad B = \sum_r B_r

Dense gradients are added up in one flat tensor. Gradients by rows never get the size of a table: every rank is
handed the rows of all, and sums them in the order of the ranks, so that the sum has the same bits on every one.
PyTorch's DistributedDataParallel knows dense gradients only; a table that collects its gradient by rows would stay
apart on every rank.

A step is three messages: how many rows there are of what, the dense gradients (gates among them) with the loss,
the gradients by rows.

What ranks share: the batches of a stream; a model and its optimizer that rank 0 alone has trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.data.stream import Stream
from lpfs.embeddings.row_grad import RowGrad, RowParameter, merged_row_grads, sum_pieces
from lpfs.errors import StateError
from lpfs.train.distributed.group import RankGroup, current_group
from lpfs.train.tensor_io import DTYPES, NAMES, flatten_state, restore_state

COUNTS, DENSE, ROWS = "counting rows", "adding up gradients", "gathering gradients by rows"


def reduce_grads(
    ranks: RankGroup, parameters: Sequence[nn.Parameter], rows: int, loss: Tensor
) -> tuple[int, Tensor]:
    """Put the gradient of all ranks' rows in the place of this one's; return their number and their loss.

    Args:
        ranks: who takes part.
        parameters: in the same order on every rank, whether they have a gradient or not.
        rows: of this rank's part of the batch; 0 is one without any gradient.
        loss: the mean over them.

    """
    tables = [each for each in parameters if isinstance(each, RowParameter)]
    others = [each for each in parameters if not isinstance(each, RowParameter) and each.requires_grad]
    mine = [merged_row_grad(each) for each in tables]
    sparse = [each.grad is not None and each.grad.is_sparse for each in others]
    held = [each.grad is not None for each in others]
    numbers = [rows, *map(int, held), *map(int, sparse), *(0 if each is None else len(each.rows) for each in mine)]
    about = torch.zeros(ranks.world, len(numbers), dtype=torch.int64)
    about[ranks.rank] = torch.tensor(numbers)
    ranks.all_reduce(about, COUNTS)
    total = int(about[:, 0].sum())
    share = rows / max(1, total)
    some = (about[:, 1 : 1 + len(others)].sum(0) > 0).tolist()
    by_rows = (about[:, 1 + len(others) : 1 + 2 * len(others)].sum(0) > 0).tolist()
    dense = [each for each, any_, one in zip(others, some, by_rows, strict=True) if any_ and not one]
    loss = all_reduce_dense(ranks, dense, share, loss)
    counts = about[:, 1 + 2 * len(others) :]
    gather_rows(ranks, tables, mine, counts, share)
    for each, one in zip(others, by_rows, strict=True):
        if one:
            each.grad = all_reduce_sparse(ranks, each, each.grad, share)
    return total, loss


def all_reduce_dense(ranks: RankGroup, parameters: Sequence[nn.Parameter], share: float, loss: Tensor) -> Tensor:
    """Add up the gradients of these parameters over the ranks, in place; return the loss added up likewise."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for each in parameters:
        if each.grad is None:
            each.grad = torch.zeros_like(each)
        kinds.setdefault((each.dtype, each.device), []).append(each)
    own = loss.detach().reshape(1)
    kinds.setdefault((own.dtype, own.device), [])
    for kind, several in kinds.items():
        grads = [each.grad for each in several if each.grad is not None]
        ours = kind == (own.dtype, own.device)
        flat = torch.cat([each.reshape(-1) for each in grads] + ([own] if ours else []))
        ranks.all_reduce(flat.mul_(share), DENSE)
        place = 0
        for grad in grads:
            grad.copy_(flat[place : place + grad.numel()].view_as(grad))
            place += grad.numel()
        if ours:
            loss = flat[-1].clone()
    return loss


def merged_row_grad(weight: RowParameter) -> RowGrad | None:
    """Return the gradient by rows of a table in one piece; None where no row has any."""
    pieces = merged_row_grads(weight)
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    return RowGrad(torch.cat([each.rows for each in pieces]), torch.cat([each.values for each in pieces]))


def gather_rows(
    ranks: RankGroup, tables: Sequence[RowParameter], mine: Sequence[RowGrad | None], counts: Tensor, share: float
) -> None:
    """Give every table the gradient by rows of all ranks; ``counts`` (W, tables) says how many rows each has.

    Rows and values of all tables travel as the bytes of one tensor.
    """
    if not tables or not int(counts.sum()):
        return
    device = tables[0].device
    widths = [each.shape[1] * each.element_size() for each in tables]
    parts = []
    for weight, piece in zip(tables, mine, strict=True):
        if piece is not None:
            parts += [as_bytes(piece.rows.long()), as_bytes(piece.values.to(weight.dtype) * share)]
    sizes = [sum(int(n) * (8 + width) for n, width in zip(of, widths, strict=True)) for of in counts]
    own = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    found = ranks.all_gather(own, sizes, ROWS)
    places = [0] * ranks.world
    for number, (weight, width) in enumerate(zip(tables, widths, strict=True)):
        pieces = []
        for rank, data in enumerate(found):
            count, at = int(counts[rank, number]), places[rank]
            if count:
                rows = data[at : at + 8 * count].clone().view(torch.int64)
                values = data[at + 8 * count : at + (8 + width) * count].clone().view(weight.dtype)
                pieces.append(RowGrad(rows, values.view(count, -1)))
            places[rank] += (8 + width) * count
        weight.row_grads[:] = [sum_pieces(weight, pieces)] if pieces else []


def all_reduce_sparse(ranks: RankGroup, weight: nn.Parameter, grad: Tensor | None, share: float) -> Tensor:
    """Return the sum over the ranks of sparse gradients of an ``nn.Embedding(sparse=True)``."""
    if grad is None:
        none = torch.empty(1, 0, dtype=torch.int64, device=weight.device)
        grad = torch.sparse_coo_tensor(none, weight.new_empty(0, *weight.shape[1:]), weight.shape)
    grad = grad.coalesce()
    rows = ranks.concat(grad.indices().t().contiguous(), ROWS)
    values = ranks.concat((grad.values() * share).flatten(1), ROWS).view(-1, *weight.shape[1:])
    return torch.sparse_coo_tensor(rows.t(), values, weight.shape).coalesce()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor where it is, (n,) uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def weighted_mean(ranks: RankGroup, tensor: Tensor, rows: int, what: str) -> Tensor:
    """Return the mean over ranks of a tensor, weighed by their rows."""
    if not ranks.is_distributed:
        return tensor
    both = torch.cat([tensor.detach().flatten().double() * rows, tensor.new_tensor([rows], dtype=torch.float64)])
    ranks.all_reduce(both, what)
    return (both[:-1] / both[-1]).to(tensor.dtype).view_as(tensor)


def check_parameters_equal(ranks: RankGroup, model: nn.Module) -> None:
    """Refuse to go on where a parameter differs between ranks: their bits are added up as whole numbers."""
    if not ranks.is_distributed:
        return
    named = dict(model.named_parameters())
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [each.detach().contiguous().view(kinds[each.element_size()]).sum(dtype=torch.int64).cpu()
            for each in named.values()]  # fmt: skip
    if not sums:
        return
    found = ranks.concat(torch.stack(sums)[None], "comparing parameters")
    wrong = (found != found[:1]).any(0).nonzero().flatten().tolist()
    if wrong:
        rank = int((found[:, wrong[0]] != found[0, wrong[0]]).nonzero()[0])
        raise StateError(
            f"parameter {list(named)[wrong[0]]!r} is not the same on rank {rank} as on rank 0: nothing is saved, "
            "the last checkpoint is intact. Was the model made from another seed there, or changed by a callback "
            "that looks at this rank's rows?"
        )


def rank_batches(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Return this rank's part of every batch of a Stream; any other batches are its part already."""
    ranks = current_group()
    if ranks.is_distributed and isinstance(batches, Stream) and batches.world == 1:
        return batches.share(ranks.rank, ranks.world)
    return batches


def broadcast_buffers(model: nn.Module) -> None:
    """Give a model the buffers that it has on rank 0: running means are of the rows that a rank has seen."""
    current_group().broadcast([each for each in model.buffers() if each.numel()], "taking over buffers")


def broadcast_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a model and its optimizer the state that they have on rank 0."""
    ranks = current_group()
    if not ranks.is_distributed:
        return
    values, tensors = flatten_state({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})
    shapes = {name: [NAMES[each.dtype], list(each.shape)] for name, each in tensors.items()}
    theirs = ranks.run_on_leader(lambda: {"values": values, "shapes": shapes}, "taking over a model")
    if not ranks.is_leader:
        shapes = theirs["shapes"]
        tensors = {name: torch.empty(shape, dtype=DTYPES[kind]) for name, (kind, shape) in shapes.items()}
    moved = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    ranks.broadcast(list(moved.values()), "taking over a model")
    if not ranks.is_leader:
        state = restore_state(theirs["values"], moved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
