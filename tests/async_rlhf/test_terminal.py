"""A terminal that is closed, and a reader that ends, do not end what is shown there: a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

import pytest
from rich.console import Console

from async_rlhf.run.display.console import Display
from async_rlhf.run.display.terminal import Lasting
from tests.conftest import REPOSITORY, python, wait_for

PROGRAM = """
import pathlib, signal, sys
from async_rlhf.run.display.terminal import on_signals
from async_rlhf.run.display.console import Display

begun, closed, ended = map(pathlib.Path, sys.argv[1:])
record = dict.fromkeys(("reward", "staleness/mean", "staleness/max", "tokens_per_second", "idle/learner", "idle/actor"), 0)
asked = []
with on_signals(lambda *_: asked.append(1)), Display() as display:
    display.event("it has begun")
    begun.touch()
    while not closed.exists():
        pass
    for step in range(1, 200):
        display.step({**record, "step": step}, 200)
        display.event("x" * 1000)
print("y" * 100_000, flush=True)
print("it has ended", file=sys.stderr, flush=True)
ended.write_text(f"{asked}")
"""


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_a_display_whose_other_end_is_gone_goes_on_in_silence(tmp_path: Path, kind: str) -> None:
    files = [tmp_path / name for name in ("begun", "closed", "ended")]
    master, slave = pty.openpty() if kind == "terminal" else os.pipe()
    started = subprocess.Popen(
        [sys.executable, "-c", leading(PROGRAM) if kind == "terminal" else PROGRAM, *map(str, files)],
        cwd=REPOSITORY,
        stdin=slave if kind == "terminal" else subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    try:
        os.close(slave)
        wait_for(files[0].exists, "its beginning")
        read_until(master, b"it has begun")
        os.close(master)  # the kernel sends SIGHUP to the leader of the session, and refuses what is written
        files[1].touch()
        assert started.wait(60) == 0
    finally:
        started.kill()
        started.wait()
    assert files[2].read_text() == "[]"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "utf-16"])
def test_what_the_output_cannot_hold_is_shown_as_an_escape(encoding: str) -> None:
    raw = io.BytesIO()
    stream = Lasting(io.TextIOWrapper(raw, encoding=encoding))
    with Display(Console(file=cast(IO[str], stream), soft_wrap=True)) as display:
        display.event("größe 😀 \ud800")
    lacks = encoding in ("ascii", "latin-1")
    assert raw.getvalue().decode(encoding).splitlines() == [
        {"ascii": "gr\\xf6\\xdfe "}.get(encoding, "größe ") + ("\\U0001f600" if lacks else "😀") + " \\ud800"
    ]


@pytest.mark.parametrize("kind", ["a full disk", "closed", "none"])
def test_a_display_that_nothing_can_be_written_to_goes_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115  it is closed by the case, or at the end
    stream = io.TextIOWrapper(raw, write_through=True)
    if kind != "a full disk":
        raw.close()
    monkeypatch.setattr(sys, "stdout", None if kind == "none" else stream)
    with Display() as display:
        for step in range(3):
            display.event(f"{step}")
    raw.close()


def test_the_command_says_an_error_in_any_encoding(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "async_rlhf", "status", str(tmp_path / "größe😀")]
    variables = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    said = subprocess.run(command, env=variables, cwd=REPOSITORY, capture_output=True, check=False)
    assert said.returncode == 3 and b"gr\xf6\xdfe\\U0001f600' is no run directory" in said.stderr


def read_until(descriptor: int, text: bytes) -> None:
    """One read holds what was written by then, which may be a part of it."""
    seen = b""
    while text not in seen:
        assert select.select([descriptor], [], [], 60)[0], f"{text!r} is not in {seen!r}"
        seen += os.read(descriptor, 1 << 16)


def leading(program: str) -> str:
    """As a shell starts it: the terminal of its input is that of its session."""
    return f"import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{program}"


TERMINATED = """
import math, signal, time
from async_rlhf.run.display.terminal import on_signals

asked = []
with on_signals(lambda number, _: asked.append(number)):
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        signal.raise_signal(number)
    time.monotonic = lambda: math.inf
    signal.raise_signal(signal.SIGTERM)
print(*asked)
"""


def test_a_termination_that_all_processes_receive_and_a_script_passes_on_is_one_and_a_later_one_another() -> None:
    assert python("-c", TERMINATED).stdout.split() == ["15", "2", "2", "15"]
