"""The memory of one simulated machine: what a process sealed, others map by its place, while that process lives.

Model. A place (process, descriptor) can be opened as long as its process lives; who has mapped it keeps it for good. In some
runs part of the attempts fail, as when another user's or another machine's memory is asked for. Memory that is not sealed
cannot be mapped, and nobody writes what is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from unittest.mock import patch

from async_rlhf.buffers.protocol.message import Place
from tests.simulation.world import ViolationError

SEALING = (
    "async_rlhf.buffers.clients.learner",
    "async_rlhf.buffers.weights.server",
    "async_rlhf.buffers.weights.relay",
)
MAPPING = ("async_rlhf.buffers.weights.server", "async_rlhf.buffers.weights.receiver")


class SimMemory:
    """`async_rlhf.buffers.weights.shared.Memory`: one process's room for one set."""

    def __init__(self, place: Place, data: bytearray, *, is_sealed: bool) -> None:
        self.place: Place | None = place
        self.path: str | None = None
        self.data, self.is_sealed = data, is_sealed
        self.view = memoryview(data).toreadonly()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if self.is_sealed:
            raise ViolationError("sealed", "memory was written that others may have mapped")
        self.data[offset : offset + len(data)] = data

    def seal(self) -> None:
        self.is_sealed = True


class Machine:
    """Its processes, and what each holds. `refusals`: share of the attempts to map that fail. mapped: those that did not."""

    def __init__(self, rng: Random, refusals: float) -> None:
        self._rng, self._refusals = rng, refusals
        self._pids: dict[str, int] = {}
        self._held: dict[int, list[SimMemory]] = {}
        self._last_pid = 0
        self._running = ""
        self.mapped = 0

    def begin(self, process: str) -> None:
        """A new life of this process; of the one before it nothing can be mapped any more."""
        self.end(process)
        self._last_pid += 1
        self._pids[process], self._held[self._last_pid] = self._last_pid, []

    def end(self, process: str) -> None:
        self._held.pop(self._pids.pop(process, 0), None)

    @contextmanager
    def run(self, process: str) -> Iterator[None]:
        """What is made or mapped meanwhile is this process's."""
        before, self._running = self._running, process
        try:
            yield
        finally:
            self._running = before

    def make(self, num_bytes: int) -> SimMemory:
        return self._hold(bytearray(num_bytes), is_sealed=False)

    def attach(self, place: Place, num_bytes: int) -> SimMemory | None:
        held = self._held.get(place.pid, [])
        if place.descriptor >= len(held) or self._rng.random() < self._refusals:
            return None
        found = held[place.descriptor]
        if not found.is_sealed or len(found.data) != num_bytes:
            return None
        self.mapped += 1
        return self._hold(found.data, is_sealed=True)

    def _hold(self, data: bytearray, *, is_sealed: bool) -> SimMemory:
        pid = self._pids[self._running]
        memory = SimMemory(Place(pid=pid, descriptor=len(self._held[pid]), token="simulated"), data, is_sealed=is_sealed)
        self._held[pid].append(memory)
        return memory

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The weight channel's memory is this machine's."""
        with ExitStack() as stack:
            for module in SEALING:
                stack.enter_context(patch(f"{module}.SealedMemory", self))
            for module in MAPPING:
                stack.enter_context(patch(f"{module}.attach", self.attach))
            yield
