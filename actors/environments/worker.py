"""Episodes in the processes that run them: a generator that is driven one step at a time, synchronous or asynchronous.

A step returns its result and never raises for what the user's code does, but for memory that ran out. An asynchronous step
runs on the event loop and is cancelled when it must end; a synchronous one runs in a thread, which ends only with its process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.actors.data.images import ImageLoader, take_none
from async_rlhf.actors.data.images import Read as ReadImage
from async_rlhf.actors.environments.config import SourceEnvironment
from async_rlhf.actors.environments.loading import EnvironmentSpec, load, with_options
from async_rlhf.actors.environments.settings import Beside, EnvironmentFunction, Reply
from async_rlhf.actors.environments.yields import EpisodeEnd, Read, read_return, read_yield
from async_rlhf.actors.workers.sessions import NOTHING, Nothing
from async_rlhf.actors.workers.watchdog import LoopWatchdog, Watched
from async_rlhf.buffers.failures import Failure, FailureKind, raised
from async_rlhf.buffers.images import IMAGES


@dataclass(frozen=True)
class EpisodeImages:
    """How a process that runs episodes reads images: those that a generator yields, those that an agent sends, and by digest
    those of a row, which are opened. Without a store each raises."""

    yielded: ReadImage = take_none
    sent: ReadImage = take_none
    opened: Callable[[str], Any] = take_none

    @classmethod
    def of(cls, directory: Path, takes: bool) -> EpisodeImages:
        """directory: of the run's store. takes: whether others than those that it has may come."""
        from async_rlhf.buffers.images.store import ImageStore

        store = ImageStore(directory, durable=True)
        add = store.add if takes else take_none
        # What an agent sends is the text of a model or of a page: it names no file here.
        return cls(ImageLoader(Path(), add, store), ImageLoader(None, add, store), store.open)


NO_IMAGES = EpisodeImages()


class EpisodeKind:
    """The `SessionKind` of a pool of episodes. function: where only this process has it; it then runs in threads."""

    timeout_setting, memory_setting = "timeout_s", "environment.worker_memory_mb"
    cleans_up = True

    def __init__(
        self, spec: EnvironmentSpec, config: SourceEnvironment, function: EnvironmentFunction | None, images: EpisodeImages
    ) -> None:
        self.spec, self.in_thread, self._images = spec, function is not None, images
        self.memory_mb = None if self.in_thread else config.worker_memory_mb
        self.at_once: int | None = config.max_concurrency
        # Made here for threads, which share this kind: each of them, and each that takes one's place, calls `load`.
        self._function = None if function is None else with_options(function, spec)
        self._threads: Executor | None = None if function is None else DaemonThreads()

    def load(self) -> None:
        """Raises EpisodeError."""
        if self._function is None:
            self._function, self._threads = load(self.spec, self._images.sent), ThreadPoolExecutor(self.at_once, "episode")

    def call(self, what: Any) -> Any:
        raise AssertionError("an episode is no single call")

    def begin(self, id: int, what: Mapping[str, Any], watchdog: LoopWatchdog) -> WorkerEpisode:
        assert self._function is not None
        threads = None if self.spec.kind == "async" else self._threads
        return WorkerEpisode(self._function, what, self.spec, threads, watchdog, id, self._images)


class WorkerEpisode:
    """A `Session`. fields: of the episode. threads: for the steps of a synchronous generator, each in whichever is free; else
    the watchdog shows whose step the loop runs."""

    def __init__(
        self,
        function: EnvironmentFunction,
        fields: Mapping[str, Any],
        spec: EnvironmentSpec,
        threads: Executor | None,
        watchdog: LoopWatchdog,
        id: int,
        images: EpisodeImages,
    ) -> None:
        self._function, self._fields, self._spec, self._threads = function, fields, spec, threads
        self._watchdog, self._id, self._images = watchdog, id, images
        self.stoppable, self.timeout_s, self.whole_timeout_s = threads is None, spec.timeout_s, spec.episode_timeout_s
        self._generator: Any = None
        self._turn = 0
        self.more: Future[None] | None = None

    def step(self, sent: str | Reply | None) -> asyncio.Future[Read | EpisodeEnd | Failure | Nothing]:
        if self._threads is None:
            return asyncio.ensure_future(self._step_async(sent))
        return asyncio.get_running_loop().run_in_executor(self._threads, self._step, sent)

    def close(self) -> asyncio.Future[str]:
        if self._threads is None:
            return asyncio.ensure_future(self._close_async())
        return asyncio.get_running_loop().run_in_executor(self._threads, self._close)

    def ends(self, result: Read | EpisodeEnd | Nothing) -> bool:
        return isinstance(result, EpisodeEnd)

    def _started(self) -> Any:
        """Calling the function fails for arguments that it does not take."""
        if self._generator is None:
            images = [self._images.opened(digest) for digest in self._fields.get(IMAGES, ())]
            self._generator = self._function(**{**self._fields, **({IMAGES: images} if images else {})})
        return self._generator

    def _read(self, yielded: Any) -> Read | EpisodeEnd | Nothing:
        if isinstance(yielded, Beside):
            yielded, more = yielded
            self.more = None if self._spec.one_by_one else more
            if yielded is None:
                return NOTHING
        read = read_yield(yielded, self._turn, self._spec.max_turns, self._spec.calls, self._images.yielded)
        self._turn += isinstance(read, Read)
        return read

    def _step(self, sent: str | Reply | None) -> Read | EpisodeEnd | Failure | Nothing:
        try:
            return self._read(self._started().send(sent))
        except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
            return self._end_of(error)

    async def _step_async(self, sent: str | Reply | None) -> Read | EpisodeEnd | Failure | Nothing:
        try:
            return self._read(await Watched(self._started().asend(sent), self._watchdog, self._id))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return Failure(FailureKind.RAISED, "CancelledError: something cancelled what the environment waits for")
        except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
            return self._end_of(error)

    def _end_of(self, error: BaseException) -> EpisodeEnd | Failure:
        """The end after a step that gave nothing."""
        if isinstance(error, StopIteration | StopAsyncIteration):
            return read_return(self._turn, getattr(error, "value", None))
        if isinstance(error, MemoryError):
            raise error
        return raised(error)

    def _close(self) -> str:
        try:
            if self._generator is not None:
                self._generator.close()
        except BaseException as error:  # noqa: BLE001  the user's cleanup may raise anything
            return raised(error).reason
        return ""

    async def _close_async(self) -> str:
        try:
            if self._generator is not None:
                await Watched(self._generator.aclose(), self._watchdog, self._id)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  the user's cleanup may raise anything
            return raised(error).reason
        return ""


class DaemonThreads(Executor):
    """One for each call, so that a step that hangs takes no other's place and never keeps the process alive."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments, **named))
                except MemoryError as error:
                    future.set_exception(error)

        threading.Thread(target=run, name="episode", daemon=True).start()
        return future
