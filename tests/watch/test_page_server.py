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
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from made_runs import HOSTILE, broken_run, made_run, records, write_lines
from serving import Site, serving
from starlette.requests import Request
from typer.testing import CliRunner

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.commands import app
from async_rlhf.watch import address, document
from async_rlhf.watch.beside import beside
from async_rlhf.watch.runs import Runs
from async_rlhf.watch.server import MAX_HEADER_BYTES, MAX_PATH_BYTES, THREADS, _Answers, save

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


def test_the_runs_of_a_directory_are_listed_and_nothing_else(site: Site) -> None:
    found = json.loads(site.get("/api/runs").text)
    assert {run["name"]: run["step"] for run in found["runs"]} == {"first": 12, "second": 20, "broken": 31}
    assert not found["one"] and found["more"] == 0


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


def test_no_answer_of_an_earlier_reading_is_kept(made: Path) -> None:
    runs = Runs(made / "first")
    answers, request = _Answers(runs), Request({"type": "http", "query_string": b"step=0", "path_params": {"name": "first"}})
    for _ in range(3):
        runs.refresh()
        answers.state(request)
    assert answers._state.cache_info().currsize == 1


def test_all_viewers_share_one_reading(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(made / "second", clock=lambda: 0.0)
    states: list[str] = []
    monkeypatch.setattr(
        Runs, "state", (lambda whole: lambda self, name: (states.append(name), whole(self, name))[1])(Runs.state)
    )
    with serving(runs) as site:
        answers = {site.get("/api/runs/second?step=20").text for _ in range(10)}
    assert len(answers) == 1 and states == ["second"]


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


@pytest.mark.parametrize(
    "path",
    ["/api/runs/secret.txt", "/api/runs/..", "/api/runs/%2e%2e%2fsecret.txt", "/api/runs/no%20run", "/api/runs/%2Fetc%2Fpasswd",
     "/secret.txt", "/../secret.txt", "/static/../../secret.txt", "/api/runs/..%2F/completions", "/api/runs/first%00"],
)  # fmt: skip
def test_what_is_no_run_is_not_found_and_no_file_is_ever_sent(site: Site, path: str) -> None:
    answer = site.get(path)
    assert answer.status == 404 and "not for the page" not in answer.text


def test_health_needs_no_run_and_readiness_does(made: Path, tmp_path: Path) -> None:
    with serving(Runs(tmp_path, may_be_empty=True), TOKEN) as site:
        assert (site.get("/healthz").status, site.get("/readyz").status) == (200, 503)
        made_run(tmp_path / "new", 2)
    with serving(Runs(tmp_path), TOKEN) as site:
        assert (site.get("/healthz").status, site.get("/readyz").status) == (200, 200)


@pytest.mark.parametrize("later", ["runs/new", "runs"])
def test_a_page_that_is_opened_before_the_first_run_fills_when_it_begins(tmp_path: Path, later: str) -> None:
    """later: the directory of the run that begins below, or at, the watched one."""
    time = [0.0]
    runs = Runs(tmp_path / "runs", clock=lambda: time[0], may_be_empty=True)
    with serving(runs) as site:
        assert json.loads(site.get("/api/runs").text) == {"one": False, "more": 0, "runs": []}
        assert site.get("/").status == site.get("/metrics").status == 200
        made_run(tmp_path / later, 2)
        time[0] += 3
        found = json.loads(site.get("/api/runs").text)
        assert [run["step"] for run in found["runs"]] == [2] and found["one"] == (later == "runs")
        assert site.get("/readyz").status == 200


def test_the_command_shows_a_page_where_no_run_is_yet(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "async_rlhf", "watch", str(tmp_path / "runs"), "--address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(2)]
        with urlopen(f"{said[0].split()[-1]}api/runs", timeout=60) as answer:
            assert json.loads(answer.read())["runs"] == []
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "is shown at http://127.0.0.1:" in said[0] and "the page is empty until a run begins there" in said[1]


def test_without_the_token_nothing_is_told(made: Path) -> None:
    basic = {"authorization": "Basic " + base64.b64encode(f"me:{TOKEN}".encode()).decode()}
    wrong = {"authorization": f"Bearer {TOKEN}x"}
    broken = {"authorization": "Basic ???"}
    with serving(Runs(made), TOKEN) as site:
        for path in ("/", "/api/runs", "/metrics", "/api/runs/first", "/alerts.yml"):
            assert [site.get(path, headers).status for headers in ({}, wrong, broken)] == [401, 401, 401]
            assert [site.get(path, headers).status for headers in ({"authorization": f"Bearer {TOKEN}"}, basic)] == [200, 200]


def test_a_site_of_another_name_cannot_read_the_page_through_a_browser(site: Site) -> None:
    assert site.get("/api/runs", {"host": "evil.example"}).status == 421
    assert [site.get("/api/runs", {"host": host}).status for host in (f"localhost:{site.port}", f"[::1]:{site.port}")] == [
        200,
        200,
    ]


def test_what_is_too_large_or_sends_something_is_refused(site: Site) -> None:
    assert site.get("/api/runs", method="POST", body=b"x").status == 413
    assert site.get("/api/runs", method="POST").status == 405
    assert site.get("/api/runs?" + "x" * MAX_PATH_BYTES).status == 414
    assert site.get("/api/runs", {"x": "x" * MAX_HEADER_BYTES}).status == 431
    assert site.get("/api/runs/first?step=-1").status == site.get("/api/runs/first?step=" + "9" * 30).status == 400


def test_a_port_in_use_is_refused_with_the_nearest_free_one() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is in use. 127\.0\.0\.1:\d+ is free"):
            address.listen(f"127.0.0.1:{port}", None)


@pytest.mark.parametrize("given", ["0.0.0.0:0", "[::]:0", "192.0.2.1:8265"])
def test_an_address_that_others_can_reach_is_refused_without_a_token(given: str) -> None:
    with pytest.raises(ConfigError, match="there is no token"):
        address.listen(given, None)


@pytest.mark.parametrize(
    ("given", "said"), [("example.org:80", "is no IP address"), ("127.0.0.1:x", "is no port"), (":70000", "is no port")]
)
def test_an_address_that_is_none_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        address.listen(given, TOKEN)


def test_a_token_that_others_know_or_could_guess_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match="is not there"):
        address.read_token(file)
    file.write_text(TOKEN)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others: chmod 600"):
        address.read_token(file)
    file.chmod(0o600)
    assert address.read_token(file) == TOKEN
    file.write_text("short")
    with pytest.raises(ConfigError, match="16 or more printable characters"):
        address.read_token(file)


def test_a_path_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, said in ((tmp_path, "none of its directories is one"), (tmp_path / "nothing", "is no directory")):
        with pytest.raises(ConfigError, match=said):
            Runs(path)
    for name in ("queue", "runs"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"it is a queue of runs, which are in {tmp_path}/runs"):
        Runs(tmp_path)
    with pytest.raises(ConfigError, match="is no directory"):
        Runs(tmp_path / "file", may_be_empty=True)


def test_a_saved_page_has_the_runs_inside_and_no_text_of_theirs_as_markup(made: Path, tmp_path: Path) -> None:
    save(made, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert HOSTILE not in text and "<img" not in text and str(made) not in text
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S).group(1))  # type: ignore[union-attr]
    assert set(data["saved"]["states"]) == {"first", "second", "broken"}
    assert data["saved"]["states"]["broken"]["completions"][0]["prompt"] == HOSTILE
    assert "connect-src 'none'" in text


def test_a_page_that_cannot_be_written_is_named(made: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["watch", str(made), "--save", str(tmp_path / "no" / "page.html")])
    assert result.exit_code == 3 and "cannot be written" in result.output


def test_a_run_that_is_removed_while_it_is_watched_is_gone_from_the_list(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 3)
    time = [0.0]
    runs = Runs(tmp_path, clock=lambda: time[0])
    assert runs.names() == ["run"] and runs.state("run")["summary"]["step"] == 3
    write_lines(run / "metrics.jsonl", records(4, begin=4))
    assert runs.state("run")["summary"]["step"] == 3
    time[0] += 3
    assert runs.state("run")["summary"]["step"] == 4
    run.rename(tmp_path.parent / f"{tmp_path.name}-moved")
    time[0] += 3
    assert runs.names() == []
    with pytest.raises(KeyError):
        runs.state("run")


def test_a_configuration_that_is_damaged_hides_no_other_run(made: Path, tmp_path: Path) -> None:
    made_run(tmp_path / "good", 2)
    made_run(tmp_path / "bad", 2)
    (tmp_path / "bad" / "config.toml").write_text("= no toml")
    listed = {run["name"]: run["state"] for run in document.listing(Runs(tmp_path))["runs"]}
    assert listed == {"good": "finished", "bad": "cannot be read"}
    assert "config.toml is damaged" in Runs(tmp_path).summaries()["bad"]["problems"][0]


def test_the_command_serves_until_it_is_interrupted_and_imports_no_torch(made: Path) -> None:
    code = "import sys; from async_rlhf.cli.commands import app; app(standalone_mode=False); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "watch", str(made), "--address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            port = int(re.search(r":(\d+)/", said).group(1))  # type: ignore[union-attr]
            assert process.stdout.readline() == "Ctrl-C ends it; the run goes on\n"
            assert Site(port).get("/healthz").text == "ok\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == "" and process.wait(60) == 0
        finally:
            process.kill()


def test_a_page_beside_a_queue_shows_runs_that_come_later_and_ends_with_it(tmp_path: Path) -> None:
    said: list[str] = []
    with beside(tmp_path, "127.0.0.1:0", None, said.append):
        url = said[0].rpartition(" ")[2]
        assert json.load(urlopen(f"{url}api/runs", timeout=60))["runs"] == []
        made_run(tmp_path / "late", 3)
        deadline = time.monotonic() + 30
        while not (found := json.load(urlopen(f"{url}api/runs", timeout=60))["runs"]):
            assert time.monotonic() < deadline
        assert [run["name"] for run in found] == ["late"]
    with pytest.raises(URLError):
        urlopen(url, timeout=60)


def test_many_viewers_are_answered_by_few_threads(made: Path) -> None:
    others = set(threading.enumerate())
    with serving(Runs(made)) as site, ThreadPoolExecutor(24) as viewers:
        answers = list(viewers.map(lambda number: site.get("/api/runs").text, range(96)))
        workers = [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("AnyIO")]
    assert all(answers) and 0 < len(workers) <= THREADS


def test_a_queue_whose_page_cannot_be_served_is_not_served(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["queue", "serve", str(tmp_path), "--address", "0.0.0.0:0"])
    assert found.exit_code == 3 and "there is no token" in found.output
    shown = ["queue", "serve", str(tmp_path), "--print-unit", "--address", "127.0.0.1:8265"]
    assert "--address 127.0.0.1:8265" in CliRunner().invoke(app, shown).output
