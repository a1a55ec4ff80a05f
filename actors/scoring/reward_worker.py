"""The process that runs rewards: plain ones, a call at a time, or asynchronous ones on an event loop, many at once.

Protocol, over one connection: the process sends `None` once its rewards are loaded, receives `Call`s and sends
`(call id, Answers)` for each. A plain call has no time-out here: the parent kills the process. An asynchronous one is
cancelled at its own. Functions that only the calling process has run the same way in its threads.

The queues see whatever runs a reward as an `Executor`: `Call` goes in, `Answers` come back.

    RewardWorkers     worker processes, or threads for functions that no other process can import
    RemoteRewards     a server: the scorer of this machine, a reward server, the process that started the run
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from async_rlhf.actors.rewards import Answer, RewardFunction, RewardSpec, Signature, Stream, failed, load, settings_of
from async_rlhf.actors.workers.process import OUT_OF_MEMORY, end_worker, obey_parent
from async_rlhf.actors.workers.watchdog import LoopWatchdog, Watched


class Call(NamedTuple):
    """One call of one reward, by its name.

    members: of each completion, its fields and the columns of its prompt's row that the reward uses. timeout_s: longest run.
    prefetch: the completions are unfinished and only read, not scored. stream: of a single completion that was or is
    prefetched. forgotten: streams to drop, in a prefetch. tokens: expected cost.
    """

    id: int
    name: str
    members: tuple[Mapping[str, Any], ...]
    timeout_s: float
    prefetch: bool = False
    stream: int | None = None
    forgotten: tuple[int, ...] = ()
    tokens: int = 0


Answers = tuple[Answer, ...]
"""One for each member of a call, or one for all of them."""

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


def timed_out(timeout_s: float, reason: str = "") -> Answer:
    """A transient failure: it may be retried."""
    now, reason = time.time(), reason or f"timed out after {timeout_s:g} s (scoring.timeout_s)"
    return Answer(None, reason, began=now - timeout_s, ended=now, retry_after_s=0.0)


class Ready(NamedTuple):
    """A loaded reward and how to call it."""

    function: Callable[..., Any]
    signature: Signature
    options: Mapping[str, Any]
    retry_on: tuple[type[BaseException], ...]
    stream: Stream | None = None

    def arguments(self, call: Call) -> dict[str, Any]:
        return self.signature.arguments(call.members, self.options)

    def prefetch(self, call: Call) -> None:
        assert self.stream is not None, "a reward without incremental scoring"
        if call.forgotten:
            self.stream.forget(list(call.forgotten), **self.options)
        if call.members:
            self.stream.prefetch(**self.arguments(call))

    def read(self, call: Call, result: Any, began: float) -> Answers:
        """The answers in what the function returned; raises what reading it raises."""
        ended = time.time()
        return tuple(a._replace(began=began, ended=ended) for a in self.signature.read(result, len(call.members)))

    def failed(self, error: BaseException, began: float) -> Answers:
        """Call it while the exception is being handled."""
        return (failed(error, self.retry_on)._replace(began=began, ended=time.time()),)


def serve(
    connection: Connection,
    watchdog: LoopWatchdog,
    specs: tuple[RewardSpec, ...],
    memory_mb: int | None,
    functions: Mapping[str, RewardFunction] | None,
) -> None:
    """Until the other end of the connection is closed. specs: all plain, or all asynchronous. functions: by reward, in a thread
    of the process that has them."""
    if functions is None:
        obey_parent(memory_mb)
    # Before the first call, so that imports do not count against its time-out.
    rewards = {spec.name: ready(spec, functions) for spec in specs}
    if specs[0].kind == "async":
        asyncio.run(_serve_on_loop(connection, watchdog, rewards))
        return
    connection.send(None)
    while (call := _received(connection)) is not None:
        answers = run_call(rewards[call.name], call)
        try:
            connection.send((call.id, answers))
        except OSError:  # this thread was left behind
            return


def ready(spec: RewardSpec, functions: Mapping[str, RewardFunction] | None) -> Ready | Answer:
    """Load a reward; one that cannot be loaded answers every call with the reason."""
    try:
        function = load(spec) if functions is None else functions[spec.name]
        settings = settings_of(function)
        if settings.prepare is not None:
            settings.prepare(**spec.options)
        return Ready(function, Signature.of(function), spec.options, settings.retry_on, settings.stream)
    except BaseException as error:  # noqa: BLE001  loading runs the user's module; its failure must not end the worker
        return failed(error)


def _received(connection: Connection) -> Call | None:
    """None when the other end is closed, which ends a process."""
    try:
        call: Call = connection.recv()
        return call
    except (EOFError, OSError):
        end_worker(0)
        return None


def run_call(reward: Ready | Answer, call: Call) -> Answers:
    """Call a plain reward; whatever it does short of ending the process becomes an answer."""
    if isinstance(reward, Answer):
        return (reward,)
    began = time.time()
    try:
        if call.prefetch:
            reward.prefetch(call)
            return (Answer(None, began=began, ended=time.time()),)
        return reward.read(call, reward.function(**reward.arguments(call)), began)
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
        if isinstance(error, MemoryError):
            end_worker(OUT_OF_MEMORY)
        return reward.failed(error, began)


async def _serve_on_loop(connection: Connection, watchdog: LoopWatchdog, rewards: Mapping[str, Ready | Answer]) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    running: set[asyncio.Task[None]] = set()

    def start(call: Call) -> None:
        task = loop.create_task(_answer(connection, rewards[call.name], call, watchdog))
        running.add(task)
        task.add_done_callback(running.discard)

    def read() -> None:
        while (call := _received(connection)) is not None:
            loop.call_soon_threadsafe(start, call)
        loop.call_soon_threadsafe(over.set)

    connection.send(None)
    # A thread reads, so that the parent can go on sending while a reward blocks the loop.
    threading.Thread(target=read, daemon=True).start()
    await over.wait()


async def _answer(connection: Connection, reward: Ready | Answer, call: Call, watchdog: LoopWatchdog) -> None:
    answers = await _await_call(reward, call, watchdog)
    # The parent always reads, so this does not block the loop.
    connection.send((call.id, answers))


async def _await_call(reward: Ready | Answer, call: Call, watchdog: LoopWatchdog) -> Answers:
    if isinstance(reward, Answer):
        return (reward,)
    began = time.time()
    scope = asyncio.timeout(call.timeout_s)
    try:
        async with scope:
            result = await Watched(reward.function(**reward.arguments(call)), watchdog, call.id)
        return reward.read(call, result, began)
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
        if isinstance(error, MemoryError):
            watchdog.begin(call.id)  # the parent reads which call it was
            end_worker(OUT_OF_MEMORY)
        return (timed_out(call.timeout_s),) if scope.expired() else reward.failed(error, began)
