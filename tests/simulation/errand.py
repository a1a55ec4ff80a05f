"""What a simulated process does beside its own thread: a thread of ours that runs only when the world lets it, one at a time.

So a real blocking client can be on its way while the process that owns it goes on, and a seed still gives one trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from async_rlhf.buffers.clients.learner import WeightUpload
from async_rlhf.buffers.protocol import wire
from tests.simulation.world import SimLink, World


class AbandonedError(Exception):
    """The process that the errand belonged to has ended."""


class Errand:
    """`resume` returns when the errand waits (`pause`) or is over. within: the process that it belongs to."""

    def __init__(self, run: Callable[[], None], within: Callable[[], AbstractContextManager[None]]) -> None:
        self._run, self._within, self._abandoned, self.is_over = run, within, False, False
        self._world_s, self._its = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        if not self.is_over:
            with self._within():
                self._its.release()
                self._world_s.acquire()

    def pause(self) -> None:
        """Called by the errand itself."""
        self._world_s.release()
        self._its.acquire()
        if self._abandoned:
            raise AbandonedError

    def abandon(self) -> None:
        self._abandoned = True
        self.resume()
        self._thread.join()

    def _live(self) -> None:
        self._its.acquire()
        if not self._abandoned:
            self._run()
        self.is_over = True
        self._world_s.release()


class ErrandLink(SimLink):
    """The link of an errand: while it waits for a message, the errand pauses."""

    errand: Errand

    def receive(self, timeout_s: float) -> wire.Frames | None:
        world, errand, until = self._network.world, self.errand, self.clock() + timeout_s
        self.woken = errand.resume
        world.after(timeout_s, f"{self.name} looks", errand.resume)
        while not self.inbox and world.now < until:
            errand.pause()
        self.woken = lambda: None
        return super().receive(timeout_s)


class SimUpload(WeightUpload):
    """A publication as an errand of the learner's, which turns the world while it waits for it."""

    def __init__(
        self,
        work: Callable[[], None],
        world: World,
        turn_until: Callable[[float], None],
        within: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._world, self._turn_until, self._within = world, turn_until, within
        super().__init__(work)

    def _start(self, run: Callable[[], None]) -> None:
        self.errand = Errand(run, self._within)
        longest = self._world.rng.choice((0.02, 0.02, 0.2))  # a large set is still on its way when the step is done
        self._world.after(self._world.rng.uniform(0.0, longest), "publication", self.errand.resume)

    def _await(self, event: threading.Event) -> None:
        while not event.is_set():
            self._turn_until(max(self._world.now, self._world.next_at()))
