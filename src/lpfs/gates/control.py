"""Control of λ: how ``keep=K`` ends with exactly K gates alive, and the rest exactly zero.

λ decides who survives: a field holds where the pull of its gradient balances λ, and the weakest gives way
first. So K is reached by moving λ, never by cutting a ranking. In the search's own time u = step / steps:

- λ starts where a gate without any gradient would need ``travel`` times the way it can go, Ση, to slide from 1 to
  0: with 1.0 it would get there at the very end. All gates sink together at first, the logits shrink, and each
  gate feels how much its field is missed: by the time the first ones arrive at zero they are in order.
- From ``begin`` to ``end`` a target falls from N to K, quadratically: fast while there is much to drop. While more
  gates are alive than the target says, λ grows, in proportion to the excess, slowly at first (``least``, in the
  end ``most``): a gate that has begun to sink takes its time, and a λ that grows meanwhile takes others along.
  So what is counted is how many will be alive ``ahead`` from now: Σ|g| over the largest |g|, and its fall since
  ``lag`` ago drawn out. Towards ``end`` that gives way to how many are alive.
- Who would die in a step that leaves fewer than K alive is held where it was, at rest, and λ is cut, but not below
  where it began: nobody is lost by accident, ties part, and what can't be revived needn't be. A λ that fell
  further would let chance revive the dead, and take the place of those who are needed. From ``hurry`` on only as
  many are held as are missing, who was farthest from zero first.
- From ``freeze`` on, once exactly K are alive and clear of zero, the dead set is frozen and λ fades away, so that
  the survivors settle while ε falls to its end, and one near zero is led away from it. From ``hurry`` on λ grows
  faster and faster while too many are alive, and the freeze no longer waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from lpfs.errors import InputError

# A steeper way down, for searches that pass K on their way or are short: a high first λ, no slow beginning, and
# nothing but who is alive counts.
STEEP = {"travel": 0.4, "begin": 0.2, "least": 4.0, "ahead": 0.0}


@dataclass(frozen=True)
class Keep:
    """Settings of the control of λ; docs/method.md says how the defaults were found."""

    keep: int
    travel: float = 1.0
    begin: float = 0.1
    end: float = 0.5
    freeze: float = 0.75
    hurry: float = 0.85
    gain: float = 10.0
    width: float = 0.2
    least: float = 1.0
    most: float = 4.0
    cut: float = 0.7
    fade: float = 40.0
    clear: float = 0.2
    ahead: float = 0.2
    lag: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most:
            raise InputError(f"least must be above 0 and at most most, found {self.least} and {self.most}")
        if self.ahead < 0 or self.lag <= 0:
            raise InputError(f"ahead must be >= 0 and lag > 0, found {self.ahead} and {self.lag}")

    def first_penalty(self, total_lr: float) -> float:
        """Return the λ that a search starts with."""
        return 1 / (self.travel * total_lr)

    def target(self, u: float, total: int) -> float:
        """Return how many of ``total`` gates should be alive at time u in [0, 1].

        >>> [Keep(15).target(u, 60) for u in (0.0, 0.1, 0.5, 1.0)]
        [60.0, 60.0, 15.0, 15.0]
        """
        left = self.left(u)
        return self.keep + (total - self.keep) * left * left

    def left(self, u: float) -> float:
        """Return which part of the time from ``begin`` to ``end`` is still to come."""
        return min(1.0, max(0.0, (self.end - u) / (self.end - self.begin)))

    def limit(self, u: float) -> float:
        """Return the largest growth, over ``gain``: nothing before ``begin``, then slow, then faster.

        >>> [Keep(15).limit(u) for u in (0.0, 0.1, 0.5)]
        [0.0, 1.0, 4.0]
        """
        gone = 1 - self.left(u)
        return self.least + (self.most - self.least) * gone * gone if u >= self.begin else 0.0

    def expected(self, u: float, alive: int, open_: float, smooth: float) -> float:
        """Return how many will be alive in a while, from how open the gates are now and were of late.

        >>> keep = Keep(15)
        >>> keep.expected(0.1, 60, 50.0, 52.0), keep.expected(0.5, 60, 50.0, 52.0)
        (42.0, 60.0)
        """
        counted = self.counted(u)
        return counted * alive + (1 - counted) * (open_ + self.ahead / self.lag * (open_ - smooth))

    def counted(self, u: float) -> float:
        """Return the weight of how many are alive, next to what is expected; all of it if nobody looks ahead."""
        return (1 - self.left(u)) ** 4 if self.ahead and u < self.hurry else 1.0

    def growth(self, u: float, total: int, alive: float) -> float:
        """Return d(log λ)/du while this many are alive, or expected: 0 while there is no excess."""
        excess = alive - self.target(u, total)
        if u < self.begin or excess <= 0:
            return 0.0
        if u >= self.hurry:
            return self.gain * (1 + 100 * (u - self.hurry) / (1 - self.hurry))
        width = max(1.0, self.width * min(self.target(u, total), total - self.keep))
        return self.gain * min(self.limit(u), excess / width)
