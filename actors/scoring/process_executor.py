"""The executor of synchronous rewards: one call at a time in each of a few worker processes that can be killed.

The process pool is pebble's, because it kills and replaces the one worker whose call timed out.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

from pebble import ProcessExpired, ProcessPool

from async_rlhf.actors.rewards import Answer, RewardSpec, failed
from async_rlhf.actors.scoring.executor import MAX_FAILED_STARTS, START_LIMIT_S, Answered, Answers, Call, ready, timed_out
from async_rlhf.actors.scoring.processes import OUT_OF_MEMORY, WorkerContext, ended, obey_parent
from async_rlhf.buffers.errors import DeadlineError, RewardError

logger = logging.getLogger(__name__)


class ProcessExecutor:
    """Owns a pebble pool with its worker processes and three threads. Waits for nothing; answers come from pebble's threads.

    longest_s: the longest time-out of its calls. memory_mb: the limit of each worker, None for none. A pool that breaks (a
    worker killed between two calls) or falls silent is replaced, and its calls fail.
    """

    def __init__(
        self, specs: tuple[RewardSpec, ...], longest_s: float, workers: int, memory_mb: int | None, answered: Answered
    ) -> None:
        self._specs = specs
        self._longest_s = longest_s
        self._workers = workers
        self._memory_mb = memory_mb
        self._answered = answered
        self._pending: dict[int, None] = {}
        self._failed_starts = 0
        self._pool = self._start()

    def submit(self, call: Call) -> None:
        if not self._pending:
            self._progress_s = time.monotonic()
        self._pending[call.id] = None
        try:
            future = self._pool.schedule(run_call, args=(call,), timeout=call.timeout_s)
        except RuntimeError:
            return  # The pool is broken: `check` answers this call with the others.
        future.add_done_callback(functools.partial(self._done, call))

    def discard(self, call_ids: set[int]) -> None:
        """A call that pebble holds runs to its end."""

    def check(self) -> None:
        """Replaces a broken pool. Raises RewardError when workers keep ending before they are ready."""
        silent_s = time.monotonic() - self._progress_s if self._pending else 0.0
        if self._pool.active and silent_s < self._longest_s + START_LIMIT_S:
            return
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            names = ", ".join(f"{spec.name} ({spec.target})" for spec in self._specs)
            raise RewardError(
                f"the worker processes of {names} ended {self._failed_starts} times in a row before they answered; "
                f"see what they wrote to stderr, and try the import in a fresh interpreter"
            )
        reason = f"the reward workers fell silent for {silent_s:.0f} s" if self._pool.active else "a reward worker died"
        logger.warning("%s; all workers are replaced, %d calls failed", reason, len(self._pending))
        threading.Thread(target=_stop, args=(self._pool,), name="stop-reward-workers", daemon=True).start()
        lost, self._pending = self._pending, {}
        self._pool = self._start()
        for call_id in tuple(lost):
            self._answered(call_id, (Answer(None, reason),))

    def close(self, deadline_s: float) -> None:
        stopper = threading.Thread(target=_stop, args=(self._pool,), name="stop-reward-workers", daemon=True)
        stopper.start()
        stopper.join(deadline_s)
        if stopper.is_alive():
            raise DeadlineError(f"reward workers did not end within {deadline_s:g} s")

    def _start(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._workers,
            initializer=start_worker,
            initargs=(self._specs, self._memory_mb),
            context=WorkerContext(),
        )
        self._progress_s = time.monotonic()
        # An empty call starts the workers, so their imports overlap with the engine's start.
        pool.schedule(_nothing).add_done_callback(self._started)
        return pool

    def _started(self, future: Future[None]) -> None:
        if future.exception() is None:
            self._failed_starts = 0

    def _done(self, call: Call, future: Future[Answers]) -> None:
        """Called from a thread of pebble's."""
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            return  # `check` answers for the whole pool.
        self._progress_s = time.monotonic()
        self._pending.pop(call.id, None)
        if error is None:
            answers = future.result()
        elif isinstance(error, TimeoutError):
            answers = (timed_out(call.timeout_s),)
        elif isinstance(error, ProcessExpired):
            answers = (Answer(None, ended(error.exitcode, self._memory_mb)),)
        else:
            answers = (failed(error),)  # What was to be sent cannot be pickled.
        self._answered(call.id, answers)


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


# -- in the worker process -------------------------------------------------------------------------------------------


def start_worker(specs: tuple[RewardSpec, ...], memory_mb: int | None) -> None:
    """Load the rewards before the first call, so that imports do not count against its time-out."""
    obey_parent(memory_mb)
    for spec in specs:
        ready(spec)


def run_call(call: Call) -> Answers:
    """Call the reward; whatever it does short of ending the process becomes an answer."""
    reward = ready(call.spec)
    if isinstance(reward, Answer):
        return (reward,)
    began = time.time()
    try:
        if call.prefetch:
            reward.prefetch(call)
            return (Answer(None, began=began, ended=time.time()),)
        return reward.read(call, reward.function(**reward.arguments(call)), began)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
        return reward.failed(error, began)


def _nothing() -> None:
    return None
