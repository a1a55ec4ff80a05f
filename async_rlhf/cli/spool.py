"""Commands for a spool: put, listen, end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.cli.app import errors, say, spool_app

SpoolPath = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of data.source = 'spool:DIR'.")]


@spool_app.command("put")
def spool_put(
    directory: SpoolPath,
    file: Annotated[Path, typer.Argument(metavar="FILE|-", help="JSONL, one row a line; - reads standard input.")],
) -> None:
    """Bring prompts in, all of the file or none: it is looked through, written beside and renamed."""
    with errors():
        from async_rlhf.buffers.errors import ConfigError
        from async_rlhf.buffers.spool.deposit import put

        if str(file) == "-":
            found = put(directory, sys.stdin.buffer)
        else:
            try:
                with file.open("rb") as lines:
                    found = put(directory, lines)
            except OSError as error:
                raise ConfigError(f"{str(file)!r} cannot be read: {error}; give a file of one JSON object a line") from error
        typer.echo(f"{found.rows} rows, {found.num_bytes} bytes")


@spool_app.command("listen")
def spool_listen(
    directory: SpoolPath,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="IP:PORT|unix:PATH",
            help="A socket that only you can open, or with a token any address. Left out: DIR/.listen, or 127.0.0.1:8266.",
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that a sender has to give.")] = None,
) -> None:
    """Take prompts over HTTP: POST JSONL to /rows. Ctrl-C ends it, not the run."""
    with errors():
        from async_rlhf.watch.intake import listen

        listen(directory, address, token_file, say)


@spool_app.command("end")
def spool_end(directory: SpoolPath) -> None:
    """Say that no further prompt will come: a run ends when it has used those that are there."""
    with errors():
        from async_rlhf.buffers.spool.deposit import end

        end(directory)
