"""The result of one call of a reward, and how its return value is read. Plain data: it crosses processes."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from async_rlhf.buffers.errors import RecordError
from async_rlhf.buffers.failures import MAX_REASON_CHARS, Failure, FailureKind
from async_rlhf.buffers.score import MAX_SCORE, Score

if TYPE_CHECKING:
    from async_rlhf.buffers.record import Float32Array

_MAX_METRICS = 32
_MAX_METRIC_CHARS = 100


class Logprobs(NamedTuple):
    """The reference's log-probabilities of a completion: float32 [T]; metrics as of a `Score`."""

    values: Float32Array
    metrics: Mapping[str, float] = {}


class Answer(NamedTuple):
    """A value, None for not applicable, or why it failed."""

    value: float | None
    failure: Failure | None = None
    metrics: Mapping[str, float] = {}
    began: float = 0.0
    """Start of the call, in seconds since the epoch; 0: unknown."""
    ended: float = 0.0
    """Its end, likewise."""
    logprobs: Float32Array | None = None
    """float32 [T], from a stage that judges tokens and has no value."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def score(self) -> Score:
        return Score(self.value, None if self.failure is None else self.failure.reason, dict(self.metrics))


def unreadable(reason: str) -> Answer:
    return Answer(None, Failure(FailureKind.UNREADABLE, reason[:MAX_REASON_CHARS]))


def read(result: Any) -> Answer:
    """One returned score: a finite number (bool counts), None, a `Score`; for anything else a failure with its description."""
    try:
        answer = _read(result)
        answer.score()  # A value that no Score takes fails here.
    except (RecordError, ValueError, TypeError, AttributeError, OverflowError) as error:
        return unreadable(f"returned {shown(result)}: {error}")
    return answer


def _read(result: Any) -> Answer:
    if isinstance(result, Score):
        return _read_score(result)
    if isinstance(result, Logprobs):
        return _read_logprobs(result)
    result = scalar(result)
    if result is None:
        return Answer(None)
    if inspect.iscoroutine(result):
        result.close()
        return unreadable("returned a coroutine; declare the reward with 'async def'")
    if not isinstance(result, numbers.Real):
        return unreadable(f"returned {shown(result)}; a number, a Score or None was expected")
    if not abs(cast(Any, result)) <= MAX_SCORE:  # nor is it true of what is not a number
        return unreadable(f"returned {shown(result)}; a score must be finite and within +-{MAX_SCORE:g}")
    return Answer(float(result))


def read_list(result: Any, count: int) -> tuple[Answer, ...]:
    """One score for each of `count` completions; a failure for all of them when there are not as many."""
    if hasattr(result, "tolist") and getattr(result, "shape", ()) != ():
        result = list(result)
    if not isinstance(result, list | tuple) or len(result) != count:
        expected = f"{count} completion{'s' * (count != 1)}; a list of {count} score{'s' * (count != 1)} was expected"
        return (unreadable(f"returned {shown(result)} for {expected}"),) * count
    return tuple(map(read, result))


def scalar(result: Any) -> Any:
    """The plain number of a scalar of numpy or torch, and of an array of one number; anything else as it is."""
    shape = getattr(result, "shape", None)
    return result.item() if isinstance(shape, tuple) and set(shape) <= {1} and hasattr(result, "item") else result


def as_text(prompt: Any, between: str = "\n") -> str:
    """A prompt as text; of a chat, its messages, one a line, without images."""
    return prompt if isinstance(prompt, str) else between.join(_said(message.get("content", "")) for message in prompt)


def _said(content: Any) -> str:
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else str(content)


def shown(result: Any) -> str:
    try:
        return f"{type(result).__name__} {result!r:.60}"
    except Exception:  # noqa: BLE001  of an object of the user's, or an integer of more digits than Python writes
        return f"{type(result).__name__} that cannot be written"


def _read_score(score: Score) -> Answer:
    if score.failure is not None:
        reason = str(score.failure)[:MAX_REASON_CHARS] or "failed without a reason"
        return Answer(None, Failure(FailureKind.REPORTED, reason), _plain(score.metrics))
    answer = read(score.value)
    return answer._replace(metrics=_plain(score.metrics))


def _read_logprobs(found: Logprobs) -> Answer:
    if not math.isfinite(float(found.values.sum())):
        return unreadable("the reference's log-probabilities are not finite")
    return Answer(None, logprobs=found.values, metrics=_plain(found.metrics))


def _plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    """As plain numbers, whatever kind they were; few enough to travel with every rollout."""
    return {str(name)[:_MAX_METRIC_CHARS]: float(value) for name, value in list(metrics.items())[:_MAX_METRICS]}
