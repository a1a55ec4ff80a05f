"""Strangers that send half a request: they end in time, give way to others, and take no descriptor from a daemon."""

from __future__ import annotations

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
from urllib.error import URLError
from urllib.request import urlopen

import h11
import pytest
from made_runs import made_run
from serving import Site, serving

from async_rlhf.watch import connections
from async_rlhf.watch.beside import beside
from async_rlhf.watch.intake import intake
from tests.conftest import wait_for

HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HALF + b"\r\n"
HALF_BODY = b"POST /rows HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with serving(intake(tmp_path)) as site:
        yield site


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
    with patch.dict(connections._DEADLINES_S, soon), patch.object(connections, "_LOOK_S", 0.05):
        with strangers(site.port, 3, sent) as waiting:
            wait_for(lambda: all(map(has_ended, waiting)), "the strangers to be left")
        assert site.get("/healthz").status == 200


def test_a_new_connection_takes_the_place_of_the_one_that_has_waited_longest(site: Site) -> None:
    honest = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
    with patch.object(connections, "_MOST", 4), strangers(site.port, 4) as waiting, closing(honest):
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


def served(url: str) -> list[str] | None:
    """The names of the runs that a page shows; None where there is no page."""
    try:
        return [run["name"] for run in json.load(urlopen(f"{url}api/runs", timeout=60))["runs"]]
    except (URLError, ConnectionError):
        return None


def children(pid: int) -> list[int]:
    return [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]


def test_the_page_beside_a_daemon_shows_runs_that_come_later_and_has_a_process_of_its_own_that_comes_back(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    before = set(children(os.getpid()))
    with beside(tmp_path, "127.0.0.1:0", None, said.append):
        url = said[0].rpartition(" ")[2]
        assert served(url) == []
        made_run(tmp_path / "late", 3)
        wait_for(lambda: served(url) == ["late"], "a run that begins later")
        (page,) = set(children(os.getpid())) - before
        os.kill(page, signal.SIGKILL)
        wait_for(lambda: served(url) == ["late"], "the page to come back")
    assert served(url) is None and set(children(os.getpid())) <= before


def test_the_page_ends_with_a_daemon_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "async_rlhf", "queue", "serve", str(tmp_path / "queue"), "--address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        url = daemon.stdout.readline().split()[-1]
        assert served(url) == []
        daemon.kill()
    wait_for(lambda: served(url) is None, "the page to end")
