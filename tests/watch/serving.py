"""The real server on a free port of this machine, and plain requests to it."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.applications import Starlette

from async_rlhf.watch import address
from async_rlhf.watch.http import server
from async_rlhf.watch.runs import Runs
from async_rlhf.watch.server import application


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass(frozen=True)
class Site:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET", body: bytes | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode())
        finally:
            connection.close()


@contextmanager
def serving(what: Runs | Starlette, token: str | None = None) -> Iterator[Site]:
    """what: an application, or runs whose page is one. token: of the page."""
    bound = address.listen("127.0.0.1:0", token)
    served = server(application(what, token) if isinstance(what, Runs) else what)
    thread = threading.Thread(target=served.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield Site(bound.getsockname()[1])
    finally:
        served.should_exit = True
        thread.join()
        bound.close()
