"""The HTTP server that the agents of one process drive the model through. It listens on this machine's loopback only.

owns        a thread with its event loop, a socket, the sessions that are open
waits for   requests; of each its body, for `_BODY_S` at most; and its call's answer, which the end of the episode bounds
woken by    the answer, or the loss of the connection
on close    the sessions end, open requests are answered (503), and the thread ends

A session is named in the URL (`/sessions/SECRET/v1/...`), or else by the key (`Authorization: Bearer`, `x-api-key`). What does
not ask the model for a turn (lists of models, versions) is answered without looking at a session.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from async_rlhf.actors.agents import chat, messages, responses
from async_rlhf.actors.agents.request import ChatRequest, RequestError
from async_rlhf.actors.agents.response import MODEL, Dialect
from async_rlhf.actors.agents.sessions import AgentSession, IncomingCall, PendingCall
from async_rlhf.actors.data.images import Read as ReadImage
from async_rlhf.actors.data.images import take_none
from async_rlhf.buffers.errors import EpisodeError

HEADER = "x-async-rlhf-train"
"""Of a request: "false" where the model's turn is not to be trained on."""
MAX_BODY_BYTES = 32 << 20
"""A history of a million tokens has an eighth of it; the rest is for images, which come with each request."""
# A longer body is read to its end and thrown away, for a client that still sends does not read why it is refused.
_MAX_DRAINED_BYTES = 1 << 30
_BODY_S = 60.0
# Clients keep connections between calls, and one that was just closed fails a request: they go with the process.
_KEEP_ALIVE_S = 3600
_MAX_CONNECTIONS, _MAX_HEADER_BYTES = 2048, 32 << 10
_CLOSE_S = 10.0

_DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": cast(Dialect, chat),
    "/messages": cast(Dialect, messages),
    "/responses": cast(Dialect, responses),
}


def _by_harness(id: str, value: float) -> None:
    raise EpisodeError("a harness sets the rewards of this episode: set_reward")


@dataclass(frozen=True)
class Llm:
    """An agent's model."""

    origin: str
    """`http://HOST:PORT`."""
    api_key: str
    """The key of the episode's session alone."""
    model: str = MODEL
    reward: Callable[[str, float], None] = field(default=_by_harness, repr=False, compare=False)
    """`reward(response.id, 0.5)` scores that one call, beside the agent's return value. Raises EpisodeError for an id of no
    call or of an untrained one, for a second reward, for a value that is no number, and after the end."""

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI-compatible SDKs."""
        return f"{self.origin}/sessions/{self.api_key}/v1"

    @property
    def anthropic_url(self) -> str:
        """The base URL for Anthropic's SDK, which adds the version itself."""
        return f"{self.origin}/sessions/{self.api_key}"

    @property
    def environ(self) -> dict[str, str]:
        """For a program: beside what the process has, `{**os.environ, **llm.environ}`."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.api_key,
            **_past_proxies(),
        }


Action = Callable[[Mapping[str, Any], str], Mapping[str, Any]]
"""What a harness asks for by name, beside its agents: JSON data for JSON data, and the origin by which the harness has reached
the server, which a forwarded port changes; raises RequestError."""
_HOST = re.compile(r"[\w.-]+(:\d+)?|\[[0-9a-fA-F:.]+\](:\d+)?", re.ASCII)


class Endpoint:
    """See the module docstring."""

    def __init__(self, port: int = 0, key: str = "", actions: Mapping[str, Action] | None = None) -> None:
        """actions: by name, served to whoever has the key, `POST /NAME`; they do not wait. Raises OSError where the port cannot
        be had."""
        self._sessions: dict[str, AgentSession] = {}
        self._key, self._actions = key.encode(), dict(actions or {})
        self.image: ReadImage = take_none  # reads those in requests
        self._socket = socket.create_server(("127.0.0.1", port), backlog=_MAX_CONNECTIONS)
        self.origin = "http://{}:{}".format(*self._socket.getsockname())
        config = uvicorn.Config(
            self._application(),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MAX_CONNECTIONS,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_CLOSE_S) // 2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="endpoint", daemon=True
        )
        self._thread.start()

    def open(self, on_call: Callable[[IncomingCall], object]) -> tuple[AgentSession, Llm]:
        """A session of an episode. Raises EpisodeError when the server has ended."""
        if not self._thread.is_alive():
            raise EpisodeError("the thread of the agents' endpoint has ended; see the log for its error")
        session = AgentSession(on_call)
        self._sessions[session.secret] = session
        return session, Llm(self.origin, session.secret)

    def end(self, session: AgentSession) -> None:
        """The episode has ended: open requests are answered, and its key is no longer one."""
        self._sessions.pop(session.secret, None)
        session.end()

    def close(self) -> None:
        for session in tuple(self._sessions.values()):
            self.end(session)
        self._server.should_exit = True
        self._thread.join(_CLOSE_S)
        self._socket.close()

    # -- the server's thread -----------------------------------------------------------------------------------------

    def _application(self) -> Starlette:
        routes = [Route(f"/v1{path}", functools.partial(self._answer, dialect), methods=["POST"])
                  for path, dialect in _DIALECTS.items()]  # fmt: skip
        routes += [Route(path, _models, methods=["GET", "HEAD"]) for path in ("/v1/models", "/v1/models/{model:path}")]
        routes += [Route(path, _alive, methods=["GET", "HEAD"]) for path in ("/", "/health", "/version", "/v1")]
        actions = [
            Route(f"/{name}", functools.partial(self._act, action), methods=["POST"]) for name, action in self._actions.items()
        ]
        return Starlette(
            routes=[Mount("/sessions/{secret}", routes=routes), *routes, *actions],
            exception_handlers={404: _no_route, 405: _no_route},
        )

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        try:
            session = self._session(request)
            body = await _body(request)
            reading = functools.partial(_read, dialect, request, body, self.image)
            # One image may have pixels for seconds, while which other calls are answered.
            key, chat_request = await asyncio.to_thread(reading) if b"image" in body else reading()
            call = session.ask(key, chat_request, is_retry=request.headers.get("x-stainless-retry-count", "0") != "0")
            if not await _has_answer(request, call):
                session.left(call)
                return Response(status_code=499)  # no client reads it
            session.gave(call)
            response = call.answer.result()
        except RequestError as error:
            return _failure(dialect, error.status, str(error))
        except ClientDisconnect:
            return Response(status_code=499)
        if chat_request.streams:
            return Response(dialect.events(chat_request, response), media_type="text/event-stream")
        return _json(dialect.whole(response))

    async def _act(self, action: Action, request: Request) -> Response:
        dialect = _DIALECTS["/chat/completions"]
        try:
            if not hmac.compare_digest(_key_of(request).encode(), self._key):
                raise RequestError("the harness' key was expected (Authorization: Bearer KEY)", 401)
            host = request.headers.get("host", "")
            origin = f"http://{host}" if _HOST.fullmatch(host) else self.origin
            return _json(action(_object(await _body(request) or b"{}"), origin))
        except RequestError as error:
            return _failure(dialect, error.status, str(error))
        except ClientDisconnect:
            return Response(status_code=499)

    def _session(self, request: Request) -> AgentSession:
        named = request.path_params.get("secret")
        session = self._sessions.get(named or _key_of(request))
        if session is None:
            raise RequestError("unknown or closed session", 404 if named else 401)
        return session


@functools.cache
def endpoint() -> Endpoint:
    """That of this process; it ends with it. Clients that the process makes from now on reach its loopback themselves."""
    os.environ.update(_past_proxies())
    return Endpoint()


def _past_proxies() -> dict[str, str]:
    """Variables by which clients reach this machine's loopback themselves, whatever proxy there is."""
    known = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    hosts = ",".join(dict.fromkeys(filter(None, [*known, "127.0.0.1", "localhost"])))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


async def _body(request: Request) -> bytes:
    """Raises RequestError for one that is too large or does not come, ClientDisconnect."""
    kept, size = bytearray(), 0
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= MAX_BODY_BYTES:
                    kept += chunk
                elif size > _MAX_DRAINED_BYTES:
                    break
    except TimeoutError as error:
        raise RequestError(f"the body did not come whole within {_BODY_S:g} s", 408) from error
    if size > MAX_BODY_BYTES:
        raise RequestError(f"a body has at most {MAX_BODY_BYTES} bytes; shorten the conversation", 413)
    return bytes(kept)


def _read(dialect: Dialect, request: Request, body: bytes, image: ReadImage) -> tuple[bytes, ChatRequest]:
    """The request, and the key that its retries share. Raises RequestError."""
    trained = request.headers.get(HEADER, "true").lower()
    if trained not in ("true", "false"):
        raise RequestError(f"header {HEADER}: {trained!r:.60}; choose true or false")
    fields = _object(body)
    try:
        chat_request = replace(dialect.read(fields, image), trained=trained == "true")
        chat_request.prefixes  # noqa: B018  computed here, where what cannot be is refused
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    key = hashlib.blake2b(b"\0".join([request.url.path.encode(), trained.encode(), body])).digest()
    return key, chat_request


def _object(body: bytes) -> dict[str, Any]:
    """Raises RequestError for what is no JSON object."""
    try:
        data = json.loads(body)
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError("the body is no JSON object")
    return data


def _key_of(request: Request) -> str:
    bearer = request.headers.get("authorization", "")
    return bearer[7:].strip() if bearer[:7].lower() == "bearer " else request.headers.get("x-api-key", "")


async def _has_answer(request: Request, call: PendingCall) -> bool:
    """Waits for the call's answer; False where the client has gone before."""
    loop, settled = asyncio.get_running_loop(), asyncio.Event()
    gone = asyncio.ensure_future(request.receive())  # behind a body nothing comes but the loss of the connection
    gone.add_done_callback(lambda _: settled.set())
    call.answer.add_done_callback(lambda _: loop.call_soon_threadsafe(settled.set))
    await settled.wait()
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    return call.answer.done()


async def _models(request: Request) -> Response:
    """In the form that both SDKs read."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL, "type": "model", "display_name": MODEL}
    model["created_at"] = "1970-01-01T00:00:00Z"
    if "model" in request.path_params:
        return _json(model)
    return _json({"object": "list", "data": [model], "has_more": False, "first_id": MODEL, "last_id": MODEL})


async def _alive(request: Request) -> Response:
    return _json({"status": "ok", "version": "1"})


async def _no_route(request: Request, error: Exception) -> Response:
    dialect = _DIALECTS["/messages" if "anthropic-version" in request.headers else "/chat/completions"]
    served = ", ".join(f"POST /v1{path}" for path in _DIALECTS)
    return _failure(dialect, getattr(error, "status_code", 404), f"{request.method} is not served here; there are: {served}")


def _failure(dialect: Dialect, status: int, reason: str) -> Response:
    """Only what did not come whole is worth a retry."""
    response = _json(dialect.failure(status, reason), status)
    response.headers["x-should-retry"] = "true" if status == 408 else "false"
    return response


def _json(data: Mapping[str, Any], status: int = 200) -> Response:
    """All ASCII: half of a surrogate pair, which a model may write in a call, has no other form."""
    return Response(json.dumps(data), status, media_type="application/json")
