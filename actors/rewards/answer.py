"""What one call of a reward came to, and how what it returned is read. Plain data: it crosses processes."""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from async_rlhf.buffers.errors import RecordError
from async_rlhf.buffers.score import MAX_SCORE, Score

if TYPE_CHECKING:
    from async_rlhf.buffers.record import Float32Array

# A failure travels with its rollout; an exception's message can be as long as the completion it quotes.
MAX_FAILURE_CHARS = 500
# The log has the traceback of a reward's first failure.
_MAX_TRACEBACK_CHARS = 20_000
# A server that demands a pause of a day gets the retry earlier: the wait for a score is bounded.
_LONGEST_PAUSE_S = 600.0
_MAX_METRICS = 32
_MAX_METRIC_CHARS = 100


class Logprobs(NamedTuple):
    """The reference's log-probabilities of a completion: float32 [T]; metrics as of a `Score`."""

    values: Float32Array
    metrics: Mapping[str, float] = {}


class Answer(NamedTuple):
    """A value, None for not applicable, or why it failed.

    logprobs: float32 [T], of a stage that judges tokens and has no value.
    traceback: of an exception, in full. began, ended: when the call ran, in seconds since the epoch; 0 where it is unknown.
    retry_after_s: the cause may pass, and the call may be made again after so many seconds; None: it would fail again.
    """

    value: float | None
    failure: str | None = None
    traceback: str = ""
    metrics: Mapping[str, float] = {}
    began: float = 0.0
    ended: float = 0.0
    retry_after_s: float | None = None
    logprobs: Float32Array | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def score(self) -> Score:
        return Score(self.value, self.failure, dict(self.metrics))


def failed(error: BaseException, retry_on: tuple[type[BaseException], ...] = ()) -> Answer:
    """The answer of a call that raised, with its traceback. Call it while the exception is being handled."""
    # TracebackException survives an exception whose own __str__ raises.
    described = traceback.TracebackException.from_exception(error)
    after_s = getattr(error, "after_s", 0.0)
    pause_s = float(min(after_s, _LONGEST_PAUSE_S)) if isinstance(after_s, int | float) and after_s > 0 else 0.0
    return Answer(
        None,
        f"{type(error).__name__}: {described}"[:MAX_FAILURE_CHARS],
        "".join(described.format())[:_MAX_TRACEBACK_CHARS],
        retry_after_s=pause_s if isinstance(error, retry_on) else None,
    )


def read(result: Any) -> Answer:
    """One returned score: a finite number (bool counts), None, a `Score`; for anything else a failure with its description."""
    try:
        answer = _read(result)
        answer.score()  # A value that no Score takes fails here.
    except (RecordError, ValueError, TypeError, AttributeError, OverflowError) as error:
        return Answer(None, f"returned {shown(result)}: {error}"[:MAX_FAILURE_CHARS])
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
        return Answer(None, "returned a coroutine; declare the reward with 'async def'")
    if not isinstance(result, numbers.Real):
        return Answer(None, f"returned {shown(result)}; a number, a Score or None was expected")
    if not abs(cast(Any, result)) <= MAX_SCORE:  # nor is it true of what is not a number
        return Answer(None, f"returned {shown(result)}; a score must be finite and within +-{MAX_SCORE:g}")
    return Answer(float(result))


def read_list(result: Any, count: int) -> tuple[Answer, ...]:
    """One score for each of `count` completions; a failure for all of them when there are not as many."""
    if hasattr(result, "tolist") and getattr(result, "shape", ()) != ():
        result = list(result)
    if not isinstance(result, list | tuple) or len(result) != count:
        expected = f"{count} completion{'s' * (count != 1)}; a list of {count} score{'s' * (count != 1)} was expected"
        return (Answer(None, f"returned {shown(result)} for {expected}"),) * count
    return tuple(map(read, result))


def scalar(result: Any) -> Any:
    """The plain number of a scalar of numpy or torch, and of an array of one number; anything else as it is."""
    shape = getattr(result, "shape", None)
    return result.item() if isinstance(shape, tuple) and set(shape) <= {1} and hasattr(result, "item") else result


def as_text(prompt: Any) -> str:
    """A prompt as text; of a chat, its messages, one a line."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content", "")) for message in prompt)


def shown(result: Any) -> str:
    try:
        return f"{type(result).__name__} {result!r:.60}"
    except Exception:  # noqa: BLE001  of an object of the user's, or an integer of more digits than Python writes
        return f"{type(result).__name__} that cannot be written"


def _read_score(score: Score) -> Answer:
    if score.failure is not None:
        reason = str(score.failure)[:MAX_FAILURE_CHARS] or "failed without a reason"
        return Answer(None, reason, metrics=_plain(score.metrics))
    answer = read(score.value)
    return answer._replace(metrics=_plain(score.metrics))


def _read_logprobs(found: Logprobs) -> Answer:
    if not math.isfinite(float(found.values.sum())):
        return Answer(None, "the reference's log-probabilities are not finite")
    return Answer(None, logprobs=found.values, metrics=_plain(found.metrics))


def _plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    """As plain numbers, whatever kind they were; few enough to travel with every rollout."""
    return {str(name)[:_MAX_METRIC_CHARS]: float(value) for name, value in list(metrics.items())[:_MAX_METRICS]}
