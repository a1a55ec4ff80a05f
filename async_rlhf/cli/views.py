"""Commands that show or publish runs: status, watch, plot, report, rollouts, track, push."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.cli.app import AsJson, Overrides, RunPath, TokenFile, app, command, experiment, group, opened, overridden, say

rollouts = group("rollouts", "Show, trace, quarantine or replay a run's rollouts.")


@command(app)
def status(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Show the state of a run. It comes from the hub of a live run, else from files."""
    from async_rlhf.inspect.status import lines, read

    reading = opened(run_dir)
    state = read(reading)
    if as_json:
        typer.echo(json.dumps(state, indent=1))
    else:
        say("\n".join(lines(reading.run, state)))


@command(app)
def watch(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, or a directory of runs: runs.")],
    address: Annotated[str, typer.Option(help="IP:PORT; an address beyond this machine needs a token.")] = "127.0.0.1:8265",
    token_file: TokenFile = None,
) -> None:
    """Serve a live page of a run, or of several to compare. It also has metrics for Prometheus. Ctrl-C ends no run."""
    from async_rlhf.watch.server import serve

    serve(directory, address, token_file, say)


@command(app)
def plot(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories; several are compared.")],
    out: Annotated[Path | None, typer.Option(help="A .png or .svg file; plot.png in the first directory by default.")] = None,
) -> None:
    """Draw the curves of runs. Reward and evaluations, staleness, lengths, divergences, entropy, ratios, idle time."""
    from async_rlhf.inspect.plot import draw

    out = out or run_dirs[0] / "plot.png"
    draw([opened(path) for path in run_dirs], out)
    typer.echo(str(out))


@command(app)
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run or of a sweep.")],
) -> None:
    """Make a report of numbers and pictures. It is written as Markdown and as HTML, from files on disk alone."""
    for path in experiment("report")(directory, typer.echo):
        typer.echo(str(path))


@command(app)
def track(
    run_dir: RunPath,
    to: Annotated[str, typer.Option("--to", metavar="KIND", help="tensorboard, wandb, trackio or mlflow.")],
) -> None:
    """Send a run to a tracker, from its files. A live run is followed to its end.

    Ctrl-C ends it; the same command continues where it stopped. It needs the tracker's package, but neither torch nor
    transformers.
    """
    from async_rlhf.run.processes.tracking import track

    track(opened(run_dir).run, to, say)


@command(app)
def push(
    path: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run (newest checkpoint), or RUN/checkpoints/best.")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository of the Hugging Face Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Push only the LoRA adapter, which names its base model.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Add a commit to a repository that has content.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the card and the files; send nothing.")] = False,
) -> None:
    """Push a model to the Hugging Face Hub. Its tokenizer, a model card and a plot are pushed with it.

    All files are first searched for tokens, paths of this machine and secrets of the environment.
    """
    from async_rlhf.push.upload import How, push

    push(path, name, How(private, adapter, update, dry_run), say)


@command(rollouts, "show")
def rollouts_show(
    run_dir: RunPath,
    step: Annotated[int | None, typer.Option(help="Only the groups of this step (from 1).")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group number.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Groups to show: 4 by default, with --json all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each group as one line of JSON, with tokens.")] = False,
) -> None:
    """Show trained groups: prompt, completions, versions, scores. They come from the journal, which keeps all with
    queue.keep_rollouts = true; other steps show the groups that were sampled into rollouts.jsonl."""
    from async_rlhf.inspect.rollouts import records
    from async_rlhf.watch.completions import decode_of, group_lines

    reading, limit, more, sampled = opened(run_dir), limit or (None if as_json else 4), 0, False
    decode = None if as_json else decode_of(reading.run)
    for number, record in enumerate(records(reading, step=step, group=group)):
        if limit is not None and number >= limit:
            more += 1
            continue
        sampled = sampled or record["sampled"]
        say(json.dumps(record) if as_json else group_lines(record, decode))
    if sampled:
        typer.echo("of steps that the journal does not hold, the groups in rollouts.jsonl are shown", err=True)
    if more:
        typer.echo(f"{more} more groups: --limit {(limit or 0) + more} shows all, --step or --group chooses", err=True)


@command(rollouts, "trace")
def rollouts_trace(
    run_dir: RunPath,
    out: Annotated[Path | None, typer.Option(help="File to write; trace.json in the run directory by default.")] = None,
) -> None:
    """Write a timeline for ui.perfetto.dev. It shows generation, scoring, queueing, training and weights."""
    from async_rlhf.inspect.trace import export

    out = out or run_dir / "trace.json"
    typer.echo(f"{export(opened(run_dir), out)} events in {out}; open it in ui.perfetto.dev")


@command(rollouts, "quarantine")
def rollouts_quarantine(
    run_dir: RunPath,
    group: Annotated[int, typer.Option(help="Number of the group.")],
    reason: Annotated[str, typer.Option(help="Reason, written to quarantine.jsonl.")] = "taken back by an operator",
) -> None:
    """Exclude a group from training, in a live or stopped run. Other steps keep their batches."""
    from async_rlhf.inspect.rollouts import quarantine

    run = opened(run_dir).run
    quarantine(run, run.config(), group, reason[:300])
    typer.echo(f"group {group} is quarantined: {run.path / 'quarantine.jsonl'}")


@command(rollouts, "replay")
def rollouts_replay(
    run_dir: RunPath,
    name: Annotated[str, typer.Option(help="Name of the new run directory, beside the old one.")],
    overrides: Overrides = None,
) -> None:
    """Train again on the batches of an earlier run. Only a learner runs: bit for bit, or with another loss (--set loss...)."""
    from async_rlhf.inspect.rollouts import replay
    from async_rlhf.run.loading import override

    source = opened(run_dir).run
    timeless = {"max_seconds": "none"}  # a replay takes another time, and all of it is wanted
    changed = timeless | overridden(overrides) | {"name": name, "output_dir": str(source.path.parent)}
    run = replay(source, override(source.config(), changed))
    typer.echo(f"{len(run.read_metrics())} steps learned again in {run.path}")
