"""The executor of functions that exist only in this process: lambdas, closures, bound methods, functions of a notebook.

They run in threads of this process, so they share its interpreter and cannot be killed. A call past its time-out is answered as
failed and its thread is abandoned. While too many abandoned threads run, every further call fails at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from async_rlhf.actors.rewards import Answer, RewardFunction, Signature, settings_of
from async_rlhf.actors.scoring.executor import Answered, Call, Ready, timed_out
from async_rlhf.buffers.errors import DeadlineError, RewardError

MAX_ABANDONED = 32
_TOO_MANY = (
    f"more than {MAX_ABANDONED} calls of rewards of the calling process ran past their time-out and never ended; put the "
    "function into a .py file, where a call can be killed"
)


class ThreadExecutor:
    """Owns a thread that starts calls and watches their deadlines, and a thread for each call, `concurrency` at most."""

    def __init__(self, functions: Mapping[str, RewardFunction], concurrency: int, answered: Answered) -> None:
        """functions: by reward name."""
        self._functions = {name: _ready(function) for name, function in functions.items()}
        self._concurrency, self._answered = concurrency, answered
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._running: dict[int, tuple[Call, float]] = {}
        self._num_abandoned = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="caller-rewards", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        with self._changed:
            self._waiting.append(call)
            self._changed.notify()

    def discard(self, call_ids: set[int]) -> None:
        """A call that runs cannot be stopped."""

    def check(self) -> None:
        if not self._thread.is_alive():
            raise RewardError("the thread of the calling process's rewards has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(f"the thread of the calling process's rewards did not end within {deadline_s:g} s")

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                late = [call for call, deadline in self._running.values() if deadline <= now]
                for call in late:
                    del self._running[call.id]
                self._num_abandoned += len(late)
                started: list[Call] = []
                refused: list[Call] = []
                if self._num_abandoned > MAX_ABANDONED:
                    refused = list(self._waiting)
                    self._waiting.clear()
                while self._waiting and len(self._running) < self._concurrency:
                    call = self._waiting.popleft()
                    self._running[call.id] = (call, now + call.timeout_s)
                    started.append(call)
                if self._closing:
                    return
                if not late and not started and not refused:
                    deadlines = [deadline for _, deadline in self._running.values()]
                    self._changed.wait(min(deadlines) - now if deadlines else None)
            for call in started:
                threading.Thread(target=self._call, args=(call,), name=f"reward {call.name}", daemon=True).start()
            for call in late:
                self._answered(call.id, (timed_out(call.timeout_s),))
            for call in refused:
                self._answered(call.id, (Answer(None, _TOO_MANY),))

    def _call(self, call: Call) -> None:
        ready, began = self._functions[call.name], time.time()
        try:
            result: Any = ready.function(**ready.arguments(call))
            answers = ready.read(call, asyncio.run(result) if ready.signature.is_async else result, began)
        except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
            answers = ready.failed(error, began)
        with self._changed:
            in_time = self._running.pop(call.id, None) is not None
            self._num_abandoned -= not in_time
            self._changed.notify()
        if in_time:
            self._answered(call.id, answers)


def _ready(function: RewardFunction) -> Ready:
    return Ready(function, Signature.of(function), {}, settings_of(function).retry_on)
