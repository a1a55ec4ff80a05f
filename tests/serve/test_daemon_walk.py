"""The walk of docs/daemon.md: its command lines, as they stand there, in a shell, with smaller sizes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from async_rlhf.inspect.rollouts import records
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from async_rlhf.serve.queue_dir import QueueDir
from tests.conftest import REPOSITORY, Command, assert_no_orphans, steps, wait_for
from tests.documents import blocks, lines

PLACE = "/srv/rl"
SUBMIT, SEE, FEED, AGAIN, END, BEST, FORK = blocks((REPOSITORY / "docs" / "daemon.md").read_text(), "## The walk")
NUM_ROWS = 200
# All that a command of the test has and the document's has not.
SIZES = " ".join(
    f"--set {size}"
    for size in (
        "generation.group_size=4", "engine.slots=16", "learner.batch_size=16", "checkpoint.save_every=4", "queue.lease_s=5.0",
        "evaluation.at_start=false", "evaluation.at_end=false", "queue.keep_rollouts=true",
    )
)  # fmt: skip
MORE = {
    "--set name=first": f" {SIZES} --set max_steps=3",
    "--set name=second": f" {SIZES} --set evaluation.every=20",
    "async-rlhf watch": " --address 127.0.0.1:0",
}
# What a name is in a shell of somebody who has installed the package; a process of the document is the shell's own.
PRELUDE = f'async-rlhf() {{ exec {sys.executable} -m async_rlhf "$@"; }}; tail() {{ exec "$(type -P tail)" "$@"; }}; '


class Shell:
    """Runs lines of the document in one folder; `place` is what /srv/rl is there."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder, self._place = folder, place
        self._started: list[Command] = []

    def start(self, line: str) -> Command:
        more = "".join(words for key, words in MORE.items() if key in line)
        script = PRELUDE + line.replace(PLACE, str(self._place)) + more
        self._started.append(Command(["-c", script], self.folder, interpreter="bash"))
        return self._started[-1]

    def run(self, line: str) -> str:
        return self.start(line).ends_with(0)

    def close(self) -> None:
        for each in self._started:
            each.close()


@pytest.fixture
def shell(tmp_path: Path, place: Path) -> Iterator[Shell]:
    found = Shell(tmp_path, place)
    yield found
    found.close()


def url(page: Command) -> str:
    assert page.process.stdout is not None
    said = page.process.stdout.readline()
    assert "is shown at http://" in said, said
    return said.split()[-1]


def kill_everything(commands: list[Command]) -> None:
    family = [process for command in commands for process in (psutil.Process(command.process.pid), *command.family())]
    for process in family:
        with suppress(psutil.NoSuchProcess):  # a role ends by itself when its supervisor is gone
            process.kill()
    for command in commands:
        command.finish()
    assert_no_orphans(family)


@pytest.mark.rest
def test_a_new_operator_walks_from_two_runs_to_the_best_model_though_everything_is_killed(shell: Shell, place: Path) -> None:
    init, submit_first, submit_second, serve = lines(SUBMIT)
    shell.run(init)
    shell.folder /= "problems"
    words = (shell.folder / "words.jsonl").read_text().splitlines()[:NUM_ROWS]
    (shell.folder / "words.jsonl").write_text("\n".join(words) + "\n")
    for line in (submit_first, submit_second):
        assert "it waits for: async-rlhf queue serve" in shell.run(line)
    queue = QueueDir.existing(place)
    first, second = queue.runs / "first", queue.runs / "second"

    def states() -> list[str]:
        return [entry.state for entry in queue.entries()]

    daemon = shell.start(serve)
    wait_for(lambda: RunDir(first).exists, "the first run")
    watch, listing, status, tail = map(shell.start, lines(SEE))
    page = url(watch)
    assert "first" in listing.finish()[1]
    assert "runs/first: " in status.finish()[1]
    assert tail.process.stdout is not None and any("all steps done: 3 steps" in line for line in tail.process.stdout)

    change, put = lines(FEED)
    wait_for(lambda: RunDir(second).exists and RunDir(second).read_ledger().get("waits_for_prompts"), "a run without prompts")
    with urlopen(f"{page}api/runs", timeout=60) as shown:
        assert {run["name"] for run in json.load(shown)["runs"]} >= {"first"}
    shell.run(change)
    assert f"{NUM_ROWS} rows" in shell.run(put)
    wait_for(lambda: steps(second) >= 4, "step 4 of the second run")
    kill_everything([daemon, watch, tail])
    assert states() == ["finished", "running"]

    killed_at = steps(second)
    serve, listing_again = lines(AGAIN)
    daemon = shell.start(serve)
    wait_for(lambda: steps(second) > killed_at, "a step after the crash")
    assert "second" in shell.run(listing_again) and states() == ["finished", "running"]

    stop, resume, end = lines(END)
    shell.run(stop)
    wait_for(lambda: states() == ["finished", "stopped"], "the second run to stop")
    shell.run(resume)
    shell.run(end)
    wait_for(lambda: states() == ["finished", "finished"], "the second run to use all rows")
    assert_each_row_is_used_once(second, words)
    assert RunDir(second).read_metrics()[-1]["learning_rate"] == 1e-4

    evaluate, vllm = lines(BEST)
    assert "reward" in shell.run(evaluate)
    assert vllm.split()[-1] == evaluate.split()[-2]  # the directory that transformers has just taken

    fork, stop, cancel = lines(FORK)
    shell.run(fork)
    shell.run(stop)
    wait_for(lambda: states()[2] == "stopped", "the third run to stop")
    shell.run(cancel)
    assert states() == ["finished", "finished", "cancelled"]
    daemon.process.send_signal(signal.SIGTERM)
    daemon.ends_with(0, "second: finished\n")


def assert_each_row_is_used_once(run: Path, words: list[str]) -> None:
    """Every row that was put makes one group, in its order, and every group is trained on once."""
    answers = [json.loads(word)["answer"] for word in words]
    stream = (run / "data" / "spool" / "stream.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"]["answer"] for line in stream] == answers
    metrics = RunDir(run).read_metrics()
    assert [record["step"] for record in metrics] == list(range(1, len(metrics) + 1))
    assert sorted(number for record in metrics for number in record["groups"]) == list(range(len(words)))
    assert {record["group"]: record["columns"]["answer"] for record in records(Reading(RunDir(run)))} == dict(
        enumerate(answers)
    )
