"""Ablations of LPFS++: α and λ, zero gates over the steps, ε, the ℓ0 penalty, overlap of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from lpfs import plots
from lpfs.compare import statistics
from lpfs.gates.functions import gate_function
from lpfs.gates.schedule import Decay, Schedule, scaled
from lpfs.paper.context import ExperimentContext, ExperimentResult
from lpfs.paper.trials import Trials, plot_curves, plot_points, plot_series
from lpfs.paper.variants import WRITTEN_METHODS, Variant, in_both_variants, written_options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHAS = (10.0, 50.0, 100.0, 200.0)
ALPHA_SHARES = (0.15, 0.4)  # shares of the fields that are kept in the curves over α …
FULL_SHARES = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5)  # … at full size
EQUAL_SHARE = 109 / 392  # share of the fields that every α keeps in the table of λ, as in the paper
FIRST_PENALTY = 1 / 32  # first λ to try: 1/Ση of the scaled schedule, below which no gate reaches zero by λ alone
PAPER_ALPHA: dict[str, list[float]] = {
    "alpha": [10, 50, 100, 200],
    "lambda": [0.004, 0.0066, 0.013, 0.02],
    "fields": [109, 119, 106, 101],
}
LATE = 0.9  # fraction of a search after which it is near its end
EPSILON_SHARE = 1 / 3  # share of the fields that is kept
FINAL_EPSILONS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
DECAY_FRACTIONS = (0.25, 0.5, 0.75, 1.0)  # of the search, after which ε has its final value of 1e-5
L1_PENALTIES = (0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0)
L0_FACTORS = (0.05, 0.2, 0.5, 0.8, 0.95, 1.05, 1.3)  # on the λ at which √(2λη) is 1 in the first step
PAPER_KEPT, PAPER_FIELDS = 177, 332  # of the robustness experiment
ROBUSTNESS_METHODS = (*WRITTEN_METHODS, "lpfs++", "lpfs", "permutation")
ROBUSTNESS_CLAIM = "highly overlapping"


@in_both_variants("industrial")
def alpha(context: ExperimentContext, variant: Variant) -> ExperimentResult:
    """Search for every α and K, then for the λ of every α that keeps about the same number of fields."""
    trials = Trials(context)
    shares = FULL_SHARES if context.full else ALPHA_SHARES
    searches = {
        (value, share): {
            "keep": trials.count_of(share),
            "method": variant.method,
            "options": variant.with_options(alpha=value),
        }
        for value in ALPHAS
        for share in shares
    }
    records = trials.evaluate(searches)
    by_alpha = {f"α = {value:g}": [records[value, share] for share in shares] for value in ALPHAS}
    target = trials.count_of(EQUAL_SHARE)
    table = []
    for value in ALPHAS:
        options = variant.with_options(alpha=value)
        record = trials.search_penalty_for(target, context.seed, FIRST_PENALTY, method=variant.method, options=options)
        table.append({"alpha": value, "lambda": record["penalty"], "fields": len(record["kept"])})
    penalties, counts = ([row[key] for row in table] for key in ("lambda", "fields"))
    curves = {
        name: {record["keep"]: record["auc"] for record in records if record["auc"] is not None}
        for name, records in by_alpha.items()
    }
    smallest, total = trials.count_of(shares[0]), len(trials.names)
    aucs = ", ".join(f"{name}: {points[smallest]:.4f}" for name, points in curves.items() if smallest in points)
    rows = [
        (f"AUC of {smallest} of {total} fields", "the larger α, the better, in general", aucs),
        ("λ for α = 10, 50, 100, 200", join(PAPER_ALPHA["lambda"]), ", ".join(f"{value:.3g}" for value in penalties)),
        ("fields kept", f"{join(PAPER_ALPHA['fields'])} of 392", f"{join(counts)} of {total}"),
    ]
    measured = {"fields": total, "by_alpha": by_alpha, "equal_size": table, "target": target}

    def draw(figure: Figure) -> None:
        plot_curves(figure.add_subplot(1, 2, 1), curves)
        axes = figure.add_subplot(1, 2, 2)
        axes.plot(ALPHAS, penalties, "o-", color=plots.KEPT)
        axes.set(xlabel="α", ylabel="λ at equal size")

    return ExperimentResult(measured, {"equal_size": PAPER_ALPHA}, rows, draw)


def join(values: Iterable[Any]) -> str:
    """Return values separated by commas."""
    return ", ".join(map(str, values))


@in_both_variants("industrial")
def zero_gates(context: ExperimentContext, variant: Variant) -> ExperimentResult:
    """Count the zero gates over the steps for several α, with λ that keep about the same number of fields."""
    trials = Trials(context)
    target, total = trials.count_of(EQUAL_SHARE), len(trials.names)
    lines: dict[str, list[tuple[int, int]]] = {}
    by_alpha: dict[str, dict[str, Any]] = {}
    for value in ALPHAS:
        options = variant.with_options(alpha=value)
        record = trials.search_penalty_for(target, context.seed, FIRST_PENALTY, method=variant.method, options=options)
        zeros = [(point["step"], total - point["alive"]) for point in record["history"]]
        lines[f"α = {value:g}, λ = {record['penalty']:.3g}"] = zeros
        facts = {"penalty": record["penalty"], "kept_count": len(record["kept"]), **zero_gate_facts(zeros)}
        by_alpha[f"{value:g}"] = facts
    claims = {
        "first_zero": (f"step of the first zero gate; α = {join(by_alpha)}", "earlier for larger α"),
        "revived": ("gates revived between records", "more for larger α"),
        "revived_late": ("of them in the last tenth", "the curves stop oscillating"),
        "kept_count": ("fields kept", "about the same"),
    }
    rows = [(*claim, join(facts[key] for facts in by_alpha.values())) for key, claim in claims.items()]
    measured = {"fields": total, "target": target, "by_alpha": by_alpha}

    def draw(figure: Figure) -> None:
        plot_series(figure.add_subplot(), lines, "step", "zero gates")

    return ExperimentResult(measured, {"alpha": list(ALPHAS)}, rows, draw, (7.0, 4.0))


def zero_gate_facts(zeros: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the step of the first zero gate, and by how much their number falls: in total, and near the end.

    >>> zero_gate_facts([(1, 0), (2, 3), (3, 1), (4, 4)])
    {'first_zero': 2, 'revived': 2, 'revived_late': 0}
    """
    falls = [(now[0], before[1] - now[1]) for before, now in pairwise(zeros) if now[1] < before[1]]
    end = zeros[-1][0] if zeros else 0
    return {
        "first_zero": next((step for step, count in zeros if count), None),
        "revived": sum(count for _, count in falls),
        "revived_late": sum(count for step, count in falls if step > LATE * end),
    }


@in_both_variants("terabyte")
def epsilon(context: ExperimentContext, variant: Variant) -> ExperimentResult:
    """Search with several final values and decay rates of ε."""
    trials = Trials(context)
    keep, steps = trials.count_of(EPSILON_SHARE), trials.base.steps.search
    final = {f"ends at {value:g}": epsilon_schedule(steps, value) for value in FINAL_EPSILONS}
    rates = {f"final at {part:.0%}": epsilon_schedule(steps, 1e-5, part) for part in DECAY_FRACTIONS if part < 1}
    schedules = (final | rates).items()
    searches = {
        name: {"keep": keep, "method": variant.method, "options": variant.with_options(schedule=schedule)}
        for name, schedule in schedules
    }
    by_schedule = trials.evaluate(searches)
    aucs = {name: record["by_seed"] for name, record in by_schedule.items()}

    def spread(names: Sequence[str]) -> str:
        means = [by_schedule[name]["auc"] for name in names if by_schedule.get(name, {}).get("auc") is not None]
        return f"{max(means) - min(means):.5f} between the best and the worst mean" if means else "-"

    over_seeds = [max(values) - min(values) for values in aucs.values() if None not in values and len(values) > 1]
    rows = [
        ("final ε from 1e-4 to 1e-8: AUC", "no significant effect", spread(list(final))),
        ("decay rate: AUC", "not much important", spread([*rates, f"ends at {1e-5:g}"])),
        ("the same setting over seeds: AUC", "-", f"{max(over_seeds, default=0.0):.5f} at most"),
    ]
    measured = {"keep": keep, "fields": len(trials.names), "by_schedule": by_schedule}

    def draw(figure: Figure) -> None:
        plot_points(figure.add_subplot(), aucs, "test AUC (diamonds: mean)")

    return ExperimentResult(measured, {"final_epsilon": list(FINAL_EPSILONS)}, rows, draw, (7.0, 3.6))


def epsilon_schedule(steps: int, final: float, fraction: float = 1.0) -> Schedule:
    """Return the default schedule with an ε that decays to ``final`` within a fraction of the search."""
    gate = gate_function("lpfs++")
    rate = (final / gate.epsilon) ** (1 / max(1, round(fraction * steps)))
    default = scaled(gate, steps)
    return Schedule(Decay(gate.epsilon, rate, floor=final), default.lr, default.refresh)


@in_both_variants("terabyte")
def l0_prox(context: ExperimentContext, variant: Variant) -> ExperimentResult:
    """Count the kept fields for several λ, under the hard threshold √(2λη) of ℓ0 and the soft threshold of ℓ1.

    x starts at 1, so the hard threshold depends on whether √(2λη) is above or below 1 in the first step.
    """
    trials = Trials(context)
    total, lr = len(trials.names), scaled(gate_function("lpfs++"), trials.base.steps.search).lr.start
    critical = 1 / (2 * lr)
    by_prox: dict[str, list[dict[str, Any]]] = {"l1": [], "l0": []}
    for prox, penalties in (("l1", L1_PENALTIES), ("l0", tuple(factor * critical for factor in L0_FACTORS))):
        for penalty in penalties:
            options = variant.with_options(prox=prox)
            record = trials.search(context.seed, variant.method, penalty=penalty, options=options)
            first_zero = next((point["step"] for point in record["history"] if point["alive"] < total), None)
            by_prox[prox].append({"lambda": penalty, "kept_count": len(record["kept"]), "first_zero": first_zero})
    counts = {prox: [point["kept_count"] for point in points] for prox, points in by_prox.items()}
    distinct = ", ".join(f"{name} {len(set(counts[prox]))}" for name, prox in (("ℓ1", "l1"), ("ℓ0", "l0")))
    rows = [
        ("ℓ1: fields kept, λ increasing", "shrinks by a small step λη, whatever x is", join(counts["l1"])),
        ("ℓ0: fields kept, λ increasing", "hardly penalised, or zero very quickly", join(counts["l0"])),
        ("ℓ0: λ relative to 1/(2η)", "-", join(L0_FACTORS)),
        ("different numbers of kept fields", "-", f"{distinct}, of {len(L0_FACTORS)} λ each"),
    ]
    measured = {"fields": total, "critical_lambda": critical, "by_prox": by_prox}

    def draw(figure: Figure) -> None:
        for number, (prox, points) in enumerate(by_prox.items()):
            axes = figure.add_subplot(1, 2, number + 1)
            axes.plot([point["lambda"] for point in points], counts[prox], "o-", color=plots.KEPT)
            axes.set(xscale="log", xlabel=f"λ, {prox}", ylabel="fields kept", ylim=(-1, total + 1))

    return ExperimentResult(measured, {}, rows, draw, (8.0, 3.2))


def robustness(context: ExperimentContext) -> ExperimentResult:
    """Measure how much the kept fields of several runs overlap; every seed has its own pretraining."""
    names = context.log.dataset.schema.names
    trials = Trials(context, must_drop=names[PAPER_FIELDS:])  # at most as many fields as in the paper
    total = len(trials.names)
    keep = trials.count_of(PAPER_KEPT / PAPER_FIELDS)
    expected = expected_overlap(keep, total)
    by_method: dict[str, dict[str, Any]] = {}
    rows = [("two random sets", "-", f"{expected:.3f}")]
    for method in ROBUSTNESS_METHODS:
        options = written_options(context, "industrial") if method in WRITTEN_METHODS else {}
        sets = [trials.search(seed, method, keep=keep, options=options)["kept"] for seed in context.seeds]
        overlap = statistics.mean_jaccard(sets)
        in_all = len(set.intersection(*map(set, sets)))
        by_method[method] = {"overlap": overlap, "in_all_runs": in_all, "recall": trials.recall(sets), "kept": sets}
        text = "-" if overlap is None else f"{overlap:.3f}; {in_all} of {keep} in all {len(sets)} runs"
        claim = ROBUSTNESS_CLAIM if method.startswith("lpfs") else "-"
        rows.append((f"{method}: overlap (Jaccard)", claim, text))
    measured = {"keep": keep, "fields": total, "expected_overlap": expected, "by_method": by_method}

    def draw(figure: Figure) -> None:
        overlaps = {
            method: [statistics.jaccard(*pair) for pair in combinations(record["kept"], 2)]
            for method, record in by_method.items()
        }
        axes = figure.add_subplot()
        plot_points(axes, overlaps, "overlap of two runs (diamonds: mean; line: random sets)")
        axes.axvline(expected, color=plots.INK, linestyle="--", linewidth=1)

    paper = {"kept": PAPER_KEPT, "fields": PAPER_FIELDS, "claim": ROBUSTNESS_CLAIM}
    return ExperimentResult(measured, paper, rows, draw, (7.0, 2.6))


def expected_overlap(keep: int, total: int) -> float:
    """Return the approximate Jaccard overlap of two random sets: K²/N common fields of 2K - K²/N.

    >>> round(expected_overlap(177, 332), 3)
    0.363
    """
    common = keep * keep / total
    return common / (2 * keep - common)
