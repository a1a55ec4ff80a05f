"""Prompts that are posted are in the spool when the answer comes, all or none; what may not be sent is refused by name."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from serving import Site, serving
from typer.testing import CliRunner

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import DISK
from async_rlhf.buffers.spool.deposit import end
from async_rlhf.cli.commands import app
from async_rlhf.watch.intake import MAX_BODY_BYTES, SOCKET, intake, listen

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


def test_rows_that_are_posted_are_in_the_spool_when_the_answer_comes(site: Site, spool: Path) -> None:
    sent = [{"prompt": "a", "answer": 1}, {"prompt": "b\u2028", "answer": 2}]
    body = "\n".join(json.dumps(row, ensure_ascii=False) for row in sent).encode()
    answer = site.get("/rows", method="POST", body=body)
    assert (answer.status, json.loads(answer.text)) == (200, {"rows": 2, "bytes": len(body) + 1})
    assert rows(spool) == sent


def test_of_rows_with_one_that_is_none_nothing_is_put_and_the_line_is_named(site: Site, spool: Path) -> None:
    answer = site.get("/rows", method="POST", body=b'{"prompt": "a"}\n{"prompt": ')
    assert answer.status == 400 and "line 2 is not JSON" in answer.text and "Nothing was put" in answer.text
    assert not list(spool.iterdir())


def test_a_spool_that_has_ended_takes_nothing_and_does_not_tell_where_it_lies(site: Site, spool: Path) -> None:
    end(spool)
    answer = site.get("/rows", method="POST", body=b'{"prompt": "a"}')
    assert answer.status == 400 and "'prompts' has ended" in answer.text and str(spool) not in answer.text


def test_a_full_disk_takes_nothing_and_the_same_can_be_sent_again(
    site: Site, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(DISK, "sync", refuse)
        answer = site.get("/rows", method="POST", body=b'{"prompt": "a"}')
    assert answer.status == 503 and "No space left on device; nothing was put into it" in answer.text
    assert str(spool) not in answer.text and not list(spool.iterdir())
    assert site.get("/rows", method="POST", body=b'{"prompt": "a"}').status == 200 and len(rows(spool)) == 1


def test_what_is_too_long_or_of_no_said_length_is_refused_before_it_is_read(site: Site, spool: Path) -> None:
    assert site.get("/rows", {"content-length": str(MAX_BODY_BYTES + 1)}, "POST").status == 413
    assert site.get("/rows", {"content-length": "1e3"}, "POST").status in (400, 413)
    assert site.get("/rows", {"transfer-encoding": "chunked"}, "POST").status == 411
    assert site.get("/rows").status == 405 and site.get("/").status == 404 and site.get("/healthz").status == 200
    assert not list(spool.iterdir())


def test_without_the_token_or_from_a_site_of_another_name_nothing_is_taken(closed_site: Site, site: Site, spool: Path) -> None:
    body = b'{"prompt": "a"}'
    assert closed_site.get("/rows", method="POST", body=body).status == 401
    assert site.get("/rows", {"host": "elsewhere.example"}, "POST", body).status == 421
    assert not list(spool.iterdir())
    assert closed_site.get("/rows", {"authorization": f"Bearer {TOKEN}"}, "POST", body).status == 200
    assert rows(spool) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain;charset=UTF-8"},
        {"origin": "null", "content-type": "text/plain"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_a_page_of_another_site_can_send_nothing_not_even_with_the_token(
    site: Site, closed_site: Site, spool: Path, headers: dict[str, str]
) -> None:
    body = b'{"prompt": "a"}'
    assert site.get("/rows", headers, "POST", body).status == 403
    assert closed_site.get("/rows", {**headers, "authorization": f"Bearer {TOKEN}"}, "POST", body).status == 403
    assert not list(spool.iterdir())


def test_a_page_of_its_own_and_programs_may_send(site: Site, spool: Path) -> None:
    body, own = b'{"prompt": "a"}', {"origin": f"http://127.0.0.1:{site.port}", "sec-fetch-site": "same-origin"}
    for headers in ({}, own, {"sec-fetch-site": "none"}):
        assert site.get("/rows", headers, "POST", body).status == 200
    assert len(rows(spool)) == 3


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
        found = CliRunner().invoke(app, ["spool", "listen", *words])
        assert found.exit_code == 3
        return found.output

    assert "is no directory" in said(str(tmp_path / "none"))
    for address in ("0.0.0.0:0", "127.0.0.1:0", "[::1]:0"):
        assert "there is no token. Give --token-file FILE, or --address unix:PATH" in said(str(spool), "--address", address)
    assert "AF_UNIX path too long" in said(str(spool), "--address", f"unix:/{'x' * 107}")
    (spool / "no-socket").write_text("kept")
    assert "cannot be used" in said(str(spool), "--address", f"unix:{spool / 'no-socket'}")
    assert (spool / "no-socket").read_text() == "kept"
    end(spool)
    assert "has ended" in said(str(spool))
