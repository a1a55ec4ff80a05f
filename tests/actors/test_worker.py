"""The actor's loop where the hub changes its mind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from actors.config import EngineConfig, RewardsConfig
from actors.engine import RolloutKey
from actors.prompts import Row
from actors.rewards import resolve
from actors.scoring.pool import ScoringPool
from actors.torch_engine.loading import load_engine
from actors.worker import Work, Worker
from buffers.client import ActorClient, ActorState
from buffers.record import Group
from buffers.wire import CreditItem

MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-speller"


class ScriptedHub:
    """Gives one batch of credits a poll, then waits for `wanted` puts and stops the actor."""

    def __init__(self, script: list[list[CreditItem]], wanted: int) -> None:
        self._script, self._wanted = script, wanted
        self.groups: list[Group] = []
        self.unacknowledged: list[tuple[int, int]] = []
        self.stop_reason: str | None = None

    def poll(self, state: ActorState, telemetry: Mapping[str, float], timeout_s: float = 0.0) -> None:
        if len(self.groups) >= self._wanted:
            self.stop_reason = "enough"

    def credits(self) -> Sequence[CreditItem]:
        return self._script.pop(0) if self._script else []

    def weights(self) -> None:
        return None

    def put(self, group: Group) -> None:
        self.groups.append(group)

    def beat(self, state: ActorState, telemetry: Mapping[str, float]) -> None:
        pass


def test_a_group_credited_again_while_it_is_made_is_made_once_by_the_new_attempt() -> None:
    def credit(number: int, attempt: int) -> CreditItem:
        return CreditItem(number=number, attempt=attempt, lowest_version=0)

    hub = ScriptedHub([[credit(0, 0), credit(1, 0)], [], [credit(0, 1)]], wanted=2)
    work = Work(
        seed=0,
        rows=[Row("ab", {"answer": "ba"})],
        encode=lambda row: (str(row.prompt), [20, 21]),
        decode=lambda ids: "x" * len(ids),
        group_size=2,
        max_completion_length=12,
        temperature=1.0,
    )
    pool = ScoringPool[RolloutKey](resolve(["exact"], Path.cwd()), RewardsConfig(functions=("exact",)))
    engine = load_engine(str(MODEL), EngineConfig(slots=8), version=0)
    try:
        reason = Worker("a", cast(ActorClient, cast(Any, hub)), engine, pool, work, 4, 1e-3).run()
    finally:
        pool.close()
    assert reason == "enough"
    assert sorted((group.number, group.attempt) for group in hub.groups) == [(0, 1), (1, 0)]
    assert all(len(group.rollouts) == 2 for group in hub.groups)
