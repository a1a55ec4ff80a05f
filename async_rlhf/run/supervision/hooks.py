"""Events of a run that may need a person, or are worth showing one, and their delivery to the operator's command or webhook.

    stalled           no step for too long, and the run has ended     diverged   it refused to train, or went beyond a limit
    failed            it has ended otherwise, by an error             finished   nothing is left to train on
    guard             the target staleness has moved                  best       `checkpoints/best` leads to another checkpoint
    failing_rewards   the share of failed scores nears its limit      disk_low   little room is left on the disk

`Events` recognises these. Each is a line of `events.jsonl`, which begins anew when it has grown, and goes to a command, a
webhook, or both (`Hooks`):

    owns        a thread, the process of one command, logs/hooks.log
    waits for   a command to end, or a webhook to answer: `hooks.timeout_s` each; the command is then killed with all it started
    woken by    `deliver`
    on close    what waits is delivered, for `hooks.timeout_s` at most; a command that still runs then is killed

One delivery at a time, in order. Nothing here ends or holds up a run: a line that finds no room is lost, a delivery that fails
is counted and reported by `failures`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rlhf.buffers.lines import LineFile
from async_rlhf.launch.exit_codes import INTERRUPTED, REFUSED_TO_TRAIN, STALLED
from async_rlhf.learner.checkpoint.evaluated import without_links
from async_rlhf.learner.checkpoint.store import step_of
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir, RunEnd
from async_rlhf.run.watching import EventKind, HooksConfig

_MOST_WAITING = 100
# Of the limit to failed scores: from where an event is raised, and below which another may be.
_NEAR, _FAR = 0.8, 0.5

Event = Mapping[str, Any]


class Hooks:
    """See the module docstring. log: where commands write."""

    def __init__(self, config: HooksConfig, run_dir: Path, log: Path) -> None:
        self._config, self._run_dir, self._log = config, run_dir, log
        self._news = threading.Condition()
        self._waiting: deque[Event] = deque()
        self._failures: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = self._is_delivering = False
        self._thread: threading.Thread | None = None
        self.failed = 0
        """Deliveries that failed."""

    def deliver(self, event: Event) -> None:
        """Begin to, if it is one of `hooks.events`. Returns at once."""
        if event["event"] not in self._config.events or not (self._config.argv or self._config.url):
            return
        with self._news:
            if self._closing or len(self._waiting) >= _MOST_WAITING:
                self._failed(event, f"left out: {len(self._waiting)} others wait")
                return
            self._waiting.append(event)
            self._news.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hooks", daemon=True)
                self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Nothing waits, and nothing is under way."""
        with self._news:
            return not (self._waiting or self._is_delivering)

    def failures(self) -> list[str]:
        """The deliveries that failed since the last call, with the reasons."""
        with self._news:
            failed, self._failures = self._failures, []
            return failed

    def close(self, *, at_once: bool = False) -> None:
        """at_once: drop waiting events."""
        with self._news:
            self._closing = True
            if at_once:
                self._waiting.clear()
            self._news.notify()
        if self._thread is None:
            return
        self._thread.join(0 if at_once else self._config.timeout_s)
        with self._news:
            for event in self._waiting:
                self._failed(event, "dropped: the run has ended")
            self._waiting.clear()
            if self._process is not None:
                _kill(self._process)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                event, self._is_delivering = self._waiting.popleft(), True
            problems = [
                f"the command {problem}" if self._config.argv and (problem := self._command(event)) else "",
                f"the webhook {problem}" if self._config.address and (problem := self._post(event)) else "",
            ]
            with self._news:
                self._is_delivering = False
                for problem in filter(None, problems):
                    self._failed(event, problem)

    def _failed(self, event: Event, problem: str) -> None:
        self.failed += 1
        self._failures.append(f"the hook for {event['event']!r} failed ({self.failed} so far): {problem}")

    def _command(self, event: Event) -> str:
        """Run the command; the error, empty when there is none."""
        timeout_s = self._config.timeout_s
        environment = {**os.environ, "ASYNC_RLHF_EVENT": event["event"], "ASYNC_RLHF_RUN_DIR": str(self._run_dir.resolve())}
        try:
            # The event is read from a file: a program that reads nothing holds up nothing.
            with tempfile.TemporaryFile() as text, self._log.open("ab") as log, self._news:
                text.write(json.dumps(event).encode() + b"\n")
                text.seek(0)
                process = self._process = subprocess.Popen(
                    self._config.argv,
                    stdin=text,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            return f"cannot be started: {error}"
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            return f"was killed after {timeout_s:g} s (hooks.timeout_s)"
        finally:
            self._process = None
        return "" if code == 0 else f"ended with code {code}; see {self._log}"

    def _post(self, event: Event) -> str:
        """Post to the webhook; the error without the address, which may hold a key; empty when there is none."""
        import httpx2

        async def post() -> int:
            async with (
                asyncio.timeout(self._config.timeout_s),
                httpx2.AsyncClient(timeout=None) as client,
                client.stream("POST", self._config.address, json=dict(event)) as response,
            ):
                return response.status_code

        try:
            status = asyncio.run(post())
        except TimeoutError:
            return f"gave no answer within {self._config.timeout_s:g} s (hooks.timeout_s)"
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ImportError, ValueError) as error:
            return f"cannot be reached: {type(error).__name__}"
        return "" if status < 300 else f"answered {status}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all its children, unless it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Events:
    """Raises the events that it finds in steps, evaluations and the end of a run. show: is given a line for an operator."""

    def __init__(self, config: Config, run: RunDir, show: Callable[[str], object]) -> None:
        self._config, self._run, self._show = config, run, show
        self._hooks = Hooks(config.hooks, run.path, run.log("hooks"))
        self._file = LineFile(run.events, config.max_log_bytes)
        with suppress(OSError):
            self._file.cut()
        self._best = self._best_step()
        self._target: int | None = None
        self._failing = False

    def ended(self, end: RunEnd) -> None:
        """The run has ended. One that an operator stopped is no event."""
        if end.finished:
            self._raise("finished", f"the run has finished: {end.reason}")
        elif end.code not in (0, INTERRUPTED):
            kinds: dict[int, EventKind] = {STALLED: "stalled", REFUSED_TO_TRAIN: "diverged"}
            self._raise(kinds.get(end.code, "failed"), end.reason, code=end.code)

    def disk_low(self, text: str) -> None:
        """Little room is left on the disk; `text` says how much."""
        self._show(text)
        self._raise("disk_low", text)

    def look(self) -> None:
        """Show the hooks' failures."""
        for last_error in self._hooks.failures():
            self._show(last_error)

    def close(self, *, at_once: bool) -> None:
        """Waits for the hooks, `hooks.timeout_s` at most. at_once: not at all."""
        self._hooks.close(at_once=at_once)
        self.look()
        self._file.close()

    def step(self, record: dict[str, Any]) -> None:
        step, target, ratio = record["step"], record.get("staleness/target"), record.get("rewards/failed_ratio")
        before, self._target = self._target, target
        if None not in (before, target) and before != target:
            text = f"from step {step + 1} on the run aims at staleness {target} instead of {before}"
            self._raise("guard", text, step=step, target=target, before=before)
        limit = self._config.rewards.max_failed_ratio
        if not isinstance(ratio, int | float) or not limit:
            return
        if ratio >= _NEAR * limit and not self._failing:
            text = f"{ratio:.0%} of the scores of step {step} failed; above {limit:.0%} (rewards.max_failed_ratio) the run ends"
            self._raise("failing_rewards", text, step=step, failed_ratio=ratio, limit=limit)
        self._failing = ratio >= (_FAR if self._failing else _NEAR) * limit

    def evaluation(self, record: dict[str, Any]) -> None:
        before, self._best = self._best, self._best_step()
        if self._best is not None and self._best != before:
            reward = record.get("mean_reward")
            checkpoint = str(self._run.path / "checkpoints" / f"step_{self._best:06d}")
            text = f"the best checkpoint is that of step {self._best}, with a held-out reward of {reward}"
            self._raise("best", text, step=self._best, mean_reward=reward, checkpoint=checkpoint)

    def _raise(self, kind: EventKind, text: str, **details: Any) -> None:
        """text: a sentence for a person. details: JSON values for a program."""
        event = {"time": time.time(), "event": kind, "run_dir": str(self._run.path), "text": text, **details}
        with suppress(OSError):
            self._file.write(json.dumps(event))
        self._hooks.deliver(event)

    def _best_step(self) -> int | None:
        with suppress(OSError, ValueError):
            return step_of(without_links(self._run.path / "checkpoints" / "best").resolve())
        return None
