"""The child process that runs episodes on one event loop. Started and killed by `workers`.

owns        the generators of its episodes, and threads for the steps of synchronous ones
waits for   messages (in a thread of its own, so that the actor can always send), steps, the time-out of each
woken by    these
on close    it is killed; episodes that are to be cleaned up have been closed before

    actor -> process   BeginEpisode, Reply, CloseEpisode
    process -> actor   None once the environment is imported, or StartFailed; EpisodeStep, EpisodeClosed

Each BeginEpisode and each Reply is answered by one EpisodeStep; each episode ends with EpisodeClosed, after its generator's
cleanup. An id names an episode of one actor's life.

A blocked loop cannot report itself: the child writes into shared memory that its loop turns and which asynchronous step runs on
it (`watchdog`); the actor reads both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.generators import AsyncSteps, DaemonThreads, Steps, ThreadSteps
from async_rlhf.actors.environments.loading import EnvironmentSpec, load, with_options
from async_rlhf.actors.environments.settings import EnvironmentFunction
from async_rlhf.actors.environments.yields import End, Read, fails, raised, read_yield
from async_rlhf.actors.workers.process import OUT_OF_MEMORY, end_worker, ended, obey_parent
from async_rlhf.actors.workers.watchdog import GRACE_S, LoopWatchdog
from async_rlhf.buffers.errors import EpisodeError

# How often the loop shows that it turns.
PULSE_S = 0.2


class BeginEpisode(NamedTuple):
    """fields: what the environment can use of its columns, `prompt` and `seed`."""

    id: int
    fields: Mapping[str, Any]


class Reply(NamedTuple):
    """What the model wrote in its turn."""

    id: int
    text: str


class CloseEpisode(NamedTuple):
    """Nothing more is wanted of it."""

    id: int


class StartFailed(NamedTuple):
    """The environment cannot be imported; the process ends."""

    reason: str


class EpisodeStep(NamedTuple):
    """What a step came to. began, ended: of it, in seconds since the epoch. retire: as of EpisodeClosed."""

    id: int
    came: Read | End
    began: float
    ended: float
    retire: bool = False


class EpisodeClosed(NamedTuple):
    """failure: what its cleanup raised. retire: something of it runs on and cannot be stopped, or memory ran out: its process
    should take no further episodes."""

    id: int
    failure: str
    retire: bool


Message = BeginEpisode | Reply | CloseEpisode | StartFailed | EpisodeStep | EpisodeClosed | None


def serve(
    connection: Connection,
    watchdog: LoopWatchdog,
    spec: EnvironmentSpec,
    config: EnvironmentConfig,
    function: EnvironmentFunction | None,
) -> None:
    """Until the other end of the connection is closed. function: in a thread of the process that has it."""
    threads: Executor = DaemonThreads()
    if function is None:
        obey_parent(config.worker_memory_mb)
        threads = ThreadPoolExecutor(config.max_concurrency, "episode")
        try:
            function = load(spec)
        except EpisodeError as error:
            connection.send(StartFailed(str(error)))
            os._exit(1)  # whatever else the import has begun
    else:
        function = with_options(function, spec)
    asyncio.run(_Worker(connection, spec, config, function, threads, watchdog).run())


class _Episode:
    """One episode: its generator, what the model writes (None: nothing more is wanted), and when it must end.

    is_stuck: a step of it runs on and cannot be stopped. retires: its process should be replaced.
    """

    def __init__(self, id: int, steps: Steps, ends_at: float) -> None:
        self.id, self.steps, self.ends_at = id, steps, ends_at
        self.replies: asyncio.Queue[str | None] = asyncio.Queue()
        self.running: asyncio.Future[Any] | None = None
        self.is_closed = self.is_stuck = self.retires = False

    def close(self) -> None:
        """Nothing more is wanted of it: an asynchronous step ends now, its cleanup is left to run."""
        if not self.is_closed:
            self.is_closed = True
            self.replies.put_nowait(None)
            if self.steps.stoppable and self.running is not None:
                self.running.cancel()


class _Worker:
    def __init__(
        self,
        connection: Connection,
        spec: EnvironmentSpec,
        config: EnvironmentConfig,
        function: EnvironmentFunction,
        threads: Executor,
        watchdog: LoopWatchdog,
    ) -> None:
        self._connection, self._spec, self._config, self._function = connection, spec, config, function
        self._threads, self._watchdog = threads, watchdog
        self._places = asyncio.Semaphore(config.max_concurrency)
        self._episodes: dict[int, _Episode] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._watchdog.beat()
        self._send(None)
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(self._take, self._connection.recv())
            end_worker(0)
            loop.call_soon_threadsafe(over.set)

        threading.Thread(target=read, name="messages", daemon=True).start()
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), PULSE_S)
            self._watchdog.beat()

    def _send(self, message: Message) -> None:
        # The parent always reads, so this does not block the loop.
        self._connection.send(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, BeginEpisode):
            self._begin(message.id, message.fields)
        elif isinstance(message, Reply) and message.id in self._episodes:
            self._episodes[message.id].replies.put_nowait(message.text)
        elif isinstance(message, CloseEpisode) and message.id in self._episodes:
            self._episodes[message.id].close()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Of the connection where a thread was left behind; else a defect of ours: the episode would never be answered.
            if not isinstance(error, OSError):
                traceback.print_exception(error)
            end_worker(1)

    def _begin(self, id: int, fields: Mapping[str, Any]) -> None:
        """At once, because a message to close it may come before its task runs."""
        try:
            generator = self._function(**fields)
        except BaseException as error:  # noqa: BLE001  calling the function fails for arguments it does not take
            now = time.time()
            self._send(EpisodeStep(id, raised(error), now, now))
            self._send(EpisodeClosed(id, "", retire=False))
            return
        steps: Steps = (
            AsyncSteps(generator, self._watchdog, id) if self._spec.kind == "async" else ThreadSteps(generator, self._threads)
        )
        limit_s = self._spec.episode_timeout_s
        ends_at = float("inf") if limit_s is None else time.monotonic() + limit_s
        self._episodes[id] = _Episode(id, steps, ends_at)
        task = asyncio.get_running_loop().create_task(self._attend(self._episodes[id]))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _attend(self, episode: _Episode) -> None:
        """One episode, from its first step to the end of its cleanup."""
        id = episode.id
        turn, sent = 0, None
        while not episode.is_closed:
            came, began = await self._step(episode, sent, turn)
            self._send(EpisodeStep(id, came, began, time.time(), episode.is_stuck or episode.retires))
            if isinstance(came, End):
                break
            sent = await episode.replies.get()
            if sent is None:
                break
            turn += 1
        episode.is_closed = True
        failure = await self._close(episode)
        del self._episodes[id]
        self._send(EpisodeClosed(id, failure, episode.is_stuck or episode.retires))

    async def _step(self, episode: _Episode, sent: str | None, turn: int) -> tuple[Read | End, float]:
        """What one step of the environment came to, and when it began."""
        reads = partial(read_yield, turn=turn, max_turns=self._spec.max_turns)
        await self._places.acquire()
        began = time.time()
        left_s = episode.ends_at - time.monotonic()
        came: Read | End | None = None
        if left_s > 0 and not episode.is_closed:
            came = await self._bounded(episode, episode.steps.step(sent, turn, reads), min(left_s, self._spec.timeout_s))
        else:
            self._places.release()
        if came is None:
            came = self._timed_out(in_step=left_s > self._spec.timeout_s)
        if isinstance(came, End) and came.kind == "died":
            # What each episode holds cannot be told apart: memory comes back with a new process.
            episode.retires = True
            came = fails("died", ended(OUT_OF_MEMORY, self._config.worker_memory_mb, "environment.worker_memory_mb"))
        return came, began

    def _timed_out(self, in_step: bool) -> End:
        if in_step:
            return fails("timed out", f"timed out after {self._spec.timeout_s:g} s (timeout_s)")
        return fails("timed out", f"the episode took longer than {self._spec.episode_timeout_s:g} s (episode_timeout_s)")

    async def _close(self, episode: _Episode) -> str:
        """Run the generator's cleanup, unless it is stuck; what that failed with."""
        if episode.is_stuck:
            return ""
        await self._places.acquire()
        failure = await self._bounded(episode, episode.steps.close(), self._spec.timeout_s)
        return f"timed out after {self._spec.timeout_s:g} s (timeout_s)" if failure is None else failure

    async def _bounded(self, episode: _Episode, running: asyncio.Future[Any], timeout_s: float) -> Any:
        """The result, None where there was none in time. The place is given back unless what runs cannot be stopped."""
        episode.running = running
        done, _ = await asyncio.wait({running}, timeout=timeout_s)
        result = None
        if done:
            result = None if running.cancelled() else running.result()
        elif episode.steps.stoppable:
            running.cancel()
            done, _ = await asyncio.wait({running}, timeout=GRACE_S)
        episode.running = None
        episode.is_stuck = not done
        if done:
            self._places.release()
        return result
