"""settle: end the descent of a search here; who is dead stays dead, and the others settle."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lpfs.errors import StateError
from lpfs.gates.module import Gates
from lpfs.gates.steer import remember, set_penalty


@torch.no_grad()
def settle(gates: Gates, x: Tensor | None = None) -> None:
    """Freeze the dead set of a search for an unknown number of fields, in place.

    Args:
        gates: whose optimizer was made with ``keep=``; from now on that is the number alive.
        x: an earlier x (N,) to go back to first; its dead set is the one that is frozen.

    """
    prox = gates._optimizer()
    if gates.keep is None or prox is None:
        raise StateError("settle is for a search with keep=: make the optimizer of these gates so")
    if x is not None:
        gates.x.copy_(x)
        velocity = prox.state[gates.x].get("momentum_buffer")
        if velocity is not None:
            velocity.zero_()
    alive = int((gates.x != 0).sum())
    gates.keep = replace(gates.keep, keep=alive)
    gates.dead.copy_(gates.x == 0)
    gates.control[2] = 1.0
    remember(gates)
    set_penalty(gates, prox, float(gates.control[0]), True)
