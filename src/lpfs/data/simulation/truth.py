"""What is true of a simulated log: roles, effects, drift, and the best any model can do."""

from __future__ import annotations

from typing import Any

import numpy as np

from lpfs.data.simulation.values import Reals
from lpfs.data.simulate_world import BLOCK, World, sigmoid

BINS = 20_000  # of the logit, from -20 to 20


class Ceiling:
    """AUC and logloss of a model that knows the probability of every click, gathered day by day.

    AUC = Σ p(i)·(1 - p(j)) over rows i above j (ties count half), divided by Σ p · Σ (1 - p): no labels, so
    no luck. Logits are counted in bins of 0.002, so that memory does not grow with the rows.
    """

    def __init__(self, days: int) -> None:
        self._clicks = np.zeros((days, BINS))
        self._others = np.zeros((days, BINS))
        self._loss = np.zeros(days)

    def add(self, day: int, logit: Reals) -> None:
        """Count rows of a day, block by block so that sums do not depend on the chunks."""
        for start in range(0, len(logit), BLOCK):
            self._add(day, logit[start : start + BLOCK])

    def _add(self, day: int, logit: Reals) -> None:
        chance = sigmoid(logit)
        where = np.clip((logit + 20.0) * (BINS / 40.0), 0, BINS - 1).astype(np.int64)
        self._clicks[day] += np.bincount(where, chance, BINS)
        self._others[day] += np.bincount(where, 1.0 - chance, BINS)
        self._loss[day] += float((np.logaddexp(0.0, logit) - chance * logit).sum())

    def to_json(self) -> dict[str, Any]:
        """Return the ceiling over all rows and of each day."""
        rows = (self._clicks + self._others).sum(1)
        by_day = [auc(clicks, others) for clicks, others in zip(self._clicks, self._others, strict=True)]
        return {
            "auc": auc(self._clicks.sum(0), self._others.sum(0)),
            "logloss": float(self._loss.sum() / rows.sum()),
            "auc_by_day": by_day,
            "logloss_by_day": (self._loss / rows).tolist(),
            "click_rate_by_day": (self._clicks.sum(1) / rows).tolist(),
        }


def auc(clicks: Reals, others: Reals) -> float:
    """Return the AUC of scores counted in bins."""
    below = np.cumsum(others) - others / 2
    return float(clicks @ below / (clicks.sum() * others.sum()))


def truth(world: World, ceiling: Ceiling) -> dict[str, Any]:
    """Return what ``truth.json`` holds."""
    plan = world.plan
    fields = []
    for spec in plan.specs:
        term = spec.name if spec.leads else spec.partner
        related = [each.name for each in plan.specs if each.source == spec.name or spec.source == each.name]
        fields.append(
            {
                "name": spec.name,
                "kind": spec.kind,
                "group": spec.group,
                "role": spec.role,
                "true": spec.true,
                "effect": spec.effect,
                "copy_of": spec.source if spec.role == "copy" else None,
                "correlated_with": spec.source if spec.role == "correlated" else None,
                "pair_with": spec.partner,
                "related": related,
                "missing": spec.missing,
                "values": spec.values,
                "width": spec.width,
                "drift": spec.drift if spec.true else None,
                "strength_by_day": world.strength[str(term)] if spec.true else None,
            }
        )
    terms = list(world.weights)
    return {
        "preset": plan.preset,
        "seed": world.seed,
        "rows": plan.rows,
        "days": plan.days,
        "base_rate": plan.base_rate,
        "true": [spec.name for spec in plan.specs if spec.true],
        "fields": fields,
        "pairs": [
            {"fields": [spec.name, spec.partner], "effect": spec.effect}
            for spec in plan.specs
            if spec.role == "pair" and spec.leads
        ],
        "bayes": ceiling.to_json(),
        "tasks": {
            task.name: {
                "base_rate": task.base_rate,
                "needs_click": task.after,
                "weights": dict(zip(terms, world.task_weights[:, at].tolist(), strict=True)),
            }
            for at, task in enumerate(plan.tasks)
        },
        "plan": plan.to_json(),
    }
