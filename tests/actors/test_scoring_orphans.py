"""No worker outlives its actor, however the actor ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import has_ended, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, re, sys, threading
from pathlib import Path
from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import resolve, spec_of
from async_rlhf.actors.scoring.pool import ScoringPool


def stuck(completion):
    os.write(1, b"begun\\n")  # whole, whatever another process writes
    re.match("(a+)+$", "a" * 60 + "b")

async def stuck_async(completion):
    stuck(completion)

def mine(completion): return float(completion)

def main(act):
    answered = threading.Event()
    rewards = [mine] if act == "score" else [stuck, stuck_async]
    specs = resolve([spec_of(function) for function in rewards], Path("/"))
    pool = ScoringPool(specs, ScoringConfig(timeout_s=600), wake=answered.set)
    pool.submit("key", {"completion": "3"})
    if act == "score":
        while not (scored := pool.poll()):
            answered.wait(1)
            answered.clear()
        print(scored[0].scores["mine"].value)
    else:
        sys.stdin.readline()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def start(act: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py"), act],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True,
    )


def test_a_reward_of_the_script_itself_is_scored_and_an_open_pool_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    with start("score", tmp_path) as script:
        output, _ = script.communicate(timeout=300)
    assert (output, script.returncode) == ("3.0\n", 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_stuck_in_a_reward_die_with_a_killed_actor(tmp_path: Path, number: signal.Signals) -> None:
    with start("hang", tmp_path) as script:
        assert script.stdout is not None
        # Both rewards say that they have begun what keeps the interpreter lock for ever.
        assert [script.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        children = psutil.Process(script.pid).children(recursive=True)
        assert len(children) >= 2
        script.send_signal(number)
        script.wait(300)
        wait_for(lambda: all(map(has_ended, children)), "the end of its workers")
