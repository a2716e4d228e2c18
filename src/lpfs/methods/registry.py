"""Every method by name; adding one is a class and a line in METHODS. This module does not import torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpfs._validation import check_keys, check_name
from lpfs.errors import InputError

if TYPE_CHECKING:
    from lpfs.methods.base import Method


@dataclass(frozen=True)
class MethodEntry:
    """Registration of a method: what can be said of it without importing it.

    Args:
        path: module and class of the :class:`~lpfs.methods.base.Method`, ``"package.module:Class"``.
        summary: one line on what it does.
        reference: the paper that proposed it; "-" if there is none.
    """

    path: str
    summary: str
    reference: str


PAPER = "Guo et al., LPFS: Learnable Polarizing Feature Selection for Click-Through Rate Prediction, 2022"
METHODS: dict[str, MethodEntry] = {
    "lpfs++": MethodEntry(
        "lpfs.methods.lpfs:LPFSPlusPlus",
        "gates x²/(x²+ε) with an odd term, so that a zeroed gate can become non-zero again",
        PAPER,
    ),
    "lpfs": MethodEntry("lpfs.methods.lpfs:LPFS", "gates x²/(x²+ε)", PAPER),
    "lpfs++_paper": MethodEntry(
        "lpfs.methods.lpfs_paper:LPFSPlusPlusPaper",
        "lpfs++ as the paper writes it: one pass, gates on the rows of the weights, no centering",
        PAPER,
    ),
    "lpfs_paper": MethodEntry("lpfs.methods.lpfs_paper:LPFSPaper", "lpfs as the paper writes it", PAPER),
    "permutation": MethodEntry(
        "lpfs.methods.permutation:Permutation",
        "AUC lost on held-out rows when a field is shuffled; the best K of that ranking",
        "Fisher et al., All Models are Wrong, but Many are Useful, 2019",
    ),
    "shufflegate": MethodEntry(
        "lpfs.methods.shufflegate:ShuffleGateMethod",
        "a gate between a field and its values from other rows, trained on held-out rows",
        "ShuffleGate: An Efficient and Self-Polarizing Feature Selection Method, 2025",
    ),
    "leap": MethodEntry(
        "lpfs.methods.leap:LeAPMethod",
        "ShuffleGate with a penalty weighted by how much a shuffle changes a field (LeAP-like)",
        "LeAP, 2026 (arXiv 2606.01111); the adaptive penalty is not public",
    ),
    "fairfs": MethodEntry(
        "lpfs.methods.fairfs:FairFS",
        "attributions from a row to its mean embedding, of a network trained to keep them small",
        "FairFS, 2026 (arXiv 2602.20001)",
    ),
    "autofield": MethodEntry(
        "lpfs.methods.stochastic_gates:AutoFieldMethod",
        "a keep probability per field, sampled by Gumbel-softmax, trained on held-out rows",
        "Wang et al., AutoField: Automating Feature Selection in Deep Recommender Systems, 2022",
    ),
    "adafs": MethodEntry(
        "lpfs.methods.row_weights:AdaFSMethod",
        "a controller weights the fields of every row; the mean weights rank them",
        "Lin et al., AdaFS: Adaptive Feature Selection in Deep Recommender System, 2022",
    ),
    "optfs": MethodEntry(
        "lpfs.methods.optfs:OptFSMethod",
        "a gate for every value of every field; the share of rows with an open gate ranks the fields",
        "Lyu et al., Optimizing Feature Set for Click-Through Rate Prediction, 2023",
    ),
    "fscd": MethodEntry(
        "lpfs.methods.stochastic_gates:FSCDMethod",
        "keep variables sampled from a concrete distribution, penalized by the costs of the fields",
        "Ma et al., Towards a Better Tradeoff between Effectiveness and Efficiency in Pre-Ranking, 2021",
    ),
    "stg": MethodEntry(
        "lpfs.methods.stochastic_gates:STGMethod",
        "stochastic gates, a clipped Gaussian per field",
        "Yamada et al., Feature Selection using Stochastic Gates, 2020",
    ),
    "hard_concrete": MethodEntry(
        "lpfs.methods.stochastic_gates:HardConcreteMethod",
        "stretched and clipped concrete gates under an expected ℓ0 penalty",
        "Louizos et al., Learning Sparse Neural Networks through L0 Regularization, 2018",
    ),
    "variational_dropout": MethodEntry(
        "lpfs.methods.stochastic_gates:VariationalDropoutMethod",
        "a learned dropout probability per field, as in EasyRec",
        "Chang et al., Dropout Feature Ranking for Deep Learning Models, 2017",
    ),
    "cold_se": MethodEntry(
        "lpfs.methods.row_weights:ColdSEMethod",
        "a squeeze-and-excitation block weights the fields of every row; the mean weights rank them",
        "Wang et al., COLD: Towards the Next Generation of Pre-Ranking System, 2020",
    ),
    "group_lasso": MethodEntry(
        "lpfs.methods.group_sparsity:GroupLasso",
        "proximal group LASSO on the columns of the first layer",
        "Yuan and Lin, Model Selection and Estimation in Regression with Grouped Variables, 2006",
    ),
    "umec": MethodEntry(
        "lpfs.methods.umec:UMEC",
        "the smallest column groups of the first layer are shrunk to zero under a budget",
        "Shen et al., UMEC: Unified Model and Embedding Compression for Efficient Recommendation Systems, 2021",
    ),
    "lassonet": MethodEntry(
        "lpfs.methods.lassonet:LassoNet",
        "skip weights that bound the first layer, along a path of λ",
        "Lemhadri et al., LassoNet: A Neural Network with Feature Sparsity, 2021",
    ),
    "autofis": MethodEntry(
        "lpfs.methods.autofis:AutoFIS",
        "multipliers on crosses (backbone dlrm_cross), trained by an optimizer that produces zeros",
        "Liu et al., AutoFIS: Automatic Feature Interaction Selection in Factorization Models, 2020",
    ),
    "shark": MethodEntry(
        "lpfs.methods.saliency:SHARK",
        "first-order change of the loss if an embedding is replaced by its mean",
        "Zhang et al., SHARK: A Lightweight Model Compression Approach for Large-scale Recommender Systems, 2023",
    ),
    "sfs": MethodEntry(
        "lpfs.methods.saliency:SFS",
        "derivative of the loss with respect to a mask on each field, over a hundred batches",
        "Wang et al., Single-shot Feature Selection for Multi-task Recommendations, 2023",
    ),
    "subset_elimination": MethodEntry(
        "lpfs.methods.subset_elimination:SubsetElimination",
        "backward elimination by the held-out loss of a network trained on random subsets of the fields",
        "Covert et al., Understanding Global Feature Contributions with Additive Importance Measures, 2020",
    ),
    "gbdt": MethodEntry(
        "lpfs.methods.trees:GBDT",
        "gain of the splits of gradient boosted trees (scikit-learn)",
        "Friedman, Greedy Function Approximation: A Gradient Boosting Machine, 2001",
    ),
    "random_forest": MethodEntry(
        "lpfs.methods.trees:RandomForest",
        "impurity that the splits of a random forest remove (scikit-learn)",
        "Breiman, Random Forests, 2001",
    ),
    "lasso_logistic": MethodEntry(
        "lpfs.methods.lasso_logistic:LassoLogistic",
        "what a field adds to the logit of a sparse logistic regression on one-hot ids (scikit-learn)",
        "Tibshirani, Regression Shrinkage and Selection via the Lasso, 1996",
    ),
    "mutual_information": MethodEntry(
        "lpfs.methods.contingency:MutualInformation",
        "mutual information of a field and the label, one field at a time",
        "Cover and Thomas, Elements of Information Theory, 1991",
    ),
    "chi2": MethodEntry(
        "lpfs.methods.contingency:ChiSquared",
        "significance of the χ² test of a field against the label, one field at a time",
        "Liu and Setiono, Chi2: Feature Selection and Discretization of Numeric Attributes, 1995",
    ),
    "random": MethodEntry("lpfs.methods.baselines:RandomFields", "K random fields: the lower baseline", "-"),
    "all": MethodEntry("lpfs.methods.baselines:AllFields", "every field, for any target: no selection", "-"),
    "oracle": MethodEntry("lpfs.methods.baselines:Oracle", "the true fields of a simulated log, strongest first", "-"),
}
TRIAL_FACTORS = (0.3, 3.0, 0.1, 10.0)  # on the penalty of a method without trial_options
PENALTY_OPTIONS = ("penalty", "strength")  # names of options that are a λ


def method_class(name: str) -> type[Method]:
    """Return the class of a method; raise InputError for an unknown name."""
    check_name(name, METHODS, "method")
    path = METHODS[name].path
    module, _, attribute = path.partition(":")
    if not attribute:
        raise InputError(f"method {name!r}: the path must be 'module:Class', found {path!r}")
    cls: type[Method] = getattr(importlib.import_module(module), attribute)
    return cls


def make_method(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """Return a method with its options; raise InputError for an unknown name, option or value."""
    cls = method_class(name)
    return cls(name, cls.Options(**check_keys(cls.Options, options or {})))


def trial_settings(name: str, count: int, options: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return at most ``count`` different option sets for tuning, the given options (or the defaults) first.

    The others are ``Method.trial_options``; for a method without these but with a λ among its options,
    multiples of that λ.

    >>> trial_settings("permutation", 3)
    [{}, {'repeats': 1}, {'repeats': 3}]
    >>> trial_settings("permutation", 3, {"repeats": 1})
    [{'repeats': 1}, {'repeats': 3}, {'repeats': 10}]
    """
    first = dict(options or {})
    method = make_method(name, first)
    trials = method.trial_options
    for option in PENALTY_OPTIONS:
        value = getattr(method.options, option, None)
        if not trials and isinstance(value, float) and value > 0:
            trials = tuple({option: value * factor} for factor in TRIAL_FACTORS)
    settings, seen = [first], [method.options]
    for trial in trials:
        candidate = {**first, **trial}
        parsed = make_method(name, candidate).options
        if parsed not in seen:
            settings.append(candidate)
            seen.append(parsed)
    return settings[: max(1, count)]
