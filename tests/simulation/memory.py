"""The memory of one simulated machine: what a process sealed, others map by its place, while that process lives.

Model. A part of a set lies at a place (process, descriptor), which can be opened as long as its process lives; who has mapped
it keeps it for good. In some runs part of the attempts fail, as when another user's or another machine's memory is asked for.
Memory that is not sealed cannot be mapped, and nobody writes what is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from unittest.mock import patch

from async_rlhf.buffers.protocol.message import Place
from async_rlhf.buffers.weights import shared
from tests.simulation.world import ViolationError

SEALING = (
    "async_rlhf.buffers.clients.learner",
    "async_rlhf.buffers.weights.server",
    "async_rlhf.buffers.weights.relay",
)
MAPPING = ("async_rlhf.buffers.weights.server", "async_rlhf.buffers.weights.receiver")
PART_BYTES = 60
"""Five parts a set."""


@dataclass
class SimPart:
    """What one process holds of a part; the bytes are those of all that hold it."""

    place: Place
    data: bytearray
    is_sealed: bool


class SimMemory:
    """`async_rlhf.buffers.weights.shared.Memory`: one process's room for one set."""

    def __init__(self, machine: Machine, num_bytes: int) -> None:
        self._machine, self._num_bytes = machine, num_bytes
        self.parts: dict[int, SimPart] = {}

    @property
    def places(self) -> list[Place]:
        return [part.place for _, part in sorted(self.parts.items())]

    @property
    def view(self) -> memoryview:
        """Of the bytes as they are now: sealed ones stay so."""
        indices = range(shared.num_parts(self._num_bytes))
        return memoryview(b"".join(self.parts[i].data if i in self.parts else bytes(self._size(i)) for i in indices))

    def write(self, offset: int, data: bytes | memoryview) -> None:
        for index, byte in enumerate(bytes(data), start=offset):
            number, at = divmod(index, shared.part_bytes(self._num_bytes))
            if number not in self.parts:
                self.parts[number] = self._machine.hold(bytearray(self._size(number)), is_sealed=False)
            if self.parts[number].is_sealed:
                raise ViolationError("sealed", "memory was written that others may have mapped")
            self.parts[number].data[at] = byte

    def seal(self, index: int | None = None) -> None:
        for number in self.parts if index is None else [index]:
            self.parts[number].is_sealed = True

    def take(self, index: int, place: Place) -> bool:
        found = self._machine.find(place, self._size(index))
        if found is not None:
            self.parts[index] = found
        return found is not None

    def _size(self, index: int) -> int:
        size = shared.part_bytes(self._num_bytes)
        return min(size, self._num_bytes - index * size)


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

    def attach(self, places: Sequence[Place], num_bytes: int) -> SimMemory | None:
        memory = SimMemory(self, num_bytes)
        is_whole = len(places) == shared.num_parts(num_bytes)
        return memory if is_whole and all(memory.take(index, place) for index, place in enumerate(places)) else None

    def find(self, place: Place, num_bytes: int) -> SimPart | None:
        """The part at this place, held by the running process from now on."""
        held = self._held.get(place.pid, [])
        # A set is refused about as often as it would be in one part.
        if place.descriptor >= len(held) or self._rng.random() < self._refusals / 5:
            return None
        found = held[place.descriptor]
        if not found.is_sealed or len(found.data) != num_bytes:
            return None
        self.mapped += 1
        return self.hold(found.data, is_sealed=True)

    def hold(self, data: bytearray, *, is_sealed: bool) -> SimPart:
        pid = self._pids[self._running]
        part = SimPart(Place(pid=pid, descriptor=len(self._held[pid]), token="simulated"), data, is_sealed)
        self._held[pid].append(part)
        return part

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The weight channel's memory is this machine's."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(shared, "PART_BYTES", PART_BYTES))
            for module in SEALING:
                stack.enter_context(patch(f"{module}.SealedMemory", self))
            for module in MAPPING:
                stack.enter_context(patch(f"{module}.attach", self.attach))
            yield
