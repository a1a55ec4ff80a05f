"""Commands that begin or end a run, or judge a model: init, train, check, evaluate, stop, chaos, sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer

from async_rlhf.cli.app import AsJson, ConfigPath, Overrides, RunPath, app, errors, experiment, load_config, say


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder for them; made where it is not there.")] = Path(),
) -> None:
    """Write a commented configuration, a reward and a little data that train at once. Nothing is overwritten."""
    with errors():
        from async_rlhf.run.shipped import write_start

        for path in write_start(directory):
            typer.echo(f"wrote {path}")
        typer.echo(f"now: async-rlhf train {directory / 'config.toml'}")


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run directory of this configuration.")] = False,
    from_step: Annotated[
        int | None,
        typer.Option(min=0, help="With --resume: go on from the kept checkpoint of this step instead of the newest."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the run directory that is there, and begin anew.")
    ] = False,
    launcher: Annotated[
        str | None, typer.Option(metavar="local|hosts|ray", help="Where actors run: the same as --set launch.kind=...")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="IP:PORT", help="Of the head of a Ray cluster: the same as --set launch.address=...")
    ] = None,
) -> None:
    """Train a model. Ctrl-C finishes what has begun and saves; a second one ends at once."""
    with errors():
        from async_rlhf.launch.local import warm

        warm()  # beside all that comes before the first role
        chosen = {"launch.kind": launcher, "launch.address": address}
        given = [f"{key}={value}" for key, value in chosen.items() if value is not None]
        loaded = load_config(config, [*(overrides or []), *given])
        run_to_end(loaded, resume=resume, from_step=from_step, overwrite=overwrite)


@app.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="Draw the stages of a rollout: what waits for what, and where.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Load the model too, and hold learner and engine to plain passes of it.")
    ] = False,
) -> None:
    """Check a configuration, its data and its rewards, and say what it will do."""
    with errors():
        from async_rlhf.inspect.trials import call_once
        from async_rlhf.run.checks.memory_fit import check_memory
        from async_rlhf.run.checks.preflight import preflight
        from async_rlhf.run.hosts.connections import connect, found_by
        from async_rlhf.run.hosts.placement import inventory_of, placement_of, table

        loaded = load_config(config, overrides)
        prepared = preflight(loaded)
        called = call_once(loaded, [*prepared.rows[0], *prepared.rows[1]], deep=deep)
        bound = loaded.bound(prepared.num_prompts)
        prompts = f"{prepared.num_prompts} training prompts, {len(prepared.rows[1])} held out"
        if loaded.data.spool is not None:
            most = "at most " if loaded.data.curriculum.is_on else ""
            prompts = f"training prompts come into {loaded.data.spool}, each for {most}{loaded.data.repeat} groups"
        length = f"groups of {loaded.generation.group_size} until it is stopped or a budget ends it"
        if not loaded.is_endless(bound):
            length = f"{bound.num_groups} groups of {loaded.generation.group_size} in at most {bound.num_steps} steps"
        typer.echo(f"{config}: good. {prompts}; {length}.")
        typer.echo(
            f"max_staleness {bound.max_staleness}, publish every {bound.publish_every} step(s), "
            f"{bound.groups_per_batch} groups a step: at most {bound.max_ahead} groups are generated ahead."
        )
        _, connections = connect(loaded)
        hosts, of_hosts = found_by(connections)
        if connections is not None:
            connections.close()
        inventory = inventory_of(loaded, hosts)
        placement = placement_of(loaded, inventory)
        lines = (*table(loaded, inventory, placement), *check_memory(loaded, inventory, placement))
        for line in (*of_hosts, *lines, *prepared.remarks, *called):
            say(line)
        if graph:
            from async_rlhf.actors.scoring.graph import drawing
            from async_rlhf.run.scoring import graph_of

            for line in drawing(graph_of(loaded)):
                typer.echo(line)
        if deep:
            from async_rlhf.learner.model.gguf import model_directory
            from async_rlhf.run.checks.model import deep_check

            for line in deep_check(loaded.model_copy(update={"model": model_directory(loaded.model)})):
                typer.echo(line)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="Model directory or GGUF file, for example runs/quick/checkpoints/best/model.")],
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model as a run of this configuration would, without one: greedy, and with evaluation.samples pass@k."""
    with errors():
        from async_rlhf.preparation import evaluate as judged
        from async_rlhf.run.display.console import Display, held_out

        loaded = load_config(config, overrides)
        if as_json:
            typer.echo(json.dumps(judged(loaded, model), indent=1))
            return
        with Display() as display:
            found = judged(loaded, model, display)
        say(f"{model}: {held_out(found)}")


@app.command("set")
def set_values(
    run_dir: RunPath,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE...]", help="For example learner.learning_rate=5e-5.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change a run that goes on, or one that will, without a restart; without values show what may be changed."""
    with errors():
        from async_rlhf.learner.loop.changes import described
        from async_rlhf.run.config import parse_override
        from async_rlhf.run.live import ask, changes, present
        from async_rlhf.run.run_dir import RunDir

        run = RunDir.existing(run_dir)
        asked = ask(run, dict(parse_override(text) for text in values)) if values else None
        if as_json:
            typer.echo(json.dumps(present(run), indent=1))
        elif not values:
            for line in (*(f"{key} = {_toml(value)}" for key, value in present(run).items()), *changes(run)):
                say(line)
        else:
            say(f"{run.path}: {'nothing changes' if asked is None else described(asked)}")


@app.command()
def stop(
    run_dir: RunPath,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Of a run, where RUN_DIR is that of a queue.")] = None,
) -> None:
    """Drain a live run: no new work, finish what has begun, checkpoint, exit 0. One of a queue stays so until it is resumed."""
    with errors():
        import signal

        if name is not None:
            from async_rlhf.serve.queue_dir import QueueDir

            say(f"{name}: {QueueDir.existing(run_dir).request('stop', name).state}")
            return

        from async_rlhf.launch.run_lock import signal_holder
        from async_rlhf.run.run_dir import RunDir

        run = RunDir.existing(run_dir)
        found = signal_holder(run.lock_file, signal.SIGTERM)
        say(f"{run.path} drains ({found}); follow it with: async-rlhf status {run.path}")


@app.command()
def chaos(
    config: ConfigPath,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(min=1, help="Blows to strike while the run goes on.")] = 200,
    long_freezes: Annotated[
        int, typer.Option(min=0, help="Of the blows, freezes of 60 to 120 s: longer than every time-out.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Decides who is struck, when and how.")] = 0,
) -> None:
    """Train while processes are killed and frozen at random, then check that nothing was lost or trained twice."""
    with errors():
        from async_rlhf.inspect.chaos import Monkey, problems
        from async_rlhf.preparation import prepare
        from async_rlhf.run.display.console import Display
        from async_rlhf.run.supervision.child import MAX_DEATHS

        loaded = load_config(config, overrides)
        with Display() as display:
            # Blows are no fault of a role's: however short its lives are, it is started again.
            supervisor, run = prepare(loaded, progress=display, max_deaths=kills + MAX_DEATHS)
            monkey = Monkey(
                supervisor.processes, lambda: supervisor.num_records, kills, seed, long_freezes, agents=supervisor.agents
            )
            with monkey:
                supervisor.run()
        struck = ", ".join(f"{name} {number}" for name, number in _tally(monkey.blows))
        typer.echo(f"{len(monkey.blows)} of {kills} blows: {struck}; {supervisor.num_records} steps recorded")
        found = problems(run, loaded)
        for problem in found:
            typer.echo(f"PROBLEM: {problem}", err=True)
        if len(monkey.blows) < kills:
            typer.echo(f"the run was over too soon: raise max_steps (now {loaded.max_steps})", err=True)
        if found or len(monkey.blows) < kills:
            raise typer.Exit(1)
        typer.echo("nothing was lost, nothing was trained twice, the ledger closes")


@app.command()
def sweep(
    config: Annotated[
        Path, typer.Argument(metavar="FILE", help="TOML file of a sweep, or the name of a shipped one, for example quick.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override in every cell, for example --set max_steps=60; also sweep.name, sweep.output_dir, sweep.seeds.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", help="Cells that run at once: 1 if left out, at most the CPUs; with --ray one a node at most."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="ADDRESS", help="Run cells on the nodes of a Ray cluster: IP:PORT of its head, or auto."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="AXIS=VALUE", help="Run only cells with this value, for example --only seed=0."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and how far they are; run nothing.")] = False,
) -> None:
    """Run a training with several settings and seeds, and draw and compare what came out.

    Every combination of settings and seeds is a cell, a run of its own. Finished cells are skipped, an interrupted one goes
    on; one that failed is listed and tried again by the same command; a cell that was run with other settings is refused,
    and --set sweep.name=NAME keeps both sweeps.

    With --ray each cell is a run of one node, which it has alone; results are written here. Every node needs async-rlhf, and
    at the same paths the files that cells name (models, data, rewards), or nothing is begun. When a node dies its cell is tried
    on another. Let sweep.output_dir lie where all nodes see it: then a cell goes on anywhere from its last checkpoint; else
    its run stays on its node, and another node begins it anew.
    """
    with errors():
        experiment("sweep")(config, overrides or [], jobs=jobs, ray=ray, only=only or [], dry_run=dry_run)


def run_to_end(config: Any, **how: Any) -> None:
    """Run a checked configuration as `async_rlhf.api.run` does, and say how it ended. Raises what that raises."""
    from async_rlhf.api import run
    from async_rlhf.run.display.terminal import Lasting, outliving_terminal

    with outliving_terminal():
        result = run(config, **how)
    model = result.checkpoint or "none was saved"
    said = f"{_ending(result)}: {result.steps} steps in {result.run_dir}\nmodel: {model}"
    typer.echo(said, file=cast(IO[str], Lasting()))


def _ending(result: Any) -> str:
    """How a run ended that did not fail, as it has recorded it."""
    from async_rlhf.run.run_dir import RunDir

    end = RunDir(result.run_dir).end()
    assert end is not None
    return end.reason if result.finished else f"{end.reason}; --resume continues"


def _toml(value: Any) -> str:
    """A value of one of the keys that may change, as it is set."""
    return "none" if value is None else json.dumps(value)


def _tally(blows: Any) -> list[tuple[str, int]]:
    from collections import Counter

    return sorted(Counter(f"{blow.kind} {blow.name}" for blow in blows).items())
