"""LPFS and LPFS++ as the paper writes them, without what this package changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lpfs.gates.functions import GateFunction
from lpfs.gates.module import Rescale
from lpfs.gates.optimizer import Prox
from lpfs.gates.schedule import LR_RATIO, REFERENCE_STEPS, Decay, Schedule
from lpfs.methods.base import Positive, SearchTask
from lpfs.methods.lpfs import LPFSPlusPlus, LPFSPlusPlusOptions
from lpfs.schema import Selection

REFRESH_STEPS = 100  # between updates of the root mean square of the gates


@dataclass(frozen=True)
class LPFSPlusPlusPaperOptions(LPFSPlusPlusOptions):
    """The same options with the paper's values.

    ``final_epsilon``: at the end of a search, 1e-5 on Terabyte and 1e-4 on the industrial log, if ``schedule`` is
    ``scaled``: the paper's curves over the steps of the search. ``terabyte`` and ``industrial`` are its absolute ones,
    for searches of hundreds of thousands of steps.
    """

    rescale: Rescale = "off"
    prox: Prox | None = "l1"
    centre: bool = False
    judges: int = 0
    final_epsilon: Positive = 1e-5

    def for_steps(self, steps: int) -> LPFSPlusPlusPaperOptions:
        """Return the options with the schedule of a search of this many steps."""
        if self.schedule != "scaled":
            return self
        return replace(self, schedule=paper_schedule(self.function, steps, self.final_epsilon, self.lr))


def paper_schedule(gate: GateFunction, steps: int, final_epsilon: float, lr: float | None = None) -> Schedule:
    """Return the paper's exponential curves over a search of this many steps.

    ε falls from its start to ``final_epsilon``. η falls to 5 % of its start, 5e-4 of .01; its start is the paper's
    value times 10,000/steps, so that the distance that a gate can travel does not depend on the length of the search.
    An ``lr`` that is given is used as it is.
    """
    final = min(gate.epsilon, final_epsilon) if gate.square else min(gate.epsilon, final_epsilon**0.5)
    start = gate.lr * REFERENCE_STEPS / steps if lr is None else lr
    return Schedule(
        Decay(gate.epsilon, (final / gate.epsilon) ** (1 / steps), floor=final),
        Decay(start, LR_RATIO ** (1 / steps), floor=start * LR_RATIO),
        REFRESH_STEPS,
    )


class LPFSPlusPlusPaper(LPFSPlusPlus):
    """LPFS++ as the paper writes it.

    Weights and gates are trained together on the search rows, read once, at the learning rate of pretraining; the
    proximal step is symmetric, so that a gate can change its sign; embeddings are not centered; gates are not rescaled
    by ε (``rescale="rms"`` is the paper's factor for models of which only a part is gated); ε ends at 1e-5. What the
    paper does not say is that of `lpfs++`: λ is controlled until K gates are left, where the authors try values of λ.
    """

    Options = LPFSPlusPlusPaperOptions
    options: LPFSPlusPlusPaperOptions
    single_pass = True

    def search(self, task: SearchTask) -> Selection:
        """Search with the schedule of this many steps."""
        method = type(self)(self.name, self.options.for_steps(task.steps))
        selection = super(LPFSPlusPlusPaper, method).search(task)
        return replace(selection, made={**selection.made, "method": self.name})


@dataclass(frozen=True)
class LPFSPaperOptions(LPFSPlusPlusPaperOptions):
    """The same options, with the gate function of LPFS."""

    gate: str = "lpfs"


class LPFSPaper(LPFSPlusPlusPaper):
    """LPFS as the paper writes it: the same with gates that have no odd term."""

    Options = LPFSPaperOptions
    trial_options = ({"lr": 0.01}, {"lr": 0.0025}, {"epsilon": 0.2}, {"epsilon": 0.05})
