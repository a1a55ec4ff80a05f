"""What runs the calls of rewards: the queues see each as an `Executor`, into which `Call`s go and from which `Answers` come.

    RewardWorkers     worker processes, or threads for functions that no other process can import
    RemoteRewards     a server: the scorer of this machine, a reward server, the process that started the run

A `remote` reward is not called in a process of the actor: its calls go to the server's client. Scoring changes nothing on the
server, so a request that is sent again does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from async_rlhf.actors.rewards import Answer, RewardFunction, RewardSpec, reward
from async_rlhf.actors.scoring.reward_worker import Answers, Call, RewardKind, timed_out
from async_rlhf.actors.workers.client import Failure, SessionClient
from async_rlhf.actors.workers.messages import SERVED, STAGES, Show, Step, Stepped, to_answers
from async_rlhf.actors.workers.messages import Shown as ShownThere
from async_rlhf.actors.workers.pool import Failed, WorkerPool
from async_rlhf.actors.workers.sessions import Came, Closed
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.score import Score

Answered = Callable[[int, Answers], None]
"""Takes the answers of a call by its id, -1 when the executor has ended; called from the executor's thread."""

Shown = Callable[[str, tuple[int, ...], Answer], None]
"""Takes a finished prefetch: reward, streams, and when it ran or why it failed."""


class Executor(Protocol):
    """Runs calls and answers each once, through the `Answered` given at construction. Never blocks its caller."""

    def submit(self, call: Call) -> None: ...

    def discard(self, call_ids: set[int]) -> None:
        """The answers of these calls are no longer needed; those it can stop are answered at once."""
        ...

    def check(self) -> None:
        """Raises RewardError when it cannot recover."""
        ...

    def close(self, deadline_s: float) -> None:
        """Kills what runs; unanswered calls get no answer. Raises DeadlineError if something is left after `deadline_s`."""
        ...


class RewardWorkers:
    """An `Executor`: each call is a session. Plain ones run in order, and are killed with their process at their time-out;
    asynchronous ones share the loop of one process.

    at_once: asynchronous calls in it. memory_mb: of each process, None for no limit. functions: by reward, those of this
    process.
    """

    def __init__(
        self,
        specs: tuple[RewardSpec, ...],
        workers: int,
        at_once: int,
        memory_mb: int | None,
        answered: Answered,
        functions: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        self._answered = answered
        self._calls: dict[int, Call] = {}
        what = f"the worker processes of {', '.join(f'{spec.name} ({spec.target})' for spec in specs)}"
        self._pool = WorkerPool(RewardKind(specs, at_once, memory_mb, functions), workers, what, RewardError, self._happened)

    def submit(self, call: Call) -> None:
        self._calls[call.id] = call
        self._pool.begin(call.id, call.id, call, call.timeout_s)

    def discard(self, call_ids: set[int]) -> None:
        """A plain call in flight runs to its end."""
        self._pool.discard(call_ids, call_ids)

    def check(self) -> None:
        self._pool.check()

    def close(self, deadline_s: float) -> None:
        self._pool.close(deadline_s)

    def _happened(self, id: int, came: Came | Closed | Failed | None) -> None:
        """Called from the pool's thread. A call whose process ended for another's reason is made again."""
        if id not in self._calls:  # the pool has ended: `check` has its reason
            self._answered(-1, ())
        elif came is None:
            self.submit(self._calls[id])
        else:
            self._answered(id, self._answers(self._calls.pop(id), came))

    def _answers(self, call: Call, came: Came | Closed | Failed) -> Answers:
        if isinstance(came, Came):
            return tuple(answer._replace(began=came.began, ended=came.ended) for answer in came.result)
        if isinstance(came, Closed):
            return (Answer(None, "discarded"),)
        return (timed_out(call.timeout_s, came.reason) if came.kind == "timed out" else Answer(None, came.reason),)


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


@reward(retries=3, timeout_s=30.0)
async def remote(address: str, keys: str = "", reward_name: str = "", **fields: Any) -> Score:
    """The score of the reward that the server at `address` serves.

    keys: a key directory (`async-rlhf keys new`), needed for a server on another machine. reward_name: which of its rewards,
    where there are several.
    """
    raise RewardError("the reward 'remote' runs at its server only")
