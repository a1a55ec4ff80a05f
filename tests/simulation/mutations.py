"""Twenty-three defects to plant, each a mistake that could really be made: the simulation must find every one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.errors import DamagedError, RefusedError
from async_rlhf.buffers.hub.learner_session import LearnerSession
from async_rlhf.buffers.hub.sessions import ActorSessions
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue import segment
from async_rlhf.buffers.queue.admission import Admission, Credit
from async_rlhf.buffers.queue.failures import Trials
from async_rlhf.buffers.queue.fleet import Fleet
from async_rlhf.buffers.queue.journal import Journal, JournalReplay
from async_rlhf.buffers.record import Entry
from async_rlhf.buffers.weights.assembly import EarlyParts
from async_rlhf.buffers.weights.broadcast import Epoch, Membership
from async_rlhf.buffers.weights.receiver import WeightReceiver
from async_rlhf.buffers.weights.relay import WeightCache
from async_rlhf.buffers.weights.server import WeightServer
from async_rlhf.buffers.weights.shared import num_parts
from async_rlhf.buffers.weights.standby import Standby
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.simulation.disk import MemoryDisk
from tests.simulation.learner_role import LearnerRole
from tests.simulation.memory import Machine, SimMemory


def around(owner: type, name: str, mutant: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Planted is what `mutant` makes of the honest method."""
    return patch.object(owner, name, mutant(getattr(owner, name)))


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
            self.fleet.credited += 1
            return True

    return patch.object(Admission, "put", put)


def count_staleness_at_completion() -> AbstractContextManager[Any]:
    """A group may enter when its tokens are young enough at that moment, however late it will be trained on."""

    def lowest(self: Admission) -> int:
        return max(0, self.step - self.bound.max_staleness)

    def credits(self: Admission) -> dict[str, list[Credit]]:
        given: dict[str, list[Credit]] = {}
        for name, actor in self.fleet.actors.items():
            begun = sum(len(each.leases) for each in self.fleet.actors.values()) + len(self._queued)
            begun += sum(len(batch) for step, batch in self._batches.of.items() if step >= self.step)
            while (
                (number := self.order.next_number()) is not None
                and actor.has_room(number, self.fleet.failures.suspects)
                and actor.fence == self.fence > 0
                and lowest(self) <= actor.version <= self.fleet.newest
                and begun < self.bound.max_ahead
            ):
                given.setdefault(name, []).append(self.fleet.lease(actor, number, self.fleet.failures.attempt(number)))
                begun += 1
        return given

    @contextmanager
    def planted() -> Iterator[None]:
        honest = Admission.put

        def put(self: Admission, name: str, number: int, entry: Entry, *, constant: bool = False) -> bool:
            with patch.object(self.order, "lowest_version", lambda number: lowest(self)):
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

        def early(self: Any, version: int, number: int, dead_below: int = 0, target_staleness: int | None = None) -> bool:
            return allows(self, version, number, dead_below + freed, target_staleness)

        with patch.object(type(bound), "allows", early):
            return honest(self)

    return patch.object(Admission, "credits", credits)


def commit_a_label_before_the_load() -> AbstractContextManager[Any]:
    """An actor takes on the version's name when it is told of it, before the weights have come and were verified."""
    honest = WeightReceiver.adopt

    def adopt(self: WeightReceiver, target: tuple[int, int], *more: Any) -> None:
        honest(self, target, *more)
        self._weights = WeightSet(*target, specs=(), blob=b"")

    return patch.object(WeightReceiver, "adopt", adopt)


def ignore_the_fence() -> AbstractContextManager[Any]:
    """Whoever speaks as the learner is believed."""
    honest = LearnerSession.handle

    def handle(self: LearnerSession, identity: bytes, request: int, message: wire.Message, *more: Any) -> Any:
        if hasattr(message, "fence"):
            message = message.model_copy(update={"fence": self._admission.fence})
        return honest(self, identity, request, message, *more)

    return patch.object(LearnerSession, "handle", handle)


def serve_another_set_under_the_name() -> AbstractContextManager[Any]:
    """A relay that is asked for a set it does not have gives out the newest it has."""
    honest = WeightCache.request

    def request_any(self: WeightCache, identity: bytes, request: int, asked: wire.Fetch | wire.FetchChunk) -> None:
        wanted = (asked.fence, asked.version)
        if not self._kept or wanted in self._kept:
            honest(self, identity, request, asked)
            return
        message, arrays = self._weight_server.serve(asked.model_copy(update={"version": self._kept[-1][1]}))
        self._queue(identity, message.model_copy(update={"version": asked.version}), request, arrays)

    return patch.object(WeightCache, "request", request_any)


def write_what_others_map() -> AbstractContextManager[Any]:
    """The learner writes each version into the memory of the one before, which was mapped although it is not sealed."""
    rooms: dict[tuple[Machine, int], SimMemory] = {}
    honest, honest_write = Machine.make, SimMemory.write

    def make(self: Machine, num_bytes: int) -> SimMemory:
        if self._running != "learner":
            return honest(self, num_bytes)
        room = self, self._pids["learner"]
        if room not in rooms:
            rooms[room] = honest(self, num_bytes)
        return rooms[room]

    def write(self: SimMemory, offset: int, data: bytes | memoryview) -> None:
        for part in self.parts.values():
            part.is_sealed = False
        honest_write(self, offset, data)

    @contextmanager
    def planted() -> Iterator[None]:
        with patch.object(Machine, "make", make), patch.object(SimMemory, "write", write):
            yield
        rooms.clear()

    return planted()


def announce_before_the_last_part() -> AbstractContextManager[Any]:
    """A set is made of the parts that came before its announcement, whether they are all there or not."""
    return patch.object(EarlyParts, "fits", lambda self, announced: True)


def take_a_part_of_an_older_set() -> AbstractContextManager[Any]:
    """Parts are told apart by their numbers alone, and kept when their set is whole."""
    honest = WeightServer._given

    def given(self: WeightServer, announced: wire.Publish) -> Any:
        early = self._early
        found = honest(self, announced)
        self._early = early
        return found

    def is_whole(self: EarlyParts, announced: wire.Publish) -> bool:
        return self._num_joined == num_parts(announced.num_bytes)

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(patch.object(WeightServer, "_given", given))
            stack.enter_context(patch.object(EarlyParts, "is_of", lambda self, part: True))
            stack.enter_context(patch.object(EarlyParts, "fits", is_whole))
            yield

    return planted()


def forget_what_was_filtered() -> AbstractContextManager[Any]:
    """A filtered group is acknowledged, and the journal is not told that its number is dead."""
    forgotten = {"filtered": (), "filtered_before": 0, "filtered_tokens": 0}
    return around(Admission, "remember", lambda honest: lambda self: replace(honest(self), **forgotten))


def give_up_what_was_trained() -> AbstractContextManager[Any]:
    """A commit deletes everything that was trained on, and not only what the oldest kept checkpoint holds."""
    return around(Admission, "commit", lambda honest: lambda self, step: honest(self, self.step))


def count_silence() -> AbstractContextManager[Any]:
    """A lease that ended because nothing was heard counts against its groups."""
    return around(Fleet, "leave", lambda honest: lambda self, name, reason="left", *, seen=True: honest(self, name, reason))


def let_two_hold_a_name() -> AbstractContextManager[Any]:
    """The last to say hello has the name."""
    return patch.object(ActorSessions, "_check_name", lambda self, hello, now: None)


def wait_for_a_stuck_actor() -> AbstractContextManager[Any]:
    """An actor that beats keeps its groups for ever."""
    return patch.object(Fleet, "overdue", lambda self, now, timeout_s: [])


def call_a_missing_page_damage() -> AbstractContextManager[Any]:
    """Only the very end of the journal may be unfinished."""
    honest = Journal._cut_off

    def cut_off(self: Journal, replay: JournalReplay, number: int, data: bytes, good: int) -> None:
        if any(segment.whole_records(data, good + 1)):
            raise DamagedError(f"damaged at byte {good}")
        honest(self, replay, number, data, good)

    return patch.object(Journal, "_cut_off", cut_off)


def blame_the_first_of_the_batch() -> AbstractContextManager[Any]:
    """The learner ended again and again with a batch: its first group is taken out without a trial."""

    def ended(self: Trials, step: int) -> int | None:
        self._ended[step] += 1
        return self.trying if self._ended[step] >= self._max_attempts else None

    def first(self: Trials, step: int, numbers: Iterable[int]) -> int | None:
        self.trying = min(numbers, default=None)
        return None

    @contextmanager
    def planted() -> Iterator[None]:
        with patch.object(Trials, "ended", ended), patch.object(Trials, "next", first):
            yield

    return planted()


def finish_a_step_before_the_weights_are_there() -> AbstractContextManager[Any]:
    """A learner says that its next step is done while the hub still takes in the version of the one before."""
    trained = lambda self, step: self._connection.send(wire.Trained(fence=self.fence, step=step))  # noqa: E731
    return patch.object(LearnerClient, "trained", trained)


def go_on_while_a_version_may_be_lost() -> AbstractContextManager[Any]:
    """In exact mode, too, the next step begins before the hub has the version of the one before."""
    return around(
        LearnerRole, "_publish", lambda honest: lambda self, *, whole: honest(self, whole=whole and not self._registered)
    )


def adopt_what_came_without_a_look_at_its_digest() -> AbstractContextManager[Any]:
    """Whatever was received under the name of the version is adopted."""

    def take(self: Standby, target: tuple[int, int], digest: str) -> WeightSet | None:
        weights, self._set = self._set, None
        return weights

    return patch.object(Standby, "take", take)


def wait_for_who_hangs_again_and_again() -> AbstractContextManager[Any]:
    """Whoever is connected takes part in the next epoch, whether it left the one that failed or not."""
    return patch.object(Membership, "_may_come", lambda self, member, states: True)


def take_an_engine_of_an_old_epoch_for_a_member() -> AbstractContextManager[Any]:
    """An engine that left some epoch is taken for one that left the epoch that failed."""

    def may_come(self: Membership, member: Any, states: Any) -> bool:
        return member not in self._given or not states[member].is_member or self._is_whole

    return patch.object(Membership, "_may_come", may_come)


def go_on_with_the_number_of_an_epoch_that_is_over() -> AbstractContextManager[Any]:
    """Those who come are put into the epoch that is there."""
    honest = Membership.gather

    def gather(self: Membership, fence: int, states: Any) -> Epoch:
        before, epoch = self.epoch, honest(self, fence, states)
        if before is not None and before.id[0] == fence:
            epoch = self.epoch = Epoch(before.id, epoch.members)
        return epoch

    return patch.object(Membership, "gather", gather)


MUTATIONS: dict[Callable[[], AbstractContextManager[Any]], set[str]] = {
    skip_an_fsync: {"lost", "restart", "refused"},
    forget_a_dedup: {"ledger", "memory", "twice"},
    count_staleness_at_completion: {"bound"},
    free_a_slot_at_take: {"memory"},
    commit_a_label_before_the_load: {"truth", "crash"},  # before its first weights an engine has no tokens to give
    ignore_the_fence: {"refused", "twice", "ledger", "replay"},
    serve_another_set_under_the_name: {"truth"},
    write_what_others_map: {"truth", "crash", "refused"},
    announce_before_the_last_part: {"truth", "crash", "restart", "progress"},
    take_a_part_of_an_older_set: {"truth", "crash"},
    forget_what_was_filtered: {"lost"},
    give_up_what_was_trained: {"refused", "lost"},
    count_silence: {"guilt"},
    let_two_hold_a_name: {"guilt"},
    wait_for_a_stuck_actor: {"progress"},
    call_a_missing_page_damage: {"restart"},
    blame_the_first_of_the_batch: {"guilt"},
    finish_a_step_before_the_weights_are_there: {"refused"},
    go_on_while_a_version_may_be_lost: {"progress"},
    adopt_what_came_without_a_look_at_its_digest: {"truth"},
    wait_for_who_hangs_again_and_again: {"waits"},
    take_an_engine_of_an_old_epoch_for_a_member: {"waits"},
    go_on_with_the_number_of_an_epoch_that_is_over: {"epoch"},
}
"""With the rules that each may break."""
