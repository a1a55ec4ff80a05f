"""The HTTP server of the page and of the intake of prompts: guarded, in one thread, for a bounded number of clients.

A client may open thousands of connections and send half a request on each. One whose request is not whole ends at a deadline,
and before that gives way to a new one where there are as many as may be; a request that is sent at once is answered.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import resource
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from anyio import to_thread
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 16 << 10
MAX_PATH_BYTES = 2 << 10
LOCAL = ("127.0.0.1", "localhost", "[::1]")
_OPEN = ("/healthz", "/readyz")
_GRACE_S = 2
_MOST, _SHARE = 128, 8  # connections at a time, and of the descriptors that this process may open; as many may be on their way
_DEADLINES_S = {h11.IDLE: 10.0, h11.SEND_BODY: 120.0}  # while the header is missing, and the body
_LOOK_S = 1.0


def until_interrupted(app: ASGIApp, bound: socket.socket) -> None:
    """Serve on a listening socket until Ctrl-C."""
    with suppress(KeyboardInterrupt):  # uvicorn has closed its connections, and raises it once more
        server(app).run(sockets=[bound])


def server(app: ASGIApp) -> uvicorn.Server:
    """Serves an application over HTTP on the sockets it is run with; takes no long header and no body worth the name."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        # Memory that several threads take at once stays with the process; an answer may have megabytes.
        to_thread.current_default_thread_limiter().total_tokens = 1
        await app(scope, receive, send)

    return uvicorn.Server(
        uvicorn.Config(
            served,
            http=HttpConnection,
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


async def healthy(request: Request) -> Response:
    """While the process lives, whatever answer is being made."""
    return PlainTextResponse("ok\n")


class Guard:
    """Checks every request: its size, its host or token, and that no page of another site sends data. Adds headers by which a
    browser gives the answers to no other site.

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
            return PlainTextResponse(f"Host header not allowed; use one of: {', '.join(self._hosts)}\n", 421)
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


def _is_elsewhere(headers: Headers) -> bool:
    """Whether a page of another site has sent it, by headers of browsers; other programs send none."""
    origin = headers.get("origin")
    other = origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()
    return other or headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0].lower()


def most() -> int:
    """Connections at a time."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if descriptors < 0 else max(1, min(_MOST, descriptors // _SHARE))


class HttpConnection(H11Protocol):
    """since: when its last request was whole, or it began, by the loop's clock."""

    since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self._timer = self.loop.call_later(_LOOK_S, self._look)
        if len(self.connections) > most():
            others = (each for each in self.connections if isinstance(each, HttpConnection))
            waiting = (each for each in others if each._deadline_s and not each.transport.is_closing())
            min(waiting, key=lambda each: each.since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._deadline_s:
            self.since = self.loop.time()

    @property
    def _deadline_s(self) -> float:
        """Seconds after `since`; 0 while its request is answered."""
        return _DEADLINES_S.get(self.conn.their_state, 0.0)

    def _look(self) -> None:
        if 0 < self._deadline_s < self.loop.time() - self.since:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_LOOK_S, self._look)
