"""What was observed: one rollout, and the group of rollouts that share a prompt.

Records hold observations only (tokens, the log-probabilities they were sampled with, the version of every token, scores
and their state). What is *believed* about them (advantages, ratios, KL) is computed by the learner when it consumes
them, so a changed algorithm never needs a changed actor. Invariants are checked when a record is made; a record that
exists is well formed. Made by actors, carried by the wire, read by the learner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from buffers.errors import RecordError

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length"]

# A version this low is older than any bound: what an unknown version counts as.
UNKNOWN_VERSION = -(1 << 31)


@dataclass(frozen=True)
class Span:
    """`num_tokens` consecutive tokens that were sampled by weight set `version`."""

    version: int
    num_tokens: int


@dataclass(frozen=True)
class Score:
    """The verdict of one reward on one completion: a value, not applicable, or failed for a reason.

    A failed score is never a number: it is left out of every mean and counted.
    """

    value: float | None = None
    failure: str | None = None

    def __post_init__(self) -> None:
        if self.value is not None and self.failure is not None:
            raise RecordError(f"a score is a value or a failure, not both: value {self.value}, failure {self.failure!r}")
        if self.value is not None and not math.isfinite(self.value):
            raise RecordError(f"a score must be finite, got {self.value}; return None for 'not applicable' or raise")

    @property
    def state(self) -> Literal["value", "not_applicable", "failed"]:
        if self.failure is not None:
            return "failed"
        return "not_applicable" if self.value is None else "value"


def combine(scores: Mapping[str, Score], weights: Mapping[str, float]) -> float | None:
    """The weighted sum of a rollout's scores (weight 1 where none is given), or None when it does not count.

    It does not count when any score failed, or when no reward applied.
    """
    if any(score.failure is not None for score in scores.values()):
        return None
    values = [weights.get(name, 1.0) * score.value for name, score in scores.items() if score.value is not None]
    return sum(values) if values else None


@dataclass(frozen=True)
class Rollout:
    """One completion with everything observed while it was made.

    completion_ids: int32 [T], the sampled tokens, the end token included when it was sampled.
    logprobs: float32 [T], log-probability of each token under the distribution it was really sampled from.
    spans: versions of the tokens in order; their lengths sum to T.
    """

    completion_ids: Int32Array
    logprobs: Float32Array
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    scores: Mapping[str, Score] = field(default_factory=dict)
    text: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids, logprobs = self.completion_ids, self.logprobs
        if ids.dtype != np.int32 or ids.ndim != 1 or len(ids) == 0:
            raise RecordError(f"completion_ids must be int32 [T] with T > 0, got {ids.dtype} {ids.shape}")
        if logprobs.dtype != np.float32 or logprobs.shape != ids.shape:
            raise RecordError(f"logprobs must be float32 {ids.shape}, got {logprobs.dtype} {logprobs.shape}")
        if not bool(np.isfinite(logprobs).all()):
            where = int(np.flatnonzero(~np.isfinite(logprobs))[0])
            raise RecordError(f"logprobs must be finite, got {logprobs[where]} at token {where}")
        if any(span.num_tokens <= 0 for span in self.spans):
            raise RecordError(f"spans must be non-empty, got {self.spans}")
        if sum(span.num_tokens for span in self.spans) != len(ids):
            raise RecordError(f"spans must cover all {len(ids)} tokens, got {self.spans}")

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids)

    @property
    def versions(self) -> Int32Array:
        """int32 [T]: the version that sampled each token."""
        return np.repeat(np.array([span.version for span in self.spans], np.int32), [span.num_tokens for span in self.spans])


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt. `(number, attempt)` names the work; `number` fixes prompt and seeds.

    prompt_ids: int32 [P]. columns: the prompt's row of the data set, kept for the record and the samples on disk.
    """

    number: int
    attempt: int
    prompt_ids: Int32Array
    rollouts: tuple[Rollout, ...]
    temperature: float
    actor: str = ""
    prompt: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.number < 0 or self.attempt < 0:
            raise RecordError(f"number and attempt must be >= 0, got {self.number} and {self.attempt}")
        if self.prompt_ids.dtype != np.int32 or self.prompt_ids.ndim != 1 or len(self.prompt_ids) == 0:
            raise RecordError(f"prompt_ids must be int32 [P] with P > 0, got {self.prompt_ids.dtype} {self.prompt_ids.shape}")
        if not self.rollouts:
            raise RecordError(f"group {self.number} has no rollouts")
        names = set(self.rollouts[0].scores)
        if any(set(rollout.scores) != names for rollout in self.rollouts):
            raise RecordError(f"all rollouts of group {self.number} must carry the same rewards, first has {sorted(names)}")

    def spans(self) -> Iterator[Span]:
        for rollout in self.rollouts:
            yield from rollout.spans

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.spans())

    @property
    def newest_version(self) -> int:
        return max(span.version for span in self.spans())

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all members (the loss-bearing ones)."""
        return sum(rollout.num_tokens for rollout in self.rollouts)


def staleness(version: int, step: int) -> int:
    """Staleness of a token: the learner's step count when it takes the token, minus the version that sampled it.

    The distance counts in both directions: a token sampled by a version the learner has not reached (possible only
    after it was restored from an older checkpoint) is as foreign to it as an old one.
    """
    return abs(step - version)
