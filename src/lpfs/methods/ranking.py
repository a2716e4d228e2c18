"""What methods that only rank have in common: the best K of a ranking are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lpfs.errors import InputError
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection


def need_number(method: str, wish: Wish) -> None:
    """Refuse a wish that a ranking cannot answer."""
    if wish.keep is None:
        raise InputError(f"{method} ranks fields, it does not know how many to keep: say keep=K")


def ranked(task: Task, method: str, scores: Mapping[str, float], **made: Any) -> Selection:
    """Return the selection of the K highest scores; fields that must be kept come first, ties keep their order."""
    wish = task.wish
    wish.check(list(scores))
    need_number(method, wish)
    assert wish.keep is not None
    kept = top(scores, wish.keep, wish.must_keep)
    chosen = set(kept)
    return Selection(
        kept=kept,
        dropped=tuple(name for name in scores if name not in chosen),
        gates={name: float(name in chosen) for name in scores},
        made={"method": method, "scores": dict(scores), "keep": wish.keep, "seed": task.seed, **made},
    )


def top(scores: Mapping[str, float], keep: int, must_keep: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the fields of the ``keep`` highest scores, in their own order.

    >>> top({"a": 0.1, "b": 0.3, "c": 0.2}, 2, must_keep=["a"])
    ('a', 'b')
    """
    order = sorted(scores, key=lambda name: (name not in must_keep, -scores[name]))
    chosen = set(order[:keep])
    return tuple(name for name in scores if name in chosen)
