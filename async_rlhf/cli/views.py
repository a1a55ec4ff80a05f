"""Commands that look at runs or try their parts: status, watch, plot, report, trace, rollouts, rewards, environments, loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.cli.app import (
    AsJson,
    Overrides,
    RunPath,
    app,
    environments_app,
    errors,
    experiment,
    loss_app,
    rewards_app,
    rollouts_app,
    say,
)


@app.command()
def status(
    run_dir: RunPath,
    as_json: AsJson = False,
    watched: Annotated[bool, typer.Option("--watch", help="Look again until the run ends, or Ctrl-C.")] = False,
) -> None:
    """Where a run stands: live from its hub, or from what it left behind."""
    with errors():
        from async_rlhf.inspect.status import lines, read, watch
        from async_rlhf.run.run_dir import RunDir

        run = RunDir.existing(run_dir)
        if watched:
            watch(run)
            return
        found = read(run)
        if as_json:
            typer.echo(json.dumps(found, indent=1))
            return
        say("\n".join(lines(run, found)))


@app.command()
def watch(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, or one that holds some: runs.")],
    address: Annotated[str, typer.Option(help="IP:PORT; beyond this machine only with a token.")] = "127.0.0.1:8265",
    token_file: Annotated[Path | None, typer.Option(help="File with the token that a viewer has to give.")] = None,
    out: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the page as one HTML file instead, to send or keep.")
    ] = None,
) -> None:
    """Serve a live page of a run, or of several to compare, and its metrics for Prometheus. Ctrl-C ends it, not the run."""
    with errors():
        from async_rlhf.watch.server import save, serve

        if out is not None:
            save(directory, out)
            typer.echo(str(out))
            return
        serve(directory, address, token_file, say)


@app.command()
def plot(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories; several are compared.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write, .png or .svg; plot.png in the first run directory by default.")
    ] = None,
) -> None:
    """Draw how runs went: reward and evaluations, staleness, lengths, divergences, entropy, ratios, idle time."""
    with errors():
        from async_rlhf.inspect.plot import draw
        from async_rlhf.run.run_dir import RunDir

        out = out or run_dirs[0] / "plot.png"
        draw([RunDir.existing(path) for path in run_dirs], out)
        typer.echo(str(out))


@app.command()
def report(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run directory, or that of a sweep with what its cells measured.")
    ],
    html: Annotated[Path | None, typer.Option(help="Page to write; report.html in the directory by default.")] = None,
) -> None:
    """Make a page of numbers and pictures, in Markdown and in HTML to print or send, from what is on disk alone."""
    with errors():
        for path in experiment("report")(directory, html, typer.echo):
            typer.echo(str(path))


@app.command()
def trace(
    run_dir: RunPath,
    out: Annotated[Path | None, typer.Option(help="File to write; trace.json in the run directory by default.")] = None,
) -> None:
    """Write a run's time line for ui.perfetto.dev: generation, scoring, queueing, training, weights."""
    with errors():
        from async_rlhf.inspect.trace import export, overlap
        from async_rlhf.run.run_dir import RunDir

        run = RunDir.existing(run_dir)
        out = out or run.path / "trace.json"
        typer.echo(f"{export(run, out)} events in {out}; open it in ui.perfetto.dev")
        for name, found in overlap(run).items():
            typer.echo(f"{name}: {found.seconds:.1f} s of calls, {found.share:.1%} hidden behind decoding and training")


@rollouts_app.command("show")
def rollouts_show(
    run_dir: RunPath,
    step: Annotated[int | None, typer.Option(help="Only the groups of this step (from 1).")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group number.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Groups to show.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Show groups as they were trained on: prompt, completions, versions, scores."""
    with errors():
        from async_rlhf.inspect.rollouts import show
        from async_rlhf.run.display.console import group_lines
        from async_rlhf.run.run_dir import RunDir

        found = show(RunDir.existing(run_dir), limit, step=step, group=group)
        for record in found.records:
            say(json.dumps(record) if as_json else group_lines(record))
        if any(record["sampled"] for record in found.records):
            typer.echo("of steps that the journal does not hold, the groups in rollouts.jsonl are shown", err=True)
        if found.more:
            typer.echo(f"{found.more} more groups: --limit {limit + found.more} shows all, --step or --group chooses", err=True)


@rollouts_app.command("export")
def rollouts_export(run_dir: RunPath, out: Annotated[Path, typer.Argument(help="JSONL file to write.")]) -> None:
    """Write every group in the journal as JSONL (all of them when queue.keep_rollouts was true)."""
    with errors():
        from async_rlhf.inspect.rollouts import export
        from async_rlhf.run.run_dir import RunDir

        typer.echo(f"{export(RunDir.existing(run_dir), out)} groups written to {out}")


@rollouts_app.command("quarantine")
def rollouts_quarantine(
    run_dir: RunPath,
    group: Annotated[int, typer.Option(help="Number of the group.")],
    reason: Annotated[str, typer.Option(help="For quarantine.jsonl.")] = "taken back by an operator",
) -> None:
    """Take a group back, of a live run or one that stands still: it is not trained on, the other steps keep their batches."""
    with errors():
        from async_rlhf.inspect.rollouts import quarantine
        from async_rlhf.run.run_dir import RunDir

        run = RunDir.existing(run_dir)
        quarantine(run, run.config(), group, reason[:300])
        typer.echo(f"group {group} is quarantined: {run.path / 'quarantine.jsonl'}")


@rollouts_app.command("replay")
def rollouts_replay(
    run_dir: RunPath,
    name: Annotated[str, typer.Option(help="Name of the new run directory, beside the old one.")],
    overrides: Overrides = None,
) -> None:
    """Train a learner alone on the very batches of an earlier run: bit for bit, or with another loss (--set loss...)."""
    with errors():
        from async_rlhf.inspect.rollouts import replay
        from async_rlhf.run.config import override, parse_override
        from async_rlhf.run.run_dir import RunDir

        source = RunDir.existing(run_dir)
        timeless = {"max_seconds": "none"}  # what is learned again takes another time, and is all that was learned
        changed = timeless | dict(parse_override(text) for text in overrides or [])
        config = override(source.config(), {**changed, "name": name, "output_dir": str(source.path.parent)})
        run = replay(source, config)
        typer.echo(f"{len(run.read_metrics())} steps learned again in {run.path}")


@rewards_app.command("try")
def rewards_try(
    rewards: Annotated[list[str], typer.Argument(metavar="FILE:NAME", help="Rewards, as in rewards.functions.")],
    data: Annotated[Path, typer.Option(help="JSONL file with completions and columns, or a run directory.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Of the sections rewards and scoring, for example scoring.timeout_s=2."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Completions to score.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score completions that exist already: values, histogram, timings, failures.

    Exit code 6 when any score failed, or no completion got one.
    """
    with errors():
        from async_rlhf.inspect.trials import lines, try_rewards
        from async_rlhf.launch.exit_codes import REWARDS_FAILED
        from async_rlhf.run.config import parse_settings

        given = parse_settings(("rewards", "scoring"), overrides or [])
        trial = try_rewards(rewards, data, limit=limit, scoring=given["scoring"], **given["rewards"])
        typer.echo(json.dumps(trial.plain()) if as_json else "\n".join(lines(trial)))
        if trial.num_failed or not trial.has_scores:
            raise typer.Exit(REWARDS_FAILED)


@environments_app.command("try")
def environments_try(
    environment: Annotated[str, typer.Argument(metavar="FILE:NAME", help="An environment, as in environment.function.")],
    data: Annotated[str, typer.Option(help="Prompts, as in data.source.")],
    model: Annotated[str | None, typer.Option(help="The model that plays; without one, lines of standard input do.")] = None,
    overrides: Overrides = None,
    limit: Annotated[int, typer.Option(min=1, help="Episodes to play, one a prompt.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Play episodes: transcripts, scores, failures, times. A turn is a line that you type (or that a file gives), or a model's.

    Exit code 6 when any episode failed.
    """
    with errors():
        from async_rlhf.inspect import episodes
        from async_rlhf.launch.exit_codes import REWARDS_FAILED
        from async_rlhf.run.config import parse_override

        settings = dict(parse_override(text) for text in overrides or [])
        config = episodes.configuration(environment, data, model, settings)
        shows = sys.stdin.isatty() and not as_json

        def write(content: object) -> str | None:
            if shows:
                typer.echo(f"reads   {content!r}\nwrites  ", nl=False)
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None

        played = []
        for trial in episodes.play_by_model(config, limit) if model else episodes.play(config, limit, write):
            played.append(trial)
            typer.echo(json.dumps(trial.plain()) if as_json else "\n".join(episodes.lines(trial)))
        if not as_json:
            typer.echo("\n".join(["", *episodes.summary(played)]))
        if any(trial.score is not None and trial.score.failure is not None for trial in played):
            raise typer.Exit(REWARDS_FAILED)


@loss_app.command("try")
def loss_try(
    loss: Annotated[str, typer.Argument(metavar="FILE:NAME", help="A loss, as in loss.kind.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the section loss.")] = None,
    as_json: AsJson = False,
) -> None:
    """Hold a loss to the laws that micro-batches, ranks and masks rest on, and measure its bias. Exit code 1 when one fails."""
    with errors():
        from async_rlhf.inspect.trials import run_loss_trial

        raise typer.Exit(run_loss_trial(loss, overrides or [], typer.echo, as_json=as_json))
