"""Observations: one rollout, and the group of rollouts that share a prompt.

Records hold observations only (tokens, the log-probabilities they were sampled with, the version of every token, scores
and their state). What is estimated from them (advantages, ratios, KL) is computed by the learner when it consumes
them, so a changed algorithm never needs a changed actor. Invariants are checked when a record is made; a record that
exists is well formed. Made by actors, carried by the wire, read by the learner.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from async_rlhf.buffers.errors import RecordError
from async_rlhf.buffers.routing import RoutingArray
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.score import Score as Score

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
FinishReason = Literal["stop", "length", "context", "max_turns"]
"""stop: its end was sampled, or its environment ended it. The others: the limit of its last turn, its row or its turns."""

SOURCE = "source"
"""The column that names which of several mixed tasks a row is of."""

# A log-probability is at most 0, up to the rounding of a log-softmax in low precision.
MAX_LOGPROB = 1e-3


@dataclass(frozen=True)
class Span:
    """`num_tokens` consecutive tokens that were sampled by weight set `version`; None: given by an environment."""

    version: int | None
    num_tokens: int
    cache_version: int | None = None
    """The oldest weights that computed keys and values these tokens attended to; None: `version` did them all."""
    restarts: bool = False
    """The row begins anew with these tokens: they are a whole prompt, and later tokens read nothing before them."""


class Piece(NamedTuple):
    """The tokens `[start, stop)`, of a row of T behind a prompt, that one plain pass reads, behind their own first
    `num_prompt` tokens; 0 in the first piece, which stands behind the group's prompt."""

    start: int
    num_prompt: int
    stop: int

    @property
    def num_read(self) -> int:
        """Tokens of the piece that are read: all but the last, which is only predicted."""
        return self.stop - self.start - 1


@dataclass(frozen=True)
class SamplingMask:
    """The tokens that could have been sampled, where the settings of sampling cut the others off.

    A learner that evaluates a token under other weights must renormalise over the same tokens, or its ratio to the behaviour
    log-probability compares two different distributions.
    """

    sizes: Int32Array
    """int32 [N], how many tokens each sampled token was one of."""
    ids: Int32Array
    """int32 [sum of sizes], one after the other."""


@dataclass(frozen=True)
class Rollout:
    """One completion with everything observed while it was made.

    In an episode with an environment the completion is all turns, and between them the environment's answers: observations,
    which the model read and did not choose. Of its T tokens N were sampled; they alone have log-probabilities, versions and
    losses. An episode of several conversations, or whose chat template rewrites earlier messages, consists of several pieces:
    between two of its turns stands the whole prompt of the later one. If its first prompt differs from the group's, it begins
    with an observation: the part of its prompt behind the group's. Axes: T tokens behind the prompt, N sampled ones.
    """

    completion_ids: Int32Array
    """int32 [T] as the engine saw them, each turn with its end token where that was sampled; the last token was."""
    logprobs: Float32Array
    """float32 [N], log-probability of each sampled token under the distribution it was really sampled from."""
    spans: tuple[Span, ...]
    """Spans of the tokens in order; their lengths sum to T."""
    finish_reason: FinishReason
    scores: Mapping[str, Score] = field(default_factory=dict)
    text: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)
    sampling_mask: SamplingMask | None = None
    reference: Float32Array | None = None
    """float32 [N], log-probability of each sampled token under the frozen reference, at the same temperature and over the same
    sampling mask; None where no actor computed it."""
    turn_scores: tuple[float | None, ...] = ()
    """The environment's score of each turn but the last, which counts for those before it too; or an agent's of each turn,
    which counts for that one. None where there is none; empty where there never is."""
    routing: RoutingArray | None = None
    """uint8 or uint16 [P + R, layers, k], the experts of each position that a forward pass reads, P of the prompt and R
    (`num_read`) behind it; None where no engine recorded them."""
    images: tuple[tuple[str, ...], ...] = ()
    """Of each piece the digests of the images in what it begins with behind the group's prompt, in the order of their places;
    empty where no piece has any."""

    def __post_init__(self) -> None:
        ids = self.completion_ids
        if ids.dtype != np.int32 or ids.ndim != 1 or len(ids) == 0:
            raise RecordError(f"completion_ids must be int32 [T] with T > 0, got {ids.dtype} {ids.shape}")
        if int(ids.min()) < 0:
            raise RecordError(f"completion_ids must be at least 0, got {ids.min()}")
        if any(span.num_tokens <= 0 for span in self.spans):
            raise RecordError(f"spans must be non-empty, got {self.spans}")
        if sum(span.num_tokens for span in self.spans) != len(ids):
            raise RecordError(f"spans must cover all {len(ids)} tokens, got {self.spans}")
        if self.spans[-1].version is None:
            raise RecordError(f"the last token must be a sampled one, got {self.spans}")
        _check_restarts(self.spans)
        _check_logprobs("logprobs", self.logprobs, self.num_tokens)
        if self.reference is not None:
            _check_logprobs("reference", self.reference, self.num_tokens)
        if self.sampling_mask is not None:
            _check_sampling_mask(self.sampling_mask, self.sampled_ids)
        turns = len(self.turn_lengths)
        if self.turn_scores and len(self.turn_scores) not in (turns - 1, turns):
            raise RecordError(f"turn_scores must be of {turns - 1} turns, an agent's of {turns}, got {self.turn_scores}")
        if any(score is not None and not math.isfinite(score) for score in self.turn_scores):
            raise RecordError(f"turn_scores must be finite, got {self.turn_scores}")
        counts = [*map(len, self.images)]
        if counts and (len(counts) != len(self.heads) or any(map(operator.gt, counts, self.heads))):
            raise RecordError(f"images must be of {len(self.pieces)} pieces, in what each begins with, got {self.images}")
        if self.routing is not None and (self.routing.dtype not in (np.uint8, np.uint16) or self.routing.ndim != 3):
            raise RecordError(f"routing must be uint8 or uint16 [N, L, k], got {self.routing.dtype} {self.routing.shape}")

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of tokens cut its last turn or the whole row. A rollout with all its turns is not truncated."""
        return self.finish_reason in ("length", "context")

    @property
    def length(self) -> int:
        """T."""
        return len(self.completion_ids)

    @cached_property
    def num_tokens(self) -> int:
        """N: those that bear a loss."""
        return sum(num_tokens for _, num_tokens in self.sampled_spans())

    def sampled_spans(self) -> Iterator[tuple[int, int]]:
        """(version, tokens) of each sampled span."""
        return ((span.version, span.num_tokens) for span in self.spans if span.version is not None)

    @property
    def turn_lengths(self) -> list[int]:
        """Sampled tokens of each turn; observations stand between turns, and perhaps before the first."""
        lengths = [0]
        for span, following in zip(self.spans, (*self.spans[1:], None), strict=True):
            if span.version is not None:
                lengths[-1] += span.num_tokens
            elif lengths[-1] and following is not None and following.version is not None:
                lengths.append(0)
        return lengths

    @property
    def sampled(self) -> BoolArray:
        """bool [T]: which tokens were sampled."""
        return sampled(self.spans)

    @property
    def sampled_ids(self) -> Int32Array:
        """int32 [N]"""
        return self.completion_ids if self.num_tokens == self.length else self.completion_ids[self.sampled]

    @property
    def restarts(self) -> list[int]:
        """Which of the spans begin the row anew, by index, ascending."""
        return [index for index, span in enumerate(self.spans) if span.restarts]

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces that plain passes read, in order; one without restarts."""
        return pieces(self.spans)

    @property
    def heads(self) -> list[int]:
        """How many tokens each piece begins with that were read."""
        first = self.spans[0]
        return [0 if first.version is not None else first.num_tokens, *(piece.num_prompt for piece in self.pieces[1:])]

    @property
    def piece_lengths(self) -> list[int]:
        """Sampled tokens of each piece; at least 1."""
        was_sampled = self.sampled
        return [int(was_sampled[piece.start : piece.stop].sum()) for piece in self.pieces]

    @cached_property
    def num_read(self) -> int:
        """Tokens behind the prompt that a forward pass reads: of each piece all but the last."""
        return self.length - 1 - len(self.restarts)

    @property
    def versions(self) -> Int32Array:
        """int32 [N]: the version that sampled each token."""
        versions, sizes = zip(*self.sampled_spans(), strict=True)
        return np.repeat(np.array(versions, np.int32), sizes)


def sampled(spans: Sequence[Span]) -> BoolArray:
    """bool [T]: which of the tokens that these spans cover were sampled."""
    return np.repeat([span.version is not None for span in spans], [span.num_tokens for span in spans])


def pieces(spans: Sequence[Span]) -> list[Piece]:
    """The pieces of the tokens that these spans cover."""
    parts, at = [Piece(0, 0, 0)], 0
    for span in spans:
        if span.restarts:
            parts.append(Piece(at, span.num_tokens, at))
        at += span.num_tokens
        parts[-1] = parts[-1]._replace(stop=at)
    return parts


def _check_restarts(spans: Sequence[Span]) -> None:
    for at, span in enumerate(spans):
        is_read = span.version is None and at > 0
        if span.restarts and (not is_read or None in (spans[at - 1].version, spans[at + 1].version)):
            near = spans[max(0, at - 1) : at + 2]
            raise RecordError(f"a span that restarts must be read, between two that were sampled, got {near}")


def _check_logprobs(name: str, logprobs: Float32Array, num_tokens: int) -> None:
    if logprobs.dtype != np.float32 or logprobs.shape != (num_tokens,):
        raise RecordError(f"{name} must be float32 ({num_tokens},), got {logprobs.dtype} {logprobs.shape}")
    good = np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB)
    if not bool(good.all()):
        where = int(np.flatnonzero(~good)[0])
        raise RecordError(f"{name} must be finite and at most 0, got {logprobs[where]} at token {where}")


def _check_sampling_mask(sampling_mask: SamplingMask, ids: Int32Array) -> None:
    sizes, kept = sampling_mask.sizes, sampling_mask.ids
    if sizes.dtype != np.int32 or kept.dtype != np.int32 or sizes.shape != ids.shape or kept.ndim != 1:
        raise RecordError(
            f"sampling_mask must be int32 sizes {ids.shape} and int32 ids, got {sizes.dtype} {sizes.shape}, {kept.dtype}"
        )
    if int(sizes.min()) < 1 or int(sizes.sum()) != len(kept):
        raise RecordError(
            f"sampling_mask must have its {len(kept)} ids in {len(ids)} parts of at least 1, got {int(sizes.sum())}"
        )
    starts = np.cumsum(sizes) - sizes
    counts = np.add.reduceat(kept == np.repeat(ids, sizes), starts, dtype=np.int64)
    if not bool((counts == 1).all()):
        raise RecordError(f"token {int(np.flatnonzero(counts != 1)[0])} is not once in its own sampling mask")


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt. `(number, attempt)` names the work; `number` fixes prompt and seeds."""

    number: int
    attempt: int
    prompt_ids: Int32Array
    """int32 [P]."""
    rollouts: tuple[Rollout, ...]
    sampling: Sampling
    """How the completions were sampled."""
    actor: str = ""
    prompt: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's row of the data set, kept for the record and the samples on disk."""
    images: tuple[str, ...] = ()
    """Digests of the prompt's images, in the order of their places in it. Where it has some, no first piece has its own."""

    def __post_init__(self) -> None:
        if self.number < 0 or self.attempt < 0:
            raise RecordError(f"number and attempt must be >= 0, got {self.number} and {self.attempt}")
        if self.prompt_ids.dtype != np.int32 or self.prompt_ids.ndim != 1 or len(self.prompt_ids) == 0:
            raise RecordError(f"prompt_ids must be int32 [P] with P > 0, got {self.prompt_ids.dtype} {self.prompt_ids.shape}")
        if int(self.prompt_ids.min()) < 0:
            raise RecordError(f"prompt_ids must be at least 0, got {self.prompt_ids.min()}")
        if not self.rollouts:
            raise RecordError(f"group {self.number} has no rollouts")
        names = set(self.rollouts[0].scores)
        if any(set(rollout.scores) != names for rollout in self.rollouts):
            raise RecordError(f"all rollouts of group {self.number} must carry the same rewards, first has {sorted(names)}")
        if self.images and any(rollout.images and rollout.images[0] for rollout in self.rollouts):
            raise RecordError(f"group {self.number} has images in its prompt, and some behind it in a first piece")
        _check_routing(len(self.prompt_ids), self.rollouts)

    def sampled_spans(self) -> Iterator[tuple[int, int]]:
        """(version, tokens) of each sampled span of all members."""
        for rollout in self.rollouts:
            yield from rollout.sampled_spans()

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.sampled_spans())

    @property
    def newest_version(self) -> int:
        return max(version for version, _ in self.sampled_spans())

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all members (the loss-bearing ones)."""
        return sum(rollout.num_tokens for rollout in self.rollouts)


def _check_routing(prompt: int, rollouts: Sequence[Rollout]) -> None:
    """Check that the routing of all members has the same layers and all positions, or that none has one."""
    found = [None if each.routing is None else each.routing.shape for each in rollouts]
    wanted = [None if found[0] is None else (prompt + each.num_read, *found[0][1:]) for each in rollouts]
    if found != wanted:
        raise RecordError(f"routing of all {len(rollouts)} rollouts must be {wanted[:8]}, got {found[:8]}")


def source_of(columns: Mapping[str, Any]) -> str | None:
    """The source named by a row's columns; None where the data are of one task."""
    return None if columns.get(SOURCE) is None else str(columns[SOURCE])


def staleness(version: int, step: int) -> int:
    """Staleness of a token: the learner's step count when it takes the token, minus the version that sampled it.

    The distance counts in both directions: a token sampled by a version the learner has not reached (possible only
    after it was restored from an older checkpoint) is as foreign to it as an old one.
    """
    return abs(step - version)


@dataclass(frozen=True)
class Entry:
    """The facts about a put group that the queue decides by."""

    attempt: int
    oldest_version: int
    newest_version: int
    num_tokens: int
    num_bytes: int = 0
