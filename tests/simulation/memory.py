"""The memory of one simulated machine: what a process sealed, others map by its place, while that process lives.

Model. A part of a set lies at a place (process, descriptor), which can be opened as long as its process lives; who has mapped
it keeps it for good. In some runs part of the attempts fail, as when another user's or another machine's memory is asked for.
Memory that is not sealed cannot be mapped, and what is sealed is not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from unittest.mock import patch

from async_rlhf.buffers.protocol.message import SealedPlace
from async_rlhf.buffers.weights import shared
from tests.simulation.world import ViolationError

SEALING = ("async_rlhf.buffers.clients.learner", "async_rlhf.buffers.weights.server", "async_rlhf.buffers.weights.relay")
MAPPING = ("async_rlhf.buffers.weights.server", "async_rlhf.buffers.weights.receiver")
PART_BYTES = 60
"""Five parts a set."""


@dataclass
class SimPart:
    """What one process holds of a part of `whole`, the bytes of a set, which are those of all that hold it."""

    place: SealedPlace
    whole: bytearray
    index: int
    is_sealed: bool


class SimMemory:
    """`async_rlhf.buffers.weights.shared.Memory`: one process's room for one set."""

    def __init__(self, machine: Machine, num_bytes: int) -> None:
        self._machine, self._own = machine, bytearray(num_bytes)
        self.parts: dict[int, SimPart] = {}

    @property
    def places(self) -> list[SealedPlace]:
        return [part.place for _, part in sorted(self.parts.items())]

    @property
    def view(self) -> memoryview:
        """They have all been written by one process. What is not there is zeros."""
        first = next(iter(self.parts.values()), None)
        if first is None or len(self.parts) == shared.num_parts(len(self._own)):
            return memoryview(self._own if first is None else first.whole).toreadonly()
        each, seen = shared.part_bytes(len(self._own)), bytearray(len(self._own))
        for start in (index * each for index in self.parts):
            seen[start : start + each] = first.whole[start : start + each]
        return memoryview(seen).toreadonly()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        each = shared.part_bytes(len(self._own))
        for index in range(offset // each, (offset + len(data) - 1) // each + 1):
            if index not in self.parts:
                self.parts[index] = self._machine.hold(self._own, index, is_sealed=False)
            if self.parts[index].is_sealed:
                raise ViolationError("sealed", "memory was written that others may have mapped")
        self._own[offset : offset + len(data)] = data

    def seal(self, index: int | None = None) -> None:
        for number in self.parts if index is None else [index]:
            self.parts[number].is_sealed = True

    def take(self, index: int, place: SealedPlace) -> bool:
        found = self._machine.find(place, index, len(self._own))
        if found is not None:
            self.parts[index] = found
        return found is not None


class Machine:
    """Its processes, and what each holds. `refusals`: share of the attempts to map that fail. mapped: those that did not."""

    def __init__(self, rng: Random, refusals: float) -> None:
        self._rng, self._refusals = rng, refusals
        self._pids: dict[str, int] = {}
        self._held: dict[int, list[SimPart]] = {}
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
        return SimMemory(self, num_bytes)

    def attach(self, places: Sequence[SealedPlace], num_bytes: int) -> SimMemory | None:
        memory = SimMemory(self, num_bytes)
        is_whole = len(places) == shared.num_parts(num_bytes)
        return memory if is_whole and all(memory.take(index, place) for index, place in enumerate(places)) else None

    def find(self, place: SealedPlace, index: int, num_bytes: int) -> SimPart | None:
        """This part of a set of so many bytes, if it is at this place: held by the running process from now on."""
        held = self._held.get(place.pid, [])
        # A set is refused about as often as it would be in one part.
        if place.descriptor >= len(held) or self._rng.random() < self._refusals / 5:
            return None
        found = held[place.descriptor]
        if not found.is_sealed or (found.index, len(found.whole)) != (index, num_bytes):
            return None
        self.mapped += 1
        return self.hold(found.whole, index, is_sealed=True)

    def hold(self, whole: bytearray, index: int, *, is_sealed: bool) -> SimPart:
        pid = self._pids[self._running]
        part = SimPart(SealedPlace(pid=pid, descriptor=len(self._held[pid]), token="simulated"), whole, index, is_sealed)
        self._held[pid].append(part)
        return part

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The weight channel's memory is this machine's."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(shared, "PART_BYTES", PART_BYTES))
            for module in SEALING:
                stack.enter_context(patch(f"{module}.SealedPool", lambda: self))
            stack.enter_context(patch("async_rlhf.buffers.weights.server.SealedMemory", self.make))
            for module in MAPPING:
                stack.enter_context(patch(f"{module}.attach", self.attach))
            yield
