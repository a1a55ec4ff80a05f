"""The actor's loop, on one screen: credit, prompt, play, score, put; and adopt weights between two decode steps.

    owns        an engine, its episodes, a scoring pool, the groups it has begun; no state to restore
    waits for   nothing while a sequence is being decoded; else for a credit, an environment, a score or new weights
    woken by    the hub's messages, and the threads of environments and scores
    on close    unfinished groups are dropped: the hub credits them again, to any actor

Generation never stops for environments (others decode while one works), for scoring (each completion is scored while its
siblings decode, incrementally where a reward can), for the queue (puts are not awaited) or for weights (they are adopted whole,
at a token border; `generation.on_update` decides what becomes of what runs).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from async_rlhf.actors.engine import Engine, RolloutKey
from async_rlhf.actors.loop.context import Environment, RunContext
from async_rlhf.actors.loop.episodes import Episodes
from async_rlhf.actors.loop.length_bias import Length, LengthBiasMonitor
from async_rlhf.actors.loop.rollouts import FinishedRollout, behind_one_prompt
from async_rlhf.actors.prompts import Row, environment_seed, from_json
from async_rlhf.actors.scoring.pool import GroupMember, Scored, ScoringPool, fields_of
from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.failures import FailureKind
from async_rlhf.buffers.protocol.wire import CreditItem, Telemetry
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.stages import GENERATION, Activity, StageTime, pack, pack_ahead
from async_rlhf.buffers.weights.weight_set import WeightSet

_log = logging.getLogger(__name__)
# The longest an idle actor sleeps before it polls by itself; credits and scores wake it at once.
_IDLE_WAIT_S = 0.2
# Between two steps the loop receives messages and collects scores: less than this is part of decoding.
_PAUSE_S = 0.02
# Room for further groups goes to the hub at most so often while something is being decoded.
_ROOM_EVERY_S = 0.01
# What is trained is compared with what was begun once in so many groups.
_GROUPS_A_REPORT = 16
_ALARMS = {
    "selection_alarm": "long completions are dropped more often than short ones",
    "selection_turns_alarm": "episodes of many turns are dropped more often than those of few",
}


RecordSpan = Callable[[str, float, float], None]
"""(what it was, began, ended): a mark for a trace; seconds since the epoch."""


@dataclass
class _Open:
    """A group that was begun here and not put yet."""

    attempt: int
    row: Row
    prompt: str
    began: float
    finished: dict[int, FinishedRollout] = field(default_factory=dict)
    generated: dict[int, StageTime] = field(default_factory=dict)
    num_judged: int = 0
    sampled: int = 0
    """The engine's progress when it last had something of this group."""

    @property
    def progress(self) -> int:
        return self.sampled + len(self.finished) + self.num_judged


class Decoding:
    """When the engine decoded and when it had nothing to do: which hides the time of scoring, and marks on a trace.

    Owns the stretches in which it decoded, as far back as `forget` leaves them.
    """

    def __init__(self, record: RecordSpan) -> None:
        self._stretches, self._record = Activity(), record
        self._until = time.time()

    def stepped(self, began: float) -> None:
        """The engine has just decoded, since `began`."""
        if began < self._until:  # the clock was set back: no stretch before that can be compared with what comes
            self._stretches, self._until = Activity(), began
        if began - self._until > _PAUSE_S:
            self._record("idle", self._until, began)
        else:
            began = self._until
        self._until = max(began, time.time())
        self._stretches.add(began, self._until)

    def overlap(self, began: float, ended: float) -> StageTime:
        """A stage that ran then, with those of its seconds in which the engine decoded."""
        ended = max(began, ended)  # the clock may have been set back meanwhile
        return StageTime(began, ended, self._stretches.covers(began, ended))

    def forget(self, before: float) -> None:
        self._stretches.forget(before)


class Worker:
    """See the module docstring. `run` returns the reason why it ended; raises DeadlineError when the hub is silent."""

    def __init__(
        self,
        name: str,
        client: ActorClient,
        engine: Engine,
        scoring: ScoringPool[RolloutKey],
        context: RunContext,
        capacity: int,
        canary_tolerance: float,
        record: RecordSpan = lambda what, began, ended: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._name, self._client, self._engine, self._scoring, self._context = name, client, engine, scoring, context
        self._episodes = Episodes(engine, context.decode, context.environments)
        self._capacity, self._canary_tolerance = capacity, canary_tolerance
        self._group_size = context.generation.group_size
        self._canary_drift = 0.0
        self._mark, self._decoding = record, Decoding(record)
        self._length_bias, self._bias = LengthBiasMonitor(), LengthBiasMonitor().report(0.0)
        self._fence = 0
        self._coming: WeightSet | None = None  # loaded, and not yet served: what runs ends first
        self._open: dict[int, _Open] = {}
        self._shown: dict[RolloutKey, int] = {}  # tokens of running completions that judges have been shown
        self._announced: tuple[int, int, int] | None = None  # fence, version, capacity
        self._announced_at = 0.0
        self._newest: ActorState | None = None
        self._count = dict.fromkeys(
            ("busy_s", "idle_s", "tokens_total", "completions_total", "groups_total", "dropped_tokens_total"), 0.0
        )

    def run(self) -> str:
        """Work until the hub stops the run."""
        while self._client.stop_reason is None:
            self.turn()
        return self._client.stop_reason

    def turn(self) -> None:
        """Take in the hub's messages, decode one token of everything, pass on what ended."""
        began = self._clock()
        idle = not self._engine.num_unfinished
        # As it was at the end of the turn before: nothing has changed since.
        self._client.poll(self._newest or self._state(), self._telemetry(), _IDLE_WAIT_S if idle else 0.0)
        if (weights := self._client.weights()) is not None:
            self._adopt(weights)
        if credits := self._client.credits():
            self._begin(credits)
            self._client.works_on(self._state())
        for finished in self._step():
            self._score(finished)
        self._serve()
        if self._context.partial_every:
            self._show()
        for scored in self._scoring.poll():
            self._collect(scored)
        self._announce()
        self._count["idle_s" if idle else "busy_s"] += self._clock() - began

    def _step(self) -> list[FinishedRollout]:
        busy, began = self._engine.num_unfinished > 0, time.time()
        ended = self._episodes.step()
        if busy:
            self._decoding.stepped(began)
            for group in self._open.values():
                if len(group.finished) < self._group_size:  # members without a slot wait for those that have one
                    group.sampled = self._engine.progress
        return ended

    def _adopt(self, weights: WeightSet) -> None:
        """Load a new set. Going back (the learner was restored) cancels what was begun."""
        if weights.version < self._engine.version:
            numbers = list(self._open)
            self._drop(numbers, again=False)
            self._client.release(numbers)
            _log.info("back to version %d: %d groups are begun again", weights.version, len(numbers))
        began = time.time()
        self._engine.load_weights(weights.version, weights.tensors())
        self._mark(f"adopt {weights.version}", began, time.time())
        self._coming = weights
        self._serve()

    def _serve(self) -> None:
        """Once the engine has adopted what was loaded, nothing is sampled from it before the probe passed."""
        if self._coming is not None and self._engine.version == self._coming.version:
            weights, self._coming = self._coming, None
            self._verify_canary(weights)
            self._fence = weights.fence

    def _verify_canary(self, weights: WeightSet) -> None:
        """The canary: engine and learner must agree on one probe under the same weights.

        Digests prove that the bytes arrived; this proves that the engine computes with them.
        """
        if weights.canary is None:
            return
        found = self._engine.probe(weights.canary.ids, behind_images=weights.canary.behind_images)
        differences = np.abs(found - np.array(weights.canary.logprobs, np.float32))
        self._canary_drift = float(differences.max())
        if not self._canary_drift <= self._canary_tolerance:  # NaN counts as drift
            raise WeightsError(
                f"version {weights.version}: engine and learner differ by {self._canary_drift:.3g} nats on the same probe "
                f"under the same weights, the limit is {self._canary_tolerance:.3g} (engine.canary_limit). "
                "Nothing was generated with it. Are both of the same model, and is the engine's dtype what you meant? Or are "
                "the weights so large (learner.learning_rate too high) that rounding alone makes this difference? The probe's "
                f"lowest log-probability is {min(weights.canary.logprobs):.3g}."
            )

    def _begin(self, credits: Sequence[CreditItem]) -> None:
        # Credited twice, or although it is being made here: the hub had given it up meanwhile. Only the newest attempt counts.
        credits = list({credit.number: credit for credit in credits}.values())
        self._drop([credit.number for credit in credits if credit.number in self._open], again=True)
        for credit in credits:
            self._length_bias.begin(credit.number, self._clock())
        begun = []
        for credit in credits:
            given = from_json(credit.row) if credit.row else None
            row, prompt, requests = self._context.requests(credit.number, credit.attempt, given, credit.place)
            self._open[credit.number] = _Open(credit.attempt, row, prompt, time.time())
            begun.append((row, environment_seed(self._context.seed, credit.number), requests))
        self._episodes.begin(begun)

    def _drop(self, numbers: Sequence[int], *, again: bool) -> None:
        """Forget these groups, or begin them again: what runs of them stops, what is being scored is not waited for."""
        for number in numbers:
            group = self._open.pop(number)
            keys = [RolloutKey(number, group.attempt, member) for member in range(self._group_size)]
            environment = self._context.environments.of(group.row.columns)
            turns = [1 if environment is None else max(1, environment.pool.num_turns(key)) for key in keys]
            thrown_away = self._episodes.discard(keys)
            self._count["dropped_tokens_total"] += sum(thrown_away)
            self._scoring.discard(keys)
            for key in keys:
                self._shown.pop(key, None)
            lengths = dict(enumerate(zip(thrown_away, turns, strict=True)))
            lengths |= {member: _length(finished) for member, finished in group.finished.items()}
            self._length_bias.dropped(number, (length for length in lengths.values() if length[0]), again=again)

    def _show(self) -> None:
        """Offers grown completions to incremental scoring; nothing waits for it."""
        for partial, prompt_ids in self._episodes.partials(self._shown):
            self._shown[partial.key] = len(partial.token_ids)
            group, text = self._open[partial.key.group], self._context.decode(partial.token_ids.tolist())
            self._scoring.show(partial.key, fields_of(group.row, prompt_ids, partial, text, self._context.template))

    def _score(self, finished: FinishedRollout) -> None:
        """The rollout ended: its judges start now."""
        key = finished.key
        self._shown.pop(key, None)
        group = self._open[key.group]
        group.finished[key.member] = finished
        group.generated[key.member] = StageTime(group.began, max(group.began, time.time()))  # the clock may be set back
        self._count["tokens_total"] += finished.num_sampled
        self._count["completions_total"] += 1
        place = GroupMember(key[:2], key.member, self._group_size)
        self._scoring.submit(key, finished.fields(group.row, self._context.template), place)

    def _collect(self, scored: Scored[RolloutKey]) -> None:
        """A completion has all its scores; with the last one of its group the group is put."""
        number, member = scored.key.group, scored.key.member
        group, environments = self._open[number], self._context.environments
        finished, environment = group.finished[member], environments.of(group.row.columns)
        stages = {name: self._decoding.overlap(*when) for name, when in scored.stages.items()}
        stages |= self._environment_stage(environment, finished)
        timings = pack({GENERATION: group.generated[member], **stages}) | pack_ahead(scored.ahead_s)
        group.finished[member] = finished.judged(scored, environments.scores(environment, finished.score), timings)
        group.num_judged += 1
        if group.num_judged == self._group_size:
            del self._open[number]
            self._decoding.forget(min((other.began for other in self._open.values()), default=time.time()))
            self._count["groups_total"] += 1
            self._account(number, [_length(member) for member in group.finished.values()])
            refill, scores = self._context.refill, [member.rollout.scores for member in group.finished.values()]
            constant = refill is not None and refill.of(group.row.columns).is_constant(scores)
            self._client.put(self._record(number, group, environment), constant=constant)

    def _record(self, number: int, group: _Open, environment: Environment | None) -> Group:
        members = [group.finished[member] for member in range(self._group_size)]
        prompts, rollouts = [member.read for member in members], [member.rollout for member in members]
        place_id = None if self._context.images is None else self._context.images.place_id
        prompt_ids, images, rollouts_behind = behind_one_prompt(prompts, rollouts, self._context.decode, place_id)
        is_agent = environment is not None and environment.spec.calls
        return Group(
            number=number,
            attempt=group.attempt,
            prompt_ids=prompt_ids,
            rollouts=rollouts_behind,
            sampling=self._context.generation.sampling,
            actor=self._name,
            prompt=members[0].prompt or (self._context.decode(prompt_ids.tolist()) if is_agent else group.prompt),
            columns=group.row.columns,
            images=images,
        )

    def _environment_stage(self, environment: Environment | None, finished: FinishedRollout) -> dict[str, StageTime]:
        """The steps of the environment as one stage: what they took, and what of it was hidden behind decoding."""
        if environment is None or not finished.steps:
            return {}
        steps = [self._decoding.overlap(*step) for step in finished.steps]
        ended = steps[-1].ended
        seconds, hidden = (sum(getattr(step, name) for step in steps) for name in ("seconds", "hidden_s"))
        return {environment.name: StageTime(ended - seconds, ended, hidden)}

    def _account(self, number: int, lengths: Sequence[Length]) -> None:
        """The group is put; once in `_GROUPS_A_REPORT`, whether long completions are dropped more often."""
        self._length_bias.trained(number, lengths)
        if self._count["groups_total"] % _GROUPS_A_REPORT == 0:
            before, self._bias = self._bias, self._length_bias.report(self._clock())
            for alarm, what in _ALARMS.items():
                if self._bias[alarm] > before[alarm]:
                    _log.warning("%s: %s", what, self._bias)

    def _state(self) -> ActorState:
        return ActorState(
            capacity=self._capacity + self._num_outside() + len(self._client.unacknowledged),
            fence=self._fence,
            version=self._engine.version,
            holding=tuple((number, group.attempt) for number, group in self._open.items()),
            progress=tuple((number, group.progress) for number, group in self._open.items()),
        )

    def _num_outside(self) -> int:
        """Groups begun here that take no room in the engine, as they only wait for scores or for environments: so many others
        may be begun. Of what has not begun no more than fills this actor once counts so, for it comes back together."""
        size = self._group_size
        if not self._context.environments.all:
            return sum(len(group.finished) == size for group in self._open.values())
        too_many = max(0, self._episodes.num_opening - self._capacity * size)
        return max(0, len(self._open) - math.ceil((self._engine.num_unfinished + too_many) / size))

    def _announce(self) -> None:
        """Send at once what changes which credits the hub can give; the rest goes with the next beat."""
        self._newest = state = self._state()
        self._client.works_on(state)
        news, now = (state.fence, state.version, state.capacity), self._clock()
        if news == self._announced:
            return
        # Where environments take episodes out of the engine and bring them back, room changes with nearly every token.
        is_of_room = self._announced is not None and news[:2] == self._announced[:2] and self._engine.num_unfinished > 0
        if not is_of_room or now - self._announced_at >= _ROOM_EVERY_S:
            self._announced, self._announced_at = news, now
            self._client.beat(state, self._telemetry())

    def _telemetry(self) -> Telemetry:
        counters = self._scoring.counters.values()
        failed = sum((counter.failed for counter in counters), self._context.environments.failed)
        return Telemetry(
            **self._count,
            canary_drift=self._canary_drift,
            **self._bias,
            scoring=float(self._scoring.num_pending),
            scores_failed_total=float(sum(counter.failed.total() for counter in counters)),
            failures={kind: float(failed[kind]) for kind in FailureKind},
            scores_asked_again_total=float(self._scoring.num_resent),
            shown_total=float(sum(counter.shown for counter in counters)),
            shown_not_read_total=float(sum(counter.not_read for counter in counters)),
            **self._context.environments.counted(),
        )


def _length(finished: FinishedRollout) -> Length:
    return finished.num_sampled, len(finished.turns)
