"""Commands for a queue of runs (serve, submit, queue, cancel, resume), and for a run that goes on from another (fork)."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from async_rlhf.cli.app import AsJson, ConfigPath, Overrides, RunPath, app, errors, load_config, say
from async_rlhf.cli.runs import run_to_end

if TYPE_CHECKING:
    from async_rlhf.run.config import Config
    from async_rlhf.serve.turns import Request

QueuePath = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a queue of runs.")]
RunName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a run in it.")]


@app.command()
def serve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the queue; made where there is none.")],
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Runs at a time.")] = 1,
    address: Annotated[
        str | None, typer.Option(metavar="IP:PORT", help="Show the page of `watch` there, of all its runs: 127.0.0.1:8265.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that a viewer of the page has to give.")] = None,
    print_unit: Annotated[bool, typer.Option("--print-unit", help="Print a unit of systemd for this, and end.")] = False,
    print_container: Annotated[bool, typer.Option("--print-container", help="Print a container file, and end.")] = False,
) -> None:
    """Run what is submitted to DIR, first in, first out. Ctrl-C drains what runs; the next start goes on with it."""
    with errors():
        if print_unit or print_container:
            from async_rlhf.serve.deployment import container, unit

            shown = [] if address is None else ["--address", address]
            shown += [] if token_file is None else ["--token-file", str(token_file.absolute())]
            typer.echo(unit(directory, at_once, shown) if print_unit else container(at_once), nl=False)
            return
        from async_rlhf.serve.daemon import Daemon
        from async_rlhf.serve.queue_dir import QueueDir
        from async_rlhf.watch.beside import beside

        queue = QueueDir.made(directory)
        with beside(queue.runs, address, token_file, say) if address else nullcontext():
            Daemon(queue, at_once=at_once, say=say).run()


@app.command()
def submit(directory: QueuePath, config: ConfigPath, overrides: Overrides = None) -> None:
    """Put a run behind the others of a queue. What `check` refuses is refused, and so is a name that is taken."""
    with errors():
        _submit(directory, load_config(config, overrides))


@app.command()
def queue(directory: QueuePath, as_json: AsJson = False) -> None:
    """List the runs of a queue: state, steps done, and why one failed."""
    with errors():
        from dataclasses import asdict

        from async_rlhf.serve.queue_dir import QueueDir

        found = QueueDir.existing(directory)
        rows = [
            {
                **asdict(entry),
                "steps": found.steps(entry),
                "max_steps": found.max_steps(entry),
                "run": str(found.run(entry).path),
            }
            for entry in found.entries()
        ]
        daemon = found.daemon()
        if as_json:
            typer.echo(json.dumps({"daemon": None if daemon is None else str(daemon), "runs": rows}, indent=1))
            return
        say(f"daemon: {daemon}" if daemon else f"no daemon; start one: async-rlhf serve {directory}")
        for row in rows:
            steps = "/".join(str(each) for each in (row["steps"], row["max_steps"]) if each is not None)
            say(f"{row['number']:>6}  {row['name']:<24} {row['state']:<10} {steps:>11}  {row['reason']}".rstrip())


@app.command()
def cancel(directory: QueuePath, name: RunName) -> None:
    """Take a run that does not run out of a queue for good; its name is free again where it has not begun."""
    _request("cancel", directory, name)


@app.command()
def resume(directory: QueuePath, name: RunName) -> None:
    """Let a run of a queue that was stopped, or has failed, go on in its old place."""
    _request("resume", directory, name)


@app.command()
def fork(
    run_dir: RunPath,
    name: Annotated[str, typer.Option(help="Name of the new run; its directory comes beside the old one's.")],
    overrides: Overrides = None,
    best: Annotated[bool, typer.Option("--best", help="From the checkpoint that was evaluated best, not the newest.")] = False,
    from_step: Annotated[int | None, typer.Option(min=1, help="From the checkpoint of this step, not the newest.")] = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Submit it to this queue; else it is run now.")] = None,
) -> None:
    """Begin a new run with the model of another run's checkpoint, and its configuration with overrides."""
    with errors():
        from async_rlhf.run.config import parse_override
        from async_rlhf.run.forking import forked
        from async_rlhf.run.run_dir import RunDir

        given = dict(parse_override(text) for text in overrides or [])
        config = forked(RunDir.existing(run_dir), name, given, best=best, from_step=from_step)
        if to is not None:
            _submit(to, config)
            return
        run_to_end(config)


def _request(what: Request, directory: Path, name: str) -> None:
    with errors():
        from async_rlhf.serve.queue_dir import QueueDir

        entry = QueueDir.existing(directory).request(what, name)
        say(f"{entry.name}: {entry.state}")


def _submit(directory: Path, config: Config) -> None:
    from async_rlhf.preparation import check_startable
    from async_rlhf.run.checks.spool import make_spool
    from async_rlhf.serve.queue_dir import QueueDir

    for remark in check_startable(config):
        say(remark)
    if (spool := config.data.spool) is not None:
        make_spool(spool)
        say(f"prompts may come from now on: async-rlhf spool put {spool} FILE")
    queue = QueueDir.made(directory)
    entry = queue.submit(config, Path.cwd())
    waits = "" if queue.daemon() else f"; it waits for: async-rlhf serve {directory}"
    say(f"run {entry.number} of {directory}: {entry.name}{waits}")
