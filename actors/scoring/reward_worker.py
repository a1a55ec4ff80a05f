"""Calls of rewards in the processes that run them: plain ones in order, or asynchronous ones on an event loop, many at once.

A plain call has no time-out here: its process is killed. Functions that only the calling process has run the same way in its
threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from async_rlhf.actors.rewards import Answer, RewardFunction, RewardSpec, Signature, Stream, load, settings_of
from async_rlhf.actors.scoring.images import with_images
from async_rlhf.actors.workers.process import OUT_OF_MEMORY, end_worker
from async_rlhf.actors.workers.sessions import Closed, StepResult
from async_rlhf.actors.workers.watchdog import LoopWatchdog, Watched
from async_rlhf.buffers.failures import Failure, FailureKind, raised


class RewardCall(NamedTuple):
    """One call of one reward, by its name. It travels as a plain tuple, which is packed faster.

    members: of each completion, its fields and the columns of its prompt's row that the reward uses. timeout_s: longest run.
    prefetch: the completions are unfinished and only read, not scored. stream: of a single completion that was or is
    prefetched. forgotten: streams to drop, in a prefetch. tokens: expected cost.
    """

    name: str
    members: tuple[Mapping[str, Any], ...]
    timeout_s: float
    prefetch: bool = False
    stream: int | None = None
    forgotten: tuple[int, ...] = ()
    tokens: int = 0


Answers = tuple[Answer, ...]
"""One for each member of a call, or one for all of them."""


def answers_of(came: StepResult | Closed) -> Answers:
    """With the times of what ran here; a server has given those of its own."""
    if isinstance(came, Closed):
        return (Answer(None, Failure(FailureKind.REFUSED, "discarded")),)
    answers: Answers = (Answer(None, came.result),) if isinstance(came.result, Failure) else came.result
    return tuple(each if each.began else each._replace(began=came.began, ended=came.ended) for each in answers)


class RewardKind:
    """The `SessionKind` of a pool of reward workers. specs: all plain, or all asynchronous. at_once: asynchronous calls in the
    process. functions: by reward, those that only this process has."""

    timeout_setting, memory_setting = "scoring.timeout_s", "scoring.worker_memory_mb"
    cleans_up = False

    def __init__(
        self,
        specs: tuple[RewardSpec, ...],
        at_once: int,
        memory_mb: int | None,
        functions: Mapping[str, RewardFunction] | None,
    ) -> None:
        self._specs, self._functions, self.in_thread = specs, functions, functions is not None
        self.memory_mb = None if self.in_thread else memory_mb
        self.at_once = at_once if specs[0].kind == "async" else None
        self._rewards: Mapping[str, Ready | Answer] = {}

    def load(self) -> None:
        self._rewards = {spec.name: ready(spec, self._functions) for spec in self._specs}

    def call(self, what: tuple[Any, ...]) -> Answers:
        call = RewardCall(*what)
        return run_call(self._rewards[call.name], call)

    def begin(self, id: int, what: tuple[Any, ...], watchdog: LoopWatchdog) -> AsyncCall:
        call = RewardCall(*what)
        return AsyncCall(self._rewards[call.name], call, watchdog, id, self.in_thread)


class Ready(NamedTuple):
    """A loaded reward and how to call it."""

    function: Callable[..., Any]
    signature: Signature
    options: Mapping[str, Any]
    retry_on: tuple[type[BaseException], ...]
    stream: Stream | None = None

    def arguments(self, call: RewardCall) -> dict[str, Any]:
        return self.signature.arguments(with_images(self.signature, call.members), self.options)

    def prefetch(self, call: RewardCall) -> Answers:
        assert self.stream is not None, "a reward without incremental scoring"
        if call.forgotten:
            self.stream.forget(list(call.forgotten), **self.options)
        if call.members:
            self.stream.prefetch(**self.arguments(call))
        return (Answer(None),)


def ready(spec: RewardSpec, functions: Mapping[str, RewardFunction] | None) -> Ready | Answer:
    """Load a reward; one that cannot be loaded answers every call with the reason."""
    try:
        function = load(spec) if functions is None else functions[spec.name]
        settings = settings_of(function)
        if settings.prepare is not None:
            settings.prepare(**spec.options)
        return Ready(function, Signature.of(function), spec.options, settings.retry_on, settings.stream)
    except BaseException as error:  # noqa: BLE001  loading runs the user's module; its failure must not end the worker
        return Answer(None, raised(error))


def run_call(reward: Ready | Answer, call: RewardCall) -> Answers:
    """Call a plain reward; whatever it does short of ending the process becomes an answer."""
    if isinstance(reward, Answer):
        return (reward,)
    try:
        if call.prefetch:
            return reward.prefetch(call)
        return reward.signature.read(reward.function(**reward.arguments(call)), len(call.members))
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
        if isinstance(error, MemoryError):
            end_worker(OUT_OF_MEMORY)
        return (Answer(None, raised(error, reward.retry_on)),)


class AsyncCall:
    """A `Session` of one step. in_thread: no new process would free memory, so that its want is a failure like others."""

    stoppable = True
    whole_timeout_s: float | None = None
    more = None

    def __init__(self, reward: Ready | Answer, call: RewardCall, watchdog: LoopWatchdog, id: int, in_thread: bool) -> None:
        self._reward, self._call, self._watchdog, self._id, self._in_thread = reward, call, watchdog, id, in_thread
        self.timeout_s = call.timeout_s

    def step(self, sent: str | None) -> asyncio.Future[Answers]:
        return asyncio.ensure_future(self._answers())

    async def _answers(self) -> Answers:
        reward = self._reward
        if isinstance(reward, Answer):
            return (reward,)
        try:
            result = await Watched(reward.function(**reward.arguments(self._call)), self._watchdog, self._id)
            return reward.signature.read(result, len(self._call.members))
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            task = asyncio.current_task()
            is_stopped = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
            if is_stopped or (isinstance(error, MemoryError) and not self._in_thread):
                raise
            return (Answer(None, raised(error, reward.retry_on)),)

    def close(self) -> asyncio.Future[str]:
        raise AssertionError("nothing of a call is cleaned up")

    def ends(self, result: Answers) -> bool:
        return True
