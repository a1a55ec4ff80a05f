"""Commands for a queue of runs (submit, list, stop, cancel, resume, serve), and for prompts that arrive during a run."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from async_rlhf.cli.app import AsJson, ConfigPath, Overrides, TokenFile, command, group, load_config, say

if TYPE_CHECKING:
    from async_rlhf.run.config import Config
    from async_rlhf.serve.turns import Request

queue = group("queue", "Queue runs, and run them one after another.")
spool = group("spool", "Add prompts during a run.")

QueuePath = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a queue of runs.")]
RunName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a run in the queue.")]
SpoolPath = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of data.source = 'spool:DIR'.")]


@command(queue, "serve")
def queue_serve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the queue; created if missing.")],
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Runs at a time.")] = 1,
) -> None:
    """Run the runs submitted to DIR, first in, first out. Ctrl-C drains the running ones; the next start continues them."""
    from async_rlhf.serve.daemon import Daemon
    from async_rlhf.serve.queue_dir import QueueDir

    Daemon(QueueDir.made(directory), at_once=at_once, say=say).run()


@command(queue, "submit")
def queue_submit(directory: QueuePath, config: ConfigPath, overrides: Overrides = None) -> None:
    """Add a run at the end of the queue. It is refused if `check` refuses it or its name is taken."""
    put_behind(directory, load_config(config, overrides))


@command(queue, "list")
def queue_list(directory: QueuePath, as_json: AsJson = False) -> None:
    """List the runs: state, steps done, and why one failed."""
    from async_rlhf.serve.queue_dir import QueueDir

    queue_dir = QueueDir.existing(directory)
    rows, daemon = queue_dir.rows(), queue_dir.daemon()
    if as_json:
        typer.echo(json.dumps({"daemon": None if daemon is None else str(daemon), "runs": rows}, indent=1))
        return
    say(f"daemon: {daemon}" if daemon else f"no daemon; start one: async-rlhf queue serve {directory}")
    for row in rows:
        steps = "/".join(str(each) for each in (row["steps"], row["max_steps"]) if each is not None)
        say(f"{row['number']:>6}  {row['name']:<24} {row['state']:<10} {steps:>11}  {row['reason']}".rstrip())


@command(queue, "stop")
def queue_stop(directory: QueuePath, name: RunName) -> None:
    """Drain a running run, or pause a waiting run until `resume`."""
    _request("stop", directory, name)


@command(queue, "cancel")
def queue_cancel(directory: QueuePath, name: RunName) -> None:
    """Remove a run that is not running. Its name is free if it never started."""
    _request("cancel", directory, name)


@command(queue, "resume")
def queue_resume(directory: QueuePath, name: RunName) -> None:
    """Continue a run that was stopped or has failed. It keeps its place in the queue."""
    _request("resume", directory, name)


def _request(what: Request, directory: Path, name: str) -> None:
    from async_rlhf.serve.queue_dir import QueueDir

    say(f"{name}: {QueueDir.existing(directory).request(what, name).state}")


def put_behind(directory: Path, config: Config) -> None:
    """Submit a run to a queue, and print what it waits for. Raises ConfigError."""
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
    waits = "" if queue.daemon() else f"; it waits for: async-rlhf queue serve {directory}"
    say(f"run {entry.number} of {directory}: {entry.name}{waits}")


@command(spool, "put")
def spool_put(
    directory: SpoolPath,
    file: Annotated[Path, typer.Argument(metavar="FILE|-", help="JSONL, one row a line; - reads standard input.")],
) -> None:
    """Add the prompts of a file, all or none. They are validated, then added atomically."""
    from async_rlhf.buffers.errors import ConfigError
    from async_rlhf.buffers.spool.deposit import put

    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as lines:
            deposited = put(directory, lines)
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}; give a file of one JSON object a line") from error
    typer.echo(f"{deposited.rows} rows, {deposited.num_bytes} bytes")


@command(spool, "listen")
def spool_listen(
    directory: SpoolPath,
    address: Annotated[
        str | None,
        typer.Option(metavar="IP:PORT|unix:PATH", help="Default: unix:DIR/.listen, for you only; with a token 127.0.0.1:8266."),
    ] = None,
    token_file: TokenFile = None,
) -> None:
    """Receive prompts over HTTP: POST JSONL to /rows. Ctrl-C ends the listener, not the run."""
    from async_rlhf.watch.intake import listen

    listen(directory, address, token_file, say)


@command(spool, "end")
def spool_end(directory: SpoolPath) -> None:
    """Close the spool. Its run ends after the prompts that have arrived."""
    from async_rlhf.buffers.spool.deposit import end

    end(directory)
