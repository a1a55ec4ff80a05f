"""The soak itself: starts the run, feeds it, changes it, watches it, kills its processes, and counts at the end.

    owns        the process of the run (`async-rlhf train`), that of its page (`async-rlhf watch`), a thread a viewer
    waits for   the clock: once a second it samples, and does what has come due
    on close    both processes have ended; what they wrote stays

The run is the smallest there is: one group of two completions of two tokens a step, so that a week's number of steps fits
into an hour. All else is as shipped, with limits so low that whatever begins anew does so often.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.spool.deposit import end, put
from async_rlhf.experiments.soak.sampling import GROWING, MIB, Census, command, rotated, sizes
from async_rlhf.experiments.soak.slopes import SlopeSample
from async_rlhf.inspect.chaos import FaultInjector, problems
from async_rlhf.learner.loop.changes import ChangeLedger
from async_rlhf.run.config import Config
from async_rlhf.run.live import ask
from async_rlhf.run.loading import dump, load
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import Tail, highest_step, read_lines

_LOOK_S = 1.0
_EPOCHS = 2  # how often each row is promised to be used
_PUT_ROWS = 50
_AHEAD_GROUPS = 200  # several seconds of them
_CHANGE_S = 5.0
_VIEW_S = 2.0
# The last groups of a spool that has ended take seconds; what takes longer hangs.
_END_S = 180.0
_ROLES = ("actor", "hub", "learner")
_CHANGES: tuple[dict[str, Any], ...] = (
    {"learner.learning_rate": 1e-4},
    {"checkpoint.keep_last": 3},
    {"learner.learning_rate": 2e-4},
    {"checkpoint.keep_last": 2},
    {"checkpoint.save_every": 80},
    {"checkpoint.save_every": 100},
)
# What an open page asks for, and Prometheus.
_PATHS = ("", "api/runs", "api/runs/run?step=0&layout=0", "api/runs/run/curves?metric=reward", "metrics")


@dataclass(frozen=True)
class SoakPlan:
    """How long, in seconds, and at most how many steps; how many kills, of each role as many, in an order by seed; viewers of
    the page."""

    seconds: float
    steps: int | None = None
    kills: int = 6
    viewers: int = 3
    seed: int = 0


@dataclass
class SoakSeen:
    """The observations from beside the run. samples: by process and measure. exit_code: None where the run had to be killed."""

    samples: dict[tuple[str, str], list[SlopeSample]] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each part of the run directory, at the end of the measurement."""
    kills: list[str] = field(default_factory=list)
    """The roles."""
    rotations: set[tuple[str, int, int]] = field(default_factory=set)
    views: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    hours: float = 0.0
    exit_code: int | None = None

    def add(self, process: str, life: int, steps: int, values: Mapping[str, float]) -> None:
        for measure, value in values.items():
            self.samples.setdefault((process, measure), []).append(SlopeSample(life, self.hours, steps / 1000, value))


def configuration(out: Path) -> Config:
    """The configuration of the run, whose directory is OUT/run and whose spool OUT/spool."""
    exam = out / "exam.jsonl"
    exam.write_text("".join(json.dumps({"prompt": str(n), "answer": str(n)}) + "\n" for n in range(4)))
    return load(
        "quick",
        {
            "name": "run",
            "output_dir": str(out),
            "max_steps": "none",
            "max_log_bytes": 1 << 17,
            "stall_timeout_s": 300.0,
            "data.source": f"spool:{out / 'spool'}",
            "data.options": {},
            "data.held_out": "none",
            "data.epochs": _EPOCHS,
            "rewards.functions": ["exact"],
            "generation.group_size": 2,
            "generation.max_prompt_length": 16,
            "generation.max_completion_length": 2,
            "engine.slots": 8,
            "queue.max_staleness": 4,
            "queue.lease_s": 5.0,
            "queue.segment_bytes": 1 << 16,
            "learner.batch_size": 2,
            "evaluation.source": str(exam),
            "evaluation.every": 5000,
            "evaluation.at_start": False,
            "evaluation.at_end": False,
            "checkpoint.save_every": 100,
        },
    )


def soak(plan: SoakPlan, out: Path) -> SoakSeen:
    """Let a run go on in this directory, which exists and is empty, and end it by ending its spool."""
    config, seen, spool = configuration(out), SoakSeen(), out / "spool"
    run, changes = RunDir(config.run_dir), cycle(_CHANGES)
    (out / "run.toml").write_text(dump(config))
    spool.mkdir()
    with ExitStack() as held:
        log = held.enter_context((out / "train.log").open("wb"))
        train = held.enter_context(command(["train", str(out / "run.toml")], log))
        # its newest step: a learner that goes on from a checkpoint takes none back
        tail, steps = Tail(run.metrics), 0
        _feed(seen, spool, 0)
        while not (steps := max(steps, highest_step(tail.rest()))) and train.poll() is None:
            time.sleep(0.1)
        page, address = held.enter_context(open_page(run.path))
        held.enter_context(viewers(address, plan.viewers, seen.views))
        census = Census({"supervisor": train.pid, "page": page.pid})
        began, next_change, share = time.monotonic(), _CHANGE_S, 0.0
        injector = FaultInjector(
            lambda: {role: process for role in _ROLES if (process := census.role(role)) is not None}, lambda: steps, plan.kills,
            plan.seed, freeze_share=0.0, is_due=lambda number: share >= (number + 0.5) / plan.kills,
        )  # fmt: skip
        held.enter_context(injector)
        while train.poll() is None:
            time.sleep(_LOOK_S)
            steps, seconds = max(steps, highest_step(tail.rest())), time.monotonic() - began
            seen.hours = seconds / 3600
            _sample(seen, census, run.path, steps)
            _feed(seen, spool, steps)
            share = max(seconds / plan.seconds, steps / plan.steps if plan.steps else 0.0)
            if share >= 1 and len(injector.faults) == plan.kills:
                break
            if seconds >= next_change:
                next_change += _CHANGE_S
                with suppress(ConfigError):  # the run has ended by itself: who waits for it sees that
                    ask(run, next(changes))
        seen.kills = [fault.target for fault in injector.faults]
        end(spool)
        with suppress(subprocess.TimeoutExpired):
            seen.exit_code = train.wait(_END_S)
        seen.parts = sizes(run.path)[0]
        seen.rotations |= rotated(run.path)
    return seen


def _sample(seen: SoakSeen, census: Census, directory: Path, steps: int) -> None:
    found = census.measure()
    for name, pid, values in found:
        if not name.endswith("'s processes"):
            seen.add(name, pid, steps, values)
    seen.add("all processes", 0, steps, {"processes": len(found)})
    num_bytes, files = sizes(directory)
    for name, parts in (("checkpoints", {"checkpoints"}), ("other files", set(num_bytes) - {"checkpoints", *GROWING})):
        sums = {"disk": sum(num_bytes.get(part, 0) for part in parts) / MIB, "files": sum(files[part] for part in parts)}
        seen.add(name, 0, steps, sums)
    seen.rotations |= rotated(directory)


def _feed(seen: SoakSeen, spool: Path, groups: int) -> None:
    """Put numbered rows into the spool, some seconds ahead of the run. groups: trained so far."""
    while seen.rows * _EPOCHS < groups + _AHEAD_GROUPS:
        numbers = range(seen.rows, seen.rows + _PUT_ROWS)
        put(spool, (json.dumps({"prompt": str(n), "answer": str(n), "n": n}).encode() for n in numbers))
        seen.rows += _PUT_ROWS


@contextmanager
def open_page(run: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The page's process and address."""
    with command(["watch", str(run), "--address", "127.0.0.1:0"], subprocess.PIPE) as process:
        assert process.stdout is not None
        words = process.stdout.readline().decode().split()
        yield process, next(word for word in words if word.startswith("http://"))
        process.stdout.close()


@contextmanager
def viewers(address: str, num_viewers: int, views: Counter[str]) -> Iterator[None]:
    """Threads that ask as an open page, and Prometheus, would."""
    closing = threading.Event()

    def view(first: int) -> None:
        for number in count(first):
            if closing.wait(_VIEW_S):
                return
            try:
                with urllib.request.urlopen(address + _PATHS[number % len(_PATHS)], timeout=30) as answer:
                    answer.read()
                views["answered"] += 1
            except OSError:
                views["failed"] += 1

    threads = [threading.Thread(target=view, args=(number,), daemon=True) for number in range(num_viewers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        closing.set()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class Books:
    """The account of a run that has ended. wrong: what should not be; empty is good. changes: that took effect."""

    steps: int
    rows: int
    quarantined: int
    changes: int
    wrong: tuple[str, ...]


def books(run: RunDir, rows: int) -> Books:
    """Read what the run left behind. rows: that were put into its spool."""
    config = run.config()
    wrong = problems(run, config)
    metrics = run.read_metrics()
    trained = Counter(number for record in metrics for number in record["groups"])
    lost = {record["group"] for record in read_lines(run.path / "quarantine.jsonl")}
    stream = [record["row"]["n"] for record in read_lines(run.path / "data" / "spool" / "stream.jsonl")]
    wrong += misused(stream, rows, trained, lost, config.data.repeat)
    changes = sum(change.step is not None for change in ChangeLedger(run.path).read().changes)
    return Books(len(metrics), len(stream), len(lost), changes, tuple(wrong))


def misused(stream: list[int], rows: int, trained: Counter[int], lost: set[int], repeat: int) -> list[str]:
    """Rows that the run has not bound in their order, once each, and rows that were not used `repeat` times, but for
    quarantined groups. stream: numbers of the rows in the order of the run's stream. trained: how often each group was."""
    wrong = []
    if stream != list(range(rows)):
        wrong.append(f"the stream has {len(stream)} rows, not 0 to {rows - 1} in their order")
    uses: Counter[int] = Counter()
    for number, times in (trained + Counter(lost)).items():
        uses[number // repeat] += times
    if bad := {row: uses[row] for row in sorted({*range(rows), *uses}) if uses[row] != repeat}:
        wrong.append(f"{len(bad)} rows were not used {repeat} times: {dict(list(bad.items())[:5])}")
    return wrong
