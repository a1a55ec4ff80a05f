"""Agents as episodes: what they return and raise, how they end, and what is left of them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.actors.agents.endpoint import HEADER, Llm, endpoint
from async_rlhf.actors.environments import resolve
from async_rlhf.actors.environments.settings import Call, Reply
from async_rlhf.actors.environments.yields import Read
from async_rlhf.buffers.errors import ConfigError, EpisodeError
from async_rlhf.buffers.score import Score
from tests.actors.agents.by_hand import answer, asked, generator_of, play, post, reply, said
from tests.actors.environments.played import Bench
from tests.conftest import has_ended, wait_for


def asks(llm: Llm, *texts: str, **more: Any) -> str:
    got = post(llm, said(*texts, **more))
    assert got.status == 200, got.text
    return str(got.data["choices"][0]["message"]["content"])


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


RETURNS: list[tuple[Any, float | None, str | None]] = [
    (1, 1.0, None),
    (True, 1.0, None),
    ({"right": 1.0, "short": 0.5}, 1.5, None),
    ({"right": 1.0, "other": None}, 1.0, None),
    ({"right": None}, None, None),
    ({}, None, None),
    (None, None, None),
    (Score(2.0, metrics={"mine": 3.0}), 2.0, None),
    (Score(failure="no network"), None, "no network"),
    ("one", None, "returned str 'one'; a number, a Score or None was expected"),
    ([1.0], None, "returned list [1.0]"),
    (float("nan"), None, "a score must be finite"),
    (10**400, None, "a score must be finite"),
    ({"right": "yes"}, None, "reward 'right': returned str 'yes'"),
    ({"a": 9e17, "b": 9e17}, None, "a score must be finite"),
    (Odd(), None, "that cannot be written"),
]


@pytest.mark.parametrize(("returned", "value", "failure"), RETURNS, ids=range(len(RETURNS)))
def test_what_an_agent_returns_is_a_score_none_is_not_scorable_and_nonsense_has_failed(
    returned: Any, value: float | None, failure: str | None
) -> None:
    def solve(llm: Llm) -> Any:
        asks(llm, "hi")
        return returned

    score = play(solve).score
    assert score.value == value and (failure or "") in (score.failure or ""), score
    assert (score.failure is None) == (failure is None)
    assert score.metrics["calls"] == score.metrics["conversations"] == 1
    if isinstance(returned, dict) and value is not None:
        assert score.metrics.items() >= {name: each for name, each in returned.items() if each is not None}.items()


@pytest.mark.parametrize("returned", [Score(1.0, metrics={"calls": 99.0}), {"calls": 3.0, "conversations": -2.0}])
def test_what_an_agent_reports_never_stands_for_what_is_counted_of_it(returned: Any) -> None:
    def solve(llm: Llm) -> Any:
        asks(llm, "hi")
        return returned

    score, told = play(solve).score, returned.metrics if isinstance(returned, Score) else returned
    assert score.value == 1.0 and score.metrics["calls"] == 1 and score.metrics["own/calls"] == told["calls"]


class Quits(BaseException):
    pass


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, Quits, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_an_agent_raises_is_raised_by_its_generator(kind: type[BaseException], is_async: bool) -> None:
    def plain(llm: Llm) -> float:
        asks(llm, "hi")
        raise kind("why")

    async def awaiting(llm: Llm) -> float:
        await asyncio.to_thread(asks, llm, "hi")
        raise kind("why")

    if is_async and kind in (SystemExit, KeyboardInterrupt):
        return  # they end the loop of any task; in a worker its process, which is an end that is counted
    with pytest.raises(kind):
        play(awaiting if is_async else plain)


def test_a_history_that_is_compacted_a_subagent_and_parallel_calls_are_conversations_of_their_own() -> None:
    def solve(llm: Llm) -> float:
        first = asks(llm, "a")
        asks(llm, "a", first, "b")
        asks(llm, "a", "[shortened]", "b")  # compacted
        asks(llm, "sub")
        threads = [threading.Thread(target=asks, args=(llm, "a", first, "same")) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 1.0

    played = play(solve, lambda asked, number: "x")
    assert played.conversations == [0, 0, 1, 2, 3, 4]
    assert [len(call.messages) for call in played.calls] == [1, 1, 3, 1, 3, 3]
    assert played.score.metrics["conversations"] == 5


def test_a_request_says_whether_its_turn_is_trained() -> None:
    def solve(llm: Llm) -> float:
        for trained in ("false", "true"):
            assert post(llm, said("title?"), **{HEADER: trained}).status == 200
        return 1.0

    assert [call.trained for call in play(solve).calls] == [False, True]


def test_a_reward_of_one_call_is_set_by_the_id_of_its_answer_once_and_what_cannot_count_is_refused() -> None:
    llms: list[Llm] = []

    def solve(llm: Llm) -> float:
        ids = [str(post(llm, said("hi"), f"/v1/{path}").data["id"]) for path in ("chat/completions", "messages")]
        ids.append(str(post(llm, {"input": "hi"}, "/v1/responses").data["id"]))
        title = str(post(llm, said("title?"), **{HEADER: "false"}).data["id"])
        assert [id.partition("turn")[0] for id in ids] == ["chatcmpl-", "msg_", "resp_"]
        llm.reward(ids[0], 0.25)
        llm.reward(ids[2], True)
        of_another = re.sub("_[0-9a-f]+$", "_00000000", ids[1])
        for id, value, reason in [
            (ids[0], 0.25, "has the reward 0.25 already"),
            (title, 1.0, "is not trained on"),
            (of_another, 1.0, "no call of this episode; the newest that it has answered is 'turn_4_"),
            (None, 1.0, "None is no call"),
            (ids[1], None, "a number was expected"),
            (ids[1], float("nan"), "must be finite"),
            (ids[1], "much", "returned str 'much'"),
        ]:
            with pytest.raises(EpisodeError, match=reason):
                llm.reward(id, value)  # type: ignore[arg-type]
        llms.append(llm)
        return 1.0

    played = play(solve)
    assert (played.score.value, played.turn_scores) == (1.0, (0.25, None, 1.0, None))
    with pytest.raises(EpisodeError, match="the episode has ended"):
        llms[0].reward("turn_1", 1.0)


def test_what_cannot_be_read_as_a_call_is_counted_and_the_template_may_be_the_users() -> None:
    tool = {"type": "function", "function": {"name": "price"}}
    written = ["<tool_call>{broken", 'CALL {"name": "price"} END']

    def solve(llm: Llm) -> float:
        first = asks(llm, "hi", tools=[tool])
        second = post(llm, said("ho", tools=[tool])).data["choices"][0]["message"]
        return {"text": float(first == written[0]), "called": float("tool_calls" in second)}  # type: ignore[return-value]

    played = play(solve, lambda asked, number: written[number - 1])
    assert played.score.metrics.items() >= {"text": 1.0, "called": 0.0, "unparsed_turns": 1}.items()
    calls = {"open": "CALL", "close_pattern": " END", "content": "json"}
    calls |= {"repeats": True, "transform": {"type": "function", "function": "{content}"}}
    template = {"defaults": {"role": "assistant"}, "start_anchor": "A", "fields": {"tool_calls": calls}}
    template["fields"]["content"] = {"content": "text"}  # type: ignore[index]
    played = play(solve, lambda asked, number: written[number - 1], {"response_template": template})
    assert played.score.metrics.items() >= {"text": 1.0, "called": 1.0, "unparsed_turns": 0}.items()


def test_an_agent_that_is_over_is_not_waited_for_by_threads_that_it_left(tmp_path: Path) -> None:
    after: list[int] = []
    threads: list[threading.Thread] = []
    is_over = threading.Event()

    def stays(llm: Llm) -> None:
        is_over.wait(300)
        after.append(post(llm, said("late")).status)

    def solve(llm: Llm) -> float:
        asks(llm, "hi")
        threads.append(threading.Thread(target=stays, args=(llm,)))
        threads[0].start()
        return 1.0

    played = play(solve)
    is_over.set()
    threads[0].join(300)
    assert len(played.calls) == 1 and played.score.value == 1.0 and after == [401]


def test_a_call_behind_another_whose_client_has_gone_is_left_out_unless_a_retry_came_before_its_turn() -> None:
    may_go_on = threading.Event()

    def solve(llm: Llm) -> float:
        session = endpoint()._sessions[llm.api_key]

        def waits(*counts: int) -> None:
            is_so = lambda: [call.num_waiting for calls in session._calls.values() for call in calls] == [*counts]  # noqa: E731
            wait_for(is_so, f"calls with {counts} connections")

        with asked(llm, said("first")) as first, ExitStack() as lost:
            waits(1)
            lost.enter_context(asked(llm, said("gone")))
            waits(1, 1)
            lost.enter_context(asked(llm, said("joined")))
            waits(1, 1, 1)
            lost.close()
            waits(1, 0, 0)
            with asked(llm, said("joined"), x_stainless_retry_count="1") as again:
                waits(1, 0, 1)
                may_go_on.set()
                assert answer(first).status == answer(again).status == 200
        assert post(llm, said("gone"), x_stainless_retry_count="1").status == 200
        return 1.0

    def model(call: Call, number: int) -> str:
        may_go_on.wait(300)
        return "x"

    played = play(solve, model)
    assert [call.messages[0]["content"] for call in played.calls] == ["first", "joined", "gone"]
    assert played.score.metrics.items() >= {"calls": 3, "calls_left": 1, "retries_joined": 1}.items()


def test_closing_the_generator_ends_the_agents_open_call_and_waits_for_the_agent() -> None:
    ended: list[Any] = []

    def plain(llm: Llm) -> None:
        try:
            ended.append(post(llm, said("hi")).status)
        finally:
            ended.append("left")

    generator = generator_of(plain)
    generator.send(None)
    generator.close()
    assert ended == [503, "left"]

    async def awaiting(llm: Llm) -> None:
        try:
            await asyncio.to_thread(post, llm, said("hi"))
        finally:
            ended.append("cancelled")

    async def closes() -> None:
        generator = generator_of(awaiting)
        await generator.asend(None)
        await generator.aclose()

    asyncio.run(closes())
    assert ended == [503, "left", "cancelled"]


def test_what_is_an_agent_and_what_is_said_of_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from async_rlhf import environment\n"
        "def agent(question, llm, level=0): ...\n"
        "async def awaiting(llm, **columns): ...\n"
        "@environment(max_turns=3, name='other')\ndef declared(llm): ...\n"
        "@environment(tools=[{'function': {'name': 'f'}}])\ndef with_tools(llm): ...\n"
        "def neither(question): ...\n"
    )
    spec = resolve(f"{path}:agent", tmp_path, {"level": 2})
    assert (spec.kind, spec.calls, spec.max_turns, spec.timeout_s) == ("sync", True, 64, 120.0)
    assert (spec.required, spec.fields) == (("question",), ("question", "level", "response_template"))
    spec = resolve(f"{path}:awaiting", tmp_path)
    assert (spec.kind, spec.fields, spec.tools) == ("async", None, ())
    spec = resolve(f"{path}:declared", tmp_path, settings={"timeout_s": 5.0})
    assert (spec.name, spec.max_turns, spec.timeout_s) == ("other", 3, 5.0)
    for name, options, reason in [
        ("agent", {"levl": 1}, "did you mean 'level'"),
        ("agent", {"response_template": {"fields": 1}}, "environment.options.response_template"),
        ("with_tools", {}, "an agent's tools are those of its requests"),
        ("neither", {}, "has no yield; .* an agent has a parameter llm, and returns its reward"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            resolve(f"{path}:{name}", tmp_path, options).check({"question"})


# -- in processes of their own

AGENTS = """
import asyncio, os, subprocess, sys, threading, time
from async_rlhf import environment
from tests.actors.agents.by_hand import post, said

def asks(llm, *texts):
    return post(llm, said(*texts))

@environment(max_turns=5, timeout_s=60.0)
def agent(act, path, llm):
    if act == "never": return 1.0
    if act == "program":
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open(path, "w").write(f"{os.getpid()} {program.pid}")
    while act == "again" and asks(llm, "hi").status == 200: pass
    got = asks(llm, f"{os.getpid()}").status
    if act == "exit": os._exit(7)
    if act == "hang":
        while True: time.sleep(1000)
    if act == "raise": raise KeyError("mine")
    return {"answered": float(got == 200)}

async def awaiting(act, llm):
    got = await asyncio.to_thread(asks, llm, f"{os.getpid()}")
    if act == "block": asks(llm, "in the loop's thread")
    if act == "refuse":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    return float(got.status == 200)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    (tmp_path / "agents_of.py").write_text(AGENTS)
    with ExitStack() as made:
        yield lambda name, **settings: made.enter_context(Bench(tmp_path / "agents_of.py", name, **settings))


def writes(key: Any, turn: int) -> Reply:
    return reply("yes")


def to_the_end(played: Bench, key: Any, **fields: Any) -> Any:
    played.begin(key, **fields)
    played.until(lambda: played.ended(key) is not None, lambda of, turn: writes(of, turn) if of == key else None)
    return played.ended(key)


def test_agents_in_a_process_end_as_environments_do(bench: Callable[..., Bench]) -> None:
    played = bench("agent")
    end = to_the_end(played, "good")
    assert end.reason == "scored" and end.score.value == 1.0 and end.score.metrics["calls"] == 1
    end = to_the_end(played, "never", act="never")
    assert end.failure[:2] == ("no_turn", "it ended before the model wrote anything")
    end = to_the_end(played, "again", act="again")
    assert end.reason == "max_turns" and played.turns("again") == 5
    end = to_the_end(played, "raise", act="raise")
    assert end.failure[:2] == ("raised", "KeyError: 'mine'") and "in agent" in end.failure.traceback
    played.opens("other")
    assert to_the_end(played, "exit", act="exit").failure.kind == "died"
    played.until(lambda: isinstance(played.events["other"][-1], Read) and played.events["other"][-2] is None)
    played.pool.reply("other", reply("yes"))
    played.until(lambda: played.ended("other") is not None, writes)
    assert played.ended("other").reason == "scored"  # type: ignore[union-attr]


def test_an_agent_that_hangs_or_refuses_to_end_fails_at_its_limit(bench: Callable[..., Bench]) -> None:
    played = bench("agent", timeout_s=4.0)
    assert to_the_end(played, "hang", act="hang").failure.reason == "timed out after 4 s (timeout_s)"
    played = bench("awaiting", timeout_s=4.0)
    assert to_the_end(played, "refuse", act="refuse").failure.reason == "timed out after 4 s (timeout_s)"


@pytest.mark.rest
def test_an_agent_that_blocks_the_loop_fails_alone(bench: Callable[..., Bench]) -> None:
    played = bench("awaiting", timeout_s=15.0)
    played.opens("other")
    end = to_the_end(played, "block", act="block")
    assert "it blocked the event loop for more than 15 s" in end.failure.reason, end
    assert played.events["other"][1:2] == [None] and played.pool.counters.failed == {"timed_out": 1}


def test_a_program_that_an_agent_leaves_behind_ends_with_the_process(bench: Callable[..., Bench], tmp_path: Path) -> None:
    played = bench("agent")
    assert to_the_end(played, "program", act="program", path=str(tmp_path / "pids")).reason == "scored"
    processes = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    played.pool.close(60.0)
    wait_for(lambda: all(map(has_ended, processes)), "the end of the process and its program")


def test_many_sessions_are_open_in_one_process_and_none_gets_the_answer_of_another(bench: Callable[..., Bench]) -> None:
    played = bench("agent")
    keys = range(64)
    for key in keys:
        played.begin(key)
    played.until(lambda: all(played.events[key] for key in keys))
    for key in keys:
        played.pool.reply(key, reply("yes"))
    played.until(lambda: all(map(played.ended, keys)))
    assert all(played.ended(key).score.value == 1.0 for key in keys)  # type: ignore[union-attr]
    assert not any(None in events for events in played.events.values())
