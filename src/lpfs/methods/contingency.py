"""χ² and mutual information of each field and the label, from contingency tables of values and labels.

Numbers are binned at quantiles; a row with a bag is divided evenly over its ids; a field of several numbers has the
best score of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lpfs.methods.base import Count, MethodOptions
from lpfs.methods.sampling import Ints, Reals, SampledRanking, SampledRows
from lpfs.schema import Field, Schema

CONSTANT_SCORE = -1e9  # of a field with a single value, which cannot be tested


@dataclass(frozen=True)
class ChiSquaredOptions(MethodOptions):
    """Number of rows, and of bins for numbers."""

    rows: Count = 200_000
    bins: Count = 32


class ChiSquared(SampledRanking):
    r"""The χ² test of each field against the label: how unlikely it is that they are independent.

    .. math:: \chi^2 = \sum_{v,y} \frac{(n_{vy} - e_{vy})^2}{e_{vy}}, \qquad
              z = \frac{(\chi^2/k)^{1/3} - (1 - 2/9k)}{\sqrt{2/9k}}

    Pearson, 1900; Liu and Setiono, Chi2: Feature Selection and Discretization, 1995. χ² grows with the number of
    values, so fields are ranked by their significance: for k degrees of freedom z is normally distributed if a
    field is uninformative (Wilson and Hilferty 1931), and unlike a p-value it does not underflow. Fields are
    tested one at a time; the model is not trained.
    """

    Options = ChiSquaredOptions
    options: ChiSquaredOptions
    trial_options = ({"bins": 8}, {"bins": 128}, {"bins": 16}, {"bins": 64})

    def score_fields(self, rows: SampledRows, schema: Schema, seed: int) -> dict[str, float]:
        return {field.name: max(map(z_score, count_tables(rows, field, self.options.bins))) for field in schema}


@dataclass(frozen=True)
class MutualInformationOptions(ChiSquaredOptions):
    """Number of rows, of bins for numbers, and of shuffles of the labels."""

    shuffles: Count = 3


class MutualInformation(SampledRanking):
    r"""Mutual information of each field and the label.

    .. math:: \text{score}_n = I(v_n; y) - \overline{I(v_n; \pi y)}, \qquad
              I = \sum_{v,y} p_{vy} \ln \frac{p_{vy}}{p_v p_y}

    Cover and Thomas, Elements of Information Theory, 1991. The mean over a few shuffles π of the labels is
    subtracted: otherwise an uninformative field of many ids would rank above a weak field of few ids. Fields are
    scored one at a time, so fields that are informative only together are not found, and a copy of a field scores
    as high as the field. The model is not trained.
    """

    Options = MutualInformationOptions
    options: MutualInformationOptions
    trial_options = ({"bins": 8}, {"bins": 128}, {"shuffles": 10}, {"bins": 16})

    def score_fields(self, rows: SampledRows, schema: Schema, seed: int) -> dict[str, float]:
        random, count = np.random.default_rng(seed), self.options.shuffles
        shuffled = [replace(rows, labels=random.permutation(rows.labels)) for _ in range(count)]

        def information(rows: SampledRows, field: Field) -> float:
            return max(map(mutual_information, count_tables(rows, field, self.options.bins)))

        return {
            field.name: information(rows, field) - sum(information(other, field) for other in shuffled) / count
            for field in schema
        }


def count_tables(rows: SampledRows, field: Field, bins: int) -> list[Reals]:
    """Return the table of values and labels (V, 2) of a field; of a numeric one, a table for each of its numbers.

    Numbers are binned at quantiles; a missing number and an empty bag are values of their own.
    """
    if field.kind == "numeric":
        return [count_table(bin_numbers(column, bins), rows.labels) for column in rows.numbers[field.name].T]
    if field.kind == "multi":
        values, sizes = rows.bags[field.name]
        empty = np.flatnonzero(sizes == 0)
        owners = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), empty])
        ids = np.concatenate([values, np.full(len(empty), -1)])
        return [count_table(ids, rows.labels[owners], 1.0 / np.maximum(sizes, 1)[owners])]
    return [count_table(rows.ids[field.name], rows.labels)]


def count_table(values: Ints, labels: Reals, weights: Reals | None = None) -> Reals:
    """Return the weighted count of each value that occurs, with labels 0 and 1 (V, 2).

    >>> count_table(np.array([5, 5, 9]), np.array([0.0, 1.0, 1.0]))
    array([[1., 1.],
           [0., 1.]])
    """
    _, index = np.unique(values, return_inverse=True)
    weights = np.ones(len(values)) if weights is None else weights
    return np.stack([np.bincount(index, weights * (labels == label)) for label in (0, 1)], 1)


def bin_numbers(numbers: Reals, bins: int) -> Ints:
    """Return the quantile bin of each number (R,); -1 where it is missing.

    >>> bin_numbers(np.array([1.0, 2.0, 3.0, 4.0, np.nan]), 2)
    array([ 0,  0,  1,  1, -1])
    """
    present = numbers[~np.isnan(numbers)]
    edges = np.unique(np.quantile(present, np.arange(1, bins) / bins)) if len(present) else np.zeros(0)
    return np.where(np.isnan(numbers), -1, np.searchsorted(edges, numbers)).astype(np.int64)


def mutual_information(counts: Reals) -> float:
    r"""Return the mutual information :math:`\sum_{v,y} p_{vy} \ln (p_{vy} / p_v p_y)` of a table, in nats."""
    joint = counts / counts.sum()
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    occurs = joint > 0
    return float((joint[occurs] * np.log(joint[occurs] / independent[occurs])).sum())


def chi_squared(counts: Reals) -> float:
    r"""Return :math:`\chi^2 = \sum_{v,y} (n_{vy} - e_{vy})^2 / e_{vy}`, e the counts under independence."""
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / counts.sum()
    occurs = expected > 0
    return float(((counts - expected)[occurs] ** 2 / expected[occurs]).sum())


def degrees_of_freedom(counts: Reals) -> int:
    """Return the degrees of freedom of a table: (V - 1)(Y - 1), of values and labels that occur."""
    return (int((counts.sum(1) > 0).sum()) - 1) * (int((counts.sum(0) > 0).sum()) - 1)


def z_score(counts: Reals) -> float:
    """Return z of a table of values and labels (V, 2)."""
    degrees = degrees_of_freedom(counts)
    if degrees < 1:
        return CONSTANT_SCORE
    spread = 2 / (9 * degrees)
    return float(((chi_squared(counts) / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)
