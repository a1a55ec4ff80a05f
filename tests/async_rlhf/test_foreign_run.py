"""A run directory that is damaged or not one's own: a clear line, no traceback, no wait without end, no process signalled."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from typer.testing import CliRunner

from async_rlhf.cli.commands import app
from async_rlhf.inspect import status
from async_rlhf.launch.run_lock import RunLock
from async_rlhf.launch.sockets import hub_address, socket_directory
from async_rlhf.run.run_dir import RunDir

GOOD = {"step": 1, "reward": 0.5, "staleness/mean": 0, "staleness/max": 0, "tokens_per_second": 1, "idle/learner": 0}
LEDGER = {"state": "running", "ledger": {"credited": 1, "trained": 1, "closes": True}}
VERBS = ("status", "stop", "rollouts show")


def invoke(verb: str, run: RunDir) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*verb.split(), str(run.path)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def quiet(run: RunDir, verbs: tuple[str, ...] = VERBS) -> dict[str, str]:
    """What each verb says, which ends in order and speaks to no terminal."""
    said = {}
    for verb in verbs:
        code, said[verb] = invoke(verb, run)
        assert code in (0, 3, 8), (verb, code, said[verb])
        assert all(line.isprintable() for line in said[verb].split("\n")), said[verb]
        assert "Traceback" not in said[verb]
    return said


@pytest.fixture
def run(small: Callable[..., Any]) -> RunDir:
    made = RunDir.create(small())
    made.retire()
    made.ledger.write_text(json.dumps(LEDGER))
    made.metrics.write_text(json.dumps(GOOD) + "\n")
    return made


@contextmanager
def held(run: RunDir) -> Iterator[None]:
    """The run lives, by its lock."""
    lock = RunLock.take(run.lock_file)
    try:
        yield
    finally:
        lock.release()


SPOILT: dict[str, tuple[str, Any, str]] = {
    "no TOML": ("config.toml", "= \x1b[2J", "config.toml is damaged"),
    "bytes of a picture": ("config.toml", b"\xff\xd8\xff", "config.toml cannot be read"),
    "another's settings": ("config.toml", 'model = "\\u001b[2J"\nmax_steps = 0', "max_steps = 0"),
    "a directory": ("config.toml", None, "config.toml is no regular file"),
    "zeros": ("metrics.jsonl", b"\0" * 100 + b"\n", "metrics.jsonl: 1 of its last 1 lines"),
    "a step that is none": ("metrics.jsonl", '{"step": "many"}\n', "metrics.jsonl: 1 of its last 1 lines"),
    "nothing but a step": ("metrics.jsonl", '{"step": 3}\n', "a record that cannot be shown (KeyError: 'reward')"),
    "words for numbers": ("metrics.jsonl", json.dumps({**GOOD, "reward": "\x1b[2J"}) + "\n", "cannot be shown (ValueError"),
    "a ledger of words": ("ledger.json", '{"ledger": {"credited": "\x1b[2J"}}', "ledger.json"),
    "actors as a list": ("ledger.json", '{"actors": []}', "ledger.json: actors: Input should be a valid dictionary"),
    "an evaluation without a name": ("evaluations.jsonl", '{"num": 1}\n', "evaluations.jsonl: 1 of its last 1 lines"),
    "an evaluation without numbers": ("evaluations.jsonl", '{"label": "start"}\n', "cannot be shown (KeyError: 'num_prompts')"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_is_spoilt_is_named_in_one_line(case: str, run: RunDir) -> None:
    name, content, message = SPOILT[case]
    path = run.path / name
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = quiet(run)["status"]
    [line] = [line for line in said.split("\n") if message in line]
    assert "\x1b" not in said and line


def test_stop_signals_no_process_that_a_file_names(run: RunDir) -> None:
    (run.path / "run.json").write_text(json.dumps({"pid": os.getpid(), "created": 0, "address": "ipc://x", "scorer": ""}))
    run.lock_file.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    assert "is not running" in quiet(run, ("stop",))["stop"]
    with held(run):
        run.lock_file.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
        assert "no supervisor that can be seen from here" in quiet(run, ("stop",))["stop"]
        run.lock_file.write_text(json.dumps({"host": "\x1b[2J", "pid": 7}))
        assert "running on another host (process 7 on host \\x1b[2J)" in quiet(run, ("stop",))["stop"]


def test_no_address_of_a_file_is_dialled(run: RunDir, socket_dir: Path) -> None:
    """A socket that is not in a private directory of this user's runs, and one of a run that does not live."""
    (socket_dir / "async-rlhf-open").mkdir(mode=0o755)
    for directory in (socket_dir, socket_dir / "async-rlhf-open"):
        (run.path / "run.json").write_text(json.dumps({"sockets": str(directory)}))
        with zmq.Context() as context, context.socket(zmq.ROUTER) as hub:
            hub.bind(hub_address(directory))
            assert "is no socket directory" not in quiet(run)["status"], "nothing lives: it is not even looked at"
            with held(run):
                assert "is no socket directory of a run of this user" in quiet(run, ("status",))["status"]
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
            with held(run):
                assert "the hub does not answer" in quiet(run, ("status",))["status"]
        finally:
            over.set()
            serving.join(30)
