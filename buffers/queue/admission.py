"""The replay queue's decisions: who may begin which group, what may enter, what a batch is, what may be deleted.

A pure state machine: no clock, socket, file or randomness; time enters as an argument. `hub` feeds it and carries out
what it decides; a simulator can run it on virtual time. The bound it keeps is stated and proved in `bound`.

Life of a group number:

    fresh -> leased -> queued -> in flight -> trained -> committed (may be deleted)
               |          |          |            |
               |          |          +------------+--- the learner was restored from an older checkpoint: offered
               |          |                            again, in the same batches
               +----------+--- the actor was lost (failed) or the bound could not be kept (stale): credited again,
               |               until it has ended `max_attempts` actors: quarantined, never consumed
               +-------------- it carries no gradient and another is to take its place: filtered, never consumed

Rules
    1. Everything that decides about a group lives in this file; nothing here does anything about it.
    2. A number is in exactly one place: fresh or open again (`order`), a lease, `_queued`, a batch, quarantined (in its
       place in the order, or taken out of a batch), or committed. The ledger's states are derived from those places, its
       ends are counted.
    3. The ledger closes after every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.failures import Trials
from async_rlhf.buffers.queue.fleet import Actor as Actor
from async_rlhf.buffers.queue.fleet import Credit as Credit
from async_rlhf.buffers.queue.fleet import Fleet, Rooms
from async_rlhf.buffers.queue.ledger import Ledger, QueueSnapshot
from async_rlhf.buffers.queue.order import Batches, ConsumptionOrder
from async_rlhf.buffers.record import Entry, staleness


class Admission:
    """Methods raise RefusedError with a reason; nothing changes then, but a `future` or `stale` `put` ends its lease."""

    def __init__(self, bound: Bound, *, max_attempts: int = 3, lease_s: float = 15.0) -> None:
        bound.check()
        self.fence = 0
        self.owner = ""  # the learner that holds the fence
        self.step = self.committed_step = 0
        self.published: int | None = None
        self.target_staleness: int | None = None  # the staleness credits are to stay within, when less than the bound
        self.draining = False
        self.order = ConsumptionOrder(bound)
        self.fleet = Fleet(self.order, max_attempts, lease_s, self._drop_of_other_version)
        self._queued: dict[int, Entry] = {}
        self._batches = Batches()
        self._trials = Trials(max_attempts)
        self._stale = self._stale_tokens = self._filtered_tokens = self._duplicates = 0

    @property
    def bound(self) -> Bound:
        return self.order.bound

    # -- credits and groups ------------------------------------------------------------------------------------------

    def target(self, name: str) -> int | None:
        """The version this actor should serve: the newest published; in exact mode the one its next group needs.

        In exact mode an actor moves only when it holds nothing, for a group is made by one version from first to last.
        """
        if self.published is None or not self.bound.exact:
            return self.published
        if self.fleet.actors[name].leases:
            return self.fleet.actors[name].version
        number = self.order.upcoming
        return self.published if number is None else min(self.order.lowest_version(number), self.published)

    def may_begin(self, version: int) -> bool:
        """Whether an actor that serves this version could be given the next credit."""
        number = self.order.next_number()
        return number is not None and self.bound.allows(version, number, self.order.dead_below(number), self.target_staleness)

    def lowest_needed_version(self) -> int:
        """The oldest weight set that may still have to be served: the newest one, in exact mode that of the oldest work."""
        if self.published is None or not self.bound.exact:
            return self.published or 0
        lowest = min([*self.fleet.leased, *self.order.open[:1], self.order.next])
        return min(self.published, self.order.lowest_version(lowest))

    def credits(self) -> dict[str, list[Credit]]:
        """Give every credit that can be given now, lowest numbers first, to the actors with most room."""
        given: dict[str, list[Credit]] = {}
        rooms, suspects = Rooms(), self.fleet.failures.suspects
        while not self.draining and (number := self.order.next_number()) is not None:
            if number in suspects or not rooms:
                if not (self.bound.exact or self.may_begin(self.fleet.newest)):
                    break  # an older version may not either
                rooms = Rooms(self.fleet.with_room(number), self.fence, self.fleet.newest)
            if (name := rooms.take(self.may_begin)) is None:
                break
            credit = self.fleet.lease(self.fleet.actors[name], number, self.fleet.failures.attempt(number))
            given.setdefault(name, []).append(credit)
            if number in suspects:
                rooms = Rooms()  # the holder of a suspect has room for no other group
            else:
                rooms.put_back(name)
        return given

    def put(self, name: str, number: int, entry: Entry, *, constant: bool = False) -> bool:
        """Admit a finished group; False when it is `constant`, and so filtered instead.

        Raises RefusedError: `unknown`, `duplicate`, `superseded`, `future` or `stale`.
        """
        if not 0 <= number < self.bound.num_numbers:
            raise RefusedError("unknown", f"group {number} is not among the {self.bound.num_numbers} of this run")
        actor = self.fleet.actors.get(name)
        credit = actor.leases.get(number) if actor else None
        if actor is None or credit is None or credit.attempt != entry.attempt:
            self._duplicates += 1
            reason = "superseded" if self.order.is_open(number) or number in self.fleet.leased else "duplicate"
            raise RefusedError(reason, f"attempt {entry.attempt} of group {number} holds no lease of {name}")
        if entry.newest_version > self.fleet.newest:
            self._give_up(actor, number)
            newest = f"version {entry.newest_version}, newest published: {self.fleet.newest}"
            raise RefusedError("future", f"group {number} has a token of {newest}")
        low = self.order.lowest_version(number)
        if entry.oldest_version < low or (self.bound.exact and entry.newest_version != low):
            self._give_up(actor, number)
            raise RefusedError("stale", f"group {number} has a token of version {entry.oldest_version}, needs {low}")
        if constant and self.order.may_filter(number):
            del actor.leases[number]
            self.order.filter(number)
            self.fleet.failures.forget([number])
            self._filtered_tokens += entry.num_tokens
            return False
        del actor.leases[number]
        self._queued[number] = entry
        return True

    def blame(self, name: str, number: int, reason: str) -> None:
        """Note why a group was refused, in case its actor is lost with it."""
        if name in self.fleet.actors and number in self.fleet.actors[name].leases:
            self.fleet.failures.blame(number, reason)

    def quarantine(self, number: int, reason: str, steps_done: int | None = None) -> None:
        """An operator takes a group back, or it ended the learner alone: it is not trained on (again).

        Out of a batch it is taken without another in its place: the other steps keep their batches. steps_done: of the learner
        that will go on; None: of the one that has registered. Raises RefusedError: `unknown`, `unregistered`, `trained` for a
        group that was trained on, or is being, `exact` for one that waits in exact mode.
        """
        if steps_done is None and self.published is None:
            raise RefusedError("unregistered", "no learner has registered since the hub began; try again when one has")
        if not 0 <= number < self.order.next:
            raise RefusedError("unknown", f"group {number} was never begun; those below {self.order.next} were")
        step = self._batches.step_of(number)
        done = self.step if steps_done is None else steps_done
        if self.order.is_decided(number) if step is None else step < done or step in self._batches.taken:
            raise RefusedError("trained", f"group {number} was trained on, is being, or was given up already")
        if self.bound.exact and number in self._queued:
            # The numbers behind it would move up, and the weights that they then need may no longer exist.
            raise RefusedError(
                "exact", f"group {number} waits for its step; in exact mode it can be taken out of its batch then"
            )
        self.fleet.failures.quarantine(number, reason)
        if step is not None:
            self._batches.remove(step, number)
            return
        if self._queued.pop(number, None) is None and not self.fleet.end_lease(number):
            self.fleet.credited += 1  # credited and given up in one go
        self.fleet.bury(number)

    def release(self, name: str, numbers: Iterable[int]) -> None:
        """An actor cancels groups that can no longer keep the bound (it went back to older weights)."""
        actor = self.fleet.actors.get(name)
        for number in numbers:
            if actor is not None and number in actor.leases:
                self._give_up(actor, number)

    # -- learner -----------------------------------------------------------------------------------------------------

    def register(self, fence: int, step: int, committed: int, owner: str = "") -> list[int]:
        """A learner (re)starts at `step` under a higher fence: batches from `step` on are offered again, as they were.

        committed: as `commit` takes it, for a hub that missed it.
        owner: names the learner's process. Another one than held the batch of the present step ended with it.
        Returns what `commit` returns. Raises RefusedError: `fenced`, `committed` or `unknown-step`.
        """
        if fence <= self.fence:
            raise RefusedError("fenced", f"fence {fence} is not above the newest, {self.fence}")
        if step < self.committed_step:
            raise RefusedError(
                "committed",
                f"groups before step {self.committed_step} were deleted, for no older checkpoint is kept; "
                f"a learner cannot resume from step {step}",
            )
        if step > self.committed_step and step - 1 not in self._batches.of:
            raise RefusedError("unknown-step", f"no batch {step - 1} was ever taken; the journal belongs to another run")
        held = self.step if owner != self.owner and self.step in self._batches.taken else None
        self.fence, self.owner, self.step, self.published = fence, owner, step, None
        self._batches.taken.clear()
        if held is not None and (guilty := self._trials.ended(held)) is not None:
            self.quarantine(guilty, f"ended the learner alone, at step {held}", step)
        self._drop_of_other_version()
        return self.commit(min(step, committed))

    def check_version(self, version: int) -> None:
        """A version is the number of steps done. Raises RefusedError: `order`."""
        if version != self.step:
            raise RefusedError("order", f"the learner has done {self.step} steps and cannot publish version {version}")

    def publish(self, version: int) -> None:
        """Weights of `version` are whole at the hub and may be served. Raises RefusedError: `order`."""
        self.check_version(version)
        self.published, self.fleet.newest = version, max(self.fleet.newest, version)

    def take(self, step: int) -> list[int] | None:
        """The numbers of batch `step` in order, or None while they are not all there. Raises RefusedError: `order`.

        `step` is the number of steps done; a batch taken before and not trained is given again.
        """
        if step != self.step:
            raise RefusedError("order", f"the learner has done {self.step} steps and cannot take batch {step}")
        if step >= self.bound.num_steps:
            return None  # there was a batch of it when the run was to go further
        if step not in self._batches.of:
            wanted = min(self.bound.groups_per_batch, self.num_left)
            picked = self.order.pick(lambda number: number in self._queued, wanted)
            if wanted == 0 or len(picked) < wanted or self._drop_too_old(picked):
                return None
            self._make_up(step, picked)
        self._batches.taken.add(step)
        return sorted(self._batches.of[step])

    def trained(self, step: int) -> None:
        """The learner has done the step of batch `step`. Raises RefusedError: `order`."""
        if step != self.step or step not in self._batches.taken:
            raise RefusedError("order", f"batch {step} was not taken at step {self.step}")
        self._trials.forget(step, self._batches.of[step])
        self.step = step + 1

    def trial(self, step: int) -> int | None:
        """The group of batch `step`, which was taken, that the learner is to try alone before it is given the whole."""
        return self._trials.next(step, self._batches.of[step])

    def tried(self, step: int, number: int, *, done: bool) -> None:
        """The learner begins to try the group alone; or is done, and lives. Raises RefusedError: `order`."""
        if step != self.step or number not in self._batches.of.get(step, ()):
            raise RefusedError("order", f"group {number} of batch {step} is not to be tried at step {self.step}")
        if done:
            self._trials.passed(number)
        else:
            self._trials.trying = number

    def commit(self, step: int) -> list[int]:
        """The oldest checkpoint that is kept has `step` steps: returns the numbers that may be deleted, for no learner goes
        back behind it. Raises RefusedError: `order`.
        """
        if step > self.step:
            raise RefusedError("order", f"the learner has done {self.step} steps and cannot commit {step}")
        numbers = self._batches.commit(step)
        self.fleet.failures.forget(numbers)
        self.committed_step = max(self.committed_step, step)
        self.order.forget_below(self.order.floor(self._batches.numbers))
        return numbers

    @property
    def num_quarantined(self) -> int:
        return len(self.order.quarantined) + len(self._batches.removed)

    @property
    def num_filtered(self) -> int:
        return self.order.num_filtered

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def batch(self, step: int) -> list[int] | None:
        """The numbers of batch `step` in order, where it is made up already (and not committed)."""
        return sorted(self._batches.of[step]) if step in self._batches.of else None

    @property
    def num_left(self) -> int:
        """Groups still to be consumed, as far as live numbers exist for them."""
        return max(0, self.order.num_consumable - self._batches.num_consumed)

    @property
    def at_end(self) -> bool:
        """Whether no batch will ever be given at the present step: the data ended, or the drain left too few groups."""
        if self.step >= self.bound.num_steps or (self.num_left == 0 and self.step not in self._batches.of):
            return True
        if self.step in self._batches.of or not self.draining:
            return False
        wanted = min(self.bound.groups_per_batch, self.num_left)
        return len(self.order.pick((self._queued.keys() | self.fleet.leased).__contains__, wanted)) < wanted

    # -- memory and numbers ------------------------------------------------------------------------------------------

    def remember(self) -> QueueSnapshot:
        """The state that a journal must keep beside the uncommitted groups and batches."""
        line, uncommitted = self.order, self._batches.numbers
        head = line.floor(uncommitted)
        passed = (n for n in range(head, line.head) if n not in uncommitted and not line.is_dead(n))
        return QueueSnapshot(
            fence=self.fence, owner=self.owner, committed_step=self.committed_step,
            committed_groups=self._batches.committed_groups, committed_tokens=self._batches.committed_tokens,
            head=head, consumed=(*passed, *sorted(line.consumed - uncommitted)), quarantined=tuple(line.quarantined),
            removed=tuple(sorted(self._batches.removed)),
            filtered=tuple(line.filtered), filtered_before=line.filtered_before, filtered_tokens=self._filtered_tokens,
            stale=self._stale, stale_tokens=self._stale_tokens,
            failed=self.fleet.failed, failures=self.fleet.failures.remember(),
        )  # fmt: skip

    def restore(self, past: QueueSnapshot, queued: Mapping[int, Entry]) -> None:
        """Begin where a journal ends: what was committed, and every group that was put since, all of them queued.

        The caller then replays the batches with `assign`, in order. Numbers begun and never put are free again."""
        self.fence, self.committed_step, self.step = past.fence, past.committed_step, past.committed_step
        self._batches.committed_groups, self._batches.committed_tokens = past.committed_groups, past.committed_tokens
        self._stale, self._stale_tokens, self.fleet.failed = past.stale, past.stale_tokens, past.failed
        self._filtered_tokens = past.filtered_tokens
        self.fleet.newest, self.owner = past.committed_step, past.owner
        self._batches.removed = set(past.removed)
        self._queued = {n: entry for n, entry in queued.items() if n not in {*past.removed, *past.quarantined}}
        self.fleet.failures.restore(past.failures)
        self.order.restore(past, self._queued)
        ended = past.committed_groups + len(self._queued) + self._stale + self.fleet.failed
        self.fleet.credited = ended + self.num_quarantined + self.num_filtered

    def assign(self, step: int, numbers: Iterable[int]) -> None:
        """Batch `step` was made of these queued numbers before the hub died, and is whenever it is offered again."""
        self._make_up(step, [number for number in numbers if number not in self._batches.removed])
        self.fleet.newest = max(self.fleet.newest, step + 1)  # it may have been trained on, and that version published

    @property
    def ledger(self) -> Ledger:
        """Every attempt ever credited, by where it is or how it ended; derived from the state above."""
        batches, tokens = self._batches, Ledger.tokens
        trained, held, waiting = batches.split(self.step)
        waiting += self._queued.values()
        given_up = self._stale_tokens + self._filtered_tokens
        everything = tokens(trained) + tokens(held) + tokens(waiting) + batches.committed_tokens + given_up
        return Ledger(
            credited=self.fleet.credited, trained=batches.committed_groups + len(trained), queued=len(waiting),
            in_flight=len(held), leased=len(self.fleet.leased), stale=self._stale,
            filtered=self.num_filtered, failed=self.fleet.failed, quarantined=self.num_quarantined,
            committed=batches.committed_groups, duplicates_refused=self._duplicates, tokens_put=everything,
            tokens_trained=batches.committed_tokens + tokens(trained), tokens_queued=tokens(waiting),
            tokens_in_flight=tokens(held), tokens_stale=self._stale_tokens, tokens_filtered=self._filtered_tokens,
        )  # fmt: skip

    # -- inside ------------------------------------------------------------------------------------------------------

    def _give_up(self, actor: Actor, number: int) -> None:
        """The lease of `number` ended because its tokens could not keep the bound."""
        del actor.leases[number]
        self._stale += 1
        self.order.reopen(number)

    def _make_up(self, step: int, numbers: Iterable[int]) -> None:
        batch = self._batches.of[step] = {number: self._queued.pop(number) for number in numbers}
        self.order.consume(batch)

    def _drop(self, number: int) -> None:
        """A queued group may not be trained on: it is counted and made again."""
        entry = self._queued.pop(number)
        self._stale += 1
        self._stale_tokens += entry.num_tokens
        self.order.reopen(number)

    def _drop_of_other_version(self) -> None:
        """In exact mode a quarantine changes the step, and so the version, of the groups behind it."""
        if not self.bound.exact:
            return
        for number in [n for n, entry in self._queued.items() if entry.oldest_version != self.order.lowest_version(n)]:
            self._drop(number)

    def _drop_too_old(self, numbers: Iterable[int]) -> bool:
        """The second net: groups over the bound are counted and made again. By the proof there are none."""
        old = [n for n in numbers if staleness(self._queued[n].oldest_version, self.step) > self.bound.max_staleness]
        for number in old:
            self._drop(number)
        return bool(old)
