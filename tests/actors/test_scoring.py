"""The scoring pool with real processes: values and failures, calls that never end, workers that die, many at once."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import Answer, resolve, spec_in_process
from async_rlhf.actors.scoring.pool import GroupMember, ScoringPool
from async_rlhf.actors.scoring.reward_worker import RewardCall, RewardKind, answers_of
from async_rlhf.actors.workers.pool import MAX_STUCK, WorkerPool
from async_rlhf.actors.workers.sessions import Closed, Lost, StepResult, Stopped
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.record import Score
from tests.actors.scored import Bench
from tests.conftest import wait_for

JUDGES = """
import asyncio, os, re, sys, time
from async_rlhf.actors.rewards import Score, reward

def number(completion): return float(completion)
def answered(completion, answer, level=0): return float(completion == answer) + level
def trl(prompts, completions, answer, **kwargs): return [len(kwargs["completion_ids"][0]) * (a == "4") for a in answer]
def not_applicable(completion): return None
def heavy(completion): return len({"torch", "transformers", "numpy", "pydantic", "zmq"} & set(sys.modules))

def act(completion):
    if completion == "spin":
        while True: pass
    if completion == "regex":  # keeps the interpreter lock
        re.match("(a+)+$", "a" * 60 + "b")
    if completion == "swallow":  # also what would end it: only a kill can
        while True:
            try: time.sleep(1000)
            except BaseException: pass
    if completion == "slow":  # for longer than a process may take to read what it is sent
        time.sleep(3)
        return 0.0
    if completion == "exit":
        os._exit(3)
    if completion == "quit":
        sys.exit("enough")
    return float(completion)

running = most = 0

async def most_at_once(completion):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.02)
    running -= 1
    return most

async def act_async(completion):
    return act(completion)

async def trl_async(completions): return [float(c) for c in completions]

@reward(scope="group")
def best(completions, prompt, answer, completion_ids, finish_reasons):
    assert prompt == "p" and answer == "a" and finish_reasons == ["stop"] * len(completions)
    assert completion_ids == [[1, 2, 3]] * len(completions)
    top = max(map(float, completions))
    return [float(float(c) == top) for c in completions]

async def measured(completion): return Score(1.0, metrics={"length": len(completion), "words": 2})

@reward(timeout_s=1.0)
async def blocker(completion):
    time.sleep(100)

async def innocent(completion):
    await asyncio.sleep(0.05)
    return float(completion)

async def dies(completion):
    await asyncio.sleep(0.02)
    os._exit(9)

async def ends_unseen(completion):
    if completion == "exit": await asyncio.to_thread(lambda: (time.sleep(0.1), os._exit(9)))
    return 1.0
"""

# Imported like any other file by `resolve`; only the workers fail on it.
UNLOADABLE = """
import multiprocessing, os
if multiprocessing.parent_process() is not None: {act}
def sync(completion): return 1.0
"""


_before = set[int]()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Real engines and runs that other tests keep."""
    _before.clear()
    _before.update(child.pid for child in psutil.Process().children())


def workers() -> list[psutil.Process]:
    """The children of this process that are new since the test began, but for a fork server, and what multiprocessing cleans up
    with."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, or nothing has reaped it yet
            line = " ".join(child.cmdline())
            if child.pid not in _before and not any(other in line for other in ("resource_tracker", "fork_server")):
                found.append(child)
    return found


def test_every_reward_answers_for_every_completion_in_workers_that_import_no_more_than_it_needs(
    bench: Callable[..., Bench],
) -> None:
    first, second = bench("answered not_applicable trl trl_async heavy").score("4", "5", answer="4", level=2, other="x")
    values = {"answered": Score(3.0), "trl": Score(3.0), "trl_async": Score(4.0), "heavy": Score(0.0)}
    assert first == {**values, "not_applicable": Score()}
    assert second["answered"] == Score(2.0) and second["not_applicable"].state == "not_applicable"


def test_a_reward_that_is_not_of_the_source_does_not_apply_and_is_not_called(bench: Callable[..., Bench]) -> None:
    pool = bench("answered number", by_source={"words": ["answered"], "sums": ["number"]})
    (words,) = pool.score("cat", answer="cat", source="words")  # `number` would fail
    (sums,) = pool.score("7", source="sums")  # `answered` has no answer to compare with
    assert words == {"answered": Score(1.0), "number": Score()} and sums == {"answered": Score(), "number": Score(7.0)}
    (both,) = pool.score("8", answer="8", source="elsewhere")
    assert both == {"answered": Score(1.0), "number": Score(8.0)}
    assert [(each.scored, each.not_applicable, each.failed.total()) for each in pool.pool.counters.values()] == [(2, 1, 0)] * 2


def test_two_thousand_completions_at_once_are_each_given_their_own_score(bench: Callable[..., Bench]) -> None:
    pool = bench("number trl_async", workers=2)
    scores = pool.score(*map(str, range(2000)))
    assert scores == [{"number": Score(float(n)), "trl_async": Score(float(n))} for n in range(2000)]
    assert {name: each.scored for name, each in pool.pool.counters.items()} == {"number": 2000, "trl_async": 2000}


def test_calls_before_and_behind_one_that_ends_its_process_are_scored(bench: Callable[..., Bench]) -> None:
    scores = [each["act"] for each in bench("act", timeout_s=4.0).score("1", "swallow", "2", "exit", "exit", "3", "4")]
    assert [score.value for score in scores] == [1.0, None, 2.0, None, None, 3.0, 4.0]
    assert "timed out after 4 s" in str(scores[1].failure)
    assert [scores[at].failure for at in (3, 4)] == ["its worker process ended with exit code 3"] * 2


def test_a_slow_call_is_ended_neither_by_the_size_of_those_behind_it_nor_by_a_limit_beyond_all_waits(
    bench: Callable[..., Bench],
) -> None:
    scores = bench("act", timeout_s=1e10).score("slow", *[" " * 500_000 + str(number) for number in range(3)])
    assert [each["act"].value for each in scores] == [0.0, 0.0, 1.0, 2.0]


def test_one_stuck_worker_does_not_hold_up_the_other(bench: Callable[..., Bench]) -> None:
    pool = bench("act", workers=2, timeout_s=60.0)
    pool.pool.submit(99, {"completion": "spin"})
    assert pool.score("1", "2", pending=1) == [{"act": Score(1.0)}, {"act": Score(2.0)}]


def test_workers_killed_between_calls_are_replaced(bench: Callable[..., Bench]) -> None:
    pool = bench("act")
    assert pool.one("1") == Score(1.0)
    guards = workers()
    for guard in guards:
        guard.suspend()  # else one may start its worker when its children have been listed
    killed = [process for guard in guards for process in (*guard.children(), guard)]
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    # One that is about to end may take a call, which is lost with it; the pool has seen the end of those it has replaced.
    wait_for(lambda: len(set(workers()) - set(guards)) == len(guards), "others in place of the killed workers")
    assert pool.one("2") == Score(2.0)


def test_fields_that_cannot_travel_are_a_failure_whose_traceback_is_in_the_log(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    scores = bench("answered trl").score("4", answer=lambda: "4")[0]
    assert all("pickle" in (score.failure or "") for score in scores.values())
    assert caplog.text.count("Traceback") == 2


def test_as_many_asynchronous_calls_run_at_once_as_may(bench: Callable[..., Bench]) -> None:
    scores = bench("most_at_once", max_concurrency=8).score(*["x"] * 64)
    assert max(each["most_at_once"].value or 0 for each in scores) == 8.0


def test_a_flood_of_calls_to_a_blocked_event_loop_is_survived(bench: Callable[..., Bench]) -> None:
    pool = bench("act_async", timeout_s=4.0, max_concurrency=4096)
    scores = [each["act_async"] for each in pool.score("regex", *[" " * 10_000 + "2"] * 200)]
    assert all((score.failure or "").startswith("timed out") or score == Score(2.0) for score in scores)
    assert scores[0].state == "failed" and pool.one("3") == Score(3.0)


def test_a_reward_that_only_workers_cannot_import_fails_with_the_reason(bench: Callable[..., Bench], tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(UNLOADABLE.format(act="raise OSError('no licence')"))
    score = bench("sync").one("x")
    assert score.failure is not None and score.failure.startswith("RewardError: importing reward file")
    assert score.failure.endswith("raised OSError: no licence")


def test_workers_that_never_come_up_end_the_run(bench: Callable[..., Bench], tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(UNLOADABLE.format(act="os._exit(7)"))
    pool = bench("sync")
    with pytest.raises(RewardError, match=r"ended 3 times in a row before .* wrote to stderr"):
        for _ in range(9):
            assert pool.one("x").state == "failed"


def test_a_discarded_completion_is_not_returned_and_its_key_is_free_again(bench: Callable[..., Bench]) -> None:
    pool = bench("act")
    pool.pool.submit(0, {"completion": "1"})
    with pytest.raises(RewardError, match="0 is being scored already"):
        pool.pool.submit(0, {"completion": "1"})
    pool.pool.discard([0, 99])
    assert pool.pool.num_pending == 0
    assert pool.score("2", "3") == [{"act": Score(2.0)}, {"act": Score(3.0)}]


def test_a_reward_of_groups_sees_all_members_in_their_order_and_each_gets_its_own(bench: Callable[..., Bench]) -> None:
    pool = bench("best measured")
    for member in (2, 0, 1):
        pool.submit(member, str(member), GroupMember("g", member, 3))
    scored = pool.wait()
    assert [scored[member].scores["best"].value for member in range(3)] == [0.0, 0.0, 1.0]
    assert scored[1].scores["measured"] == Score(1.0, metrics={"length": 1.0, "words": 2.0})
    began, ended = scored[0].stages["best"]
    assert 0 < began <= ended and scored[0].stages["best"] == scored[2].stages["best"]


def test_a_discarded_member_takes_its_group_with_it(bench: Callable[..., Bench]) -> None:
    pool = bench("best")
    pool.submit(0, "1", GroupMember(("g", 0), 0, 2))
    pool.pool.discard([0])
    for member in range(2):
        pool.submit(member, "7", GroupMember(("g", 0), member, 2))
    assert [each.scores["best"].value for each in pool.wait().values()] == [1.0, 1.0]


@pytest.mark.parametrize(("culprit", "told"), [("blocker", "it blocked the event loop"), ("dies", "exit code 9")])
def test_only_the_call_at_fault_fails_and_the_others_on_its_loop_begin_again(
    bench: Callable[..., Bench], culprit: str, told: str
) -> None:
    (scores,) = bench(f"innocent {culprit}").score("7")
    assert told in (scores[culprit].failure or "") and scores["innocent"] == Score(7.0)


def test_what_has_succeeded_is_not_suspected_any_more(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    found = queue.SimpleQueue[StepResult | Closed | Lost | Stopped]()
    kind = RewardKind(resolve(["judges.py:ends_unseen"], tmp_path), 1, None, None)
    processes = WorkerPool(kind, 1, "processes", RewardError, found.put)
    came = []
    for id, text in enumerate(("exit", "1", "exit", "exit")):
        processes.begin(id, "key", tuple(RewardCall("ends_unseen", ({"completion": text},), 60.0)), 60.0)
        came.append(found.get(timeout=300))
    processes.close(60.0)
    assert (came[0], came[2]) == (Lost(0), Lost(2)), "each was the first end since nothing was known against it"
    assert isinstance(came[1], StepResult) and came[1].result[0].value == 1.0
    assert isinstance(came[3], StepResult) and came[3].result.kind == "died"


def test_while_too_many_calls_of_the_calling_process_never_end_every_other_fails_at_once_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()

    def hangs(completion: str) -> bool:
        return completion == "quick" or release.wait(600)

    found = queue.SimpleQueue[StepResult | Closed | Lost | Stopped]()
    kind = RewardKind((spec_in_process("hangs", hangs, None),), 1, None, {"hangs": hangs})
    threads = WorkerPool(kind, 16, "threads", RewardError, found.put)

    def ask(text: str, timeout_s: float) -> Answer:
        call = RewardCall("hangs", ({"completion": text},), timeout_s)
        threads.begin(0, 0, tuple(call), timeout_s)
        came = found.get(timeout=300)
        assert isinstance(came, StepResult)
        return answers_of(came)[0]

    for _ in range(MAX_STUCK + 1):
        assert "timed out" in str(ask("x", 0.05).failure)
    assert "the thread is left behind" in caplog.text and "process is replaced" not in caplog.text
    assert "never ended; put the function into a .py file" in str(ask("quick", 60.0).failure)
    release.set()
    wait_for(lambda: ask("quick", 60.0).value == 1.0, "an answer")
    threads.close(60.0)


@pytest.mark.parametrize("is_async", [False, True])
def test_want_of_memory_in_a_function_of_the_calling_process_is_its_own_error_and_no_limit(is_async: bool) -> None:
    def wants(completion: str) -> float:
        raise MemoryError("too large")

    async def wants_async(completion: str) -> float:
        raise MemoryError("too large")

    found = queue.SimpleQueue[StepResult | Closed | Lost | Stopped]()
    function, call = wants_async if is_async else wants, RewardCall("own", ({"completion": "x"},), 60.0)
    kind = RewardKind((spec_in_process("own", function, None),), 1, 512, {"own": function})
    threads = WorkerPool(kind, 1, "threads", RewardError, found.put)
    threads.begin(0, 0, tuple(call), 60.0)
    came = found.get(timeout=300)
    assert isinstance(came, StepResult) and "MemoryError: too large" in str(answers_of(came)[0].failure)
    threads.close(60.0)


def test_a_closed_pool_leaves_no_process_and_no_descriptor(bench: Callable[..., Bench]) -> None:
    resource_tracker.ensure_running()  # of this process, which keeps it
    descriptors = {*os.listdir("/proc/self/fd")}
    pool = bench("act act_async", workers=2)
    pool.score("1")
    wait_for(lambda: len(workers()) == 3, "two workers and the process of the event loop")
    pool.pool.submit(0, {"completion": "swallow"})
    pool.pool.close(60.0)
    assert not workers()
    assert {*os.listdir("/proc/self/fd")} == descriptors


def test_without_rewards_a_completion_is_back_at_once() -> None:
    pool = ScoringPool[int]((), ScoringConfig())
    pool.submit(0, {"completion": "judged by its environment"})
    pool.submit(1, {"completion": "forgotten"})
    pool.discard([1])
    assert [(scored.key, scored.scores) for scored in pool.poll()] == [(0, {})] and pool.num_pending == 0
    pool.close(60.0)
