"""Calls as an agent yields them, and what it gets back: in a process of its own, in a thread, from a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.environments import Call, Reply
from async_rlhf.actors.environments.settings import Scores
from async_rlhf.actors.environments.yields import MAX_BYTES, EpisodeEnd, Read, read_yield
from async_rlhf.buffers.score import Score
from tests.actors.environments.played import Bench
from tests.actors.environments.test_environment_server import Server

ASKED = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}
AGENTS = """
from async_rlhf import Score, environment
from async_rlhf.actors.environments import Call

ASKED = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}

def shown(reply):
    return [{"role": "user", "content": repr(tuple(reply))}]

@environment(max_turns=4, calls=True)
def synchronous(question):
    first = yield Call(0, ASKED, (TOOL,), max_tokens=7, stop=("end",))
    other = yield Call(1, shown(first), trained=False)
    last = yield Call(0, shown(other))
    if question == "more":
        while True: yield Call(0, ASKED)
    yield Score(last.num_tokens)
"""
AGENTS += AGENTS[AGENTS.index("@") :].replace("def synchronous", "async def asynchronous")
REPLIES = [Reply("a\ud800", "stop", 5, 2), Reply("", "length", 9, 1, 1), Reply("c", "stop", 1, 3)]


def shown(reply: Reply) -> list[dict[str, str]]:
    return [{"role": "user", "content": repr(tuple(reply))}]


CALLED = [
    Call(0, ASKED, (TOOL,), 7, ("end",)),
    Call(1, shown(REPLIES[0]), trained=False),
    Call(0, shown(REPLIES[1])),
]


@pytest.fixture(params=["synchronous", "asynchronous", "remote", "thread"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Bench]]:
    source = tmp_path / "echoes.py"
    with ExitStack() as made:
        if request.param == "remote":
            server = Server(tmp_path, AGENTS, "synchronous")
            server.start()
            made.callback(server._made.close)
            yield lambda **settings: made.enter_context(Bench(tmp_path, f"remote:{server.address}", **settings))
            return
        source.write_text(AGENTS)
        if request.param != "thread":
            yield lambda **settings: made.enter_context(Bench(source, request.param, **settings))
            return
        scope: dict[str, Any] = {"__name__": "a_notebook"}
        exec(AGENTS, scope)
        own = scope["synchronous"]
        yield lambda **settings: made.enter_context(Bench(source, "synchronous", own, **settings))


def test_a_call_comes_as_it_was_made_and_its_reply_goes_back(bench: Callable[..., Bench]) -> None:
    played = bench()
    played.play(*REPLIES)
    *read, end = played.events[0]
    assert read == [Read(call.messages, call=call) for call in CALLED]
    assert isinstance(end, EpisodeEnd) and end.score == Score(3.0)
    played.play(*REPLIES, Reply("d", "stop", 1, 1), question="more")
    assert [type(event) for event in played.events[1]] == [Read] * 4 + [EpisodeEnd]
    assert played.events[1][-1].reason == "max_turns"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("yielded", "reason"),
    [
        ("text", "yielded str 'text'; an agent yields Call(...), and Score(...) at its end"),
        (Call(2, ASKED), "yielded a Call whose conversation is int 2; they are numbered as they begin, none is above 1 here"),
        (Call(-1, ASKED), "yielded a Call whose conversation is int -1"),
        (Call(True, ASKED), "yielded a Call whose conversation is bool True"),
        (Call(0, "text"), "yielded a Call whose messages are str 'text'; a list of chat messages was expected"),  # type: ignore[arg-type]
        (Call(0, []), "yielded list []; text, a list of chat messages"),
        (Call(0, [{"role": "wizard", "content": ""}]), "yielded a chat message whose role is 'wizard'"),
        (Call(0, ASKED, ({"name": "price"},)), "yielded a Call whose tools are tuple ({'name': 'price'},); schemas {'type'"),
        (Call(0, ASKED, ({**TOOL, "x": {1}},)), "yielded tools that are no JSON data for text"),
        (Call(0, ASKED, ({**TOOL, "x": 1 << 64},)), "yielded tools that are no JSON data for text"),
        (Call(0, ASKED, ({**TOOL, "x": "y" * MAX_BYTES},)), "returned 1048"),
        (Call(0, ASKED, max_tokens=0), "yielded a Call whose max_tokens is int 0; a whole number of 1 or more"),
        (Call(0, ASKED, max_tokens=1.0), "yielded a Call whose max_tokens is float 1.0"),  # type: ignore[arg-type]
        (Call(0, ASKED, stop="end"), "yielded a Call whose stop is str 'end'; at most 16 texts of 1 to 256"),  # type: ignore[arg-type]
        (Call(0, ASKED, stop=("",)), "yielded a Call whose stop is tuple ('',)"),
        (Scores(Score(1.0), (0.5, float("nan"))), "Scores with a score of a turn:"),
        (Scores(Score(1.0), (0.5, "good")), "Scores with a score of a turn:"),  # type: ignore[arg-type]
        (Scores(Score(1.0), (0.5, 0.5)), "Scores of 2 turns, and the model wrote 1"),
        (Call(0, ASKED, trained=1), "yielded a Call whose trained is int 1"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_call_is_failed_by_name(yielded: Any, reason: str) -> None:
    end = read_yield(yielded, 1, 3, calls=True)
    assert isinstance(end, EpisodeEnd) and end.reason == "failed" and end.score.failure.startswith(reason), end


def test_a_call_in_place_of_an_observation_names_what_it_needs() -> None:
    end = read_yield(Call(0, ASKED), 1, 3)
    assert isinstance(end, EpisodeEnd) and end.score.failure.endswith("only @environment(calls=True) yields Calls")


def test_more_tokens_than_can_be_counted_are_as_many_as_there_may_be() -> None:
    assert read_yield(Call(0, ASKED, max_tokens=10**40), 0, 3, calls=True) == Read(ASKED, call=Call(0, ASKED))
