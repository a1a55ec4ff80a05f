"""How what an environment yields is read: an observation, or the end of its episode. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgpack

from async_rlhf.actors.chat import chat_of
from async_rlhf.actors.data.images import Read as ReadImage
from async_rlhf.actors.data.images import named, take_none
from async_rlhf.actors.environments.settings import Call, Content, Feedback, Scores
from async_rlhf.actors.rewards.answer import read, shown
from async_rlhf.buffers.failures import Failure, FailureKind
from async_rlhf.buffers.score import Score

Reason = Literal["scored", "returned", "max_turns", "failed"]
ROLES = ("system", "user", "assistant", "tool")

# No model's context holds more; an environment that reads a page of the web or a log shortens it.
MAX_BYTES = 1 << 20
# OpenAI takes 4 texts, Anthropic more; each is looked for after every token.
MAX_STOPS, MAX_STOP_CHARS = 16, 256
_EXPECTED = "text, a list of chat messages, Feedback or Score was expected"


@dataclass(frozen=True)
class Read:
    """The next input of the model; for a call, its messages."""

    content: Content
    score: float | None = None
    """The score of the turn before it, None for none."""
    call: Call | None = None


@dataclass(frozen=True)
class EpisodeEnd:
    """The end of an episode."""

    reason: Reason
    score: Score | None = None
    """None where the environment gave none."""
    failure: Failure | None = None
    """Why it has failed."""
    turn_scores: tuple[float | None, ...] = ()
    """As in `Scores`."""

    @classmethod
    def of(cls, failure: Failure) -> EpisodeEnd:
        """The episode has failed."""
        return cls("failed", Score(failure=failure.reason), failure)


def unreadable(reason: str) -> EpisodeEnd:
    return EpisodeEnd.of(Failure(FailureKind.UNREADABLE, reason))


def no_turn(what: str = "ended") -> EpisodeEnd:
    return EpisodeEnd.of(Failure(FailureKind.NO_TURN, f"it {what} before the model wrote anything"))


def read_yield(value: Any, turn: int, max_turns: int, calls: bool = False, image: ReadImage = take_none) -> Read | EpisodeEnd:
    """The meaning of a yielded value after `turn` turns of the model. calls: as in `EnvironmentSettings`. image: reads those
    in messages."""
    if isinstance(value, Score):
        return _end(value, turn)
    if calls and isinstance(value, Scores):
        answers = [read(score) for score in value.turns]
        if failed_ones := [answer.failure for answer in answers if answer.failure is not None]:
            return unreadable(f"Scores with a score of a turn: {failed_ones[0].reason}")
        if len(answers) > turn:
            return unreadable(f"Scores of {len(answers)} turns, and the model wrote {turn}")
        return replace(_end(value.score, turn), turn_scores=tuple(answer.value for answer in answers))
    if calls:
        call = _call(value, turn, image)
        if isinstance(call, EpisodeEnd):
            return call
        return EpisodeEnd("max_turns") if turn >= max_turns else Read(call.messages, call=call)
    feedback = value if isinstance(value, Feedback) else Feedback(value)
    score = read(feedback.score)
    if score.failure is not None:
        return unreadable(f"Feedback with a score: {score.failure.reason}")
    if score.value is not None and not turn:
        return no_turn("gave Feedback with a score")
    content = _content(feedback.content, image)
    if isinstance(content, EpisodeEnd):
        return content
    if turn >= max_turns:
        return EpisodeEnd("max_turns", None if score.value is None else Score(score.value))
    return Read(content, score.value)


def read_return(turn: int, value: object = None) -> EpisodeEnd:
    """The end of an episode whose generator ended after `turn` turns of the model. value: returned, and without meaning."""
    if value is not None:
        return unreadable(f"returned {shown(value)}; a score is yielded: yield Score(...)")
    return EpisodeEnd("returned") if turn else no_turn()


def _end(given: Score, turn: int) -> EpisodeEnd:
    if not turn:
        return no_turn()
    answer = read(given)
    if answer.failure is not None:
        return EpisodeEnd("failed", answer.score(), answer.failure)
    return EpisodeEnd("scored", answer.score())


def _call(call: Any, turn: int, image: ReadImage) -> Call | EpisodeEnd:
    """The call as plain data, of bounded size."""
    if not isinstance(call, Call):
        return unreadable(f"yielded {shown(call)}; an agent yields Call(...), and Score(...) at its end")
    if (problem := _problem_of(call, turn)) is not None:
        return unreadable(f"yielded a Call {problem}")
    messages, tools = _content(call.messages, image), _json([*call.tools], "tools")
    if isinstance(messages, EpisodeEnd) or isinstance(tools, EpisodeEnd):
        return messages if isinstance(messages, EpisodeEnd) else tools
    assert not isinstance(messages, str)
    most = call.max_tokens if call.max_tokens is not None and call.max_tokens < 1 << 31 else None  # larger ones do not travel
    return replace(call, messages=messages, tools=tuple(tools), max_tokens=most, stop=tuple(call.stop))


def _problem_of(call: Call, turn: int) -> str | None:
    """Why this is no call that can be answered."""
    if type(call.conversation) is not int or not 0 <= call.conversation <= turn:
        return f"whose conversation is {shown(call.conversation)}; they are numbered as they begin, none is above {turn} here"
    if not isinstance(call.messages, list | tuple):
        return f"whose messages are {shown(call.messages)}; a list of chat messages was expected"
    if not isinstance(call.tools, list | tuple) or not all(map(_is_tool, call.tools)):
        return f"whose tools are {shown(call.tools)}; schemas {{'type': 'function', 'function': {{'name': ...}}}} were expected"
    if call.max_tokens is not None and not (type(call.max_tokens) is int and call.max_tokens >= 1):
        return f"whose max_tokens is {shown(call.max_tokens)}; a whole number of 1 or more was expected, or None"
    is_list = isinstance(call.stop, list | tuple) and len(call.stop) <= MAX_STOPS
    if not is_list or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in call.stop):
        return f"whose stop is {shown(call.stop)}; at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters were expected"
    return None if isinstance(call.trained, bool) else f"whose trained is {shown(call.trained)}; True or False was expected"


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _content(content: Any, image: ReadImage) -> Content | EpisodeEnd:
    if isinstance(content, list | tuple) and content:
        if (problem := next((problem for message in content if (problem := _problem(message))), None)) is not None:
            return unreadable(f"yielded a chat message {problem}")
        try:
            given = named(content, image)
        except ValueError as error:
            return unreadable(f"yielded chat messages with an image that cannot be read: {error}")
        messages: Content | EpisodeEnd = _json(given, "chat messages", partial(chat_of, with_images=True))
        return messages
    if not isinstance(content, str):
        hint = "; a score is yielded as Score(...)" if isinstance(content, int | float) else ""
        hint = "; only @environment(calls=True) yields Calls" if isinstance(content, Call) else hint
        return unreadable(f"yielded {shown(content)}; {_EXPECTED}{hint}")
    try:
        size = len(content.encode())
    except UnicodeEncodeError as error:
        return unreadable(f"yielded text that has no UTF-8 form: {error}")
    return content if size <= MAX_BYTES else _too_large(size)


def _json(value: list[Any], what: str, read: Callable[[list[Any]], Any] = list) -> Any:
    """The value read from JSON data of bounded size, or the episode's end. what: for messages."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        plain, size = read(json.loads(written)), len(written.encode())
        msgpack.packb(plain)  # whole numbers beyond 64 bits do not travel
    except UnicodeEncodeError as error:
        return unreadable(f"yielded text that has no UTF-8 form: {error}")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return unreadable(f"yielded {what} that are no JSON data for text: {error}")
    return plain if size <= MAX_BYTES else _too_large(size)


def _too_large(size: int) -> EpisodeEnd:
    return unreadable(f"returned {size} bytes, at most {MAX_BYTES} are read; shorten it, or yield a part of it")


def _problem(message: Any) -> str | None:
    """Why this is no chat message that the model can be given."""
    if not isinstance(message, Mapping):
        return f"that is {shown(message)}; a dictionary with role and content was expected"
    if message.get("role") not in ROLES:
        return f"whose role is {message.get('role')!r}; choose one of: {', '.join(ROLES)}"
    return None
