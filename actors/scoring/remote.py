"""Rewards that a server runs: the scorer of this machine, a reward server, the process that started the run.

A `remote` reward is not called in a process of the actor: its calls go to the server's client. Scoring changes nothing on the
server, so a request that is sent again does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import Any

from async_rlhf.actors.rewards import Answer, reward
from async_rlhf.actors.scoring.reward_worker import RewardCall
from async_rlhf.actors.workers.book import Failed
from async_rlhf.actors.workers.client import Failure, SessionClient
from async_rlhf.actors.workers.messages import SERVED, STAGES, SessionStep, Show, Stepped, to_answers
from async_rlhf.actors.workers.messages import Shown as ShownThere
from async_rlhf.actors.workers.sessions import Closed, Happened, StepResult
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.score import Score

Shown = Callable[[str, tuple[int, ...], Answer], None]
"""Takes a finished prefetch: reward, streams, and when it ran or why it failed."""


class RemoteRewards:
    """`Sessions` of calls. Batches, limits and the choice of what to prefetch are the server's."""

    def __init__(
        self, address: str, keys: str, names: Mapping[str, str], happened: Happened, shown: Shown, *, is_scorer: bool
    ) -> None:
        """names: by reward, that of its stage there. is_scorer: the scorer of this machine, which limits the time of calls
        itself."""
        self._names, self._happened, self._shown, self._is_scorer = names, happened, shown, is_scorer
        self._timeouts: dict[int, float] = {}
        self._client = SessionClient(address, keys, STAGES if is_scorer else SERVED, self._came, self._show)

    @property
    def num_resent(self) -> int:
        return self._client.num_resent

    def begin(self, id: int, key: Hashable, what: tuple[Any, ...], timeout_s: float) -> None:
        """A prefetch gets no answer of its own: the server reports what it has read (`shown`)."""
        self._client.do(partial(self._begin, id, RewardCall(*what)))

    def discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        self._client.do(partial(self._discard, tuple(ids)))

    def check(self) -> None:
        self._client.check()

    def close(self, deadline_s: float) -> None:
        self._client.close(deadline_s)

    # -- the client's thread -----------------------------------------------------------------------------------------

    def _begin(self, id: int, call: RewardCall) -> None:
        stage, members = self._names[call.name], [dict(member) for member in call.members]
        if call.prefetch:
            if call.forgotten:
                self._client.leave((), call.forgotten)
            for member in members:
                self._client.show(Show.model_construct(stage=stage, stream=call.stream or 0, member=member))
            return
        self._timeouts[id] = call.timeout_s
        step = SessionStep.model_construct(id=id, stage=stage, members=members, tokens=call.tokens, stream=call.stream)
        self._client.step(step, float("inf") if self._is_scorer else call.timeout_s)

    def _discard(self, ids: Collection[int]) -> None:
        self._client.leave(sorted(ids))
        for id in ids:
            if self._timeouts.pop(id, None) is not None:
                self._happened(id, Closed(id))

    def _came(self, id: int, came: Stepped | Failure) -> None:
        timeout_s = self._timeouts.pop(id)
        if isinstance(came, Stepped):
            self._happened(id, StepResult(id, to_answers(came.answers)))
        elif came.kind == "late":
            self._happened(id, Failed("timed out", f"{came.reason}: {timeout_s:g} s (scoring.timeout_s)"))
        else:
            self._happened(id, Failed("died", came.reason))

    def _show(self, message: ShownThere) -> None:
        (answer,) = to_answers([message.answer])
        self._shown(message.stage, tuple(message.streams), answer)


@reward(retries=3, timeout_s=30.0)
async def remote(address: str, keys: str = "", reward_name: str = "", **fields: Any) -> Score:
    """The score of the reward that the server at `address` serves.

    keys: a key directory (`async-rlhf keys new`), needed for a server on another machine. reward_name: which of its rewards,
    where there are several.
    """
    raise RewardError("the reward 'remote' runs at its server only")
