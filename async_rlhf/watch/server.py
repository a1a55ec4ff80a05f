"""The page, its data, and the Prometheus endpoint over HTTP: reads runs, changes none.

    GET                               answers
    /                                 the page, one document
    /api/runs                         the runs, a line each
    /api/runs/NAME                    one run but for its curves; ?step=N&layout=L also the curves that changed since
    /api/runs/NAME/curves?metric=M    curves by name
    /api/runs/NAME/completions        the newest sampled groups
    /metrics  /alerts.yml             for Prometheus
    /healthz  /readyz                 200 while it lives; 503 until the runs have been read

`application` is the whole of it; `routes` can be mounted in another application, which then decides who may ask.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import write_whole
from async_rlhf.run.run_dir import no_run
from async_rlhf.watch import address as addresses
from async_rlhf.watch import document, prometheus
from async_rlhf.watch.connections import Connection, most
from async_rlhf.watch.runs import Runs, as_json
from async_rlhf.watch.series import MAX_STEP

MAX_HEADER_BYTES = 16 << 10
MAX_PATH_BYTES = 2 << 10
_OPEN = ("/healthz", "/readyz")
LOCAL = ("127.0.0.1", "localhost", "[::1]")
_GRACE_S = 2
_MAX_CURVES = 64
_MOST_KEPT = 64


def application(runs: Runs, token: str | None = None, hosts: Sequence[str] | None = LOCAL) -> Starlette:
    """Everything under `/`. token: a request must give it, as a bearer token or as the password of basic authentication.

    hosts: host names that requests without a token may have, so that no site of another name can read it through a browser.
    """
    app = Starlette(routes=routes(runs))
    app.add_middleware(Guard, token=token, hosts=None if token else hosts)
    return app


def routes(runs: Runs) -> list[BaseRoute]:
    """What `application` serves, unguarded. The page asks relative to where it is mounted."""
    answers = _Answers(runs)
    return [
        Route("/", answers.page),
        Route("/api/runs", answers.listing),
        Route("/api/runs/{name}", answers.state),
        Route("/api/runs/{name}/curves", answers.curves),
        Route("/api/runs/{name}/completions", answers.completions),
        Route("/metrics", answers.metrics),
        Route("/alerts.yml", lambda request: FileResponse(prometheus.ALERTS, media_type="text/plain; charset=utf-8")),
        Route("/healthz", healthy),
        Route("/readyz", answers.ready),
    ]


def serve(path: Path, address: str, token_file: Path | None, say: Callable[[str], object]) -> None:
    """Serve the page of a run, or of the runs in a directory, until Ctrl-C. Raises ConfigError before it listens."""
    runs, token = Runs(path, may_be_empty=True), addresses.read_token(token_file)
    with closing(addresses.listen(address, token)) as bound:
        say(addresses.announcement(path, bound, token))
        if not runs.names():
            say(f"{no_run(path)}; the page is empty until a run begins there")
        say("Ctrl-C ends it; the run goes on")
        show(runs, bound, token)


def show(runs: Runs, bound: socket.socket, token: str | None) -> None:
    """Serve the page of these runs, which are read meanwhile, on a listening socket until Ctrl-C."""
    with closing(runs):
        runs.start()
        until_interrupted(application(runs, token, (*LOCAL, addresses.shown(bound)[0])), bound)


def until_interrupted(app: ASGIApp, bound: socket.socket) -> None:
    """Serve on a listening socket until Ctrl-C."""
    with suppress(KeyboardInterrupt):  # uvicorn has closed its connections, and raises it once more
        server(app).run(sockets=[bound])


def server(app: ASGIApp) -> uvicorn.Server:
    """Serves an application over HTTP on the sockets it is run with; takes no long header and no body worth the name."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        to_thread.current_default_thread_limiter().total_tokens = 1
        await app(scope, receive, send)

    return uvicorn.Server(
        uvicorn.Config(
            served,
            http=Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=most(),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )


def save(path: Path, out: Path) -> None:
    """Write the page with what it shows now as one file. Raises ConfigError."""
    try:
        write_whole(out, document.page(document.snapshot(Runs(path))))
    except OSError as error:
        raise ConfigError(f"--save {str(out)!r} cannot be written: {error}") from error


class Guard:
    """Before every request: its size, its host or token, and that no page of another site sends something. Adds headers by
    which a browser gives the answers to no other site.

    max_body_bytes: of what is sent, whose length must be given; 0: nothing can be sent.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: Sequence[str] | None, max_body_bytes: int = 0) -> None:
        self._app, self._hosts, self._max_body_bytes = app, hosts, max_body_bytes
        self._token = None if token is None else token.encode()
        self._headers = {
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in self._headers.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if not self._max_body_bytes and (length != "0" or "transfer-encoding" in headers):
            return PlainTextResponse("nothing can be sent here: a request has no body\n", 413)
        if "transfer-encoding" in headers:
            return PlainTextResponse("send it whole, with its Content-Length\n", 411)
        if not length.isdecimal() or len(length) > 12 or int(length) > self._max_body_bytes:
            return PlainTextResponse(f"a body has at most {self._max_body_bytes} bytes; split it\n", 413)
        if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_PATH_BYTES:
            return PlainTextResponse(f"a path and its query have at most {MAX_PATH_BYTES} bytes\n", 414)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            return PlainTextResponse(f"headers have at most {MAX_HEADER_BYTES} bytes\n", 431)
        if self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            return PlainTextResponse(f"requested by another name than {', '.join(self._hosts)}\n", 421)
        if scope["method"] not in ("GET", "HEAD") and _is_elsewhere(headers):
            return PlainTextResponse("sent by a page of another site: nothing is taken from there\n", 403)
        if self._token is not None and scope["path"] not in _OPEN and not self._is_token(headers.get("authorization", "")):
            return PlainTextResponse(
                "a token is needed\n", 401, {"www-authenticate": 'Basic realm="async-rlhf", charset="UTF-8"'}
            )
        return None

    def _is_token(self, authorization: str) -> bool:
        """Takes as long for a nearly right one as for any other."""
        kind, _, given = authorization.partition(" ")
        sent = given.encode() if kind.lower() == "bearer" else b""
        if kind.lower() == "basic":
            with suppress(binascii.Error, ValueError):
                sent = base64.b64decode(given, validate=True).partition(b":")[2]
        assert self._token is not None
        return secrets.compare_digest(sent, self._token)


class _Answers:
    """Made in one thread, one after the other: a whole one takes ten times its size while it is made, and what several threads
    take at once the process keeps. The same answer is made once for all viewers."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._made: dict[tuple[str, tuple[int, str] | None], bytes] = {}
        self._made_of = 0

    def page(self, request: Request) -> Response:
        headers = {"cache-control": "no-cache", "content-security-policy": document.policy()}
        return Response(document.page(), media_type="text/html", headers=headers)

    def listing(self, request: Request) -> Response:
        return _json(as_json(document.listing(self._runs)).encode())

    def state(self, request: Request) -> Response:
        query = request.query_params
        wanted = (_step(query["step"]), query.get("layout", "")[:40]) if "step" in query else None
        name = self._known(request)
        self._runs.touch(name)
        # what was made of an earlier reading is requested no more, and may be a megabyte each
        if self._runs.revision != self._made_of or len(self._made) >= _MOST_KEPT:
            self._made_of = self._runs.revision
            self._made.clear()
        if (key := (name, wanted)) not in self._made:
            found = self._runs.state(name)
            if wanted is not None:
                found["history"] = self._runs.curves(name, document.METRICS, *wanted)
            self._made[key] = as_json(found).encode()
        return _json(self._made[key])

    def curves(self, request: Request) -> Response:
        metrics = request.query_params.getlist("metric")[:_MAX_CURVES]
        return _json(as_json(self._runs.curves(self._known(request), metrics)).encode())

    def completions(self, request: Request) -> Response:
        return _json(as_json(self._runs.completions(self._known(request))).encode())

    def metrics(self, request: Request) -> Response:
        text = prometheus.exposition(self._runs)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def ready(self, request: Request) -> Response:
        ready = bool(self._runs.names())
        return PlainTextResponse("ready\n" if ready else "no run has been read yet\n", 200 if ready else 503)

    def _known(self, request: Request) -> str:
        name: str = request.path_params["name"]
        if name not in self._runs.names():
            raise HTTPException(404, "no such run")
        return name


async def healthy(request: Request) -> Response:
    """While the process lives, whatever answer is being made."""
    return PlainTextResponse("ok\n")


def _step(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise HTTPException(400, f"step: a number from 0 to {MAX_STEP}")
    return int(text)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})


def _is_elsewhere(headers: Headers) -> bool:
    """Whether a page of another site has sent it, by headers of browsers; other programs send none."""
    origin = headers.get("origin")
    other = origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()
    return other or headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _name(host: str) -> str:
    """Of a Host header, without the port."""
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0].lower()
