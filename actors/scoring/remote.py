"""The executor of rewards that a server runs, and the reward `remote`, which names one.

A `remote` reward is not called in a process of the actor: the dispatcher hands its calls to the server's client. Scoring
changes nothing on the server, so a request that is sent again does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from async_rlhf.actors.rewards import Answer, reward
from async_rlhf.actors.scoring.reward_worker import Answered, Call, Shown, timed_out
from async_rlhf.actors.workers.client import Failure, SessionClient
from async_rlhf.actors.workers.messages import SERVED, STAGES, Show, Step, Stepped, to_answers
from async_rlhf.actors.workers.messages import Shown as ShownThere
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.score import Score


@reward(retries=3, timeout_s=30.0)
async def remote(address: str, keys: str = "", reward_name: str = "", **fields: Any) -> Score:
    """The score of the reward that the server at `address` serves.

    keys: a key directory (`async-rlhf keys new`), needed for a server on another machine. reward_name: which of its rewards,
    where there are several.
    """
    raise RewardError("the reward 'remote' runs at its server only")


class RemoteRewards:
    """An `Executor`. Batches, limits and the choice of what to prefetch are the server's."""

    def __init__(
        self, address: str, keys: str, names: Mapping[str, str], answered: Answered, shown: Shown, *, is_scorer: bool
    ) -> None:
        """names: by reward, that of its stage there. is_scorer: the scorer of this machine, which limits the time of calls
        itself."""
        self._names, self._answered, self._shown, self._is_scorer = names, answered, shown, is_scorer
        self._timeouts: dict[int, float] = {}
        self._client = SessionClient(address, keys, STAGES if is_scorer else SERVED, self._came, self._show)

    @property
    def num_resent(self) -> int:
        return self._client.num_resent

    def submit(self, call: Call) -> None:
        """A prefetch gets no answer of its own: the server reports what it has read (`shown`)."""
        self._client.do(partial(self._submit, call))

    def discard(self, call_ids: set[int]) -> None:
        self._client.do(partial(self._discard, call_ids))

    def check(self) -> None:
        self._client.check()

    def close(self, deadline_s: float) -> None:
        self._client.close(deadline_s)

    # -- the client's thread -----------------------------------------------------------------------------------------

    def _submit(self, call: Call) -> None:
        stage, members = self._names[call.name], [dict(member) for member in call.members]
        if call.prefetch:
            if call.forgotten:
                self._client.leave((), call.forgotten)
            for member in members:
                self._client.show(Show.model_construct(stage=stage, stream=call.stream or 0, member=member))
            return
        self._timeouts[call.id] = call.timeout_s
        step = Step.model_construct(id=call.id, stage=stage, members=members, tokens=call.tokens, stream=call.stream)
        self._client.step(step, float("inf") if self._is_scorer else call.timeout_s)

    def _discard(self, call_ids: set[int]) -> None:
        self._client.leave(sorted(call_ids))
        for call_id in call_ids:
            if self._timeouts.pop(call_id, None) is not None:
                self._answered(call_id, (Answer(None, "discarded"),))

    def _came(self, call_id: int, came: Stepped | Failure) -> None:
        timeout_s = self._timeouts.pop(call_id)
        if isinstance(came, Stepped):
            self._answered(call_id, to_answers(came.answers))
        else:
            self._answered(call_id, (timed_out(timeout_s) if came.kind == "late" else Answer(None, came.reason),))

    def _show(self, message: ShownThere) -> None:
        (answer,) = to_answers([message.answer])
        self._shown(message.stage, tuple(message.streams), answer)
