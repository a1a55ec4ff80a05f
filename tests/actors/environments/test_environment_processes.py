"""Processes of episodes that hang, exit, are killed or never start: who fails, who is begun again, what is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from async_rlhf.actors.environments import EnvironmentConfig
from async_rlhf.actors.environments.loading import spec_in_process
from async_rlhf.actors.environments.pool import EpisodePool, Event
from async_rlhf.actors.environments.worker import NO_IMAGES, EpisodeKind
from async_rlhf.actors.environments.yields import EpisodeEnd, Read
from async_rlhf.actors.workers import pool
from async_rlhf.actors.workers.sessions import SessionKind, serve
from async_rlhf.actors.workers.watchdog import LoopWatchdog
from async_rlhf.buffers.errors import EpisodeError
from tests.actors.environments.played import Bench
from tests.conftest import has_ended, wait_for

ENVIRONMENTS = """
import asyncio, os, time
from async_rlhf import Score

def do(act, path):
    if act == "exit": os._exit(7)
    if act == "abort": os.abort()
    if act == "sleep":
        while True: time.sleep(1000)

def synchronous(act, path):
    text = yield str(os.getpid())
    try:
        do(act, path)
        text = yield f"{os.getpid()} {text}"
        yield Score(1.0)
    finally:
        if act == "slow cleanup": time.sleep(1000)

async def asynchronous(act, path):
    try:
        text = yield str(os.getpid())
        while act == "refuse":
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
        if act == "wait": await asyncio.sleep(1000)
        do(act, path)
        text = yield f"{os.getpid()} {text}"
        yield Score(1.0)
    finally:
        if act == "wait" and path: open(path, "a").write("closed")
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    (tmp_path / "environments.py").write_text(ENVIRONMENTS)
    with ExitStack() as made:
        yield lambda name, **settings: made.enter_context(Bench(tmp_path / "environments.py", name, **settings))


def pid_of(bench: Bench, key: Any) -> int:
    """Of the process in which the episode's newest observation was made."""
    observed = [event.content for event in bench.events[key] if isinstance(event, Read)]
    return int(str(observed[-1]).split()[0])


def lost(bench: Bench, key: Any) -> int:
    return sum(event is None for event in bench.events[key])


def test_a_synchronous_step_that_hangs_is_failed_and_its_process_goes_when_the_others_have_ended(
    bench: Callable[..., Bench],
) -> None:
    played = bench("synchronous", timeout_s=4.0)
    played.begin("hangs", act="sleep")
    played.begin("other")
    played.until(played.heard(2))
    old = psutil.Process(pid_of(played, "other"))
    played.pool.reply("hangs", "")
    played.until(lambda: played.ended("hangs") is not None)
    assert played.failure("hangs") == "timed out after 4 s (timeout_s)"
    assert played.pool.counters.failed == {"timed_out": 1}
    played.opens("new")
    assert pid_of(played, "new") != old.pid == pid_of(played, "other") and not has_ended(old)
    played.pool.reply("other", "")
    played.until(lambda: played.ended("other") is not None, lambda key, turn: "")
    assert lost(played, "other") == 0 and pid_of(played, "other") == old.pid
    wait_for(lambda: has_ended(old), "the end of the retired process")


def test_a_retired_process_that_does_not_drain_is_killed_at_its_bound(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "DRAIN_S", 0.3)
    played = bench("synchronous", timeout_s=4.0)
    played.begin("hangs", act="sleep")
    played.begin("other")
    played.until(played.heard(2))
    played.pool.reply("hangs", "")
    played.until(lambda: lost(played, "other") == 1 and isinstance(played.events["other"][-1], Read))
    assert played.ended("hangs") is not None and played.pool.counters.lost == 1


def test_an_asynchronous_step_that_hangs_is_cancelled_and_its_process_goes_on(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    played = bench("asynchronous", timeout_s=4.0)
    played.opens("other")
    assert played.fails("waits", act="wait", path=str(tmp_path / "log")) == "timed out after 4 s (timeout_s)"
    assert (tmp_path / "log").read_text() == "closed"
    played.opens("new")
    assert pid_of(played, "new") == pid_of(played, "other")


def test_a_step_that_refuses_to_end_takes_its_process_with_it_and_a_whole_episode_has_a_limit_too(
    bench: Callable[..., Bench],
) -> None:
    played = bench("asynchronous", timeout_s=1000.0, episode_timeout_s=1.0)
    assert played.fails("bad", act="refuse") == "the episode took longer than 1 s (episode_timeout_s)"
    played.opens("new")
    assert pid_of(played, "new") != pid_of(played, "bad")


def test_of_a_process_that_dies_suspects_are_begun_again_once_and_the_waiting_are_only_lost(
    bench: Callable[..., Bench],
) -> None:
    played = bench("synchronous")
    played.opens("other")
    assert played.fails("exits", act="exit") == (
        "its process ended twice while it was in a step: its worker process ended with exit code 7"
    )
    played.until(lambda: lost(played, "other") == 2)
    assert lost(played, "exits") == 1
    assert played.pool.counters.failed == {"died": 1}
    played.until(lambda: isinstance(played.events["other"][-1], Read))
    played.pool.reply("other", "")
    played.until(lambda: played.ended("other") is not None, lambda key, turn: "")
    assert played.pool.counters.episodes == {"failed": 1, "scored": 1}


def test_the_asynchronous_step_that_was_on_the_loop_is_the_cause_and_fails_alone(bench: Callable[..., Bench]) -> None:
    played = bench("asynchronous")
    played.opens("other")
    assert played.fails("cause", act="abort").startswith("its worker process ended with exit code -6")
    assert lost(played, "cause") == 0
    played.until(lambda: lost(played, "other") == 1 and isinstance(played.events["other"][-1], Read))


def test_processes_that_are_killed_from_outside_lose_nothing(bench: Callable[..., Bench]) -> None:
    played = bench("asynchronous", workers=2)
    played.opens(*range(6))

    def all_wait() -> bool:
        return all(isinstance(each, Read) for events in played.events.values() for each in events[-1:] or [None])

    for kills in range(1, 4):
        played.until(all_wait)
        os.kill(pid_of(played, 0), signal.SIGKILL)
        played.until(lambda kills=kills: lost(played, 0) == kills)  # type: ignore[misc]
    played.until(all_wait)
    for key in range(6):
        played.pool.reply(key, "")
    played.until(lambda: played.pool.num_pending == 0, lambda key, turn: "")
    assert all(isinstance(events[-1], EpisodeEnd) and events[-1].reason == "scored" for events in played.events.values())
    assert played.pool.counters.lost >= 3


def test_an_observation_of_an_episode_that_is_lost_before_it_is_polled_is_not_shown(bench: Callable[..., Bench]) -> None:
    played = bench("synchronous")
    played.opens("a")
    played.pool.reply("a", "")
    inbox = played.pool._inbox
    wait_for(lambda: inbox.qsize() == 1, "the observation")
    os.kill(pid_of(played, "a"), signal.SIGKILL)
    wait_for(lambda: inbox.qsize() == 2, "the loss")
    assert played.pool.poll() == [Event("a", None)] and played.pool.num_pending == 0


def test_a_cleanup_that_hangs_is_counted_and_its_process_replaced(bench: Callable[..., Bench]) -> None:
    played = bench("synchronous", timeout_s=4.0)
    played.begin("a", act="slow cleanup")
    played.until(lambda: played.ended("a") is not None, lambda key, turn: "")
    played.until(lambda: played.pool.counters.cleanups_failed == 1)
    played.opens("b")
    assert pid_of(played, "b") != pid_of(played, "a")
    assert played.ended("a") is not None and played.ended("a").reason == "scored"  # type: ignore[union-attr]


def own(prompt: str, level: int = 0) -> Iterator[str]:
    yield f"{prompt} {level}"


def test_threads_that_take_each_others_place_have_one_function_with_its_options() -> None:
    kind = EpisodeKind(spec_in_process("own", own, {"level": 2}, {}), EnvironmentConfig(), own, NO_IMAGES)
    functions = []
    for _ in range(3):  # as each thread does
        kind.load()
        functions.append(kind._function)
    assert functions[0] is functions[1] is functions[2] is not None
    assert next(functions[0](prompt="?")) == "? 2"


def wants_memory() -> Iterator[str]:
    yield "?"
    raise MemoryError("too large")


def test_want_of_memory_in_a_function_of_the_calling_process_is_of_no_limit() -> None:
    config = EnvironmentConfig()
    spec = spec_in_process("wants", wants_memory, {}, {})
    pool, events = EpisodePool[str](spec, config, function=wants_memory), list[Event[str]]()
    pool.begin("a", {})
    wait_for(lambda: events.extend(pool.poll()) or events, "its first words")
    pool.reply("a", "")
    wait_for(lambda: events.extend(pool.poll()) or len(events) == 2, "its end")
    assert (
        isinstance(events[1].result, EpisodeEnd)
        and events[1].result.failure is not None
        and events[1].result.failure.reason == "out of memory: the system gave no more"
    )
    pool.close(60.0)


def test_an_environment_that_no_process_can_import_ends_the_run_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "unloadable.py"
    path.write_text("""
import multiprocessing
if multiprocessing.parent_process() is not None: raise KeyError('no licence')
def environment(question): text = yield question
""")
    with Bench(path, "environment") as played:
        played.begin("a")
        with pytest.raises(EpisodeError, match=r"ended 3 times in a row before they were ready: .*KeyError: 'no licence'"):
            played.until(lambda: False)
    assert "KeyError: 'no licence'; the process is replaced" in caplog.text, "of the first already"


@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize("error", [None, EpisodeError("of the import")])
def test_a_thread_that_is_ready_or_fails_after_its_owner_has_closed_ends(
    at_once: int | None, error: EpisodeError | None
) -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.close()

    def load() -> None:
        if error is not None:
            raise error

    kind = SimpleNamespace(in_thread=True, memory_mb=None, load=load, at_once=at_once)
    serve(theirs, LoopWatchdog(), cast(SessionKind, kind))
