"""What methods that rank have in common: the best K of a ranking are kept, or those that a method keeps itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lpfs.errors import InputError, SearchError
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection


def need_number(method: str, wish: Wish) -> None:
    """Refuse a wish that a ranking cannot answer."""
    if wish.keep is None:
        raise InputError(f"{method} ranks fields, it does not know how many to keep: say keep=K")


def need_number_or_penalty(method: str, wish: Wish) -> None:
    """Refuse a wish that a mask cannot answer."""
    if wish.keep is None and wish.penalty is None:
        raise InputError(f"{method} keeps what its penalty leaves, or the best K: say keep=K or penalty=λ")


def strength_of(wish: Wish, default: float) -> float:
    """Return λ: the penalty that is wished for, or the method's own."""
    return default if wish.penalty is None else wish.penalty


def cut(
    task: Task, method: str, scores: Mapping[str, float], own: Collection[str] | None, **made: Any
) -> Selection:
    """Return the K best, with how many the method would have kept; without a K those of its own."""
    if own is None:
        return ranked(task, method, scores, **made)
    if task.wish.keep is not None:
        return ranked(task, method, scores, own_count=len(own), **made)
    need_number_or_penalty(method, task.wish)
    chosen = {*own, *task.wish.must_keep}
    if not chosen:
        raise SearchError(f"{method} keeps no field at penalty={task.wish.penalty:g}; give less, or say keep=K")
    made = {"penalty": task.wish.penalty, "own_count": len(own), **made}
    return _selection(task, method, scores, chosen, **made)


def ranked(task: Task, method: str, scores: Mapping[str, float], **made: Any) -> Selection:
    """Return the selection of the K highest scores; fields that must be kept come first, ties keep their order."""
    wish = task.wish
    wish.check(list(scores))
    need_number(method, wish)
    assert wish.keep is not None
    chosen = top(scores, wish.keep, wish.must_keep)
    return _selection(task, method, scores, set(chosen), keep=wish.keep, **made)


def _selection(
    task: Task, method: str, scores: Mapping[str, float], chosen: Collection[str], **made: Any
) -> Selection:
    return Selection(
        kept=tuple(name for name in scores if name in chosen),
        dropped=tuple(name for name in scores if name not in chosen),
        gates={name: float(name in chosen) for name in scores},
        made={"method": method, "scores": dict(scores), "seed": task.seed, **made},
    )


def top(scores: Mapping[str, float], keep: int, must_keep: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the fields of the ``keep`` highest scores, in their own order.

    >>> top({"a": 0.1, "b": 0.3, "c": 0.2}, 2, must_keep=["a"])
    ('a', 'b')
    """
    order = sorted(scores, key=lambda name: (name not in must_keep, -scores[name]))
    chosen = set(order[:keep])
    return tuple(name for name in scores if name in chosen)
