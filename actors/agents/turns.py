"""The turns of an agent's episode: what a request asks becomes a `Call`, and the model's `Reply` what answers it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from async_rlhf.actors.agents.asked import Asked
from async_rlhf.actors.agents.conversations import Conversations
from async_rlhf.actors.agents.sessions import Session
from async_rlhf.actors.agents.written import Written, read_reply
from async_rlhf.actors.environments.settings import Call, Reply
from async_rlhf.actors.rewards.answer import read
from async_rlhf.buffers.score import Score

RESPONSE_TEMPLATE = "response_template"
"""The option by which what the model writes is read."""


class Turns:
    """Of one episode, one at a time: `call`, then `wrote`. template: how the model writes reasoning and calls of tools."""

    def __init__(self, template: Mapping[str, Any]) -> None:
        self._template, self._conversations = template, Conversations()
        self._asked: tuple[Asked, int] | None = None
        self._counts = Counter({"calls": 0, "unparsed_turns": 0})

    @property
    def num_calls(self) -> int:
        return self._counts["calls"]

    def call(self, asked: Asked) -> Call:
        assert self._asked is None
        self._counts["calls"] += 1
        chain, known = self._conversations.place(asked.prefixes)
        self._asked = asked, chain
        tools = () if known else asked.tools
        return Call(chain, asked.messages[known:], tools, asked.max_tokens, asked.stop, asked.trained)

    def wrote(self, reply: Reply) -> Written:
        assert self._asked is not None
        (asked, chain), self._asked = self._asked, None
        written = read_reply(reply, asked, self._template, self._counts["calls"])
        self._counts["unparsed_turns"] += written.is_unparsed
        self._conversations.wrote(chain, asked.prefixes, written.message)
        return written

    def score(self, result: Any, session: Session) -> Score:
        """What an episode ended with: a number, a `Score` or None (not scorable), or such by name, whose sum is the score and
        each of which is a metric. Anything else is a failure."""
        counts = {**self._counts, "chains": self._conversations.num_chains}
        counts |= {"retries_joined": session.num_joined, "calls_left": session.num_left}
        if not isinstance(result, Mapping):
            answer = read(result)
            return Score(answer.value, answer.failure, {**counts, **answer.metrics})
        answers = {str(name): read(value) for name, value in result.items()}
        if failed := [f"reward {name!r}: {each.failure}" for name, each in answers.items() if each.failure is not None]:
            return Score(failure=failed[0], metrics=counts)
        values = {name: answer.value for name, answer in answers.items() if answer.value is not None}
        total = read(sum(values.values()) if values else None)
        return Score(total.value, total.failure, {**counts, **values})
