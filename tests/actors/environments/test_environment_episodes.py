"""Episodes in real processes: what an environment yields, how it ends, how it is cleaned up, how many run at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.environments import Feedback
from async_rlhf.actors.environments.yields import MAX_BYTES, EpisodeEnd, Read, read_return, read_yield
from async_rlhf.buffers.errors import EpisodeError
from async_rlhf.buffers.score import Score
from tests.actors.environments.played import Bench
from tests.conftest import wait_for

ENVIRONMENTS = """
import asyncio, os, re, threading, time
from pathlib import Path
from async_rlhf import Feedback, Score, environment

@environment(max_turns=3)
async def asynchronous(question, answer, act, path, n, seed):
    try:
        text = yield question
        if act == "count":
            for i in range(n):
                text = yield f"{i}: {text}"
        elif act == "feedback":
            text = yield Feedback([{"role": "tool", "content": text, "name": "t"}], score=0.25)
            text = yield Feedback("again", score=0.5)
            yield Feedback("beyond", score=0.75)
        elif act == "return": return
        elif act == "raise": raise ValueError("no " + text)
        elif act == "sleep": await asyncio.sleep(1000)
        elif act == "slow cleanup": yield "more"
        yield Score(float(text.endswith(answer)), metrics={"seed": seed})
        open(path, "a").write("went on")
    finally:
        if path:
            await asyncio.sleep(0)
            open(path, "a").write("closed")
        if act == "slow cleanup": raise RuntimeError("dirty")

most = running = 0
lock = threading.Lock()

@environment(max_turns=3, timeout_s=30)
def synchronous(question, answer, act, path):
    global most, running
    try:
        text = yield question
        if act == "together":  # while others do
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.02)
            with lock: running -= 1
            text = yield str(most)
        elif act == "raise": raise ValueError("no " + text)
        elif act == "slow cleanup":
            try: yield "more"
            finally: yield "no end"
        yield Score(float(text.endswith(answer)))
    finally:
        if path: open(path, "a").write("closed")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "environments.py"
    path.write_text(ENVIRONMENTS)
    return path


@pytest.fixture(scope="module", params=["asynchronous", "synchronous"])
def either(source: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    with Bench(source, request.param) as bench:
        yield bench


@pytest.fixture(scope="module")
def bench(source: Path) -> Iterator[Bench]:
    with Bench(source, "asynchronous") as bench:
        yield bench


def test_an_episode_that_is_discarded_runs_its_cleanup(either: Bench, tmp_path: Path) -> None:
    assert either.play("it is 4", question="2 + 2")[0] == "2 + 2"
    path = tmp_path / "log"
    either.begin("discarded", path=str(path))
    either.until(lambda: len(either.events["discarded"]) == 1)
    either.pool.discard(["discarded", "unknown"])
    assert wait_for(lambda: path.exists() and path.read_text(), "cleanup") == "closed"
    assert either.pool.num_pending == 0 and either.pool.poll() == []


TOOL = [{"role": "tool", "content": "a", "name": "t"}]


@pytest.mark.parametrize(
    ("texts", "fields", "came"),
    [
        ("abc", {"act": "count", "n": 5}, [Read("?"), Read("0: a"), Read("1: b"), EpisodeEnd("max_turns")]),
        ("abc", {"act": "feedback"}, [Read("?"), Read(TOOL, 0.25), Read("again", 0.5), EpisodeEnd("max_turns", Score(0.75))]),
        ("a", {"act": "return"}, [Read("?"), EpisodeEnd("returned")]),  # rewards judge it
        (["4"], {"seed": 7}, [Read("?"), EpisodeEnd("scored", Score(1.0, metrics={"seed": 7.0}))]),
    ],
)
def test_what_is_yielded_is_read_or_ends_the_episode_which_is_then_closed(
    bench: Bench, tmp_path: Path, texts: Any, fields: Any, came: list[Any]
) -> None:
    bench.play(*texts, **fields, path=str(tmp_path / "log"))
    assert bench.events[max(key for key in bench.events if isinstance(key, int))] == came
    assert wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text(), "cleanup") == "closed"


def test_the_turns_of_an_episode_are_known_until_it_ends(bench: Bench) -> None:
    bench.begin("counted", act="count", n=5)
    bench.until(lambda: bench.turns("counted") == 2, lambda key, turn: "a" if (key, turn) == ("counted", 1) else None)
    assert bench.pool.num_turns("counted") == 2
    bench.pool.discard(["counted"])
    assert bench.pool.num_turns("counted") == bench.pool.num_turns("unknown") == 0


@pytest.mark.parametrize(
    ("came", "reason"),
    [
        (
            read_yield(1.0, 1, 3),
            "yielded float 1.0; text, a list of chat messages, Feedback or Score was expected; a score is",
        ),
        (
            read_yield([{"role": "wizard", "content": ""}], 1, 3),
            "yielded a chat message whose role is 'wizard'; choose one of: ",
        ),
        (read_yield("\ud800", 1, 3), "yielded text that has no UTF-8 form"),
        (read_yield([{"role": "user", "content": {1, 2}}], 1, 3), "yielded chat messages that are no JSON data"),
        (read_yield("x" * (MAX_BYTES + 1), 1, 3), "returned 1048577 bytes, at most 1048576 are read"),
        (read_yield(Feedback("x", 1e300), 1, 3), "Feedback with a score: returned float 1e+300"),
        (read_yield(Score(1.0), 0, 3), "it ended before the model wrote anything"),
        (read_yield(Feedback("x", 1.0), 0, 3), "it gave Feedback with a score before the model wrote anything"),
        (read_return(0), "it ended before the model wrote anything"),
        (read_return(1, 1.0), "returned float 1.0; a score is yielded: yield Score(...)"),
    ],
)
def test_what_is_no_observation_is_failed_by_name(came: Any, reason: str) -> None:
    assert isinstance(came, EpisodeEnd) and came.reason == "failed" and came.score.failure.startswith(reason), came


SHOWN = """
from async_rlhf import Score, environment

@environment
def shown(images):
    yield [{"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,YWJj"}]}]
    yield Score(1.0)
"""


def test_messages_that_an_environment_yields_are_read_as_those_of_rows_are() -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None, "tool_calls": []}]
    assert read_yield(said, 0, 2) == Read([{"role": "user", "content": "a"}])
    end = read_yield([{"role": "user", "content": [{"type": "image"}]}], 0, 2)
    assert isinstance(end, EpisodeEnd) and "image 1: the part has no image" in str(end.failure)


def test_an_episode_whose_images_its_process_does_not_have_fails_by_name(tmp_path: Path) -> None:
    """As at a server, which has none of a run."""
    (tmp_path / "shown.py").write_text(SHOWN)
    with Bench(tmp_path / "shown.py", "shown") as bench:
        assert "this run takes none while it goes on: set data.images = true" in bench.fails("row", images=["0" * 32])
        assert "image 1: this run takes none while it goes on" in bench.fails("yield", images=[])


def test_failures_are_counted_by_kind_and_cleanups_that_raise_or_yield_apart(either: Bench) -> None:
    before, dirty = either.pool.counters.failed.copy(), either.pool.counters.cleanups_failed
    either.begin("dirty", act="slow cleanup")
    either.until(lambda: len(either.events["dirty"]) == 2, lambda key, turn: "x" if (key, turn) == ("dirty", 1) else None)
    either.pool.discard(["dirty"])
    either.until(lambda: either.pool.counters.cleanups_failed == dirty + 1)
    assert either.play("a", act="raise")[-1].reason == "failed"
    assert either.pool.counters.failed - before == {"raised": 1}


def test_only_so_many_steps_run_at_once_and_the_others_wait(source: Path) -> None:
    with Bench(source, "synchronous", max_concurrency=3) as bench:
        for key in range(30):
            bench.begin(key, act="together")
        bench.until(lambda: bench.pool.num_pending == 0, lambda key, turn: "4")
        observed = [event.content for events in bench.events.values() for event in events[1:2] if isinstance(event, Read)]
        assert len(observed) == 30 and max(map(int, map(str, observed))) == 3


def test_thousands_of_tiny_episodes_go_through_without_loss(source: Path) -> None:
    with Bench(source, "asynchronous", workers=2) as bench:
        for key in range(2000):
            bench.begin(key, act="count", n=key % 4, question=str(key))
        dropped = range(0, 2000, 50)

        def model(key: int, turn: int) -> str:
            return f"{key}"

        bench.until(bench.heard(1), model)  # so that some have begun
        bench.pool.discard(dropped)
        bench.until(lambda: bench.pool.num_pending == 0, model)
        for key, events in bench.events.items():
            if key not in dropped:
                *observed, end = events
                assert [each.content for each in observed if isinstance(each, Read)] == [
                    str(key), *(f"{i}: {key}" for i in range(min(key % 4, 2)))]  # fmt: skip
                assert isinstance(end, EpisodeEnd) and end.reason == ("max_turns" if key % 4 == 3 else "scored")
        ends = bench.pool.counters.episodes
        assert set(ends) == {"max_turns", "scored"} and ends["max_turns"] in range(490, 501)
        assert 2000 - len(dropped) <= ends.total() <= 2000 and bench.pool.counters.lost == 0
        wait_for(lambda: not bench.pool._sessions.num_sessions(), "the cleanup of all of them")


def test_columns_that_cannot_travel_fail_their_episode_alone(bench: Bench) -> None:
    assert "<lambda>" in bench.play("4", question=lambda: "?")[-1].failure.reason
    assert bench.play("4")[-1].reason == "scored"


def test_a_reply_that_is_not_due_and_a_second_beginning_are_refused(bench: Bench) -> None:
    bench.begin("twice", act="sleep")
    with pytest.raises(EpisodeError, match="runs already"):
        bench.pool.begin("twice", {})
    with pytest.raises(EpisodeError, match="waits for no reply"):
        bench.pool.reply("twice", "x")
    bench.until(lambda: len(bench.events["twice"]) == 1, lambda key, turn: "x")
    with pytest.raises(EpisodeError, match="waits for no reply"):
        bench.pool.reply("twice", "x")
    bench.pool.discard(["twice"])


def test_closing_the_pool_lets_generators_clean_up(source: Path, tmp_path: Path) -> None:
    with Bench(source, "asynchronous") as bench:
        bench.begin("a", path=str(tmp_path / "log"))
        bench.until(bench.heard(1))
    assert (tmp_path / "log").read_text() == "closed"
