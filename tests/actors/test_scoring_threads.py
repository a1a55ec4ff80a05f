"""Functions that only this process has: called in its threads, timed out, and never waited for without an end."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from async_rlhf.actors.rewards import Answer, spec_in_process
from async_rlhf.actors.scoring.executor import Call
from async_rlhf.actors.scoring.thread_executor import MAX_ABANDONED, ThreadExecutor
from async_rlhf.buffers.errors import ConfigError

Found = queue.SimpleQueue[tuple[int, tuple[Answer, ...]]]


def test_a_call_past_its_time_out_is_answered_once_and_holds_up_no_other() -> None:
    release = threading.Event()
    functions = {"hangs": lambda completion: float(release.wait(600)), "plain": lambda completion: len(completion)}
    found: Found = queue.SimpleQueue()
    executor = ThreadExecutor(functions, 2, lambda call_id, answers: found.put((call_id, answers)))
    for number, name in enumerate(functions):
        timeout_s = 0.3 if name == "hangs" else 60.0
        executor.submit(Call(number, name, ({"completion": "xyz"},), timeout_s))
    answers = dict(found.get(timeout=300) for _ in functions)
    assert answers[0][0].failure == "timed out after 0.3 s (scoring.timeout_s)" and answers[1][0].value == 3.0
    release.set()
    with pytest.raises(queue.Empty):
        found.get(timeout=0.3)
    executor.check()
    executor.close(60.0)


def test_while_too_many_calls_never_end_every_other_fails_at_once_with_the_reason() -> None:
    release = threading.Event()
    found: Found = queue.SimpleQueue()

    def hangs(completion: str) -> bool:
        return completion == "quick" or release.wait(600)

    executor = ThreadExecutor({"hangs": hangs}, 64, lambda call_id, answers: found.put((call_id, answers)))

    def ask(number: int, text: str, timeout_s: float) -> None:
        executor.submit(Call(number, "hangs", ({"completion": text},), timeout_s))

    for number in range(MAX_ABANDONED + 1):
        ask(number, "x", 0.05)
    for _ in range(MAX_ABANDONED + 1):
        assert "timed out" in str(found.get(timeout=300)[1][0].failure)
    ask(99, "quick", 60.0)
    assert "never ended; put the function into a .py file" in str(found.get(timeout=300)[1][0].failure)
    release.set()
    until = time.monotonic() + 300
    value = None
    while value is None and time.monotonic() < until:
        ask(100, "quick", 60.0)
        value = found.get(timeout=300)[1][0].value
    assert value == 1.0
    executor.check()
    executor.close(60.0)


def test_what_needs_a_process_of_its_own_is_refused() -> None:
    from async_rlhf.actors.rewards import reward

    with pytest.raises(ConfigError, match="judges groups"):
        spec_in_process("all", reward(scope="group")(lambda completions: [1.0]), None)
    with pytest.raises(ConfigError, match="asks for 'anser'"):
        spec_in_process("one", lambda completion, anser: 1.0, {"answer"})
