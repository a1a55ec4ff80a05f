"""Whatever stands in the files of a run, the page shows the others and marks that one; commands name it in a clear line, wait
for nothing without end, and signal no process."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import made_run
from typer.testing import CliRunner

from async_rlhf.cli.commands import app
from async_rlhf.inspect import status
from async_rlhf.launch.run_lock import RunLock
from async_rlhf.launch.sockets import hub_address, socket_directory
from async_rlhf.run.run_dir import RunDir
from async_rlhf.watch.document import METRICS, listing
from async_rlhf.watch.prometheus import exposition
from async_rlhf.watch.runs import Runs, as_json

NUMBERS = ["9" * 400, "-" + "9" * 400, "9" * 5000, "1e999", "NaN", "-Infinity", "9007199254740993", "-1", "0.5", "1e300"]
LEAVES = [
    *NUMBERS, "null", "true", '""', '"\\ud800"', '"\\u0000"', '"9999999999999999999999"', '"<img src=x>"', "[]", "{}", "[1]",
    '[["a"]]', '{"a": 1}', '{"version": 1}', "[" * 300 + "]" * 300, "[[0, -1], [1, 1]]", '[{"text": "t"}]', '"1"',
]  # fmt: skip
NAMES = [
    "config.toml", "metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl", "events.jsonl", "changes.jsonl", "quarantine.jsonl",
    "spans/actor-0.jsonl", "ledger.json", "restarts.json", "placement.json", "manifest.json", "run.json", "lock",
]  # fmt: skip


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a good run, and a pattern of one to spoil, which has every file that is read."""
    directory = tmp_path_factory.mktemp("watched")
    made_run(directory / "runs" / "good", 4)
    pattern = made_run(directory / "pattern", 4)
    (pattern / "quarantine.jsonl").write_text('{"group": 3, "prompt": 1, "attempts": 3, "reasons": ["lost"]}\n')
    (pattern / "events.jsonl").write_text('{"time": 1.0, "event": "best", "run_dir": "x", "text": "better"}\n')
    (pattern / "placement.json").write_text('{"slots": {}}')
    (pattern / "manifest.json").write_text('{"format": 1}')
    (pattern / "run.json").write_text('{"sockets": "/nowhere"}')
    return directory


def said(run: Path | RunDir, verb: str) -> str:
    """What a command says of a run, which ends in order and speaks to no terminal."""
    path = run if isinstance(run, Path) else run.path
    result = CliRunner().invoke(app, [*verb.split(), str(path)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 3, 8), (verb, result.exit_code, result.output)
    assert all(line.isprintable() for line in result.output.split("\n")) and "Traceback" not in result.output
    return result.output


def seen(runs: Path, bad: str) -> None:
    """Every answer of the page, and what commands say of the bad run, also while it lives."""
    found = Runs(runs)
    assert set(found.names()) == {"good", bad}
    for name in found.names():
        as_json({**found.state(name), "history": found.curves(name, METRICS)})
        as_json(found.completions(name))
    found.refresh()
    listed = {run["name"]: run for run in json.loads(as_json(listing(found)))["runs"]}
    assert listed["good"]["step"] == 4 and bad in listed
    assert b'async_rlhf_steps_total{run="good"} 4.0' in exposition(found)
    for verb in ("status", "stop", "rollouts show"):
        said(runs / bad, verb)
    if not (runs / bad / "lock").exists():
        with held(runs / bad):
            said(runs / bad, "status")


@contextmanager
def bad_run(watched: Path, name: str = "bad") -> Iterator[Path]:
    """Beside the good one, until the end of the block; then everything that is shown is looked at."""
    bad = shutil.copytree(watched / "pattern", watched / "runs" / name)
    try:
        yield bad
        seen(watched / "runs", name)
    finally:
        shutil.rmtree(bad)


@given(st.sampled_from(NAMES), st.integers(0, 1 << 32), st.integers(1, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_in_a_file_of_one_run_blinds_the_page(watched: Path, name: str, seed: int, blows: int) -> None:
    chance = random.Random(seed)
    with bad_run(watched) as bad:
        (bad / "lock").write_text('{"host": "x", "pid": 7}') if name == "lock" else None
        text = (bad / name).read_text()
        for _ in range(blows):
            text = spoilt(text, chance, chance.choice(LEAVES))
        (bad / name).write_text(text)


def spoilt(text: str, chance: random.Random, leaf: str) -> str:
    """One value of a line, or of the file, is another; or its bytes are cut and turned."""
    if chance.random() < 0.15:
        at = chance.randrange(len(text) + 1)
        return (
            text[:at]
            + chance.choice(["", "\0", "[" * 50_000, "\udcff".encode(errors="replace").decode(), "\n{"])
            + text[at + 3 :]
        )
    lines = text.split("\n")
    number = chance.randrange(len(lines))
    if " = " in lines[number]:
        lines[number] = f"{lines[number].partition(' = ')[0]} = {leaf}"
        return "\n".join(lines)
    try:
        value = json.loads(lines[number])
        assert isinstance(value, dict | list)
    except (ValueError, AssertionError, RecursionError):
        return "\n".join([*lines[:number], leaf, *lines[number:]])
    at, mark = value, "the leaf"
    while True:  # down to some value
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key: Any = chance.choice(keys) if keys else None
        if key is None:
            break
        if not isinstance(at[key], dict | list) or chance.random() < 0.4:
            at[key] = mark
            break
        at = at[key]
    lines[number] = json.dumps(value).replace(f'"{mark}"', leaf)
    return "\n".join(lines)


@pytest.mark.parametrize("name", [*NAMES, "checkpoints/latest/model/tokenizer.json", "queue/00000001.log"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "bytes"])
def test_what_is_no_file_is_marked_and_waited_for_by_nothing(watched: Path, name: str, kind: str) -> None:
    with bad_run(watched) as bad:
        path = bad / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        {"pipe": os.mkfifo, "directory": Path.mkdir, "bytes": lambda path: path.write_bytes(b"\xff\xfe\0" * 50)}[kind](path)


@pytest.mark.parametrize("name", ['"><img src=x onerror=alert(1)>{}\\', "a b", "é😀", "..a", "%2e", "run=1,b"])
def test_any_name_of_a_run_is_shown(watched: Path, name: str) -> None:
    with bad_run(watched, name):
        pass


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("= no toml", "config.toml is damaged: "),
        (f"max_steps = {'9' * 5000}\n", "config.toml is damaged: max_steps (line 1): numbers are integers from"),
    ],
)
def test_a_damaged_configuration_marks_its_run_and_names_the_place(watched: Path, content: str, problem: str) -> None:
    with bad_run(watched) as bad:
        (bad / "config.toml").write_text(content)
        summary = Runs(watched / "runs").summaries()["bad"]
        assert summary["state"] == "cannot be read" and summary["problems"][0].startswith(problem)


GOOD = {"step": 1, "reward": 0.5, "staleness/mean": 0, "staleness/max": 0, "tokens_per_second": 1, "idle/learner": 0}
LEDGER = {"state": "running", "ledger": {"credited": 1, "trained": 1, "closes": True}}


@pytest.fixture
def run(small: Callable[..., Any]) -> RunDir:
    made = RunDir.create(small())
    made.retire()
    made.ledger.write_text(json.dumps(LEDGER))
    made.metrics.write_text(json.dumps(GOOD) + "\n")
    return made


@contextmanager
def held(run: Path) -> Iterator[None]:
    """The run lives, by its lock."""
    lock = RunLock.take(run / "lock")
    try:
        yield
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.toml", "= \x1b[2J", "config.toml is damaged"),
        ("config.toml", b"\xff\xd8\xff", "config.toml cannot be read"),
        ("config.toml", 'model = "\\u001b[2J"\nmax_steps = 0', "max_steps = 0"),
        ("config.toml", None, "config.toml is no regular file"),
        ("metrics.jsonl", b"\0" * 100 + b"\n", "metrics.jsonl: 1 of its last 1 lines"),
        ("metrics.jsonl", '{"step": "many"}\n', "metrics.jsonl: 1 of its last 1 lines"),
        ("metrics.jsonl", '{"step": 3}\n', "a record that cannot be shown (KeyError: 'reward')"),
        ("metrics.jsonl", json.dumps({**GOOD, "reward": "\x1b[2J"}) + "\n", "cannot be shown (ValueError"),
        ("ledger.json", '{"ledger": {"credited": "\x1b[2J"}}', "ledger.json"),
        ("ledger.json", '{"actors": []}', "ledger.json: actors: Input should be a valid dictionary"),
        ("evaluations.jsonl", '{"num": 1}\n', "evaluations.jsonl: 1 of its last 1 lines"),
        ("evaluations.jsonl", '{"label": "start"}\n', "cannot be shown (KeyError: 'num_prompts')"),
    ],
)
def test_what_is_spoilt_is_named_in_one_line(name: str, content: str | bytes | None, message: str, run: RunDir) -> None:
    path = run.path / name
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    [line] = [line for line in said(run, "status").split("\n") if message in line]
    assert "\x1b" not in line


def test_stop_signals_no_process_that_a_file_names(run: RunDir) -> None:
    (run.path / "run.json").write_text(json.dumps({"pid": os.getpid(), "created": 0, "address": "ipc://x", "scorer": ""}))
    run.lock_file.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    assert "is not running" in said(run, "stop")
    with held(run.path):
        run.lock_file.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
        assert "no supervisor that can be seen from here" in said(run, "stop")
        run.lock_file.write_text(json.dumps({"host": "\x1b[2J", "pid": 7}))
        assert "running on another host (process 7 on host \\x1b[2J)" in said(run, "stop")


def test_no_address_of_a_file_is_dialled(run: RunDir, socket_dir: Path) -> None:
    """A socket that is not in a private directory of this user's runs, and one of a run that does not live."""
    (socket_dir / "async-rlhf-open").mkdir(mode=0o755)
    for directory in (socket_dir, socket_dir / "async-rlhf-open"):
        (run.path / "run.json").write_text(json.dumps({"sockets": str(directory)}))
        with zmq.Context() as context, context.socket(zmq.ROUTER) as hub:
            hub.bind(hub_address(directory))
            assert "is no socket directory" not in said(run, "status"), "nothing lives: it is not even looked at"
            with held(run.path):
                assert "is no socket directory of a run of this user" in said(run, "status")
            assert not hub.poll(100)


@pytest.mark.parametrize("answer", [None, [], [b""], [b"\x80"], [b"\xff" * 9, b"x"]])
def test_a_hub_that_answers_nonsense_or_nothing_is_not_waited_for(
    answer: list[bytes] | None, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_PATIENCE_S", 0.5)
    with socket_directory() as directory, zmq.Context() as context, context.socket(zmq.ROUTER) as hub:
        hub.bind(hub_address(directory))
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                if hub.poll(50):
                    peer, *_ = hub.recv_multipart()
                    if answer is not None:
                        hub.send_multipart([peer, *answer])

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            run.announce(directory)
            with held(run.path):
                assert "the hub does not answer" in said(run, "status")
        finally:
            over.set()
            serving.join(30)
