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

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from async_rlhf.run.run_dir import no_run
from async_rlhf.watch import address as addresses
from async_rlhf.watch import document, prometheus
from async_rlhf.watch.http import LOCAL, Guard, healthy, until_interrupted
from async_rlhf.watch.runs import Runs, as_json
from async_rlhf.watch.series import MAX_STEP

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
    """The routes of `application`, unguarded. The page's requests are relative to its mount point."""
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
    runs, token = Runs(path), addresses.read_token(token_file)
    with closing(addresses.listen(address, token)) as bound:
        host, at = addresses.shown(bound)
        say(f"{path} is shown at {at}" + (" (user: any, password: the token)" if token else ""))
        if not runs.names():
            say(f"{no_run(path)}; the page is empty until a run begins there")
        say("Ctrl-C ends it; the run goes on")
        runs.start()
        with closing(runs):
            until_interrupted(application(runs, token, (*LOCAL, host)), bound)


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
            state = self._runs.state(name)
            if wanted is not None:
                state["history"] = self._runs.curves(name, document.METRICS, *wanted)
            self._made[key] = as_json(state).encode()
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


def _step(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise HTTPException(400, f"step: a number from 0 to {MAX_STEP}")
    return int(text)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})
