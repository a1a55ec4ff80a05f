"""The turns of an agent's episode: what a request asks becomes a `Call`, the model's `Reply` what answers it, and what the
agent returns the end. Pure.

A conversation is what the model has read and written behind one beginning; its tokens are never made anew from text. A request
goes on with one when its messages begin with exactly all of that one's, the model's last turn included as it was given out, and
something follows. The longest such conversation has it, of equal ones the first. Everything else (another system prompt, a
history that was compacted, a subagent, a second call beside the first) begins another: nothing is ever matched by likeness.
"""

from __future__ import annotations

import re
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from async_rlhf.actors.agents.request import ChatRequest, RequestError, after
from async_rlhf.actors.agents.response import ChatResponse, read_reply
from async_rlhf.actors.agents.sessions import AgentSession
from async_rlhf.actors.environments.settings import Call, Message, Reply, Scores, counted
from async_rlhf.actors.rewards.answer import read
from async_rlhf.buffers.score import Score

RESPONSE_TEMPLATE = "response_template"
"""The option by which what the model writes is read."""


# Of a dialect, before what it shares with the others.
_PREFIX = re.compile("^(chatcmpl-|msg_|resp_)")


class Conversations:
    """Those of one episode. num_conversations: so far."""

    def __init__(self) -> None:
        self.num_conversations = 0
        self._ends: dict[bytes, list[int]] = {}  # by what they have: conversations, in order

    def place(self, prefixes: Sequence[bytes]) -> tuple[int, int]:
        """The conversation that a request is the next turn of, and how many messages that has read; a new one has read none.

        prefixes: as of `request.digests`. The conversation has no other turn until `wrote`.
        """
        for known in range(len(prefixes) - 1, 0, -1):
            if equal := self._ends.get(prefixes[known - 1]):
                conversation = equal.pop(0)
                if not equal:
                    del self._ends[prefixes[known - 1]]
                return conversation, known
        self.num_conversations += 1
        return self.num_conversations - 1, 0

    def wrote(self, conversation: int, prefixes: Sequence[bytes], message: Message) -> None:
        """The model's turn in answer to a request that was placed."""
        insort(self._ends.setdefault(after(prefixes[-1], message), []), conversation)


class Turns:
    """The turns of one episode, one at a time in each conversation: `call`, then `wrote`. template: how the model writes
    reasoning and calls of tools."""

    def __init__(self, template: Mapping[str, Any], session: AgentSession) -> None:
        self._template, self._session, self._conversations = template, session, Conversations()
        self._requests: dict[int, tuple[ChatRequest, int]] = {}
        self._counts = Counter({"calls": 0, "unparsed_turns": 0})
        # Of the calls that were answered: their numbers and whether they are trained on, by the answer's id.
        self._trained: dict[str, tuple[int, bool]] = {}
        self._rewards: dict[int, float] = {}
        self._is_over = False

    @property
    def num_calls(self) -> int:
        return self._counts["calls"]

    def call(self, request: ChatRequest) -> Call:
        self._counts["calls"] += 1
        conversation, known = self._conversations.place(request.prefixes)
        self._requests[conversation] = request, self.num_calls
        tools = () if known else request.tools
        return Call(conversation, request.messages[known:], tools, request.max_tokens, request.stop, request.trained)

    def wrote(self, reply: Reply) -> ChatResponse:
        request, number = self._requests.pop(reply.conversation)
        response = read_reply(reply, request, self._template, number, self._session.name)
        self._trained[response.id] = number, request.trained
        self._counts["unparsed_turns"] += response.is_unparsed
        self._conversations.wrote(reply.conversation, request.prefixes, response.message)
        return response

    def reward(self, id: str, value: Any) -> None:
        """A score of one call, once. id: of its answer, as the client has it. Raises RequestError."""
        named, known = _PREFIX.sub("", str(id)), tuple(self._trained)
        if self._is_over:
            raise RequestError("the episode has ended; rewards of its calls are set before", 410)
        if named not in known:
            answered = f"the newest that it has answered is {known[-1]!r}" if known else "it has answered none"
            raise RequestError(f"{id!r:.80} is no call of this episode; {answered}", 404)
        number, is_trained = self._trained[named]
        if not is_trained:
            raise RequestError(f"call {named!r} is not trained on, as its request wanted: a reward for it would be lost")
        if number in self._rewards:
            raise RequestError(f"call {named!r} has the reward {self._rewards[number]:g} already; it is set once", 409)
        answer = read(value)
        if answer.value is None:
            raise RequestError(
                f"the reward of call {named!r}: {answer.failure.reason if answer.failure else 'None; a number was expected'}"
            )
        self._rewards[number] = answer.value

    def end(self, result: Any) -> Scores:
        """The scores of an episode's result: a number, a `Score` or None (not scorable), or these by name, each a metric and
        their sum the score. Anything else is a failure."""
        self._is_over = True
        return Scores(self._score(result), tuple(map(self._rewards.get, range(1, self.num_calls + 1))))

    def _score(self, result: Any) -> Score:
        counts = {**self._counts, "conversations": self._conversations.num_conversations}
        counts |= {"retries_joined": self._session.num_joined, "calls_left": self._session.num_left}
        if not isinstance(result, Mapping):
            answer = read(result)
            return counted(answer.score(), counts)
        answers = {str(name): read(value) for name, value in result.items()}
        if failed := [
            f"reward {name!r}: {answer.failure.reason}" for name, answer in answers.items() if answer.failure is not None
        ]:
            return Score(failure=failed[0], metrics=counts)
        values = {name: answer.value for name, answer in answers.items() if answer.value is not None}
        total = read(sum(values.values()) if values else None)
        return counted(replace(total.score(), metrics=values), counts)
