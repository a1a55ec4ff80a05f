"""The scoring pool: scores each completion when it ends, while its group is still being generated.

Used by the actor's loop, which must never block: `submit` and `poll` return at once, and `wake` is called from another
thread when a poll may have something. `places` says where each reward runs, `calls` what is called there and when.
"""

from __future__ import annotations

import itertools
import logging
import queue
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from async_rlhf.actors.config import REFERENCE, ScoringConfig
from async_rlhf.actors.engine import Partial
from async_rlhf.actors.prompts import PLAIN, Row, Template
from async_rlhf.actors.rewards import Answer, RewardFunction, RewardSpec
from async_rlhf.actors.scoring.images import with_paths
from async_rlhf.actors.scoring.places import RewardPlaces
from async_rlhf.actors.scoring.remote import is_elsewhere
from async_rlhf.actors.scoring.reward_queue import ScoringTask
from async_rlhf.actors.scoring.reward_worker import Answers
from async_rlhf.buffers import failures
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.failures import FailureKind
from async_rlhf.buffers.images import IMAGES
from async_rlhf.buffers.record import Float32Array, Rollout, SamplingMask, Score, pieces, source_of

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

STREAM = "stream_id"
"""The field that names a completion in incremental scoring."""
OURS = frozenset({"sampling_mask", "row_pieces", "model_prompt"})
"""Fields that a reward gets only where it names them, and not with every column."""


class GroupMember(NamedTuple):
    """A member of a group of `size`."""

    group: Hashable
    member: int
    size: int


class ScoringInterval(NamedTuple):
    """When something ran, in seconds since the epoch."""

    began: float
    ended: float


@dataclass(frozen=True)
class Scored(Generic[Key]):
    """A completion with the answers of all rewards.

    stages: when each reward's call ran, the last one after retries. ahead_s: by reward with incremental scoring, this
    completion's share of its prefetches. reference: float32 [T] where that stage ran and did not fail; its score is then not
    applicable.
    """

    key: Key
    scores: Mapping[str, Score]
    stages: Mapping[str, ScoringInterval] = field(default_factory=dict)
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    reference: Float32Array | None = None


@dataclass
class RewardCounters:
    """failed: by kind. shown: prefetched texts of unfinished completions; not_read: those that it failed to read."""

    scored: int = 0
    not_applicable: int = 0
    failed: Counter[FailureKind] = field(default_factory=Counter)
    shown: int = 0
    not_read: int = 0

    def count(self, name: str, answer: Answer) -> None:
        if answer.failure is not None:
            failures.count(self.failed, answer.failure, f"reward {name!r}")
        elif answer.value is None and answer.logprobs is None:
            self.not_applicable += 1
        else:
            self.scored += 1


@dataclass
class _PendingScores(Generic[Key]):
    key: Key
    fields: Mapping[str, Any]
    num_unanswered: int
    stream: int | None = None
    task_ids: set[int] = field(default_factory=set)
    scores: dict[str, Score] = field(default_factory=dict)
    stages: dict[str, ScoringInterval] = field(default_factory=dict)
    reference: Float32Array | None = None


class ScoringPool(Generic[Key]):
    """Scores completions with every reward of a run; its methods are called from one thread. `counters`: by reward."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        config: ScoringConfig,
        wake: Callable[[], None] = lambda: None,
        scorer: str = "",
        by_source: Mapping[str, Collection[str]] | None = None,
        functions: Mapping[str, RewardFunction] | None = None,
        images: Path | None = None,
    ) -> None:
        """by_source: as `RewardsConfig.by_source`. scorer, functions: as of `RewardPlaces`. images: the directory of the store
        that has those of prompts; by default that of this process."""
        self._specs = tuple(specs)
        self._wake, self._by_source, self._images = wake, by_source or {}, images
        self._answers: queue.SimpleQueue[Callable[[], list[Scored[Key]]]] = queue.SimpleQueue()
        self._task_ids = itertools.count()
        self._tasks: dict[int, tuple[str, list[_PendingScores[Key]]]] = {}
        self._pending: dict[Key, _PendingScores[Key]] = {}
        self._groups: dict[Hashable, dict[int, _PendingScores[Key]]] = {}
        self._incremental = tuple(spec for spec in self._specs if spec.stream_tokens)
        self._stream_ids = itertools.count()
        # The streams of unfinished completions; by stream, the seconds of prefetches of each reward.
        self._streams: dict[Key, int] = {}
        self._ahead_s: dict[int, dict[str, float]] = {}
        self.counters = {spec.name: RewardCounters() for spec in self._specs}
        self._places = RewardPlaces(self._specs, config, self._answered, self._shown, wake, scorer, functions)

    @property
    def stream_tokens(self) -> int:
        """How many new tokens of a completion are worth a `show`; 0 without incremental scoring."""
        return min((spec.stream_tokens for spec in self._incremental), default=0)

    @property
    def num_pending(self) -> int:
        """Completions submitted and neither returned by `poll` nor discarded."""
        return len(self._pending)

    @property
    def num_resent(self) -> int:
        """Requests resent to the scoring server, because it restarted or had dropped this client."""
        return self._places.num_resent

    def show(self, key: Key, fields: Mapping[str, Any]) -> None:
        """Offer an unfinished completion to incremental scoring, which may skip it. It is later submitted or discarded.

        fields: as for `submit`, as far as they are known.
        """
        if key not in self._streams:
            self._streams[key] = next(self._stream_ids)
            self._ahead_s[self._streams[key]] = {}
        stream = self._streams[key]
        known = {**with_paths(fields, self._images), STREAM: stream}
        for spec in self._incremental:
            if self._applies(spec, fields):
                self._places.of(spec.name).show(spec.name, stream, usable(spec, known))

    def submit(self, key: Key, fields: Mapping[str, Any], place: GroupMember | None = None) -> None:
        """Score one completion; a group's reward is called with the last member of the group.

        fields: `completion` and `prompt` (text), `completion_ids` and `prompt_ids` (lists of int), `finish_reason`, `images`
        (digests), and every column of the prompt's row; plain data; `sampling_mask` and `row_pieces` for a stage `reference`.
        place: without it the completion is a group of its own.
        Raises RewardError for a key that is being scored already.
        """
        if key in self._pending:
            raise RewardError(f"{key} is being scored already; poll or discard it first")
        place, fields = place or GroupMember(key, 0, 1), with_paths(fields, self._images)
        stream = self._streams.pop(key, None)
        applicable = [spec for spec in self._specs if self._applies(spec, fields)]
        pending = self._pending[key] = _PendingScores(key, fields, len(applicable), stream)
        for spec in self._specs:
            if spec not in applicable:
                pending.scores[spec.name] = Score()
                self.counters[spec.name].not_applicable += 1
        group = self._groups.setdefault(place.group, {})
        group[place.member] = pending
        is_whole = len(group) == place.size
        if is_whole:
            del self._groups[place.group]
        if not applicable:  # an environment has judged it
            self._answers.put(lambda: self._done(pending))
        for spec in applicable:
            if spec.scope == "completion":
                self._submit(spec, [pending])
            elif is_whole:
                self._submit(spec, [group[member] for member in sorted(group)])

    def poll(self) -> list[Scored[Key]]:
        """The completions whose every reward has answered since the last poll. Never waits.

        Raises RewardError when the processes of a reward end again and again before they can answer anything.
        """
        self._places.check()
        scored = []
        # Only what is there now: rewards that answer faster than this loop must not block the actor.
        for _ in range(self._answers.qsize()):
            scored += self._answers.get_nowait()()
        return scored

    def discard(self, keys: Iterable[Key]) -> None:
        """Forget these completions; unknown keys are ignored. Running calls end, their answers are dropped."""
        keys = tuple(keys)
        gone = [pending for key in keys if (pending := self._pending.pop(key, None)) is not None]
        unfinished = [stream for key in keys if (stream := self._streams.pop(key, None)) is not None]
        if streams := unfinished + [pending.stream for pending in gone if pending.stream is not None]:
            self._places.forget(streams)
            for stream in streams:
                del self._ahead_s[stream]
        if not gone:
            return
        lost = {id(pending) for pending in gone}
        self._groups = {
            name: members
            for name, members in self._groups.items()
            if not any(id(pending) in lost for pending in members.values())
        }
        # A task of a group is dropped with the last of its members.
        touched = {task_id for pending in gone for task_id in pending.task_ids if task_id in self._tasks}
        dropped = {task_id for task_id in touched if not self._awaited(self._tasks[task_id][1])}
        for task_id in dropped:
            del self._tasks[task_id]
        self._places.discard(dropped)

    def close(self, deadline_s: float = 10.0) -> None:
        """Kill all processes; what is pending is never scored. Raises DeadlineError if one is left after `deadline_s`."""
        self._places.close(deadline_s)

    def _applies(self, spec: RewardSpec, fields: Mapping[str, Any]) -> bool:
        chosen = self._by_source.get(source_of(fields) or "")
        return chosen is None or spec.name in chosen or spec.name == REFERENCE

    def _submit(self, spec: RewardSpec, members: list[_PendingScores[Key]]) -> None:
        task_id = next(self._task_ids)
        self._tasks[task_id] = (spec.name, members)
        for pending in members:
            pending.task_ids.add(task_id)
        shown = [{**pending.fields, STREAM: pending.stream} if spec.stream_tokens else pending.fields for pending in members]
        usable_fields = tuple(usable(spec, fields) for fields in shown)
        tokens = 0 if spec.tokens_per_minute is None else sum(num_tokens(pending.fields) for pending in members)
        self._places.of(spec.name).submit(spec.name, ScoringTask(task_id, usable_fields, tokens, stream=members[0].stream))

    def _answered(self, task_id: int, answers: Answers) -> None:
        """Called from the thread of its place."""
        self._answers.put(partial(self._settle, task_id, answers))
        self._wake()

    def _shown(self, name: str, streams: Collection[int], answer: Answer) -> None:
        """Called from the thread of its place; not urgent, so it wakes nothing."""
        self._answers.put(partial(self._note, name, streams, answer))

    def _note(self, name: str, streams: Collection[int], answer: Answer) -> list[Scored[Key]]:
        counters = self.counters[name]
        if answer.failure is not None and not counters.not_read:
            reason = answer.failure.reason
            logger.warning("incremental scoring of reward %r failed, later failures are only counted: %s", name, reason)
        counters.shown += len(streams)
        counters.not_read += len(streams) if answer.failure is not None else 0
        for stream in streams:
            if (seconds := self._ahead_s.get(stream)) is not None:  # Else it was discarded.
                seconds[name] = seconds.get(name, 0.0) + answer.seconds / len(streams)
        return []

    def _settle(self, task_id: int, answers: Answers) -> list[Scored[Key]]:
        if task_id not in self._tasks:
            return []  # It was discarded.
        name, members = self._tasks.pop(task_id)
        own = answers * len(members) if len(answers) == 1 else answers
        done = []
        for pending, answer in zip(members, own, strict=True):
            self.counters[name].count(name, answer)
            pending.scores[name] = answer.score()
            pending.stages[name] = ScoringInterval(answer.began, answer.ended)
            if answer.logprobs is not None:
                pending.reference = answer.logprobs
            pending.num_unanswered -= 1
            if not pending.num_unanswered:
                done += self._done(pending)
        return done

    def _done(self, pending: _PendingScores[Key]) -> list[Scored[Key]]:
        if self._pending.get(pending.key) is not pending:
            return []  # It was discarded.
        del self._pending[pending.key]
        scores = {spec.name: pending.scores[spec.name] for spec in self._specs}
        ahead_s = {} if pending.stream is None else self._ahead_s.pop(pending.stream)
        return [Scored(pending.key, scores, pending.stages, ahead_s, pending.reference)]

    def _awaited(self, members: list[_PendingScores[Key]]) -> bool:
        return any(self._pending.get(pending.key) is pending for pending in members)


def fields_of(
    row: Row, prompt_ids: Sequence[int], completion: Rollout | Partial, text: str, template: Template = PLAIN
) -> dict[str, Any]:
    """The inputs of rewards, in training and in evaluation, as plain data: the row's columns, and over them `rewards.FIELDS`
    and the digests of its images.

    An unfinished completion has no `finish_reason`. template: with which the row became what the model read.
    """
    token_ids = completion.token_ids if isinstance(completion, Partial) else completion.completion_ids
    known = {
        **row.columns,
        **({IMAGES: [*row.images]} if row.images else {}),
        "prompt": row.prompt,
        "model_prompt": template.said(row),
        "completion": text,
        "prompt_ids": list(prompt_ids),
        "completion_ids": token_ids.tolist(),
    }
    if isinstance(completion, Partial):
        return known
    row_pieces = pieces(completion.spans)
    return {
        **known,
        "finish_reason": completion.finish_reason,
        "sampling_mask": _plain(completion),
        "row_pieces": [list(piece) for piece in row_pieces] if len(row_pieces) > 1 else None,
    }


def usable(spec: RewardSpec, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields a reward can use: only those travel to it, and that there are images to another machine, but not they."""
    if spec.fields is None:
        unsent = {IMAGES: None} if IMAGES in fields and is_elsewhere(spec) else {}
        return {name: value for name, value in fields.items() if name not in OURS} | unsent
    return {name: fields[name] for name in spec.fields if name in fields}


def num_tokens(fields: Mapping[str, Any]) -> int:
    """The expected cost of scoring: the length in the policy's tokens."""
    return len(fields.get("prompt_ids", ())) + len(fields.get("completion_ids", ()))


def _plain(rollout: Rollout) -> tuple[bytes, bytes] | None:
    """Sizes and ids of the sampling mask, little-endian int32; of what was not sampled the token itself is the mask."""
    mask = rollout.sampling_mask
    if mask is None:
        return None
    if len(mask.sizes) < rollout.length:
        mask = _of_all(mask, rollout)
    return mask.sizes.astype("<i4").tobytes(), mask.ids.astype("<i4").tobytes()


def _of_all(mask: SamplingMask, rollout: Rollout) -> SamplingMask:
    """With a mask of one token for each that an environment gave, so that every token has one."""
    was_sampled = rollout.sampled
    sizes = np.ones(len(was_sampled), np.int32)
    sizes[was_sampled] = mask.sizes
    ids = np.repeat(rollout.completion_ids, sizes)
    ids[np.repeat(was_sampled, sizes)] = mask.ids
    return SamplingMask(sizes, ids)
