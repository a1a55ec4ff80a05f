"""Prompts over HTTP: what is posted goes into a spool, all of it or nothing, and is on disk before the answer.

    POST /rows      JSONL, an object a line          200 {"rows": N, "bytes": N}, 400 with the line and what is wrong with it,
                                                     503 where the disk takes nothing now: the same can be sent again
    GET  /healthz                                    200 while it lives

Knows nothing of runs, as the spool does: what a row must have is looked at by the run that claims it. `Guard` stands before it:
a token, or a socket that this user alone can open; and no page of another site.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from async_rlhf.buffers.errors import ConfigError, SpoolError
from async_rlhf.buffers.spool.deposit import check_open, put
from async_rlhf.watch import address as addresses
from async_rlhf.watch.http import LOCAL, Guard, healthy, until_interrupted

DEFAULT = "127.0.0.1:8266"
SOCKET = ".listen"
"""The socket of a spool; a name that begins with it is no file of rows."""
MAX_BODY_BYTES = 32 << 20


def intake(spool: Path, token: str | None = None, hosts: tuple[str, ...] = LOCAL) -> Starlette:
    """token, hosts: as of `server.application`."""

    async def rows(request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            return PlainTextResponse("the body is not whole; nothing was put\n", 400)
        try:
            deposited = await run_in_threadpool(put, spool, body.splitlines())
        except ConfigError as error:
            status = 503 if isinstance(error, SpoolError) else 400
            return PlainTextResponse(f"{str(error).replace(str(spool), spool.name)}\n", status)
        return JSONResponse({"rows": deposited.rows, "bytes": deposited.num_bytes})

    routes = [Route("/rows", rows, methods=["POST"]), Route("/healthz", healthy)]
    app = Starlette(routes=routes)
    app.add_middleware(Guard, token=token, hosts=None if token else hosts, max_body_bytes=MAX_BODY_BYTES)
    return app


def listen(spool: Path, address: str | None, token_file: Path | None, say: Callable[[str], object]) -> None:
    """Take rows until Ctrl-C. address: left out, `DEFAULT` with a token and a socket in the spool without one.

    Raises ConfigError before it listens: for a spool that is not there or has ended too.
    """
    check_open(spool)
    token = addresses.read_token(token_file)
    address = address or (f"{addresses.UNIX}{spool / SOCKET}" if token is None else DEFAULT)
    with closing(addresses.listen(address, token, takes=True)) as bound:
        host, at = addresses.shown(bound)
        rows = " (POST /rows)" if bound.family == socket.AF_UNIX else "rows"
        say(f"rows for {spool} are taken at {at}{rows}" + (" (bearer token)" if token else ""))
        until_interrupted(intake(spool, token, (*LOCAL, host)), bound)
