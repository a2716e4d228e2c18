"""online: train continually on a stream, with fields that close and reopen; go back to an earlier bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lpfs.cli import options as opt
from lpfs.cli.app import cli, print_json, resume_hint
from lpfs.models import MODELS

ONLINE_HELP = """Train continually on the stream SOURCE; the state, the metrics and the published models are in RUN.

SOURCE is a folder into which segments (.parquet, .csv, .jsonl) are renamed, kafka://HOST:PORT/TOPIC or
redis://HOST:PORT/STREAM. A run that exists is continued from its last commit, bit for bit, also after kill -9.
"lpfs online status RUN" says how far it is, "lpfs online rollback RUN" makes an earlier bundle the current one; to
serve bundles: lpfs serve RUN/bundles.
"""

stream, selection = opt.section("Stream"), opt.section("Selection")


@cli.command(
    help=ONLINE_HELP,
    short_help="Train continually on a stream; fields close and reopen.",
    examples=[
        "lpfs online segments run --like data/log --keep 20 --key event_id",
        "lpfs online kafka://localhost:9092/clicks run --like data/log --penalty 0.01",
        "lpfs online status run",
        "lpfs online rollback run",
    ],
)
@click.argument("source", type=opt.FILES)
@click.argument("run", type=opt.PATH)
@stream("--like", type=opt.PATH, help="Dataset whose encoding, fields and label are used.")
@stream("--batch", type=int, default=1024, help="Events per training step.")
@stream("--key", help="Column that identifies an event; a repeated key is a duplicate.")
@stream("--window", type=int, default=100_000, help="Number of keys that are remembered.")
@stream("--time", help="Column with the time of an event, a number or ISO 8601 text.")
@stream("--lateness", type=float, help="With --time: an event this much before the median of a batch is late.")
@stream("--idle", type=float, help="End after this many seconds without events. Default: never.")
@stream("--max-rows", type=int, help="End after this many events.")
@selection("--keep", type=int, help="Number of fields that the control of the penalty aims at.")
@selection("--penalty", type=float, help="Penalty of the gates, instead of --keep.  [default: 0.02]")
@selection("--threshold", type=float, default=1e-3, help="Gain in logloss for which a field is reopened.")
@selection("--open", "opened", multiple=True, help="Field that is open at the start; repeatable. Default: all.")
@selection("--must-keep", multiple=True, help="Field that is never closed; repeatable.")
@selection("--all-fields", is_flag=True, help="Keep all fields, without gates.")
@opt.model("--model", choices=tuple(MODELS), default="mlp", help="Kind of model.")
@opt.model("--model-option", "model_options", multiple=True, help=opt.MODEL_OPTION_HELP)
@opt.model("--optimizer", choices=opt.OPTIMIZERS, default="adagrad", help="Optimizer of the model.")
@opt.model("--lr", type=float, default=0.02, help="Its learning rate.")
@opt.model("--seed", type=int, default=0, help="Seed of the first weights and of the probes.")
@opt.output("--commit-every", type=int, default=40, help="Batches per commit.")
@opt.output("--publish-every", type=int, default=5, help="Commits per bundle; 0: no bundles.")
@opt.output("--keep-bundles", type=int, default=5, help="Number of bundles that are kept.")
@opt.output("--version", help="With rollback: the bundle to go back to. Default: the one before.")
@opt.OUTPUT_OPTIONS
def online(source: str, run: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    """Train continually on a stream."""
    if source == "rollback":
        _rollback(run, options["version"], as_json)
        return
    if source == "status":
        _print_status(run, as_json)
        return
    from contextlib import closing
    from dataclasses import asdict

    import torch

    from lpfs._console import Console
    from lpfs.online.gates import GateSettings
    from lpfs.online.learner import LearnerSettings
    from lpfs.online.run import OnlineSettings, OnlineTrainer
    from lpfs.online.source import open_source

    if options["like"] is None:
        raise click.UsageError("Missing option '--like': the Dataset whose encoding is used.")
    if options["keep"] is not None and options["penalty"] is not None:
        raise click.UsageError("Give either --keep or --penalty, not both.")
    chosen = opt.drop_none({name: options[name] for name in ("keep", "penalty", "threshold", "must_keep")})
    model_options = opt.parse_pairs(options["model_options"], "--model-option")
    for name in opt.LIST_OPTIONS:
        if isinstance(model_options.get(name), int):
            model_options[name] = [model_options[name]]
    learner = LearnerSettings(
        model=options["model"],
        options={**LearnerSettings().options, **model_options},
        gates=None if options["all_fields"] else GateSettings(**chosen),
        **{name: options[name] for name in ("optimizer", "lr", "seed")},
    )
    names = ("batch", "commit_every", "publish_every", "keep_bundles", "key", "window", "time", "lateness")
    settings = OnlineSettings(learner, **{name: options[name] for name in names})
    torch.set_num_threads(1)  # the result does not depend on the number of cores, and batches are small
    console = Console(quiet=quiet)
    opened = list(options["opened"]) or None
    with resume_hint("lpfs", "online", source, run, "…"), closing(open_source(source)) as events:
        trainer = OnlineTrainer(events, run, options["like"], settings, opened=opened, console=console)
        result = trainer.run(idle_seconds=options["idle"], max_rows=options["max_rows"])
    refused = ", ".join(f"{count:,} {kind}" for kind, count in sorted(result.refused.items())) or "none"
    console.message(f"{run}: {result.rows:,} events, refused: {refused}; {len(result.kept)} fields are selected")
    if as_json:
        print_json(asdict(result))


def _print_status(run: Path, as_json: bool) -> None:
    from lpfs._console import Console
    from lpfs.online.state import StateReader

    reader = StateReader(run)
    summary, metrics = reader.summary(), reader.metrics(1)
    auc = metrics[-1]["auc"] if metrics else None
    texts = [
        f"{summary['rows']:,} events",
        f"{summary['commits']:,} commits",
        f"{len(summary['kept'])} fields are selected",
    ]
    texts += [] if auc is None else [f"AUC {auc:.4f}"]
    texts += [] if summary["lag"] is None else [f"lag {summary['lag']:,.0f}"]
    message = f"{run}: {', '.join(texts)}; the current bundle is {summary['version'] or 'none'}"
    Console(quiet=as_json).message(message)
    if as_json:
        print_json({**summary, "auc": auc, "changes": len(reader.changes()), "alarms": len(reader.alarms())})


def _rollback(run: Path, version: str | None, as_json: bool) -> None:
    from lpfs._console import Console
    from lpfs.online.bundle import rollback
    from lpfs.online.state import BUNDLES

    bundles = run / BUNDLES if (run / BUNDLES).is_dir() else run
    bundle = rollback(bundles, version)
    Console(quiet=as_json).message(f"{bundles}: the current bundle is {bundle.version}")
    if as_json:
        print_json({"version": bundle.version, "fields": list(bundle.fields)})
