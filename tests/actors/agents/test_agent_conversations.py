"""Which conversation a request goes on with, against a slow twin that compares the messages themselves."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.agents.request import digests
from async_rlhf.actors.agents.turns import Conversations
from async_rlhf.actors.environments.settings import Message

Tools = list[dict[str, Any]]


class SlowTwin:
    """Every conversation keeps its tools and all its messages."""

    def __init__(self) -> None:
        self.conversations: list[tuple[Tools, list[Message]]] = []

    def place(self, tools: Tools, messages: list[Message]) -> tuple[int, int]:
        best, known = len(self.conversations), 0
        for number, (shown, has) in enumerate(self.conversations):
            if shown == tools and len(has) < len(messages) and same(has, messages[: len(has)]) and len(has) > known:
                best, known = number, len(has)
        if best == len(self.conversations):
            self.conversations.append((tools, []))
        self.conversations[best] = (tools, [*messages])
        return best, known

    def wrote(self, conversation: int, message: Message) -> None:
        self.conversations[conversation][1].append(message)


def same(one: list[Message], other: list[Message]) -> bool:
    return [*map(whole, one)] == [*map(whole, other)]


def whole(message: Message) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message["role"], message.get("content") or "", calls


def assistant(text: str, *calls: tuple[str, Any]) -> Message:
    shown = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": text, "tool_calls": shown}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def echoed(message: Message, draw: st.DrawFn) -> Message:
    """As clients send back what they got: with ids of their own, null for no text, arguments in another order, or reasoning."""
    if message["role"] != "assistant":
        return message
    calls = [
        {"id": draw(st.text(max_size=2)), "function": {**call["function"], "arguments": as_read_again(call, draw)}}
        for call in message.get("tool_calls") or ()
    ]
    content = message["content"] or draw(st.sampled_from(["", None]))
    extra = draw(st.sampled_from([{}, {"reasoning_content": "because"}, {"name": "me"}]))
    return {"role": "assistant", "content": content, **extra, **({"tool_calls": calls} if calls else {})}


def as_read_again(call: Any, draw: st.DrawFn) -> Any:
    arguments = call["function"]["arguments"]
    items = draw(st.permutations([*arguments.items()]))
    return {name: float(value) if type(value) is int and draw(st.booleans()) else value for name, value in items}


TURNS = st.builds(
    lambda text, calls: assistant(text, *calls),
    st.sampled_from(["", "a", "b"]),
    st.lists(
        st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(st.sampled_from("xy"), st.integers(0, 1), max_size=2)),
        max_size=2,
    ),
)


@st.composite
def episodes(draw: st.DrawFn) -> list[tuple[Tools, list[Message], Message]]:
    """Requests of an episode and the model's turns: each goes on with what an earlier one ended as, or with a part of it, or
    anew."""
    ends: list[list[Message]] = [[]]
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from(ends))
        kept = [echoed(message, draw) for message in base[: draw(st.integers(0, len(base)) | st.just(len(base)))]]
        messages = [*kept, *draw(st.lists(st.sampled_from([user("a"), user("b")]), min_size=1, max_size=2))]
        turn = draw(TURNS)
        tools: Tools = draw(st.sampled_from([[], [], [{"type": "function", "function": {"name": "f"}}]]))
        requests.append((tools, messages, turn))
        ends.append([*messages, turn])
    return requests


@given(episodes())
def test_a_request_goes_on_with_the_longest_conversation_that_it_begins_with_and_else_begins_one(
    requests: list[tuple[Tools, list[Message], Message]],
) -> None:
    fast, slow = Conversations(), SlowTwin()
    for tools, messages, turn in requests:
        prefixes = digests(tools, messages)
        placed = fast.place(prefixes)
        assert placed == slow.place(tools, messages)
        fast.wrote(placed[0], prefixes, turn)
        slow.wrote(placed[0], turn)
        assert fast.num_conversations == len(slow.conversations)


@given(st.lists(st.tuples(st.sampled_from(["u", "a"]), st.text(max_size=3)), max_size=6))
def test_a_digest_is_of_the_messages_and_not_of_how_they_are_cut(pairs: list[tuple[str, str]]) -> None:
    messages = [user(text) if role == "u" else assistant(text) for role, text in pairs]
    found = digests([], messages)
    assert len(set(found)) == len(found) == len(messages)
    joined = [user("".join(text for _, text in pairs))]
    assert len(messages) < 2 or digests([], joined)[-1] != found[-1]
    assert digests([], json.loads(json.dumps(messages))) == found


def test_two_calls_at_the_same_time_are_two_conversations_and_each_goes_on_with_its_own() -> None:
    conversations, first = Conversations(), digests([], [user("q")])
    assert [conversations.place(first), conversations.place(first)] == [(0, 0), (1, 0)]
    conversations.wrote(0, first, assistant("same"))
    conversations.wrote(1, first, assistant("same"))
    following = digests([], [user("q"), assistant("same"), user("more")])
    assert [conversations.place(following) for _ in range(3)] == [(0, 2), (1, 2), (2, 0)]


def test_arguments_in_lists_are_compared_as_json_values_too() -> None:
    def digest(argument: Any) -> bytes:
        (found,) = digests([], [assistant("", ("f", {"x": argument}))])
        return found

    for one, other in ((1, 1.0), ([1], [1.0]), ([[1, "a"]], [[1.0, "a"]]), ([{"n": 1}], [{"n": 1.0}])):
        assert digest(one) == digest(other)
    assert len({digest(each) for each in (["{}"], [{}], [None], [""], ["1"], [1])}) == 6
