"""How what an environment yields is read: an observation, or the end of its episode. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from async_rlhf.actors.chat import chat_of
from async_rlhf.actors.environments.settings import Content, Feedback, Message
from async_rlhf.actors.rewards.answer import failed, read, shown
from async_rlhf.buffers.score import Score

Reason = Literal["scored", "returned", "max_turns", "failed"]
Kind = Literal["", "raised", "timed out", "died", "not readable", "too large", "no turn", "reported", "lost"]
"""Of a failure, to count by."""
ROLES = ("system", "user", "assistant", "tool")

# No model's context holds more; an environment that reads a page of the web or a log shortens it.
MAX_BYTES = 1 << 20
_EXPECTED = "text, a list of chat messages, Feedback or Score was expected"


@dataclass(frozen=True)
class Read:
    """What the model is to read next. score: of the turn before it, None for none."""

    content: Content
    score: float | None = None


@dataclass(frozen=True)
class End:
    """The end of an episode. score: None where the environment gave none. kind: of a failure. traceback: of an exception."""

    reason: Reason
    score: Score | None = None
    kind: Kind = ""
    traceback: str = ""

    @property
    def failure(self) -> str:
        """ "" for none."""
        return (self.score.failure or "") if self.score is not None else ""


def fails(kind: Kind, reason: str, traceback: str = "") -> End:
    """The episode is failed(reason)."""
    return End("failed", Score(failure=reason), kind, traceback)


def raised(error: BaseException) -> End:
    """The end of an episode whose environment raised. Call it while the exception is being handled."""
    answer = failed(error)
    return fails("raised", answer.failure or "", answer.traceback)


def read_yield(value: Any, turn: int, max_turns: int) -> Read | End:
    """What a yielded value means after `turn` turns of the model."""
    if isinstance(value, Score):
        return _end(value, turn)
    feedback = value if isinstance(value, Feedback) else Feedback(value)
    score = read(feedback.score)
    if score.failure is not None:
        return fails("not readable", f"Feedback with a score: {score.failure}")
    if score.value is not None and not turn:
        return fails("no turn", "it gave Feedback with a score before the model wrote anything")
    content = _content(feedback.content)
    if isinstance(content, End):
        return content
    if turn >= max_turns:
        return End("max_turns", None if score.value is None else Score(score.value))
    return Read(content, score.value)


def read_return(turn: int, value: object = None) -> End:
    """What the end of the generator means after `turn` turns of the model. value: what it returned, which means nothing."""
    if value is not None:
        return fails("not readable", f"returned {shown(value)}; a score is yielded: yield Score(...)")
    return End("returned") if turn else fails("no turn", "it ended before the model wrote anything")


def _end(given: Score, turn: int) -> End:
    if not turn:
        return fails("no turn", "it ended before the model wrote anything")
    answer = read(given)
    if answer.failure is not None:
        return End("failed", Score(failure=answer.failure, metrics=dict(answer.metrics)), "reported")
    return End("scored", answer.score())


def _content(content: Any) -> Content | End:
    found: Content
    try:
        if isinstance(content, str):
            found, size = content, len(content.encode())
        elif isinstance(content, list | tuple) and content:
            problem = next((problem for each in content if (problem := _problem(each))), None)
            if problem is not None:
                return fails("not readable", f"yielded a chat message {problem}")
            written = json.dumps([dict(message) for message in content], ensure_ascii=False, allow_nan=False)
            messages: list[Message] = chat_of(json.loads(written))
            msgpack.packb(messages)  # whole numbers beyond 64 bits do not travel
            found, size = messages, len(written.encode())
        else:
            hint = "; a score is yielded as Score(...)" if isinstance(content, int | float) else ""
            return fails("not readable", f"yielded {shown(content)}; {_EXPECTED}{hint}")
    except UnicodeEncodeError as error:
        return fails("not readable", f"yielded text that has no UTF-8 form: {error}")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return fails("not readable", f"yielded chat messages that are no JSON data for text: {error}")
    if size > MAX_BYTES:
        return fails("too large", f"returned {size} bytes, at most {MAX_BYTES} are read; shorten it, or yield a part of it")
    return found


def _problem(message: Any) -> str | None:
    """Why this is no chat message that the model can be given."""
    if not isinstance(message, Mapping):
        return f"that is {shown(message)}; a dictionary with role and content was expected"
    if message.get("role") not in ROLES:
        return f"whose role is {message.get('role')!r}; choose one of: {', '.join(ROLES)}"
    return None
