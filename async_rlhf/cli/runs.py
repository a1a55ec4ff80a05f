"""Commands that begin, change or end a run, or judge a model: init, check, train, evaluate, set, stop, fork, sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer

from async_rlhf.cli.app import AsJson, ConfigPath, Overrides, RunPath, app, command, experiment, load_config, overridden, say


@command(app)
def init(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to write to; created if missing.")] = Path(),
) -> None:
    """Write a configuration, a reward and data that train at once. All are commented; no file is overwritten."""
    from async_rlhf.run.shipped import write_start

    for path in write_start(directory):
        typer.echo(f"wrote {path}")
    typer.echo(f"now: async-rlhf train {directory / 'config.toml'}")


@command(app)
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run directory of this configuration.")] = False,
    from_step: Annotated[int | None, typer.Option(min=0, help="With --resume: from the checkpoint of this step.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the existing run directory and start anew.")] = False,
) -> None:
    """Train a model. Ctrl-C finishes the groups in progress and saves a checkpoint; a second one ends at once."""
    from async_rlhf.launch.local import warm

    warm()  # beside all that comes before the first role
    _run_to_end(load_config(config, overrides), resume=resume, from_step=from_step, overwrite=overwrite)


@command(app)
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    deep: Annotated[bool, typer.Option("--deep", help="Load the model; compare engine and learner with plain passes.")] = False,
) -> None:
    """Check a configuration, its data and its rewards. Print the size of its run and the placement of processes."""
    from async_rlhf.inspect.trials import call_once
    from async_rlhf.preparation import places
    from async_rlhf.run.checks.preflight import preflight

    loaded = load_config(config, overrides)
    prepared = preflight(loaded)
    called = call_once(loaded, [*prepared.rows[0], *prepared.rows[1]], deep=deep)
    for line in (*_plan_of(config, loaded, prepared), *places(loaded, prepared.images), *prepared.remarks, *called):
        say(line)
    if not deep:
        say("the model's weights are not looked at: --deep loads them, and computes with them")
    else:
        from async_rlhf.learner.model.gguf import model_directory
        from async_rlhf.run.checks.model import deep_check

        for line in deep_check(loaded.model_copy(update={"model": model_directory(loaded.model)})):
            typer.echo(line)


def _plan_of(config: Path, loaded: Any, prepared: Any) -> tuple[str, ...]:
    """How many prompts, groups and steps a run has."""
    bound = loaded.bound(prepared.num_prompts)
    prompts = f"{prepared.num_prompts} training prompts, {len(prepared.rows[1])} held out"
    if loaded.data.spool is not None:
        most = "at most " if loaded.data.curriculum.is_on else ""
        prompts = f"training prompts come into {loaded.data.spool}, each for {most}{loaded.data.repeat} groups"
    length = f"groups of {loaded.generation.group_size} until it is stopped or a budget ends it"
    if not loaded.is_endless(bound):
        length = f"{bound.num_groups} groups of {loaded.generation.group_size} in at most {bound.num_steps} steps"
    return (
        f"{config}: good. {prompts}; {length}.",
        f"max_staleness {bound.max_staleness}, publish every {bound.publish_every} step(s), "
        f"{bound.groups_per_batch} groups a step: at most {bound.max_ahead} groups are generated ahead.",
    )


@command(app)
def evaluate(
    model: Annotated[str, typer.Argument(help="Model directory or GGUF file, for example runs/quick/checkpoints/best/model.")],
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model as a run of this configuration would. Decoding is greedy; evaluation.samples adds pass@k."""
    from async_rlhf.preparation import evaluate as judged
    from async_rlhf.run.display.console import Display, held_out

    loaded = load_config(config, overrides)
    if as_json:
        typer.echo(json.dumps(judged(loaded, model), indent=1))
        return
    with Display() as display:
        record = judged(loaded, model, display)
    say(f"{model}: {held_out(record)}")


@command(app, "set")
def set_values(
    run_dir: RunPath,
    values: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE...]", help="As learner.learning_rate=5e-5.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change settings of a run without a restart. Without values, list the settings that can be changed."""
    from async_rlhf.learner.loop.changes import described
    from async_rlhf.run.live import ask, present
    from async_rlhf.run.reading import Reading
    from async_rlhf.run.run_dir import RunDir

    run = RunDir.existing(run_dir)
    asked = ask(run, overridden(values)) if values else None
    if as_json:
        typer.echo(json.dumps(present(run), indent=1))
    elif not values:
        shown = {key: "none" if value is None else json.dumps(value) for key, value in present(run).items()}
        for line in (*(f"{key} = {value}" for key, value in shown.items()), *Reading(run).changes_in_words()):
            say(line)
    else:
        say(f"{run.path}: {'nothing changes' if asked is None else described(asked)}")


@command(app)
def stop(run_dir: RunPath) -> None:
    """Drain a live run. It begins no new work, finishes the groups in progress, saves a checkpoint and exits with 0."""
    import signal

    from async_rlhf.launch.run_lock import signal_holder
    from async_rlhf.run.run_dir import RunDir

    run = RunDir.existing(run_dir)
    holder = signal_holder(run.lock_file, signal.SIGTERM)
    say(f"{run.path} drains ({holder}); follow it with: async-rlhf status {run.path}")


@command(app)
def fork(
    run_dir: RunPath,
    name: Annotated[str, typer.Option(help="Name of the new run; its directory is made beside the old one.")],
    overrides: Overrides = None,
    best: Annotated[bool, typer.Option("--best", help="Start from the checkpoint with the best evaluation.")] = False,
    from_step: Annotated[int | None, typer.Option(min=1, help="Start from the checkpoint of this step.")] = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Submit to this queue instead of running it.")] = None,
) -> None:
    """Begin a new run from another run's newest checkpoint. It has that run's configuration with your overrides."""
    from async_rlhf.cli.queues import put_behind
    from async_rlhf.run.live import forked
    from async_rlhf.run.run_dir import RunDir

    config = forked(RunDir.existing(run_dir), name, overridden(overrides), best=best, from_step=from_step)
    if to is not None:
        put_behind(to, config)
    else:
        _run_to_end(config)


@command(app)
def sweep(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file of a sweep, or the name of a shipped one: quick.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override in each cell; also sweep.name, .output_dir, .seeds."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Cells at a time: 1 by default, at most one per CPU or Ray node.")] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Run cells on Ray: IP:PORT of its head, or auto.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="AXIS=VALUE", help="Only cells with this value: seed=0.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and their progress; run nothing.")] = False,
) -> None:
    """Run several settings and seeds, and compare the results.

    Every combination of settings and seeds is a cell, a run of its own. Finished cells are skipped and interrupted cells
    continue. Failed cells are listed, and the same command tries them again. A cell that was run with other settings is
    refused; --set sweep.name=NAME keeps both sweeps.

    With --ray each cell runs alone on one node, and results are written here. Every node needs async-rlhf, and the files that
    cells name (models, data, rewards) at the same paths; without them a cell fails before it begins. When a node dies, its
    cell is tried on another. If all nodes share sweep.output_dir, the cell continues from its last checkpoint; otherwise its
    run stays on its node, and the other node starts it from the beginning.
    """
    experiment("sweep")(config, overrides or [], jobs=jobs, ray=ray, only=only or [], dry_run=dry_run)


def _run_to_end(config: Any, **how: Any) -> None:
    """Run a checked configuration by `async_rlhf.api.run`, and print how it ended. Raises its errors."""
    from async_rlhf.api import run
    from async_rlhf.run.display.terminal import Lasting, outliving_terminal
    from async_rlhf.run.run_dir import RunDir

    with outliving_terminal():
        result = run(config, **how)
    end = RunDir(result.run_dir).end()
    assert end is not None
    how_it_ended = end.reason if result.finished else f"{end.reason}; --resume continues"
    words = f"{how_it_ended}: {result.steps} steps in {result.run_dir}\nmodel: {result.checkpoint or 'none was saved'}"
    typer.echo(words, file=cast(IO[str], Lasting()))
