"""A whole comparison as part of an experiment, by ``compare`` itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lpfs.compare.compare import compare
from lpfs.compare.run_dir import digest
from lpfs.compare.summary import Comparison
from lpfs.markup import shortened
from lpfs.paper.job import Job

Curves = dict[str, dict[int, float]]


def compared(job: Job, methods: Sequence[str], keep: Sequence[int], **settings: Any) -> Comparison:
    """Compare methods on the log of an experiment; its folder has the report."""
    told = {**job.scale.settings(), **settings}
    return compare(
        job.log,
        job.folder / f"compare-{digest([told, job.log.fingerprint, job.seed])[:10]}",
        methods=methods,
        keep=keep,
        seeds=job.scale.seeds,
        seed=job.seed,
        truth=job.truth,
        quiet=job.console.quiet,
        **told,
    )


def curves_of(found: Comparison) -> Curves:
    """Return method -> K -> mean AUC, the best method first."""
    return {
        name: {int(size): of["auc"]["value"] for size, of in each["sizes"].items()}
        for name, each in found.methods.items()
        if each["sizes"]
    }


def numbers(found: Comparison) -> dict[str, Any]:
    """Return the numbers of a comparison that an experiment keeps."""
    values = found.values
    keys = ("best", "sizes", "seeds", "fields", "all_fields", "kinds", "fingerprint", "periods", "recipe")
    methods = {name: short(each) for name, each in found.methods.items()}
    kept = [{key: each.get(key) for key in ("method", "keep", "seed", "auc", "kept")} for each in found.results]
    return {**{key: values[key] for key in keys}, "methods": methods, "results": kept}


def short(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return area, AUCs, differences to the best, overlap and cost of a method."""
    return {key: method[key] for key in ("area", "against", "overlap", "search", "sizes", "failed")}


def rows_of(found: Comparison, claims: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return a line a method: its AUC at every K, its area, and how it stands to the best."""
    level = found.values["all_fields"]["auc"]
    rows = [("all fields", claims.get("all fields", "-"), "-" if level is None else f"{level['value']:.5f}")]
    for name, each in found.methods.items():
        aucs = ", ".join(f"{size}: {of['auc']['value']:.4f}" for size, of in each["sizes"].items())
        to_best = each["against"].get("best")
        stands = "best" if name == found.best else "" if to_best is None else f"{to_best['verdict']}"
        area = "" if each["area"] is None else f"area {each['area']['value']:.4f} ({stands}); "
        failed = shortened(each["failed"][0]["reason"], 90) if each["failed"] and not aucs else ""
        rows.append((name, claims.get(name, "-"), f"{area}{aucs}{failed}"))
    return rows
