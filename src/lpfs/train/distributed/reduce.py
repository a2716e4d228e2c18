r"""Sharing between ranks: gradients, batches of a stream, and the state of a model.

.. math:: \nabla L = \sum_r \frac{B_r}{B} \nabla L_r, \qquad B = \sum_r B_r

The gradients of the ranks are averaged, weighted by their numbers of rows B_r. Dense gradients are summed as one flat
tensor. Gradients by rows never get the size of a table: every rank receives the rows of all ranks and sums them in the
order of the ranks, which gives the same bits everywhere. (DistributedDataParallel supports dense gradients only.)

A step needs three messages: the row counts, the dense gradients with the loss, and the gradients by rows.
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
from lpfs.train.tensor_io import DTYPE_NAMES, DTYPES, as_bytes, flatten_state, restore_state

COUNTS, DENSE, ROWS = "counting rows", "summing gradients", "gathering gradients by rows"  # purposes


def reduce_grads(ranks: RankGroup, parameters: Sequence[nn.Parameter], rows: int, loss: Tensor) -> tuple[int, Tensor]:
    """Replace the gradients of this rank by those of all ranks; return the total number of rows and the loss.

    ``parameters`` has the same order on every rank; a rank with 0 rows has no gradients.
    """
    tables = [weight for weight in parameters if isinstance(weight, RowParameter)]
    others = [weight for weight in parameters if not isinstance(weight, RowParameter) and weight.requires_grad]
    row_grads = [merged_row_grad(weight) for weight in tables]
    row_counts = [0 if grad is None else len(grad.rows) for grad in row_grads]
    has_grad = [int(weight.grad is not None) for weight in others]
    has_sparse = [int(weight.grad is not None and weight.grad.is_sparse) for weight in others]
    counts = torch.zeros(ranks.world, 1 + 2 * len(others) + len(tables), dtype=torch.int64)
    counts[ranks.rank] = torch.tensor([rows, *has_grad, *has_sparse, *row_counts])
    ranks.all_reduce(counts, COUNTS)
    batch_rows, grads, sparse_grads, table_rows = counts.split([1, len(others), len(others), len(tables)], 1)
    total = int(batch_rows.sum())
    share = rows / max(1, total)
    flags = list(zip(others, grads.any(0).tolist(), sparse_grads.any(0).tolist(), strict=True))
    loss = all_reduce_dense(ranks, [weight for weight, grad, sparse in flags if grad and not sparse], share, loss)
    gather_rows(ranks, tables, row_grads, table_rows, share)
    for weight, _, sparse in flags:
        if sparse:
            weight.grad = all_reduce_sparse(ranks, weight, weight.grad, share)
    return total, loss


def all_reduce_dense(ranks: RankGroup, parameters: Sequence[nn.Parameter], share: float, loss: Tensor) -> Tensor:
    """Sum the gradients of these parameters over the ranks, in place; return the summed loss, sent with them."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter.grad)
    loss_group = (loss.dtype, loss.device)
    groups.setdefault(loss_group, []).append(loss.detach().clone())
    for grads in groups.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        ranks.all_reduce(flat.mul_(share), DENSE)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
    return groups[loss_group][-1]


def merged_row_grad(weight: RowParameter) -> RowGrad | None:
    """Return the gradient by rows of a table in one piece; None without a gradient."""
    pieces = merged_row_grads(weight)
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    return RowGrad(torch.cat([piece.rows for piece in pieces]), torch.cat([piece.values for piece in pieces]))


def gather_rows(
    ranks: RankGroup, tables: Sequence[RowParameter], row_grads: Sequence[RowGrad | None], counts: Tensor, share: float
) -> None:
    """Replace the gradients by rows of the tables by their sums over the ranks; ``counts`` is (W, tables).

    Rows and values of all tables are sent as the bytes of one tensor.
    """
    if not tables or not int(counts.sum()):
        return
    widths = [weight.shape[1] * weight.element_size() for weight in tables]  # bytes per row
    parts = [torch.empty(0, dtype=torch.uint8, device=tables[0].device)]
    for weight, grad in zip(tables, row_grads, strict=True):
        if grad is not None:
            parts += [as_bytes(grad.rows.long()), as_bytes(grad.values.to(weight.dtype) * share)]
    sizes = (counts * (8 + torch.tensor(widths))).sum(1).tolist()
    received = ranks.all_gather(torch.cat(parts), sizes, ROWS)
    for number, (weight, width) in enumerate(zip(tables, widths, strict=True)):
        pieces = []
        for rank, count in enumerate(counts[:, number].tolist()):
            if count:
                rows, values, received[rank] = received[rank].tensor_split([8 * count, (8 + width) * count])
                values = values.clone().view(weight.dtype).view(count, -1)
                pieces.append(RowGrad(rows.clone().view(torch.int64), values))
        weight.row_grads[:] = [sum_pieces(weight, pieces)] if pieces else []


def all_reduce_sparse(ranks: RankGroup, weight: nn.Parameter, grad: Tensor | None, share: float) -> Tensor:
    """Return the sum over the ranks of the sparse gradient of an ``nn.Embedding(sparse=True)``."""
    if grad is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=weight.device)
        grad = torch.sparse_coo_tensor(indices, weight.new_empty(0, *weight.shape[1:]), weight.shape)
    grad = grad.coalesce()
    rows = ranks.concat(grad.indices().t().contiguous(), ROWS)
    values = ranks.concat((grad.values() * share).flatten(1), ROWS).view(-1, *weight.shape[1:])
    return torch.sparse_coo_tensor(rows.t(), values, weight.shape).coalesce()


def weighted_mean(ranks: RankGroup, tensor: Tensor, rows: int, purpose: str) -> Tensor:
    """Return the mean of a tensor over the ranks, weighted by their numbers of rows."""
    if not ranks.is_distributed:
        return tensor
    sums = torch.cat([tensor.detach().flatten().double() * rows, tensor.new_tensor([rows], dtype=torch.float64)])
    ranks.all_reduce(sums, purpose)
    return (sums[:-1] / sums[-1]).to(tensor.dtype).view_as(tensor)


def check_parameters_equal(ranks: RankGroup, model: nn.Module) -> None:
    """Raise StateError if a parameter differs between ranks; compares the sums of its bits as integers."""
    if not ranks.is_distributed:
        return
    named = dict(model.named_parameters())
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size
    bits = [weight.detach().contiguous().view(integers[weight.element_size()]) for weight in named.values()]
    sums = [weight.sum(dtype=torch.int64).cpu() for weight in bits]
    if not sums:
        return
    all_sums = ranks.concat(torch.stack(sums)[None], "comparing parameters")  # (ranks, parameters)
    different = (all_sums != all_sums[:1]).t().nonzero().tolist()  # pairs of parameter and rank
    if different:
        first, rank = different[0]
        raise StateError(
            f"parameter {list(named)[first]!r} differs between rank {rank} and rank 0; the last checkpoint is "
            "intact. Create the model from the same seed on all ranks, and check callbacks that depend on the rows"
        )


def rank_batches(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Return this rank's part of every batch of a Stream; other batches are returned unchanged."""
    ranks = current_group()
    if ranks.is_distributed and isinstance(batches, Stream) and batches.world == 1:
        return batches.share(ranks.rank, ranks.world)
    return batches


def broadcast_buffers(model: nn.Module) -> None:
    """Overwrite the buffers of a model by those of rank 0; running means differ between ranks."""
    current_group().broadcast([buffer for buffer in model.buffers() if buffer.numel()], "broadcasting buffers")


def broadcast_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Overwrite the state of a model and its optimizer by that of rank 0."""
    ranks = current_group()
    if not ranks.is_distributed:
        return
    values, tensors = flatten_state({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})
    shapes = {name: [DTYPE_NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}
    leader = ranks.run_on_leader(lambda: {"values": values, "shapes": shapes}, "broadcasting a model")
    if not ranks.is_leader:
        tensors = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in leader["shapes"].items()}
    received = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    ranks.broadcast(list(received.values()), "broadcasting a model")
    if not ranks.is_leader:
        state = restore_state(leader["values"], received)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
