"""What is posted is in the spool when the answer comes, all or none, or is refused by name; strangers that send half a request
end in time, give way to others, and take no descriptor from a daemon."""

from __future__ import annotations

import errno
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import h11
import pytest
from serving import Site, serving

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import DISK
from async_rlhf.buffers.spool.deposit import end
from async_rlhf.watch import http as served_over
from async_rlhf.watch.intake import MAX_BODY_BYTES, SOCKET, intake, listen
from tests.conftest import output_of, wait_for

TOKEN = "0123456789abcdef-secret"


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    made = tmp_path / "prompts"
    made.mkdir()
    return made


@pytest.fixture
def site(spool: Path) -> Iterator[Site]:
    with serving(intake(spool)) as site:
        yield site


@pytest.fixture
def closed_site(spool: Path) -> Iterator[Site]:
    with serving(intake(spool, TOKEN)) as site:
        yield site


def rows(spool: Path) -> list[object]:
    return [json.loads(line) for file in sorted(spool.glob("*.jsonl")) for line in file.read_bytes().splitlines()]


ROW, SENT = b'{"prompt": "a"}', {"origin": "http://127.0.0.1:PORT", "sec-fetch-site": "same-origin"}
BEARER = {"authorization": f"Bearer {TOKEN}"}
ELSEWHERE: list[dict[str, str]] = [
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain;charset=UTF-8"},
    {"origin": "null", "content-type": "text/plain"},
    {"origin": "http://127.0.0.1:1"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site"},
]


def test_rows_that_are_posted_are_in_the_spool_when_the_answer_comes(site: Site, spool: Path) -> None:
    sent = [{"prompt": "a", "answer": 1}, {"prompt": "b\u2028", "answer": 2}]
    body = "\n".join(json.dumps(row, ensure_ascii=False) for row in sent).encode()
    answer = site.get("/rows", method="POST", body=body)
    assert (answer.status, json.loads(answer.text)) == (200, {"rows": 2, "bytes": len(body) + 1})
    assert rows(spool) == sent
    for headers in ({}, SENT, {"sec-fetch-site": "none"}):
        own = {name: value.replace("PORT", str(site.port)) for name, value in headers.items()}
        assert site.get("/rows", own, "POST", ROW).status == 200
    assert len(rows(spool)) == 5


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (400, {}, b'{"prompt": "a"}\n{"prompt": '),
        (413, {"content-length": str(MAX_BODY_BYTES + 1)}, None),
        (400, {"content-length": "1e3"}, None),
        (411, {"transfer-encoding": "chunked"}, None),
        (421, {"host": "elsewhere.example"}, ROW),
        *((403, headers, ROW) for headers in ELSEWHERE),
    ],
)
def test_of_what_may_not_be_sent_nothing_is_put(
    site: Site, closed_site: Site, spool: Path, status: int, headers: dict[str, str], body: bytes | None
) -> None:
    answer = site.get("/rows", headers, "POST", body)
    assert answer.status == status
    if not headers:
        assert "line 2 is not JSON" in answer.text and "Nothing was put" in answer.text
    if status == 403:  # not even with the token
        assert closed_site.get("/rows", {**headers, **BEARER}, "POST", body).status == 403
    assert site.get("/rows").status == 405 and site.get("/").status == 404 and not list(spool.iterdir())


def test_without_the_token_nothing_is_taken(closed_site: Site, spool: Path) -> None:
    assert closed_site.get("/rows", method="POST", body=ROW).status == 401 and not list(spool.iterdir())
    assert closed_site.get("/rows", BEARER, "POST", ROW).status == 200 and rows(spool) == [{"prompt": "a"}]


def test_a_full_disk_or_a_spool_that_has_ended_takes_nothing_and_does_not_tell_where_it_lies(
    site: Site, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(DISK, "sync", refuse)
        answer = site.get("/rows", method="POST", body=ROW)
    assert answer.status == 503 and "No space left on device; nothing was put into it" in answer.text
    assert str(spool) not in answer.text and not list(spool.iterdir())
    assert site.get("/rows", method="POST", body=ROW).status == 200 and len(rows(spool)) == 1
    end(spool)
    answer = site.get("/rows", method="POST", body=ROW)
    assert answer.status == 400 and "'prompts' has ended" in answer.text and str(spool) not in answer.text


def test_the_command_takes_rows_at_a_socket_that_this_user_alone_can_open(spool: Path) -> None:
    command = [sys.executable, "-m", "async_rlhf", "spool", "listen", str(spool)]
    path = spool / SOCKET
    for _ in range(2):  # what a killed one has left is replaced
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and f"unix:{path} (POST /rows)" in process.stdout.readline()
            assert path.stat().st_mode & 0o777 == 0o600
            with closing(http.client.HTTPConnection("localhost")) as connection:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.connect(str(path))
                connection.request("POST", "/rows", b'{"prompt": "a"}')
                assert connection.getresponse().status == 200
            with pytest.raises(ConfigError, match="Address already in use"):
                listen(spool, None, None, print)
            process.kill()
    assert len(rows(spool)) == 2


def test_the_command_refuses_what_it_could_not_take_rows_for(tmp_path: Path, spool: Path) -> None:
    def said(*words: str) -> str:
        return output_of(3, "spool", "listen", *words)

    assert "is no directory" in said(str(tmp_path / "none"))
    for address in ("0.0.0.0:0", "127.0.0.1:0", "[::1]:0"):
        assert "there is no token. Give --token-file FILE, or --address unix:PATH" in said(str(spool), "--address", address)
    assert "AF_UNIX path too long" in said(str(spool), "--address", f"unix:/{'x' * 107}")
    (spool / "no-socket").write_text("kept")
    assert "cannot be used" in said(str(spool), "--address", f"unix:{spool / 'no-socket'}")
    assert (spool / "no-socket").read_text() == "kept"
    end(spool)
    assert "has ended" in said(str(spool))


HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HALF + b"\r\n"
HALF_BODY = b"POST /rows HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


@contextmanager
def strangers(port: int, count: int, sent: bytes = HALF) -> Iterator[list[socket.socket]]:
    """Connections on each of which so much is sent, and no more."""
    with ExitStack() as held:
        opened = []
        for _ in range(count):
            opened.append(held.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=60))))
            opened[-1].sendall(sent)
        yield opened


def has_ended(stranger: socket.socket) -> bool:
    stranger.setblocking(False)
    try:
        while stranger.recv(1 << 16):  # an answer to what was whole
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", b"G", HALF, HALF_BODY, WHOLE + HALF])
def test_a_request_that_does_not_become_whole_ends_at_its_deadline(site: Site, sent: bytes) -> None:
    soon = {h11.IDLE: 0.2, h11.SEND_BODY: 0.3}
    with patch.dict(served_over._DEADLINES_S, soon), patch.object(served_over, "_LOOK_S", 0.05):
        with strangers(site.port, 3, sent) as waiting:
            wait_for(lambda: all(map(has_ended, waiting)), "the strangers to be left")
        assert site.get("/healthz").status == 200


def test_a_new_connection_takes_the_place_of_the_one_that_has_waited_longest(site: Site) -> None:
    honest = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
    with patch.object(served_over, "_MOST", 4), strangers(site.port, 4) as waiting, closing(honest):
        for _ in range(3):
            honest.request("GET", "/healthz")
            assert honest.getresponse().read() == b"ok\n"
        wait_for(partial(has_ended, waiting[0]), "the oldest to give way")
        assert not any(map(has_ended, waiting[1:]))


def test_slow_clients_take_no_more_than_a_share_of_the_descriptors(tmp_path: Path) -> None:
    count, limit = 150, 128
    (token := tmp_path / "token").write_text("x" * 32)
    token.chmod(0o600)
    command = ["spool", "listen", str(tmp_path), "--address", "127.0.0.1:0", "--token-file", str(token)]
    limited = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (limit, limit))
    process = subprocess.Popen([sys.executable, "-m", "async_rlhf", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               preexec_fn=limited, text=True)  # fmt: skip
    with process, closing(process.stdout) as said:  # type: ignore[type-var]
        port = int(said.readline().partition("http://127.0.0.1:")[2].partition("/")[0])  # type: ignore[union-attr]
        with strangers(port, count):
            for _ in range(5):
                assert Site(port).get("/healthz").status == 200
                assert len(os.listdir(f"/proc/{process.pid}/fd")) < limit // 2 + 20
        process.send_signal(signal.SIGINT)
        assert said.read() == ""  # type: ignore[union-attr]
