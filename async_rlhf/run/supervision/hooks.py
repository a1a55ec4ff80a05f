"""Delivers events to what the operator has named: a command, a webhook, or both.

    owns        a thread, the process of one command, logs/hooks.log
    waits for   a command to end, or a webhook to answer: `hooks.timeout_s` each; the command is then killed with all it started
    woken by    `deliver`
    on close    what waits is delivered, for `hooks.timeout_s` at most; a command that still runs then is killed

One delivery at a time, in order. The run never waits for one: what fails is counted and reported by `failures`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rlhf.run.watching import HooksConfig

_MOST_WAITING = 100

Event = Mapping[str, Any]


class Hooks:
    """See the module docstring. log: where commands write."""

    def __init__(self, config: HooksConfig, run_dir: Path, log: Path) -> None:
        self._config, self._run_dir, self._log = config, run_dir, log
        self._news = threading.Condition()
        self._waiting: deque[Event] = deque()
        self._failures: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self.failed = 0
        """Deliveries that failed."""

    def deliver(self, event: Event) -> None:
        """Begin to, if it is one of `hooks.events`. Returns at once."""
        config = self._config
        if event["event"] not in config.events or not (config.argv or config.url):
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

    def failures(self) -> list[str]:
        """What failed since the last call."""
        with self._news:
            failed, self._failures = self._failures, []
            return failed

    def close(self, *, at_once: bool = False) -> None:
        """at_once: what waits is dropped."""
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
                while not self._waiting and not self._closing:
                    self._news.wait()
                if not self._waiting:
                    return
                event = self._waiting.popleft()
            if self._config.argv:
                self._judge(event, "the command", self._command(event))
            if self._config.address:
                self._judge(event, "the webhook", self._post(event))

    def _judge(self, event: Event, what: str, problem: str) -> None:
        if problem:
            with self._news:
                self._failed(event, f"{what} {problem}")

    def _failed(self, event: Event, problem: str) -> None:
        self.failed += 1
        self._failures.append(f"the hook for {event['event']!r} failed ({self.failed} so far): {problem}")

    def _command(self, event: Event) -> str:
        """What went wrong; empty when nothing did."""
        argv, timeout_s = self._config.argv, self._config.timeout_s
        environment = {**os.environ, "ASYNC_RLHF_EVENT": event["event"], "ASYNC_RLHF_RUN_DIR": str(self._run_dir.resolve())}
        try:
            # The event is read from a file: a program that reads nothing holds up nothing.
            with tempfile.TemporaryFile() as text, self._log.open("ab") as log:
                text.write(json.dumps(event).encode() + b"\n")
                text.seek(0)
                process = self._started(argv, text=text, log=log, environment=environment)
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

    def _started(self, argv: Sequence[str], *, text: Any, log: Any, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self._news:
            self._process = subprocess.Popen(
                argv, stdin=text, stdout=log, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
            )
            return self._process

    def _post(self, event: Event) -> str:
        """What went wrong, without the address, which may hold a key; empty when nothing did."""
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
    """With all it started, unless it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
