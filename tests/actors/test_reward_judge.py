"""The HTTP judge against a real server that answers well, late, wrongly, or not at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.rewards import resolve
from async_rlhf.buffers.record import Score
from tests.actors.scored import Bench


class Judge(ThreadingHTTPServer):
    """Says what the completion asks for (`7`, `429 then 7`, `garbage`, ...) and remembers when it was asked what."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[float, dict[str, Any], str]] = []
        self.never = threading.Event()
        self.lock = threading.Lock()
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Judge

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = asked["messages"][0]["content"]
        with self.server.lock:
            before = sum(each[1]["messages"][0]["content"] == said for each in self.server.asked)
            self.server.asked.append((time.monotonic(), asked, self.headers.get("Authorization", "")))
        if said == "never":
            self.server.never.wait(30)
            return
        if said == "hang up":
            self.close_connection = True
            self.connection.close()
            return
        status, _, then = said.partition(" then ")
        if status.isdigit() and len(status) == 3 and (not then or before == 0):
            self.answer(int(status), b"no", {"Retry-After": "0"})
        elif said == "garbage":
            self.answer(200, b"<html>")
        elif said == "empty":
            self.answer(200, b'{"choices": []}')
        else:
            message = {"choices": [{"message": {"content": then or said}}], "usage": {"total_tokens": 42}}
            self.answer(200, json.dumps(message).encode())

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Judge]:
    with Judge() as judge:
        thread = threading.Thread(target=judge.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield judge
        judge.never.set()
        judge.shutdown()
        thread.join(60)


@pytest.fixture
def scores(server: Judge) -> Callable[..., list[Score]]:
    def ask(*completions: str, options: dict[str, Any] | None = None, **settings: Any) -> list[Score]:
        chosen = {"url": server.url, "model": "m", "template": "{completion}", **(options or {})}
        specs = resolve(["judge"], Path.cwd(), {"judge": chosen}, {"judge": settings})
        with Bench(specs) as bench:
            return [each["judge"] for each in bench.score(*completions)]

    return ask


def test_the_last_number_is_the_score_on_the_judges_own_scale(server: Judge, scores: Callable[..., list[Score]]) -> None:
    plain, worded = scores("7", "Good, but 2 mistakes.\nScore: 2.5")
    assert plain == Score(0.7, metrics={"raw": 7.0, "tokens": 42.0}) and worded.value == 0.25
    # Both are asked at once: which one the server hears first is open.
    assert {
        "model": "m",
        "messages": [{"role": "user", "content": "7"}],
        "temperature": 0.0,
        "max_tokens": 256,
    } in [body for _, body, _ in server.asked]


def test_the_judge_reads_the_template_with_every_column_and_gets_its_key(
    server: Judge, scores: Callable[..., list[Score]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    (score,) = scores("{3}", options={"template": "{prompt}|{answer}|{completion}", "api_key_env": "JUDGE_KEY"})
    assert score.value == 0.3
    _, asked, authorization = server.asked[0]
    assert asked["messages"][0]["content"] == "p|a|{3}" and authorization == "Bearer secret"


def test_each_way_a_judge_can_fail_is_named(scores: Callable[..., list[Score]]) -> None:
    told = {
        "401": "ValueError: .* answered 401: 'no'",
        "500": "TransientError: .* answered 500",
        "garbage": "ValueError: .* answered what is no JSON: '<html>'",
        "empty": r"ValueError: the judge's answer has no choices\[0\]",
        "very good": "ValueError: the judge gave no score: 'very good'",
        "11": "ValueError: the judge gave 11, its scale goes from 0 to 10",
        "hang up": "TransientError: .*RemoteProtocolError",
        "never": "timed out after 1 s",
    }
    never = told.pop("never")  # it alone is to time out
    found = [*scores(*told, timeout_s=60.0, retries=0), *scores("never", timeout_s=1.0, retries=0)]
    found += scores("1", options={"url": "http://127.0.0.1:9/v1"}, retries=0)
    absent = "^TransientError: http://127.0.0.1:9/v1/chat/completions: ConnectError"
    for (said, reason), score in zip([*told.items(), ("never", never), ("absent", absent)], found, strict=True):
        assert score.state == "failed", said
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(score.failure)


def test_a_busy_judge_is_asked_again_and_a_wrong_request_is_not(server: Judge, scores: Callable[..., list[Score]]) -> None:
    assert [score.value for score in scores("429 then 5", "503 then 6", "400 then 6", retries=2)] == [0.5, 0.6, None]
    assert sorted(asked["messages"][0]["content"] for _, asked, _ in server.asked) == [
        "400 then 6",
        *["429 then 5"] * 2,
        *["503 then 6"] * 2,
    ]


def test_connections_are_used_again(server: Judge, scores: Callable[..., list[Score]]) -> None:
    assert all(score.value == 0.4 for score in scores(*["4"] * 64, max_concurrency=4))
    assert len(server.asked) == 64 and server.connections <= 4


def test_a_judge_on_this_machine_is_asked_by_no_proxy(
    scores: Callable[..., list[Score]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert scores("7")[0].value == 0.7
