"""How the scores of a rollout become its reward. The record keeps every component; the learner trains on the reward.

    score -> (v - mean) / std where it is normalised -> clipped -> times its weight -> summed or multiplied
          -> 0 unless every gate is above 0 -> clipped

Used by the learner when it consumes a batch, and by an evaluation. Pure but for the running statistics, which are the
learner's: they change with each batch it takes, in order, and stand in its checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.record import source_of
from async_rlhf.buffers.score import Score

TOTAL = "reward"
"""The name by which the whole reward is clipped."""
EPSILON = 1e-6
"""Rewards closer to each other than this are equal."""
_MIN_STD = 1e-6


@dataclass(frozen=True)
class Composition:
    """How the components, by name, make one reward."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """1.0 where none is given."""
    rule: Literal["sum", "product"] = "sum"
    """Whether the weighted values are summed or multiplied."""
    gates: tuple[str, ...] = ()
    """Components that only open or close: where one is not above 0 the reward is 0."""
    clip: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest value; `reward` clips the whole."""
    normalise: tuple[str, ...] = ()
    """Components that are measured in running standard deviations from their running mean."""
    by_source: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Weights by the `source` of a row, over those of `weights`."""

    def of(self, columns: Mapping[str, Any]) -> Composition:
        """The rule for the rollouts of a row with these columns."""
        own = self.by_source.get(source_of(columns) or "")
        return replace(self, weights={**self.weights, **own}) if own else self

    def check(self, names: Iterable[str]) -> None:
        """Raises ConfigError for a name that is no reward's, and for a range that is empty."""
        known = sorted(names)
        named = [("weights", name) for name in self.weights] + [("gates", name) for name in self.gates]
        named += [("clip", name) for name in self.clip if name != TOTAL] + [("normalise", name) for name in self.normalise]
        for section, name in named:
            if name not in known:
                raise ConfigError(
                    f"rewards.{section} names {name!r}, which is no reward of this run; {did_you_mean(name, known)}"
                )
        for name, (low, high) in self.clip.items():
            if not low < high:
                raise ConfigError(
                    f"rewards.clip.{name} = [{low:g}, {high:g}] is an empty range; the first number must be lower"
                )
        if self.gates and set(self.gates) == set(known):
            raise ConfigError("rewards.gates names every reward: a gate only opens or closes; name one that is counted")

    def reward(self, scores: Mapping[str, Score], statistics: Statistics | None = None) -> float | None:
        """The reward of one rollout, or None when it does not count: a score failed, or none that counts applied."""
        if any(score.failure is not None for score in scores.values()):
            return None
        gated = [score.value for name, score in scores.items() if name in self.gates and score.value is not None]
        values = [
            self._component(name, score.value, statistics)
            for name, score in scores.items()
            if score.value is not None and name not in self.gates
        ]
        if not values:
            return None
        whole = math.fsum(values) if self.rule == "sum" else math.prod(values)
        return self._clipped(TOTAL, whole if all(value > 0 for value in gated) else 0.0)

    def is_constant(self, members: Sequence[Mapping[str, Score]]) -> bool:
        """Whether all members have the same reward, so that nothing can be learned from comparing them.

        Not where a score failed: failures are for the learner to see. Not with `normalise`: that takes its statistics.
        """
        if any(score.failure is not None for scores in members for score in scores.values()):
            return False
        rewards = [reward for reward in map(self.reward, members) if reward is not None]
        return len(rewards) < 2 or max(rewards) - min(rewards) < EPSILON

    def _component(self, name: str, value: float, statistics: Statistics | None) -> float:
        if statistics is not None and name in self.normalise:
            value = statistics.normalised(name, value)
        return self.weights.get(name, 1.0) * self._clipped(name, value)

    def _clipped(self, name: str, value: float) -> float:
        low, high = self.clip.get(name, (-math.inf, math.inf))
        return min(high, max(low, value))


class Statistics:
    """Count, mean and summed squared deviation of each normalised component (Welford 1962). Owned by the learner."""

    def __init__(self, state: Mapping[str, tuple[float, float, float]] | None = None) -> None:
        self._of = {name: (float(count), float(mean), float(m2)) for name, (count, mean, m2) in (state or {}).items()}

    @property
    def state(self) -> dict[str, list[float]]:
        """The state as JSON values; give it back to continue."""
        return {name: list(values) for name, values in self._of.items()}

    def observe(self, composition: Composition, rollouts: Iterable[Mapping[str, Score]]) -> None:
        """Take in the scores of a batch, without failures and scores that do not apply."""
        for scores in rollouts:
            for name in composition.normalise:
                score = scores.get(name)
                if score is not None and score.value is not None:
                    count, mean, m2 = self._of.get(name, (0.0, 0.0, 0.0))
                    off = score.value - mean
                    mean += off / (count + 1)
                    self._of[name] = (count + 1, mean, m2 + off * (score.value - mean))

    def normalised(self, name: str, value: float) -> float:
        """The value in standard deviations from the mean; unchanged before two observations differ."""
        count, mean, m2 = self._of.get(name, (0.0, 0.0, 0.0))
        std = math.sqrt(m2 / count) if count > 1 else 0.0
        return (value - mean) / std if std > _MIN_STD else value
