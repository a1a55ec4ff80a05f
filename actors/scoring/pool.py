"""The scoring pool: judges each completion the moment it ends, while its group is still being generated.

Used by the actor's loop, which must never block: `submit` and `poll` return at once, and `wake` is called from another
thread when a poll may have something. Never here: running user code (`sync_calls`, `async_calls` do, in other processes),
or deciding who is called when (`lanes`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.engine import Completion, Partial
from async_rlhf.actors.prompts import Row
from async_rlhf.actors.rewards import Answer, RewardSpec
from async_rlhf.actors.scoring.dispatcher import Dispatcher
from async_rlhf.actors.scoring.executor import Answers
from async_rlhf.actors.scoring.remote_executor import ScorerClient
from async_rlhf.actors.scoring.reward_queue import Task
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.record import Float32Array, SamplingMask, Score

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)


class Place(NamedTuple):
    """Where a completion stands: a name for its group, its number among the members, and how many there are."""

    group: Hashable
    member: int
    size: int


class Interval(NamedTuple):
    """When something ran, in seconds since the epoch."""

    began: float
    ended: float


@dataclass(frozen=True)
class Scored(Generic[Key]):
    """A completion that every reward has answered for.

    seconds: from `submit` to the last answer. stages: when each reward's call ran (the last one, where it was made again).
    ahead_s: by reward that read along, the seconds it did, as this completion's share of each call. reference: float32 [T],
    where there is such a stage and it did not fail; its score is then not applicable.
    """

    key: Key
    scores: Mapping[str, Score]
    seconds: float
    stages: Mapping[str, Interval] = field(default_factory=dict)
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    reference: Float32Array | None = None


@dataclass
class RewardCounters:
    """What one reward has done so far. seconds: time its calls ran, summed over concurrent calls.

    shown: completions that it was shown while they were being written; not_read: those of them that it failed to read.
    """

    scored: int = 0
    not_applicable: int = 0
    failed: int = 0
    seconds: float = 0.0
    shown: int = 0
    not_read: int = 0


@dataclass
class _Pending(Generic[Key]):
    key: Key
    fields: Mapping[str, Any]
    num_unanswered: int
    submitted_s: float
    stream: int | None = None
    task_ids: set[int] = field(default_factory=set)
    scores: dict[str, Score] = field(default_factory=dict)
    stages: dict[str, Interval] = field(default_factory=dict)
    reference: Float32Array | None = None


class ScoringPool(Generic[Key]):
    """Scores completions with every reward of a run.

    Owns: a dispatcher with the processes it needs, and a line to the scorer process where stages are placed there. Waits for
    nothing. Woken by `submit` and `poll`, both called from one thread. On close: kills its processes. `counters` has one entry
    per reward.
    """

    def __init__(
        self, specs: Sequence[RewardSpec], config: ScoringConfig, wake: Callable[[], None] = lambda: None, scorer: str = ""
    ) -> None:
        """scorer: address of the scorer process; without one every stage runs here."""
        if not specs:
            raise RewardError("a scoring pool needs a reward, got none; name one in rewards.functions")
        self._specs = tuple(specs)
        self._wake = wake
        self._answers: queue.SimpleQueue[Callable[[], list[Scored[Key]]]] = queue.SimpleQueue()
        self._task_ids = itertools.count()
        self._tasks: dict[int, tuple[str, list[_Pending[Key]]]] = {}
        self._pending: dict[Key, _Pending[Key]] = {}
        self._groups: dict[Hashable, dict[int, _Pending[Key]]] = {}
        self._along = tuple(spec for spec in self._specs if spec.stream_tokens)
        self._stream_ids = itertools.count()
        # Of completions that are being written, their streams; by stream, the seconds each reward has read along.
        self._streams: dict[Key, int] = {}
        self._ahead_s: dict[int, dict[str, float]] = {}
        self.counters = {spec.name: RewardCounters() for spec in self._specs}
        here = tuple(spec for spec in self._specs if not (scorer and config.in_process(spec.name)))
        self._hands: dict[str, Dispatcher | ScorerClient] = {}
        if here:
            self._hands |= dict.fromkeys((spec.name for spec in here), Dispatcher(here, config, self._answered, self._shown))
        self._scorer: ScorerClient | None = None
        if len(here) < len(self._specs):
            self._scorer = ScorerClient(scorer, self._answered, self._shown)
            self._hands |= {spec.name: self._scorer for spec in self._specs if spec not in here}
        self._everybody = tuple(set(self._hands.values()))

    @property
    def stream_tokens(self) -> int:
        """Tokens a completion should have grown by each time it is shown to those who read along; 0 when none does."""
        return min((spec.stream_tokens for spec in self._along), default=0)

    @property
    def num_pending(self) -> int:
        """Completions submitted and neither returned by `poll` nor discarded."""
        return len(self._pending)

    @property
    def asked_again(self) -> int:
        """Tasks that were asked again because the scorer process had died, or had heard nothing of this one for long."""
        return 0 if self._scorer is None else self._scorer.asked_again

    def show(self, key: Key, fields: Mapping[str, Any]) -> None:
        """Show a completion that is still being written to the rewards that read along. It may be skipped, never waited for.

        fields: as `submit` takes them, as far as they are known. Who is shown is later submitted or discarded.
        """
        if key not in self._streams:
            self._streams[key] = next(self._stream_ids)
            self._ahead_s[self._streams[key]] = {}
        stream = self._streams[key]
        for hands in self._everybody:
            own = [spec for spec in self._along if self._hands[spec.name] is hands]
            if own:
                hands.show(stream, {spec.name: _usable(spec, {**fields, STREAM: stream}) for spec in own})

    def submit(self, key: Key, fields: Mapping[str, Any], place: Place | None = None) -> None:
        """Score one completion; a reward of groups is called when the last member of its group has come.

        fields: `completion` and `prompt` (text), `completion_ids` and `prompt_ids` (lists of int), `finish_reason`, and
        every column of the prompt's row; plain data; `sampling_mask` for a stage `reference`. place: without it the
        completion is a group of its own.
        Raises RewardError for a key that is being scored already.
        """
        if key in self._pending:
            raise RewardError(f"{key} is being scored already; poll or discard it first")
        place = place or Place(key, 0, 1)
        stream = self._streams.pop(key, None)
        pending = self._pending[key] = _Pending(key, fields, len(self._specs), time.monotonic(), stream)
        group = self._groups.setdefault(place.group, {})
        group[place.member] = pending
        is_whole = len(group) == place.size
        if is_whole:
            del self._groups[place.group]
        for spec in self._specs:
            if spec.scope == "completion":
                self._ask(spec, [pending])
            elif is_whole:
                self._ask(spec, [group[member] for member in sorted(group)])

    def poll(self) -> list[Scored[Key]]:
        """The completions whose every reward has answered since the last poll. Never waits.

        Raises RewardError when the processes of a reward end again and again before they can answer anything.
        """
        for hands in self._everybody:
            hands.check()
        scored = []
        # No more than what is there now: rewards that answer faster than this loop must not hold the actor up.
        for _ in range(self._answers.qsize()):
            scored += self._answers.get_nowait()()
        return scored

    def discard(self, keys: Iterable[Key]) -> None:
        """Forget these completions: what was not begun is not begun, what runs is not listened to. Unknown keys are ignored."""
        keys = tuple(keys)
        gone = [pending for key in keys if (pending := self._pending.pop(key, None)) is not None]
        unfinished = [stream for key in keys if (stream := self._streams.pop(key, None)) is not None]
        if streams := unfinished + [pending.stream for pending in gone if pending.stream is not None]:
            for hands in self._everybody:
                hands.forget(streams)
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
        # A task is dropped only when nobody is left who waits for it.
        touched = {task_id for pending in gone for task_id in pending.task_ids if task_id in self._tasks}
        dropped = {task_id for task_id in touched if not self._awaited(self._tasks[task_id][1])}
        for task_id in dropped:
            del self._tasks[task_id]
        for hands in self._everybody:
            hands.discard(dropped)

    def close(self, deadline_s: float = 5.0) -> None:
        """Kill all processes; what is pending is never scored. Raises DeadlineError if one is left after `deadline_s`."""
        with contextlib.ExitStack() as closing:  # one that fails to close does not keep the other open
            for hands in self._everybody:
                closing.callback(hands.close, deadline_s)

    def _ask(self, spec: RewardSpec, asking: list[_Pending[Key]]) -> None:
        task_id = next(self._task_ids)
        self._tasks[task_id] = (spec.name, asking)
        for pending in asking:
            pending.task_ids.add(task_id)
        shown = [{**pending.fields, STREAM: pending.stream} if spec.stream_tokens else pending.fields for pending in asking]
        members = tuple(_usable(spec, fields) for fields in shown)
        tokens = 0 if spec.tokens_per_minute is None else sum(_tokens(pending.fields) for pending in asking)
        self._hands[spec.name].submit(spec.name, Task(task_id, members, tokens, stream=asking[0].stream))

    def _answered(self, task_id: int, answers: Answers) -> None:
        """Called from the dispatcher's thread."""
        self._answers.put(partial(self._settle, task_id, answers))
        self._wake()

    def _shown(self, name: str, streams: tuple[int, ...], answer: Answer) -> None:
        """Called from the dispatcher's thread; nobody waits for this, so nobody is woken."""
        self._answers.put(partial(self._note, name, streams, answer))

    def _note(self, name: str, streams: tuple[int, ...], answer: Answer) -> list[Scored[Key]]:
        counters = self.counters[name]
        if answer.failure is not None and not counters.not_read:
            logger.warning("reward %r could not read along, later failures are only counted: %s", name, answer.failure)
        counters.shown += len(streams)
        counters.not_read += len(streams) if answer.failure is not None else 0
        for stream in streams:
            if (seconds := self._ahead_s.get(stream)) is not None:  # else nobody waits for it any more
                seconds[name] = seconds.get(name, 0.0) + answer.seconds / len(streams)
        return []

    def _settle(self, task_id: int, answers: Answers) -> list[Scored[Key]]:
        if task_id not in self._tasks:
            return []  # Nobody waits for it any more.
        name, asking = self._tasks.pop(task_id)
        own = answers * len(asking) if len(answers) == 1 else answers
        done = []
        for pending, answer in zip(asking, own, strict=True):
            self._count(name, answer)
            pending.scores[name] = answer.score()
            pending.stages[name] = Interval(answer.began, answer.ended)
            if answer.logprobs is not None:
                pending.reference = answer.logprobs
            pending.num_unanswered -= 1
            if not pending.num_unanswered and self._pending.get(pending.key) is pending:
                del self._pending[pending.key]
                seconds = time.monotonic() - pending.submitted_s
                scores = {spec.name: pending.scores[spec.name] for spec in self._specs}
                ahead_s = {} if pending.stream is None else self._ahead_s.pop(pending.stream)
                done.append(Scored(pending.key, scores, seconds, pending.stages, ahead_s, pending.reference))
        return done

    def _awaited(self, asking: list[_Pending[Key]]) -> bool:
        return any(self._pending.get(pending.key) is pending for pending in asking)

    def _count(self, name: str, answer: Answer) -> None:
        counters = self.counters[name]
        counters.seconds += answer.seconds
        if answer.failure is not None:
            if counters.failed == 0:
                logger.warning(
                    "reward %r failed, later failures are only counted: %s\n%s", name, answer.failure, answer.traceback
                )
            counters.failed += 1
        elif answer.value is None and answer.logprobs is None:
            counters.not_applicable += 1
        else:
            counters.scored += 1


def _usable(spec: RewardSpec, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward can use of a completion's fields: only that travels."""
    if spec.fields is None:
        return {name: value for name, value in fields.items() if name not in OURS}
    return {name: fields[name] for name in spec.fields if name in fields}


def _tokens(fields: Mapping[str, Any]) -> int:
    """What judging it will probably cost: its own length in the policy's tokens."""
    return len(fields.get("prompt_ids", ())) + len(fields.get("completion_ids", ()))


STREAM = "stream_id"
"""The field by which a stage that reads along knows a completion again."""
OURS = frozenset({"sampling_mask"})
"""What only a stage of ours is told: a reward that takes every column is not."""


def fields_of(row: Row, prompt_ids: Sequence[int], completion: Completion | Partial, text: str) -> dict[str, Any]:
    """The row's columns, and over them the fields every reward may ask for (`async_rlhf.actors.rewards.FIELDS`); plain data.

    Of a completion that is still being written nobody knows how it ends.
    """
    known = {
        **row.columns,
        "prompt": row.prompt,
        "completion": text,
        "prompt_ids": list(prompt_ids),
        "completion_ids": completion.token_ids.tolist(),
    }
    if isinstance(completion, Partial):
        return known
    return {**known, "finish_reason": completion.finish_reason, "sampling_mask": _plain(completion.sampling_mask)}


def _plain(sampling_mask: SamplingMask | None) -> tuple[bytes, bytes] | None:
    """Sizes and ids, little-endian int32, as a stage in another process takes them."""
    return (
        None
        if sampling_mask is None
        else (sampling_mask.sizes.astype("<i4").tobytes(), sampling_mask.ids.astype("<i4").tobytes())
    )
