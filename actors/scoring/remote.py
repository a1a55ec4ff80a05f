"""Rewards that a server runs: the scorer of this machine, a reward server, the process that started the run.

Batches, limits and the choice of what to prefetch are the server's. Scoring changes nothing there, so a request that is sent
again does no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from async_rlhf.actors.rewards import RewardSpec, reward
from async_rlhf.actors.scoring.reward_worker import Answers, RewardCall
from async_rlhf.actors.workers import CALLER
from async_rlhf.actors.workers.messages import SERVED, STAGES, Leave, SessionStep, Show, Stepped, to_answers
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.score import Score
from async_rlhf.buffers.weights.shared import is_local


class RemoteRewards:
    """The `RemoteKind` of calls. names: by reward, that of its stage there. is_scorer: the scorer of this machine, which limits
    the time of calls itself."""

    timeout_setting = "scoring.timeout_s"
    whole_timeout_s: float | None = None

    def __init__(self, names: Mapping[str, str], *, is_scorer: bool = False) -> None:
        self._names, self._is_scorer = names, is_scorer
        self.codec = STAGES if is_scorer else SERVED

    def begins(self, id: int, what: tuple[Any, ...]) -> Iterable[SessionStep | Show | Leave]:
        """A prefetch gets no answer of its own: the server reports what it has read."""
        call = RewardCall(*what)
        stage, members = self._names[call.name], [dict(member) for member in call.members]
        if not call.prefetch:
            yield SessionStep.model_construct(id=id, stage=stage, members=members, tokens=call.tokens, stream=call.stream)
            return
        if call.forgotten:
            yield Leave(streams=list(call.forgotten))
        for member in members:
            yield Show.model_construct(stage=stage, stream=call.stream or 0, member=member)

    def goes_on(self, id: int, turn: int, sent: Any) -> SessionStep:
        raise AssertionError("a call has one turn")

    def limit_s(self, step: SessionStep, timeout_s: float) -> float:
        return float("inf") if self._is_scorer else timeout_s

    def read(self, step: Stepped) -> Answers:
        return to_answers(step.answers)

    def ends(self, result: Answers) -> bool:
        return True


def is_elsewhere(spec: RewardSpec) -> bool:
    """Whether its calls go to a server on another machine."""
    address = str(spec.options.get("address", ""))
    return spec.target == "remote" and not (is_local(address) or address.startswith(CALLER))


@reward(retries=3, timeout_s=30.0)
async def remote(address: str, keys: str = "", reward_name: str = "", **fields: Any) -> Score:
    """The score of the reward that the server at `address` serves.

    keys: a key directory (`async-rlhf keys new`), needed for a server on another machine. reward_name: which of its rewards,
    where there are several.
    """
    raise RewardError("the reward 'remote' runs at its server only")
