"""What a candidate gives: for each set of devices the best layouts that fit into its memory, and the time of a step.

Roles of a set that trains and generates put aside what they work with (caches, activations) when the next one begins, as
systems that switch engines do; weights that are frozen or trained stay. A generator keeps weights of its own beside the
trained ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Literal

from async_rlhf.experiments.planning.model.schedules import Stage, StageTime, StepTime, step_time
from async_rlhf.experiments.planning.model.stages import Layout, Place, publication_s
from async_rlhf.experiments.planning.placement.roles import LEARNING, SCORING, Choice, Kind, Role, Roles
from async_rlhf.experiments.planning.placement.strategies import Candidate, DeviceSet, Seat

_LAST_ROWS = 64  # that a frozen model reads in one pass at the end of a batch
_LEAST_CHOICES, _MOST_COMBINATIONS = 6, 6**4  # layouts of each role, and of a set: all of one role, the fastest of several


@dataclass(frozen=True)
class Filled:
    """A set with its layouts. bytes_per_device: at the peak. slots: of one engine, where it generates."""

    set: DeviceSet
    choices: Mapping[Role, Choice]
    generation: StageTime | None
    slots: int
    bytes_per_device: float


@dataclass(frozen=True)
class Plan:
    """A candidate that fits. times: by stage, of the whole cluster. devices: of the cluster, used or not."""

    candidate: Candidate
    filled: tuple[Filled, ...]
    times: Mapping[Stage, StageTime]
    step: StepTime
    rows: int
    devices: int

    @property
    def samples_per_s(self) -> float:
        return self.rows / self.step.seconds

    @property
    def device_seconds_per_million(self) -> float:
        """Of completions that are trained on."""
        return self.devices * self.step.seconds / self.rows * 1e6

    def layout(self, role: Role) -> Layout:
        """Of a role that the plan has."""
        return next(filled.choices[role].layout for filled in self.filled if role in filled.choices)

    @property
    def slots(self) -> int:
        return max(filled.slots for filled in self.filled)


class Evaluation:
    """Of candidates of one spec. Sets that several candidates share are filled once."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self._filled: dict[tuple[object, ...], Filled | None] = {}

    def plan(self, candidate: Candidate) -> Plan | None:
        """None where a set finds no layout that fits."""
        filled = []
        for group in candidate.sets:
            found = self._fill(candidate, group)
            if found is None:
                return None
            filled.append(found)
        times = self._times(candidate, filled)
        way = candidate.strategy
        lanes = self._lanes(candidate, filled, times)
        step = step_time(candidate.max_staleness, times, lanes, continuous=way.continuous, scores_early=way.scores_early)
        return Plan(candidate, tuple(filled), times, step, self.roles.rows, self.roles.spec.cluster.size)

    def _fill(self, candidate: Candidate, group: DeviceSet) -> Filled | None:
        ahead = candidate.max_staleness if candidate.strategy.continuous else 0
        key = (group.seats, candidate.here, candidate.strategy.zero, ahead if "generate" in group.roles else 0)
        if key not in self._filled:
            options = self._options(candidate, group, ahead)
            self._filled[key] = min(options, key=lambda each: _taken_s(each, ahead), default=None)
        found = self._filled[key]
        return None if found is None else replace(found, set=group)

    def _options(self, candidate: Candidate, group: DeviceSet, ahead: float) -> Iterator[Filled]:
        """Every combination of layouts that fits."""
        beside = candidate.here and "train_critic" in group.roles
        if beside and self.roles.models["train_critic"] != self.roles.policy:
            return
        others = [seat for seat in group.seats if seat.role != "generate" and not (beside and seat.role == "train_critic")]
        each = [self._fitting(candidate, seat, len(others)) for seat in others]
        parts = {seat.part for seat in others} - {None} or {None}
        for choices in product(*each):
            by_role = {seat.role: choice for seat, choice in zip(others, choices, strict=True)}
            if beside:
                by_role["train_critic"] = self.roles.critic_beside(by_role["train"].layout)
            kept, working = 0.0, 0.0
            for part in parts:
                here = [by_role[seat.role] for seat in others if seat.part in (None, part)]
                kept = max(kept, sum(choice.kept_bytes for choice in here))
                working = max(working, max((choice.working_bytes for choice in here), default=0.0))
            if kept + working > self.roles.room_bytes:
                continue
            if "generate" not in group.roles:
                yield Filled(group, by_role, None, 0, kept + working)
                continue
            for tensor in self.roles.tensors("generate", group.devices):
                weights = self.roles.policy.weight_bytes / tensor
                # Actors that never stop hold their cache while others of the set work.
                active = working if candidate.strategy.continuous or candidate.here else 0.0
                room = self.roles.room_bytes - kept - active - weights
                layout = Layout(tensor=tensor, data=group.devices // tensor)
                for time, slots in self.roles.generation(group.devices, tensor, room, ahead):
                    # Of rows that decode, at their mean.
                    tokens = slots * (self.roles.read + self.roles.alive_tokens)
                    cache_bytes = tokens * self.roles.policy.kv_bytes_per_token / min(tensor, self.roles.policy.kv_heads)
                    own = Choice(layout, time.span_s, weights, cache_bytes)
                    peak = kept + weights + (cache_bytes + active if active else max(cache_bytes, working - weights))
                    yield Filled(group, {**by_role, "generate": own}, time, slots, peak)

    def _fitting(self, candidate: Candidate, seat: Seat, roles: int) -> tuple[Choice, ...]:
        """Those that fit where the role is alone, the fastest first; of more than can be combined the last is the leanest."""
        room, most = self.roles.room_bytes, max(_LEAST_CHOICES, int(_MOST_COMBINATIONS ** (1 / roles)))
        kind: Kind = "zero-3" if candidate.strategy.zero else "here" if candidate.here else "any"
        trains = seat.role in LEARNING
        there = self.roles.training(seat.role, seat.devices, kind) if trains else self.roles.inference(seat.role, seat.devices)
        found = tuple(choice for choice in there if choice.kept_bytes + choice.working_bytes <= room)
        return found if len(found) <= most else (*found[: most - 1], found[-1])

    def _times(self, candidate: Candidate, filled: list[Filled]) -> dict[Stage, StageTime]:
        generation = next(each.generation for each in filled if each.generation is not None)
        times: dict[Stage, StageTime] = {"generate": generation}
        models = max(model_seconds(each, "score") for each in filled)
        judged = self.roles.judged()
        score = StageTime(
            max(models, judged.busy_s),
            max(models, judged.span_s),
            max(models * min(1.0, _LAST_ROWS / self.roles.rows), judged.last_s),
        )
        train = max(model_seconds(each, "train") for each in filled)
        if candidate.strategy.fused:
            score, train = self._fused(filled, generation, score, train)
        times["score"], times["train"] = score, StageTime(train, train)
        return {**times, **self._weights(candidate, filled)}

    def _fused(self, filled: list[Filled], generation: StageTime, score: StageTime, train: float) -> tuple[StageTime, float]:
        """RLHFuse: scoring fills what the tail of generation leaves idle; the two trainings fill each other's bubbles.

        Bounds from below: in the tail every device that is not needed for what is left scores; trainings have no bubbles left.
        """
        [both] = filled
        tensor = both.choices["generate"].layout.tensor
        count = both.set.devices
        steady = self.roles.generation(count, tensor, self.roles.room_bytes, 1)
        idle = generation.span_s - (steady[0][0].busy_s if steady else generation.span_s)
        left = max(score.span_s - max(idle, 0.0), score.last_s)
        updates = self.roles.spec.batch.updates_per_step
        trainings = [choice for role, choice in both.choices.items() if role in LEARNING]
        work = 0.0
        for choice in trainings:
            micro = choice.layout.micro_batches(self.roles.rows // updates)
            work += choice.seconds * micro / (micro + choice.layout.pipeline - 1)
        return StageTime(score.busy_s, left, score.last_s), max(work, *(choice.seconds for choice in trainings))

    def _weights(self, candidate: Candidate, filled: list[Filled]) -> dict[Stage, StageTime]:
        """From training to generation: moved within the same devices, or published to others.

        Moved: the share of the weights that a device receives, by HybridFlow (Sheng et al., arXiv 2409.19256, table 2). ZeRO-3
        gathers all but its own part. Tensor groups of generation at a stride gather what their new shard has besides the old
        one; other groups gather the model from its parts.
        """
        by_role = {role: choice.layout for each in filled for role, choice in each.choices.items()}
        train, generate = by_role["train"], by_role["generate"]
        source = self.roles.place("train", train)
        if candidate.here:
            return self._channel(source, generate)
        if candidate.set_of("train") is candidate.set_of("generate"):
            held = Fraction(1, train.tensor * train.pipeline)
            if train.zero_stage == 3:
                moved = 1 - held / train.data
            elif train.tensor % generate.tensor == 0:
                moved = Fraction(1, generate.tensor) - held
            else:
                moved = 1 - held
            seconds = float(moved) * self.roles.policy.weight_bytes / source.far.bytes_per_s
            return {"switch": StageTime(seconds, seconds)}
        seconds = publication_s(source, generate.data, links=min(train.tensor * train.pipeline, generate.tensor))
        adopted = self.roles.policy.weight_bytes / generate.tensor / source.near.bytes_per_s
        return {"publish": StageTime(seconds, seconds), "adopt": StageTime(adopted, adopted)}

    def _channel(self, source: Place, generate: Layout) -> dict[Stage, StageTime]:
        """This system's: a copy into the host's memory, for which the learner stands still; from there through the hub to all
        actors, whose engines copy it into their devices."""
        size, host = self.roles.policy.weight_bytes, source.device.host_bytes_per_s * source.efficiency.links
        copied, adopted = size / host, size / generate.tensor / host
        travels = size / self.roles.spec.efficiency.weights_bytes_per_s
        return {"publish": StageTime(copied, copied + travels), "adopt": StageTime(adopted, adopted)}

    def _lanes(
        self, candidate: Candidate, filled: list[Filled], times: Mapping[Stage, StageTime]
    ) -> dict[str, dict[Stage, StageTime]]:
        """By set, what its devices are taken for; the judges that are no models, and this system's weight channel."""
        lanes: dict[str, dict[Stage, StageTime]] = {}
        for each in filled:
            lane: dict[Stage, StageTime] = {}
            if each.generation is not None:
                lane["generate"] = each.generation
                lane |= {stage: times[stage] for stage in ("adopt", "switch") if stage in times}
            for stage in ("score", "train"):
                if seconds := model_seconds(each, stage):
                    lane[stage] = StageTime(seconds, seconds)
            if "train" in each.choices and "publish" in times:
                lane["publish"] = times["publish"]
            lanes[each.set.name] = lane
        if candidate.strategy.fused:
            return {}
        judged = self.roles.judged()
        if judged.busy_s:
            lanes["judges"] = {"score": judged}
        if candidate.here:  # one set of weights at most is on its way
            sent = times["publish"]
            lanes["weight channel"] = {"publish": StageTime(sent.span_s - sent.busy_s, sent.span_s)}
        return lanes


def model_seconds(filled: Filled, stage: Literal["score", "train"]) -> float:
    """Of the models of a set: one after the other, those with parts of their own beside each other."""
    roles = SCORING if stage == "score" else LEARNING
    seats = [seat for seat in filled.set.seats if seat.role in roles]
    parts: dict[int, float] = {}
    together = 0.0
    for seat in seats:
        seconds = filled.choices[seat.role].seconds
        if seat.part is None:
            together += seconds
        else:
            parts[seat.part] = parts.get(seat.part, 0.0) + seconds
    return together + max(parts.values(), default=0.0)


def _taken_s(filled: Filled, ahead: float) -> float:
    """By which layouts of a set are compared: a generator also by its longest row, which `ahead` batches have time for."""
    generation = 0.0
    if filled.generation is not None:
        generation = max(filled.generation.busy_s, filled.generation.span_s / (ahead + 1))
    return generation + model_seconds(filled, "score") + model_seconds(filled, "train")
