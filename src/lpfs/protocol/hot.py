"""Hot start: go on from the pruned model instead of training the kept fields from scratch."""

from __future__ import annotations

import copy

import torch

from lpfs.gates.prune import Pruned
from lpfs.models.base import Model
from lpfs.pipeline.stages import Trained, Watch, Work, anew, judge, train

BY_HEART = 0.1  # AUC by which a model is better on the rows it searched on than on rows that it never saw
SHRUNK = 0.3  # what is left of the weights of such a model; the rest is drawn anew …
HASTE = 2.0  # … and learns at so many times the rate: it has a quarter of the steps
LOOKED = 50_000  # rows of the search period to judge that on


def hot_start(work: Work, pruned: Pruned) -> tuple[Model, Watch]:
    """Go on with a copy of the pruned model for a quarter of the steps of a training from scratch; watch it.

    Its optimizer goes on too. The best state on the validation rows is left, the one it began with among them, so
    that it is never worse there than the pruned model. Rows that nothing orders are all trained on, else those of
    the search period, the latest.

    A search that goes through few rows again and again leaves a model that knows them by heart, and training
    further does not make it forget. Then its weights are shrunk towards a fresh start, and all training rows are
    trained on.
    """
    model, optimizer = copy.deepcopy((pruned.model, pruned.optimizer))
    assert isinstance(model, Model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    watch = Watch()
    seen, held = search_auc(work, model), judge(work, model, work.parts.valid).auc
    by_heart = work.recipe.shuffle and seen is not None and held is not None and seen - held > BY_HEART
    if by_heart:
        work.tell.say(
            f"the search knows its rows by heart: AUC {seen:.3f} there, {held:.3f} on held-out ones; "
            f"its weights are shrunk to {SHRUNK:g} before they go on"
        )
        model, optimizer = shrunk(work, model)
    part = work.parts.train if by_heart or work.parts.dealt else work.parts.search
    train(work, model, optimizer, part, work.recipe.hot, "hot_start", work.settings.seed, watch)
    if by_heart and held is not None:
        watch.shrunk = SHRUNK
        watch.seen[0] = (0, held)
        if watch.best[0] == 0:
            model = copy.deepcopy(pruned.model)
            assert isinstance(model, Model)
    return model, watch


def search_auc(work: Work, model: Model) -> float | None:
    """Return the AUC on rows that the search was trained on."""
    rows = work.parts.search.rows
    return judge(work, model, work.parts.search.part(max(0, rows - LOOKED), rows)).auc


def shrunk(work: Work, model: Model) -> Trained:
    r"""Draw the weights of a model back to a fresh start, in place; return it and a new optimizer, a faster one.

    .. math:: w \leftarrow s\,w + (1 - s)\,w_0

    Ash and Adams, On Warm-Starting Neural Network Training, 2020.
    """
    fresh = anew(work, model)
    with torch.no_grad():
        for mine, new in zip(model.parameters(), fresh.parameters(), strict=True):
            mine.lerp_(new, 1 - SHRUNK)
    optimizer = work.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= HASTE
    return model, optimizer
