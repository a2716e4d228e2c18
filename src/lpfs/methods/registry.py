"""Every method by name; adding one is a file here and a line in METHODS."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpfs.errors import InputError
from lpfs.schema import Selection, known_keys

if TYPE_CHECKING:  # so that the command line can list the methods without torch
    from lpfs.methods.task import Task
    from lpfs.methods.wish import Wish
    from lpfs.models.base import Model


@dataclass(frozen=True)
class Entry:
    """Where a method is, what it does in a line, and who proposed it.

    ``preset`` are options it starts from; ``tried`` are those that a tuning tries after its defaults, in order.
    ``each_keep`` says that another K is another search; else one gives scores that can be cut at every K.
    ``shared`` says that several processes can share its search, each with a part of every batch.
    ``captured`` says that a step of its search can be captured as a CUDA graph and replayed.
    ``together`` says that it learns from all training rows of a small table, whose rows come again: it has no
    gates or masks beside the weights that could learn from rows of their own.
    """

    module: str
    summary: str
    reference: str
    preset: tuple[tuple[str, Any], ...] = ()
    tried: tuple[Mapping[str, Any], ...] = ()
    each_keep: bool = False
    shared: bool = False
    captured: bool = False
    together: bool = False


PAPER = "Guo et al., LPFS: Learnable Polarizing Feature Selection for Click-Through Rate Prediction, 2022"
METHODS: dict[str, Entry] = {
    "lpfs++": Entry(
        "lpfs.methods.lpfs",
        "gates x²/(x²+ε) with an odd term, so that a dead field can come back",
        PAPER,
        tried=({"alpha": 30.0}, {"lr": 0.02}, {"lr": 0.005}, {"alpha": 100.0}),
        each_keep=True,
        shared=True,
        captured=True,
    ),
    "lpfs": Entry(
        "lpfs.methods.lpfs",
        "gates x²/(x²+ε)",
        PAPER,
        (("gate", "lpfs"),),
        ({"lr": 0.01}, {"lr": 0.0025}, {"epsilon": 0.2}, {"epsilon": 0.05}),
        each_keep=True,
        shared=True,
        captured=True,
    ),
    "permutation": Entry(
        "lpfs.methods.permutation",
        "AUC lost on held-out rows when a field is shuffled; the best K of that ranking",
        "Fisher et al., All Models are Wrong, but Many are Useful, 2019",
        tried=({"repeats": 1}, {"repeats": 3}, {"repeats": 10}, {"repeats": 30}),
    ),
    "shufflegate": Entry(
        "lpfs.methods.shufflegate",
        "a gate between a field and its values from other rows, learnt on held-out rows",
        "ShuffleGate: An Efficient and Self-Polarizing Feature Selection Method, 2025",
    ),
    "autofield": Entry(
        "lpfs.methods.autofield",
        "a keep probability a field, drawn by Gumbel-softmax, learnt on held-out rows",
        "Wang et al., AutoField: Automating Feature Selection in Deep Recommender Systems, 2022",
        tried=({"lr": 0.003}, {"lr": 0.01}, {"lr": 0.0003}, {"every": 1}),
    ),
    "adafs": Entry(
        "lpfs.methods.adafs",
        "a controller weighs the fields of every row; the mean weights rank them",
        "Lin et al., AdaFS: Adaptive Feature Selection in Deep Recommender System, 2022",
        tried=({"lr": 0.003}, {"lr": 0.01}, {"lr": 0.0003}, {"hidden": 16}),
    ),
    "optfs": Entry(
        "lpfs.methods.optfs",
        "a gate for every value of every field; the share of rows that is kept ranks them",
        "Lyu et al., Optimizing Feature Set for Click-Through Rate Prediction, 2023",
        tried=({"lr": 0.03}, {"lr": 0.003}, {"sharpness": 200.0}, {"start": 1.0}),
    ),
    "fscd": Entry(
        "lpfs.methods.fscd",
        "keep variables by concrete draws, under a penalty that knows what fields cost",
        "Ma et al., Towards a Better Tradeoff between Effectiveness and Efficiency in Pre-Ranking, 2021",
    ),
    "stg": Entry(
        "lpfs.methods.stg",
        "stochastic gates, a clipped Gaussian a field",
        "Yamada et al., Feature Selection using Stochastic Gates, 2020",
    ),
    "hard_concrete": Entry(
        "lpfs.methods.hard_concrete",
        "stretched and clipped concrete gates under an expected ℓ0 penalty",
        "Louizos et al., Learning Sparse Neural Networks through L0 Regularization, 2018",
    ),
    "variational_dropout": Entry(
        "lpfs.methods.variational_dropout",
        "how likely each field may be dropped, as EasyRec learns it",
        "Chang et al., Dropout Feature Ranking for Deep Learning Models, 2017",
    ),
    "cold_se": Entry(
        "lpfs.methods.cold_se",
        "a squeeze-and-excitation block weighs the fields of every row; the mean weights rank them",
        "Wang et al., COLD: Towards the Next Generation of Pre-Ranking System, 2020",
        tried=({"lr": 0.003}, {"lr": 0.01}, {"lr": 0.0003}, {"lr": 0.03}),
    ),
    "group_lasso": Entry(
        "lpfs.methods.group_lasso",
        "proximal group LASSO on the columns of the first layer",
        "Yuan and Lin, Model Selection and Estimation in Regression with Grouped Variables, 2006",
        each_keep=True,
        together=True,
    ),
    "umec": Entry(
        "lpfs.methods.umec",
        "the smallest groups of the first layer are squeezed out under a budget",
        "Shen et al., UMEC: Unified Model and Embedding Compression for Efficient Recommendation Systems, 2021",
        tried=({"y_rate": 30.0}, {"y_rate": 300.0}, {"s_rate": 3.0}, {"s_rate": 30.0}),
        each_keep=True,
        together=True,
    ),
    "lassonet": Entry(
        "lpfs.methods.lassonet",
        "skip weights that bound the first layer, along a path of λ",
        "Lemhadri et al., LassoNet: A Neural Network with Feature Sparsity, 2021",
        tried=({"M": 3.0}, {"M": 30.0}, {"M": 1.0}, {"M": 100.0}),
        each_keep=True,
        together=True,
    ),
    "autofis": Entry(
        "lpfs.methods.autofis",
        "multipliers on crosses (backbone dlrm_cross), moved by an optimizer that makes zeros",
        "Liu et al., AutoFIS: Automatic Feature Interaction Selection in Factorization Models, 2020",
        tried=({"lr": 0.03}, {"lr": 0.3}, {"mu": 0.6}, {"mu": 1.0}),
    ),
    "shark": Entry(
        "lpfs.methods.shark",
        "change of the loss, to first order, if an embedding were its mean",
        "Zhang et al., SHARK: A Lightweight Model Compression Approach for Large-scale Recommender Systems, 2023",
        tried=({"rows": 50_000}, {"rows": 20_000}, {"rows": 10_000}, {"rows": 5_000}),
    ),
    "sfs": Entry(
        "lpfs.methods.sfs",
        "slope of the loss by a mask on each field, over a hundred batches",
        "Wang et al., Single-shot Feature Selection for Multi-task Recommendations, 2023",
        tried=({"batches": 300}, {"batches": 30}, {"batches": 1_000}, {"batches": 10}),
    ),
    "gbdt": Entry(
        "lpfs.methods.gbdt",
        "gain of the splits of gradient boosted trees (scikit-learn)",
        "Friedman, Greedy Function Approximation: A Gradient Boosting Machine, 2001",
        tried=({"depth": 5}, {"trees": 300}, {"lr": 0.03}, {"depth": 2}),
        together=True,
    ),
    "random_forest": Entry(
        "lpfs.methods.random_forest",
        "impurity that the splits of a random forest remove (scikit-learn)",
        "Breiman, Random Forests, 2001",
        tried=({"leaf": 5}, {"leaf": 80}, {"trees": 300}, {"leaf": 200}),
        together=True,
    ),
    "lasso_logistic": Entry(
        "lpfs.methods.lasso_logistic",
        "what a field adds to the logit of a sparse logistic regression on one-hot ids (scikit-learn)",
        "Tibshirani, Regression Shrinkage and Selection via the Lasso, 1996",
        together=True,
    ),
    "mutual_information": Entry(
        "lpfs.methods.mutual_information",
        "mutual information of a field and the label, field by field",
        "Cover and Thomas, Elements of Information Theory, 1991",
        tried=({"bins": 8}, {"bins": 128}, {"shuffles": 10}, {"bins": 16}),
        together=True,
    ),
    "chi2": Entry(
        "lpfs.methods.chi2",
        "significance of the χ² test of a field against the label, field by field",
        "Liu and Setiono, Chi2: Feature Selection and Discretization of Numeric Attributes, 1995",
        tried=({"bins": 8}, {"bins": 128}, {"bins": 16}, {"bins": 64}),
        together=True,
    ),
    "random": Entry("lpfs.methods.random_fields", "K fields drawn at random: the floor", "-"),
    "all": Entry(
        "lpfs.methods.all_fields", "every field, whatever is asked for: nothing is selected", "-", each_keep=True
    ),
    "oracle": Entry("lpfs.methods.oracle", "the true fields of a simulated log, the strongest first", "-"),
}
FACTORS = (0.3, 3.0, 0.1, 10.0)  # on λ of a method that does not say what to try
LAMBDAS = ("penalty", "strength")  # options that are a λ


def entry_of(name: str) -> Entry:
    """Return what is known about a method."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"there is no method {name!r}{hint}; known are {', '.join(METHODS)}")
    return METHODS[name]


def options_of(name: str, options: Mapping[str, Any]) -> Any:
    """Return the settings of a method, checked, with those that its name stands for."""
    entry = entry_of(name)
    kind = importlib.import_module(entry.module).Options
    return kind(**known_keys(kind, {**dict(entry.preset), **options}))


def each_keep(name: str, options: Mapping[str, Any]) -> bool:
    """Return whether another K is another search; else one gives scores that can be cut at every K."""
    return entry_of(name).each_keep or bool(getattr(options_of(name, options), "each_keep", False))


def settings_to_try(name: str, count: int, given: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return at most ``count`` different settings for a tuning, those given (or the defaults) first.

    They are those of ``Entry.tried``; for a method that names none but has a λ among its options, factors on it.

    >>> settings_to_try("permutation", 3)
    [{}, {'repeats': 1}, {'repeats': 3}]
    >>> settings_to_try("permutation", 3, {"repeats": 1})
    [{'repeats': 1}, {'repeats': 3}, {'repeats': 10}]
    """
    own = dict(given or {})
    tried, options = entry_of(name).tried, options_of(name, own)
    for each in LAMBDAS:
        value = getattr(options, each, None)
        if not tried and isinstance(value, float) and value > 0:
            tried = tuple({each: value * factor} for factor in FACTORS)
    found, seen = [own], [options]
    for changed in tried:
        settings = {**own, **changed}
        if options_of(name, settings) not in seen:
            found.append(settings)
            seen.append(options_of(name, settings))
    return found[: max(1, count)]


def check_method(name: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown method or option, or a value that is none, before anything runs."""
    options_of(name, options)


def check_search(
    name: str,
    options: Mapping[str, Any],
    wish: Wish,
    names: Sequence[str],
    steps: int,
    model: Model | None = None,
) -> None:
    """Refuse a search of these fields, in this model, that could not be begun, before anything is trained."""
    wish.check(names)
    module = importlib.import_module(entry_of(name).module)
    module.check(options_of(name, options), wish, names, steps)
    if model is not None and hasattr(module, "check_model"):
        module.check_model(model)


def method_named(name: str) -> Callable[[Task], Selection]:
    """Return the search of a method."""
    entry = entry_of(name)

    def search(task: Task) -> Selection:
        task.options = {**dict(entry.preset), **task.options}
        found: Selection = importlib.import_module(entry.module).search(task)
        return found

    return search
