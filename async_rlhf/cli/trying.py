"""Commands before a run depends on something: try a reward, an environment, a loss, chaos, the machine; doctor; plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from async_rlhf.cli.app import AsJson, ConfigPath, Overrides, app, command, experiment, group, load_config, overridden, say

trying = group("try", "Try a reward, an environment, a loss, chaos, or this machine.")


@command(trying, "reward")
def try_reward(
    rewards: Annotated[list[str], typer.Argument(metavar="FILE:NAME...", help="Rewards, as in rewards.functions.")],
    data: Annotated[Path, typer.Option(help="JSONL file with completions and columns, or a run directory.")],
    overrides: Overrides = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Completions to score.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score existing completions. Show values, a histogram, times and failures.

    --set takes keys of the sections rewards and scoring. Exit code 6 when any score failed, or no completion got one.
    """
    from async_rlhf.inspect.trials import lines, try_rewards
    from async_rlhf.launch.exit_codes import REWARDS_FAILED
    from async_rlhf.run.loading import parse_settings

    given = parse_settings(("rewards", "scoring"), overrides or [])
    trial = try_rewards(rewards, data, limit=limit, scoring=given["scoring"], **given["rewards"])
    typer.echo(json.dumps(trial.plain()) if as_json else "\n".join(lines(trial)))
    if trial.num_failed or not trial.has_scores:
        raise typer.Exit(REWARDS_FAILED)


@command(trying, "environment")
def try_environment(
    environment: Annotated[str, typer.Argument(metavar="FILE:NAME", help="An environment, as in environment.function.")],
    data: Annotated[str, typer.Option(help="Prompts, as in data.source.")],
    model: Annotated[str | None, typer.Option(help="The model that plays; without it you type the turns.")] = None,
    overrides: Overrides = None,
    limit: Annotated[int, typer.Option(min=1, help="Episodes to play, one a prompt.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Play episodes and show transcripts, scores, failures, times. You type each turn as a line, pipe it in, or name a model.

    Exit code 6 when any episode failed.
    """
    from async_rlhf.inspect import episodes
    from async_rlhf.launch.exit_codes import REWARDS_FAILED

    config = episodes.configuration(environment, data, model, overridden(overrides))
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


@command(trying, "loss")
def try_loss(
    loss: Annotated[str, typer.Argument(metavar="FILE:NAME", help="A loss, as in loss.kind.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check that a loss keeps its laws. Micro-batches, ranks and masks depend on them. Its bias is measured too.

    --set takes keys of the section loss. Exit code 1 when a law does not hold.
    """
    from async_rlhf.learner.config import LossConfig
    from async_rlhf.learner.objective import trial
    from async_rlhf.run.loading import parse_settings

    given = parse_settings(("loss",), [f"loss.kind='{loss}'", *(overrides or [])])
    tried = trial.try_loss(LossConfig.model_validate(given["loss"]))
    typer.echo(json.dumps(tried.plain()) if as_json else "\n".join(trial.lines(tried)))
    raise typer.Exit(0 if tried.holds else 1)


@command(trying, "chaos")
def try_chaos(
    config: ConfigPath,
    overrides: Overrides = None,
    faults: Annotated[int, typer.Option(min=1, help="Faults to inject while the run goes on.")] = 200,
    long_freezes: Annotated[
        int, typer.Option(min=0, help="How many faults are freezes of 60 to 120 s, longer than every time-out.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed for target, time and kind of each fault.")] = 0,
) -> None:
    """Train while processes are killed and frozen at random. Then check that nothing was lost or trained twice."""
    from collections import Counter

    from async_rlhf.inspect.chaos import FaultInjector, problems
    from async_rlhf.preparation import prepare
    from async_rlhf.run.display.console import Display
    from async_rlhf.run.supervision.child import MAX_DEATHS

    loaded = load_config(config, overrides)
    with Display() as display:
        # An injected fault is not a role's own: however short its lives are, it is started again.
        supervisor, run = prepare(loaded, progress=display, max_deaths=faults + MAX_DEATHS)
        injector = FaultInjector(
            supervisor.processes, lambda: supervisor.num_records, faults, seed, long_freezes, agents=supervisor.agents
        )
        with injector:
            supervisor.run()
    injected = injector.faults
    words = ", ".join(f"{name} {number}" for name, number in sorted(Counter(f"{f.kind} {f.target}" for f in injected).items()))
    typer.echo(f"{len(injected)} of {faults} faults: {words}; {supervisor.num_records} steps recorded")
    violations = problems(run, loaded)
    for problem in violations:
        typer.echo(f"PROBLEM: {problem}", err=True)
    if len(injected) < faults:
        typer.echo(f"the run was over too soon: raise max_steps (now {loaded.max_steps})", err=True)
    if violations or len(injected) < faults:
        raise typer.Exit(1)
    typer.echo("nothing was lost, nothing was trained twice, the ledger closes")


@command(app)
def doctor(
    device: Annotated[str | None, typer.Option(help="Device to test: cpu, cuda or cuda:N. Without it nothing is run.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CHECK", help="Only this check or measurement; may be repeated.")
    ] = None,
    speeds: Annotated[bool, typer.Option("--speeds", help="Also measure copies, decoding, publication and a run.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write report.md and report.json there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Report this machine's hardware and missing packages. With a device, test every part on it.

    The tests compare model families, dtypes, CUDA graphs and gradients with plain passes on the CPU, then make small runs: the
    built-in engine, vLLM, two ranks, ZeRO-3. They take minutes; paste the report into an issue. Exit code 1 if one fails.
    """
    if not experiment("doctor")(device, only or [], speeds, report, as_json, typer.echo):
        raise typer.Exit(1)


@command(app)
def plan(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC.toml", help="A spec (docs/planning.md), or a shipped one's name: qwen3-8b.")
    ] = None,
    as_json: AsJson = False,
    settings: Annotated[Path | None, typer.Option(help="TOML file to write: sections of a configuration for train.")] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Finished run; with SPEC.toml plan by its speeds, alone compare staleness bounds."),
    ] = None,
    devices: Annotated[bool, typer.Option("--devices", help="List the catalogue of devices and exit.")] = False,
) -> None:
    """Show which role goes on which devices. Predict step times and how far ahead to generate, without any device."""
    if devices:
        say(experiment("devices")())
        return
    say(experiment("plan")(spec, from_run, settings=settings, as_json=as_json))


@command(trying, "machine")
def try_machine(
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the matrix product.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Measure this machine for `plan`. Print arithmetic and memory speed as the section cluster.own of a spec."""
    say(experiment("calibrate")(device=device, dtype=dtype, threads=threads))
