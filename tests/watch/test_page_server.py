"""The page's server answers what it should, refuses the rest, and says before it listens what it cannot do."""

from __future__ import annotations

import base64
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from made_runs import broken_run, made_run, records, write_lines
from serving import Site, serving
from starlette.requests import Request

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.run_dir import RunDir
from async_rlhf.watch import address
from async_rlhf.watch.http import MAX_HEADER_BYTES, MAX_PATH_BYTES
from async_rlhf.watch.runs import Runs
from async_rlhf.watch.server import _Answers

TOKEN = "0123456789abcdef-secret"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    made_run(directory / "first", 12)
    made_run(directory / "second", 20, seed=1)
    broken_run(directory / "broken")
    (directory / "no run").mkdir()
    (directory / "secret.txt").write_text("not for the page")
    return directory


@pytest.fixture(scope="module")
def site(made: Path) -> Iterator[Site]:
    with serving(Runs(made)) as site:
        yield site


NO_RUNS = (
    "/api/runs/secret.txt", "/api/runs/..", "/api/runs/%2e%2e%2fsecret.txt", "/api/runs/no%20run", "/api/runs/%2Fetc%2Fpasswd",
    "/secret.txt", "/../secret.txt", "/static/../../secret.txt", "/api/runs/..%2F/completions", "/api/runs/first%00",
)  # fmt: skip
LONG = {"x": "x" * MAX_HEADER_BYTES}


@pytest.mark.parametrize(
    ("status", "path", "about"),
    [
        *((404, path, {}) for path in NO_RUNS),
        (421, "/api/runs", {"headers": {"host": "evil.example"}}),
        (413, "/api/runs", {"method": "POST", "body": b"x"}),
        (405, "/api/runs", {"method": "POST"}),
        (414, "/api/runs?" + "x" * MAX_PATH_BYTES, {}),
        (431, "/api/runs", {"headers": LONG}),
        (400, "/api/runs/first?step=-1", {}),
        (400, "/api/runs/first?step=" + "9" * 30, {}),
        (200, "/api/runs", {"headers": {"host": "localhost:1"}}),
        (200, "/api/runs", {"headers": {"host": "[::1]:1"}}),
    ],
)
def test_the_runs_of_a_directory_are_listed_no_file_is_ever_sent_and_what_is_no_request_for_a_run_is_refused(
    site: Site, status: int, path: str, about: dict[str, Any]
) -> None:
    answer = site.get(path, **about)
    assert answer.status == status and "not for the page" not in answer.text
    if status == 200:
        found = json.loads(answer.text)
        assert {run["name"]: run["step"] for run in found["runs"]} == {"first": 12, "second": 20, "broken": 31}
        assert not found["one"] and found["more"] == 0


@pytest.mark.parametrize(
    ("given", "token", "said"),
    [
        *((given, None, "there is no token") for given in ("0.0.0.0:0", "[::]:0", "192.0.2.1:8265")),
        ("example.org:80", TOKEN, "is no IP address"),
        ("127.0.0.1:x", TOKEN, "is no port"),
        (":70000", TOKEN, "is no port"),
        ("127.0.0.1:TAKEN", None, r"port \d+ is in use. 127\.0\.0\.1:\d+ is free"),
    ],
)
def test_an_address_that_is_none_is_taken_or_that_others_can_reach_without_a_token_is_refused(
    given: str, token: str | None, said: str
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, pytest.raises(ConfigError, match=said):
        address.listen(given.replace("TAKEN", str(taken.getsockname()[1])), token)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (None, 0, "does not exist"),
        (TOKEN, 0o644, "can be read by others: chmod 600"),
        ("short", 0o600, "16 or more printable characters"),
        (f"{TOKEN} {TOKEN}", 0o600, "no space"),
    ],
)
def test_a_token_that_others_know_or_could_guess_is_refused(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=said):
        address.read_token(file)
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert address.read_token(file) == TOKEN


def test_a_path_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        Runs(tmp_path / "file")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"is no run directory \(it has no config\.toml\)$"):
            RunDir.existing(path)
    for number in range(7):
        (tmp_path / f"of{number}").mkdir()
        (tmp_path / f"of{number}" / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"\(it has no config\.toml; runs in it: 'of0', .*'of4', \.\.\.\)$"):
        RunDir.existing(tmp_path)
    for name in ("queue", "runs"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"it is a queue of runs, which are in {tmp_path}/runs"):
        RunDir.existing(tmp_path)


@pytest.mark.parametrize("later", ["runs/new", "runs"])
def test_a_page_that_is_opened_before_the_first_run_fills_when_it_begins_and_forgets_it_when_it_is_removed(
    tmp_path: Path, later: str
) -> None:
    """later: the directory of the run that begins below, or at, the watched one."""
    time = [0.0]
    with serving(runs := Runs(tmp_path / "runs", clock=lambda: time[0])) as site:
        assert json.loads(site.get("/api/runs").text) == {"one": False, "more": 0, "runs": []}
        assert [site.get(path).status for path in ("/", "/metrics", "/healthz", "/readyz")] == [200, 200, 200, 503]
        run = made_run(tmp_path / later, 2)
        time[0] += 3
        found = json.loads(site.get("/api/runs").text)
        assert [run["step"] for run in found["runs"]] == [2] and found["one"] == (later == "runs")
        assert site.get("/readyz").status == 200 and runs.state(run.name)["summary"]["step"] == 2
        write_lines(run / "metrics.jsonl", records(3, begin=3))
        assert runs.state(run.name)["summary"]["step"] == 2
        time[0] += 3
        assert runs.state(run.name)["summary"]["step"] == 3
        run.rename(tmp_path / "moved")
        time[0] += 3
        assert runs.names() == []
        with pytest.raises(KeyError):
            runs.state(run.name)


def test_the_command_serves_also_before_the_first_run_until_it_is_interrupted_and_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from async_rlhf.cli.commands import app; app(standalone_mode=False); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "watch", str(tmp_path / "runs"), "--address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            said = [process.stdout.readline() for _ in range(3)]
            assert "is shown at http://127.0.0.1:" in said[0] and "the page is empty until a run begins there" in said[1]
            assert said[2] == "Ctrl-C ends it; the run goes on\n"
            assert Site(int(said[0].rpartition(":")[2].strip("/\n"))).get("/healthz").text == "ok\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == "" and process.wait(60) == 0
        finally:
            process.kill()


def test_a_run_is_told_with_its_curves_and_then_only_with_what_changed(made: Path) -> None:
    run = made_run(made.parent / "grows", 30)
    with serving(Runs(run)) as site:
        first = json.loads(site.get("/api/runs/grows?step=0").text)
        layout = first["history"]["layout"]
        assert first["summary"]["step"] == 30 and len(first["history"]["curves"]["reward"]["step"]) == 30
        again = json.loads(site.get(f"/api/runs/grows?step=30&layout={layout}").text)
        assert again["history"]["curves"]["reward"]["step"] == [30] and again["history"]["from"] == 30
        assert json.loads(site.get("/api/runs/grows/curves?metric=loss&metric=nothing").text)["curves"].keys() == {"loss"}
        assert len(json.loads(site.get("/api/runs/grows/completions").text)) == 24


def test_a_page_is_one_document_that_runs_only_its_own_programs(site: Site) -> None:
    answer = site.get("/")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert len(re.findall(r"<script>", answer.text)) == policy.count(
        "sha256-", policy.index("script-src"), policy.index("style-src")
    )
    assert not re.search(r"(src|href)=\"(?!data:)", answer.text)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_without_the_token_nothing_is_told(made: Path) -> None:
    basic = {"authorization": "Basic " + base64.b64encode(f"me:{TOKEN}".encode()).decode()}
    wrong = {"authorization": f"Bearer {TOKEN}x"}
    broken = {"authorization": "Basic ???"}
    with serving(Runs(made), TOKEN) as site:
        for path in ("/", "/api/runs", "/metrics", "/api/runs/first", "/alerts.yml"):
            assert [site.get(path, headers).status for headers in ({}, wrong, broken)] == [401, 401, 401]
            assert [site.get(path, headers).status for headers in ({"authorization": f"Bearer {TOKEN}"}, basic)] == [200, 200]


def test_many_viewers_share_one_reading_and_one_thread_and_nothing_of_an_earlier_one_is_kept(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, whole, made_of = Runs(made, clock=lambda: 0.0), Runs.state, list[str]()
    monkeypatch.setattr(Runs, "state", lambda self, name: (made_of.append(name), whole(self, name))[1])
    others = set(threading.enumerate())
    with serving(runs) as site, ThreadPoolExecutor(24) as viewers:
        answers = set(viewers.map(lambda number: site.get("/api/runs/second?step=20").text, range(48)))
        workers = [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("AnyIO")]
    assert len(answers) == len(workers) == 1 and made_of == ["second"]
    served, request = _Answers(runs), Request({"type": "http", "query_string": b"step=0", "path_params": {"name": "first"}})
    for _ in range(3):
        runs.refresh()
        served.state(request)
    assert len(served._made) == 1
