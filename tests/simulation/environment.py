"""An environment in virtual time: it says "p", answers one or two turns with an observation, and gives a score; now and then
its process ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, cast

from async_rlhf.actors.engine import RolloutKey
from async_rlhf.actors.environments import Content, EnvironmentSpec
from async_rlhf.actors.environments.pool import EpisodeCounters, EpisodePool, Event
from async_rlhf.actors.environments.rendering import Rendered, Renderer
from async_rlhf.actors.environments.yields import End, Read
from async_rlhf.actors.loop.episodes import Play
from async_rlhf.buffers.record import Score

OBSERVED = 1 << 20
"""The token of an observation: no version of these runs."""
_LOST = 0.02


class FakeEnvironment:
    """Answers after none or a few polls. Which turns an episode has follows from its key, as from seeds."""

    def __init__(self, rng: Random) -> None:
        self._rng, self.counters = rng, EpisodeCounters()
        self._turns: dict[RolloutKey, int] = {}
        self._waiting: dict[RolloutKey, int] = {}  # polls until it answers

    def begin(self, key: RolloutKey, fields: Mapping[str, Any]) -> None:
        assert key not in self._turns
        self._turns[key], self._waiting[key] = 0, self._rng.choice((0, 0, 1, 4))

    def reply(self, key: RolloutKey, text: str) -> None:
        assert key not in self._waiting, "it is not the model's turn"
        self._turns[key] += 1
        self._waiting[key] = self._rng.choice((0, 0, 1, 4))

    def num_turns(self, key: RolloutKey) -> int:
        return self._turns[key] + 1 if key in self._turns else 0

    def poll(self) -> list[Event[RolloutKey]]:
        ready = [key for key, left in self._waiting.items() if left == 0]
        self._waiting = {key: left - 1 for key, left in self._waiting.items() if left > 0}
        return [self._event(key) for key in ready]

    def discard(self, keys: Iterable[RolloutKey]) -> None:
        for key in keys:
            self._turns.pop(key, None)
            self._waiting.pop(key, None)

    def _event(self, key: RolloutKey) -> Event[RolloutKey]:
        if self._rng.random() < _LOST:
            del self._turns[key]
            return Event(key, None)
        if self._turns[key] <= (key.group + key.member) % 3:
            return Event(key, Read("p"))
        del self._turns[key]
        return Event(key, End("scored", Score(float(key.group // 2 % 2))))


class _Rendering:
    def prompt(self, content: Content) -> Rendered:
        return Rendered("p", [1])

    def is_chat(self, prompt: Content) -> bool:
        return False

    def splits(self, prompt: Content) -> bool:
        return True

    def whole(self, prompt: Content, turns: Sequence[object], row_ids: Sequence[int]) -> Rendered:
        """The row begins anew with every second answer."""
        return Rendered("o", [OBSERVED, OBSERVED], restarts=len(turns) % 2 == 0)


def fake_play(rng: Random) -> Play:
    pool = cast("EpisodePool[RolloutKey]", FakeEnvironment(rng))
    spec = EnvironmentSpec("environment", "environment", "sync", max_turns=1000)
    return Play(spec, pool, cast("Renderer", _Rendering()), 4, 64)
