"""The command line. Every verb imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from async_rlhf.buffers.errors import AsyncRLHFError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Asynchronous off-policy RLHF. Start with:  async-rlhf train configs/quick.toml\n\n"
    "Exit codes: 0 done, 1 failed, 2 usage, 3 configuration, 4 stalled, 5 a process ends again and again, "
    "6 rewards fail too often, 7 refused to train, 8 a file is damaged, 130 forced to end.",
)

rollouts_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look at a run's rollouts, or learn from them again."
)
app.add_typer(rollouts_app, name="rollouts")
keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keys for a hub that listens to other machines.")
app.add_typer(keys_app, name="keys")
rewards_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at rewards before a run depends on them.")
app.add_typer(rewards_app, name="rewards")
app.add_typer(loss_app := typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at a loss."), name="loss")

ConfigPath = Annotated[Path, typer.Argument(help="TOML file, for example configs/quick.toml.")]
RunPath = Annotated[Path, typer.Argument(help="Run directory, for example runs/quick.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, for example --set queue.max_staleness=0.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run directory of this configuration.")] = False,
    from_step: Annotated[
        int | None,
        typer.Option(min=0, help="With --resume: go on from the kept checkpoint of this step instead of the newest."),
    ] = None,
) -> None:
    """Train a model. Ctrl-C finishes what has begun and saves; a second one ends at once."""
    with _errors():
        from async_rlhf.run.api import run

        result = run(_load(config, overrides), resume=resume, from_step=from_step)
        ended = "all steps done" if result.finished else "drained; --resume continues"
        typer.echo(f"{ended}: {len(result.metrics)} steps in {result.run_dir}")
        typer.echo(f"model: {result.checkpoint}")


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
    with _errors():
        from async_rlhf.run.api import preflight

        loaded = _load(config, overrides)
        num_prompts = preflight(loaded)
        bound = loaded.bound(num_prompts)
        typer.echo(
            f"{config}: good. {num_prompts} training prompts, {bound.num_groups} groups of "
            f"{loaded.generation.group_size} in at most {-(-bound.num_groups // bound.groups_per_batch)} steps."
        )
        typer.echo(
            f"max_staleness {bound.max_staleness}, publish every {bound.publish_every} step(s), "
            f"{bound.groups_per_batch} groups a step: at most {bound.max_ahead} groups are generated ahead."
        )
        if graph:
            from async_rlhf.actors.scoring.graph import drawing
            from async_rlhf.run.scoring import graph_of

            for line in drawing(graph_of(loaded)):
                typer.echo(line)
        if deep:
            from async_rlhf.learner.model.gguf import model_directory
            from async_rlhf.run.model_checks import deep_check

            for line in deep_check(loaded.model_copy(update={"model": model_directory(loaded.model)})):
                typer.echo(line)


@app.command()
def status(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Where a run stands: live from its hub, or from what it left behind."""
    with _errors():
        from async_rlhf.inspect.status import lines, read
        from async_rlhf.run.run_dir import RunDir

        run = RunDir.existing(run_dir)
        found = read(run)
        if as_json:
            typer.echo(json.dumps(found, indent=1))
            return
        _say("\n".join(lines(run, found)))


@app.command()
def trace(
    run_dir: RunPath,
    out: Annotated[Path | None, typer.Option(help="File to write; trace.json in the run directory by default.")] = None,
) -> None:
    """Write a run's time line for ui.perfetto.dev: generation, scoring, queueing, training, weights."""
    with _errors():
        from async_rlhf.inspect.trace import export, overlap
        from async_rlhf.run.run_dir import RunDir

        run = RunDir.existing(run_dir)
        out = out or run.path / "trace.json"
        typer.echo(f"{export(run, out)} events in {out}; open it in ui.perfetto.dev")
        for name, found in overlap(run).items():
            typer.echo(f"{name}: {found.seconds:.1f} s of calls, {found.share:.1%} hidden behind decoding and training")


@app.command()
def stop(run_dir: RunPath) -> None:
    """Drain a live run: no new work, finish what has begun, checkpoint, exit 0."""
    with _errors():
        import signal

        from async_rlhf.launch.run_lock import signal_holder
        from async_rlhf.run.run_dir import RunDir

        run = RunDir.existing(run_dir)
        found = signal_holder(run.lock_file, signal.SIGTERM)
        _say(f"{run.path} drains ({found}); follow it with: async-rlhf status {run.path}")


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
    with _errors():
        from async_rlhf.inspect.chaos import Monkey, problems
        from async_rlhf.run.api import start
        from async_rlhf.run.child import MAX_DEATHS
        from async_rlhf.run.display import Display

        loaded = _load(config, overrides)
        with Display() as display:
            # Blows are no fault of a role's: however short its lives are, it is started again.
            supervisor, run = start(loaded, progress=display, max_deaths=kills + MAX_DEATHS)
            with Monkey(supervisor.processes, lambda: supervisor.num_records, kills, seed, long_freezes) as monkey:
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
    config: Annotated[Path, typer.Argument(help="TOML file of a sweep, for example experiments/staleness/quick.toml.")],
) -> None:
    """Run an experiment over several settings and seeds; finished cells are skipped."""
    with _errors():
        from importlib.metadata import entry_points

        found = entry_points(group="async_rlhf.experiments", name="sweep")
        next(iter(found)).load()(config)


@rollouts_app.command("show")
def rollouts_show(
    run_dir: RunPath,
    step: Annotated[int | None, typer.Option(help="Only the groups of this step (from 1).")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group number.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Groups to show.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Show groups as they were trained on: prompt, completions, versions, scores."""
    with _errors():
        import itertools

        from async_rlhf.inspect.rollouts import records
        from async_rlhf.run.display import group_lines
        from async_rlhf.run.run_dir import RunDir

        for record in itertools.islice(records(RunDir.existing(run_dir), step=step, group=group), limit):
            _say(json.dumps(record) if as_json else group_lines(record))


@rollouts_app.command("export")
def rollouts_export(run_dir: RunPath, out: Annotated[Path, typer.Argument(help="JSONL file to write.")]) -> None:
    """Write every group in the journal as JSONL (all of them when queue.keep_rollouts was true)."""
    with _errors():
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
    with _errors():
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
    with _errors():
        from async_rlhf.inspect.rollouts import replay
        from async_rlhf.run.config import override, parse_override
        from async_rlhf.run.run_dir import RunDir

        source = RunDir.existing(run_dir)
        changed = dict(parse_override(text) for text in overrides or [])
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
    """Score completions that exist already: values, histogram, timings, failures. Exit code 6 when any score failed."""
    with _errors():
        from async_rlhf.inspect.trials import lines, try_rewards
        from async_rlhf.launch.exit_codes import REWARDS_FAILED
        from async_rlhf.run.config import parse_settings

        given = parse_settings(("rewards", "scoring"), overrides or [])
        trial = try_rewards(rewards, data, limit=limit, scoring=given["scoring"], **given["rewards"])
        typer.echo(json.dumps(trial.plain()) if as_json else "\n".join(lines(trial)))
        if trial.num_failed:
            raise typer.Exit(REWARDS_FAILED)


@loss_app.command("try")
def loss_try(
    loss: Annotated[str, typer.Argument(metavar="FILE:NAME", help="A loss, as in loss.kind.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the section loss.")] = None,
    as_json: AsJson = False,
) -> None:
    """Hold a loss to the laws that micro-batches, ranks and masks rest on, and measure its bias. Exit code 1 when one fails."""
    with _errors():
        from async_rlhf.inspect.trials import run_loss_trial

        raise typer.Exit(run_loss_trial(loss, overrides or [], typer.echo, as_json=as_json))


@app.command()
def relay(
    hub: Annotated[str, typer.Argument(help="Address of the hub, or of another relay.")],
    address: Annotated[str, typer.Argument(help="tcp://IP:PORT or ipc://PATH for actors; beyond this machine only with keys.")],
    keys: Annotated[Path | None, typer.Option(help="Key directory to speak to the hub, as an actor's.")] = None,
    own_keys: Annotated[Path | None, typer.Option(help="Key directory to be spoken to by actors, as a hub's.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the section weights.")] = None,
) -> None:
    """Stand between the hub and many actors: weights come here once and go on from here. Ctrl-C ends it."""
    with _errors():
        from async_rlhf.run.roles import run_relay

        run_relay(hub, address, keys, own_keys, overrides or [], typer.echo)


@app.command("serve-reward")
def serve_reward(
    reward: Annotated[str, typer.Argument(metavar="FILE:NAME", help="A reward, as in rewards.functions.")],
    address: Annotated[str, typer.Option(help="tcp://IP:PORT or ipc://PATH; beyond this machine only with --keys.")],
    keys: Annotated[Path | None, typer.Option(help="Key directory (async-rlhf keys new DIR).")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of the sections rewards and scoring, for example scoring.workers=4."),
    ] = None,
) -> None:
    """Serve a reward to actors on this and other machines, who ask it as the reward `remote`. Ctrl-C ends it."""
    with _errors():
        import signal

        from async_rlhf.actors.config import RewardsConfig, ScoringConfig
        from async_rlhf.actors.scoring.server import REWARD_SERVER, ScoringServer
        from async_rlhf.run.config import parse_settings

        given = parse_settings(("rewards", "scoring"), overrides or [])
        scoring = ScoringConfig.model_validate(given["scoring"])
        (spec,) = RewardsConfig.model_validate({**given["rewards"], "functions": [reward]}).specs(Path.cwd(), scoring.stages)
        server = ScoringServer([spec], scoring, address, REWARD_SERVER, keys)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        typer.echo(f"{spec.name} is served at {server.address}")
        server.run()
        typer.echo(", ".join(f"{count} {name}" for name, count in server.counters.items()))


@keys_app.command("new")
def keys_new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New directory; it stays on the hub's machine.")],
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name", metavar="NAME[:ROLE,...]", help="Another machine, and what it may be: actor, relay, learner, control."
        ),
    ] = None,
) -> None:
    """Make the hub's or a relay's keys, and a key for each machine (of actors by default). Files are never overwritten."""
    with _errors():
        from async_rlhf.buffers.transport.keys import create
        from async_rlhf.buffers.transport.link import new_pair

        create(directory, names or [], new_pair)
        typer.echo(f"{directory} stays on this machine; in the configuration:  [security]  keys = {json.dumps(str(directory))}")
        for name in (text.partition(":")[0] for text in names or []):
            typer.echo(f"move {directory / f'for-{name}'} to {name}, keeping its modes (scp -rp), and delete it here")


def _say(text: str, *, err: bool = False) -> None:
    """Print what comes from files or peers: it may not speak to the terminal."""
    from async_rlhf.run.run_files import printable

    typer.echo(printable(text), err=err)


def _tally(blows: Any) -> list[tuple[str, int]]:
    from collections import Counter

    return sorted(Counter(f"{blow.kind} {blow.name}" for blow in blows).items())


def _load(config: Path, overrides: list[str] | None) -> Any:
    from async_rlhf.run.config import load, parse_override

    return load(config, dict(parse_override(text) for text in overrides or []))


@contextmanager
def _errors() -> Iterator[None]:
    """An error on purpose is one message and its exit code; anything else is a defect and shows where."""
    try:
        # Rewards named by import path are found from where the command is run, after everything that is installed.
        sys.path.append(str(Path.cwd()))
        yield
    except AsyncRLHFError as error:
        from async_rlhf.launch.exit_codes import exit_code

        _say(f"error: {error}", err=True)
        raise typer.Exit(exit_code(error)) from error


def main() -> None:
    app()
