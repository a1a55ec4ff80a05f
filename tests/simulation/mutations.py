"""Nine defects to plant, each a mistake that somebody could really make: the simulation must find every one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from buffers.errors import RefusedError
from buffers.hub.tenure import Tenure
from buffers.protocol import wire
from buffers.queue.admission import Admission, Credit
from buffers.queue.ledger import Entry, Restored
from buffers.weights.cache import WeightCache
from buffers.weights.fetching import Fetching
from buffers.weights.weight_set import WeightSet
from tests.simulation.disk import MemoryDisk
from tests.simulation.memory import Machine, SimMemory


def skip_an_fsync() -> AbstractContextManager[Any]:
    """Groups are acknowledged when they were written, not when they are durable."""
    return patch.object(MemoryDisk, "sync", lambda self, file: None)


def forget_a_dedup() -> AbstractContextManager[Any]:
    """A finished group is admitted without asking whose lease it is."""
    honest = Admission.put

    def put(self: Admission, name: str, number: int, entry: Entry, *, constant: bool = False) -> bool:
        try:
            return honest(self, name, number, entry, constant=constant)
        except RefusedError as error:
            if error.reason not in ("duplicate", "superseded"):
                raise
            self._queued[number] = entry
            self._credited += 1
            return True

    return patch.object(Admission, "put", put)


def count_staleness_at_completion() -> AbstractContextManager[Any]:
    """A group may enter when its tokens are young enough at that moment, however late it will be trained on."""

    def lowest(self: Admission) -> int:
        return max(0, self.step - self.bound.max_staleness)

    def credits(self: Admission) -> dict[str, list[Credit]]:
        given: dict[str, list[Credit]] = {}
        for name, actor in self.actors.items():
            begun = sum(len(each.leases) for each in self.actors.values()) + len(self._queued)
            begun += sum(len(batch) for step, batch in self._batches.of.items() if step >= self.step)
            while (
                (number := self._line.next_number()) is not None
                and actor.has_room(number, self.failures.suspects)
                and actor.fence == self.fence > 0
                and lowest(self) <= actor.version <= self._newest
                and begun < self.bound.max_ahead
            ):
                given.setdefault(name, []).append(self._lease(actor, number, self.failures.attempt(number)))
                begun += 1
        return given

    @contextmanager
    def planted() -> Iterator[None]:
        honest = Admission.put

        def put(self: Admission, name: str, number: int, entry: Entry, *, constant: bool = False) -> bool:
            with patch.object(self._line, "lowest_version", lambda number: lowest(self)):
                return honest(self, name, number, entry, constant=constant)

        with ExitStack() as stack:
            for attribute, mutant in (("credits", credits), ("put", put), ("_drop_too_old", lambda self, numbers: False)):
                stack.enter_context(patch.object(Admission, attribute, mutant))
            yield

    return planted()


def free_a_slot_at_take() -> AbstractContextManager[Any]:
    """A group's slot is free as soon as its batch is taken, not when it has been trained on."""
    honest = Admission.credits

    def credits(self: Admission) -> dict[str, list[Credit]]:
        bound, freed = self.bound, self.bound.groups_per_batch * (self.step in self._batches.taken)
        allows = type(bound).allows

        def early(self: Any, version: int, number: int, dead_below: int = 0, aim: int | None = None) -> bool:
            return allows(self, version, number, dead_below + freed, aim)

        with patch.object(type(bound), "allows", early):
            return honest(self)

    return patch.object(Admission, "credits", credits)


def commit_a_label_before_the_load() -> AbstractContextManager[Any]:
    """An actor takes on the version's name when it is told of it, before the weights have come and were verified."""
    honest = Fetching.adopt

    def adopt(self: Fetching, target: tuple[int, int]) -> None:
        honest(self, target)
        self._weights = WeightSet(*target, specs=(), blob=b"")

    return patch.object(Fetching, "adopt", adopt)


def ignore_the_fence() -> AbstractContextManager[Any]:
    """Whoever speaks as the learner is believed."""
    honest = Tenure.hear

    def hear(self: Tenure, identity: bytes, request: int, message: wire.Message, *more: Any) -> Any:
        if hasattr(message, "fence"):
            message = message.model_copy(update={"fence": self._admission.fence})
        return honest(self, identity, request, message, *more)

    return patch.object(Tenure, "hear", hear)


def serve_another_set_under_the_name() -> AbstractContextManager[Any]:
    """A relay that is asked for a set it does not have gives out the newest it has."""
    honest = WeightCache.ask

    def ask(self: WeightCache, identity: bytes, request: int, asked: wire.Fetch | wire.FetchChunk) -> None:
        wanted = (asked.fence, asked.version)
        if not self._kept or wanted in self._kept:
            honest(self, identity, request, asked)
            return
        message, arrays = self._publication.serve(asked.model_copy(update={"version": self._kept[-1][1]}))
        self._say(identity, message.model_copy(update={"version": asked.version}), request, arrays)

    return patch.object(WeightCache, "ask", ask)


def write_what_others_map() -> AbstractContextManager[Any]:
    """The learner writes each version into the memory of the one before, which was mapped although it is not sealed."""
    rooms: dict[tuple[Machine, int], SimMemory] = {}
    honest = Machine.make

    def make(self: Machine, num_bytes: int) -> SimMemory:
        if self._running != "learner":
            return honest(self, num_bytes)
        room = self, self._pids["learner"]
        if room not in rooms:
            rooms[room] = honest(self, num_bytes)
        return rooms[room]

    def write(self: SimMemory, offset: int, data: bytes | memoryview) -> None:
        self.data[offset : offset + len(data)] = data

    @contextmanager
    def planted() -> Iterator[None]:
        with patch.object(Machine, "make", make), patch.object(SimMemory, "write", write):
            yield
        rooms.clear()

    return planted()


def forget_what_was_filtered() -> AbstractContextManager[Any]:
    """A filtered group is acknowledged, and the journal is not told that its number is dead."""
    honest = Admission.remember

    def remember(self: Admission) -> Restored:
        return replace(honest(self), filtered=(), filtered_before=0, filtered_tokens=0)

    return patch.object(Admission, "remember", remember)


MUTATIONS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    skip_an_fsync,
    forget_a_dedup,
    count_staleness_at_completion,
    free_a_slot_at_take,
    commit_a_label_before_the_load,
    ignore_the_fence,
    serve_another_set_under_the_name,
    write_what_others_map,
    forget_what_was_filtered,
)
