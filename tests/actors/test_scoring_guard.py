"""What a reward may take, and what is left of it however its actor ends: memory, output, programs, names. An actor of its own
in each test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.actors.workers.guard import OUTPUT_BYTES
from tests.conftest import gone, has_ended, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(600)
guarded = pytest.mark.skipif(sys.platform != "linux", reason="guards are for Linux")

ACTOR = """
import json, os, re, subprocess, sys, threading, time
from pathlib import Path
from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import resolve, spec_of
from async_rlhf.actors.scoring.pool import ScoringPool

DAEMON = '''
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
with open(sys.argv[1] + ".new", "w") as file: file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(1000)
'''

def escape(completion):
    subprocess.run([sys.executable, "-c", DAEMON, completion])
    while not os.path.exists(completion): time.sleep(0.01)
    return 1.0

def escape_and_hang(completion):
    escape(completion)
    time.sleep(1000)

async def escape_async(completion):
    return escape(completion)

kept = []

def hoard(completion):
    for _ in range(int(completion)): kept.append(bytearray(1 << 20))
    return float(len(kept))

def shout(completion):
    print("heard", completion)
    os.write(1, b"x" * int(completion))
    subprocess.run(["sh", "-c", "head -c 1000000 /dev/zero >&2"])
    return 1.0

def stuck(completion):
    os.write(1, b"begun\\n")  # whole, whatever another process writes
    re.match("(a+)+$", "a" * 60 + "b")  # keeps the interpreter lock

async def stuck_async(completion):
    stuck(completion)

def main(name, settings, completions):
    answered = threading.Event()
    pool = ScoringPool(resolve([spec_of(globals()[name])], Path("/")), ScoringConfig(**json.loads(settings)), answered.set)
    for completion in json.loads(completions):
        pool.submit("key", {"completion": completion})
        scored = []
        while not scored:
            answered.wait(1)
            answered.clear()
            scored = pool.poll()
        score = scored[0].scores[name]
        print("\\nscored", json.dumps([score.value, score.failure]), flush=True)
    if sys.stdin.readline() == "leave\\n": return
    pool.close(60.0)
    print("closed", flush=True)
    sys.stdin.readline()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[Start]:
    """`actor("hoard", ["1", "2"], timeout_s=3)`: scores one after the other, closes its pool at a line, ends at another."""
    (tmp_path / "actor.py").write_text(ACTOR)
    (tmp_path / "t").mkdir()
    started = []

    def start(reward: str, completions: list[str], **settings: Any) -> subprocess.Popen[str]:
        with (tmp_path / "stderr").open("wb") as errors:
            running = subprocess.Popen(
                [sys.executable, str(tmp_path / "actor.py"), reward, json.dumps(settings), json.dumps(completions)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path / "t")},
                text=True,
                start_new_session=True,
            )
        started.append(running)
        return running

    yield start
    for each in started:
        each.kill()
        each.communicate(timeout=300)


def say(actor: subprocess.Popen[str], line: str = "") -> None:
    assert actor.stdin is not None
    actor.stdin.write(f"{line}\n")
    actor.stdin.flush()


def heard(actor: subprocess.Popen[str], word: str) -> str:
    """What follows this word, where a line begins with it."""
    assert actor.stdout is not None
    for line in actor.stdout:
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise AssertionError(f"the actor ended without {word!r}")


def score(actor: subprocess.Popen[str]) -> tuple[float | None, str]:
    value, failure = json.loads(heard(actor, "scored"))
    return value, failure or ""


def read(of_process: Callable[[], list[Any]]) -> list[Any]:
    """Nothing of a process that has just ended, as those between a reward and its daemon do."""
    try:
        return of_process()
    except psutil.NoSuchProcess:
        return []


def test_an_actor_that_ends_is_not_held_up_by_its_open_pool(actor: Start) -> None:
    running = actor("hoard", ["3"])
    assert score(running) == (3.0, "")
    say(running, "leave")
    assert running.wait(300) == 0


@pytest.mark.parametrize(("reward", "number"), [("stuck", signal.SIGKILL), ("stuck_async", signal.SIGTERM)])
def test_a_worker_stuck_in_a_reward_ends_with_its_actor(actor: Start, reward: str, number: signal.Signals) -> None:
    running = actor(reward, [""], timeout_s=600)
    heard(running, "begun")
    children = psutil.Process(running.pid).children(recursive=True)
    assert children
    running.send_signal(number)
    running.wait(300)
    wait_for(lambda: all(map(has_ended, children)), "the end of its workers")


@guarded
def test_a_program_that_left_its_session_and_its_parent_ends_with_the_call_that_is_killed(actor: Start, tmp_path: Path) -> None:
    running = actor("escape_and_hang", [str(tmp_path / "pid")], timeout_s=15.0)
    assert "timed out" in score(running)[1]
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: gone(pid), "the end of what the call started")


@guarded
@pytest.mark.parametrize(
    ("reward", "end"),
    [("escape_async", "close"), *(("escape", end) for end in ("kill the actor", "kill its group", "kill the guard"))],
)
def test_nothing_that_a_reward_started_outlives_its_worker(actor: Start, tmp_path: Path, reward: str, end: str) -> None:
    running = actor(reward, [str(tmp_path / "pid")])
    assert score(running) == (1.0, "")
    pid = int((tmp_path / "pid").read_text())
    assert not gone(pid)
    below = psutil.Process(running.pid).children(recursive=True)
    guards = [process for process in below if any(word.endswith("guard.py") for word in read(process.cmdline))]
    assert len(guards) == 1
    if end == "close":
        say(running)
        heard(running, "closed")
    elif end == "kill the actor":
        running.kill()
    elif end == "kill its group":
        os.killpg(running.pid, signal.SIGKILL)
    else:
        # Its worker ends with it. What had escaped is then the init process's: this is as far as it goes.
        workers = [process for process in guards[0].children() if process.pid != pid]
        guards[0].kill()
        wait_for(lambda: all(gone(worker.pid) for worker in workers), "the end of its worker")
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: gone(pid), "the end of what the reward started")


@guarded
def test_a_group_that_is_killed_leaves_no_name_behind(actor: Start, tmp_path: Path) -> None:
    running = actor("escape_async", [str(tmp_path / "pid")])
    assert score(running)[1] == ""
    family = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
    shared = [mapped.path for process in family for mapped in read(process.memory_maps) if mapped.path.startswith("/dev/shm")]
    assert shared == []
    os.killpg(running.pid, signal.SIGKILL)
    wait_for(lambda: all(gone(process.pid) for process in family), "the end of them all")
    assert list((tmp_path / "t").iterdir()) == []


@guarded
def test_without_a_limit_a_reward_takes_what_it_needs(actor: Start) -> None:
    assert score(actor("hoard", ["300"], worker_memory_mb=None)) == (300.0, "")


@guarded
def test_what_a_reward_prints_reaches_the_log_and_no_more_of_it_than_is_allowed(actor: Start, tmp_path: Path) -> None:
    running = actor("shout", ["1000", "50000000", "7"], timeout_s=60.0)
    assert heard(running, "heard") == "1000"
    assert [score(running) for _ in range(3)] == [(1.0, "")] * 3
    say(running)
    heard(running, "closed")
    errors = (tmp_path / "stderr").read_text(errors="replace")
    assert "the rest of this minute's output is dropped" in errors
    dropped = re.findall(r"(\d+) bytes of its output were dropped", errors)  # of each minute
    assert errors.count("\0") < OUTPUT_BYTES * len(dropped)
    assert sum(map(int, dropped)) > 50_000_000


@guarded
def test_a_reward_never_waits_for_a_log_that_is_not_read(actor: Start, tmp_path: Path) -> None:
    running = actor("shout", ["50000000", "50000000"], timeout_s=60.0)
    # Its standard output is a pipe that is read only after all of it was written.
    errors = tmp_path / "stderr"
    wait_for(lambda: "is dropped" in errors.read_text(errors="replace"), "the limit")
    assert [score(running) for _ in range(2)] == [(1.0, "")] * 2
