"""Admission under every disorder a run can meet: actors come, go and pause; learner and hub die and come back.

Random events, and after each of them the ledger closes and the promises of `bound` and `admission` hold. At the end the
actors behave and nothing dies any more: then the run must end, with every live number trained exactly once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, note
from hypothesis import strategies as st

from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.record import Entry
from tests.buffers.queue.ready import Ready, entry

NAMES = ("anna", "ben", "carl")


@dataclass
class Process:
    """An actor as it sees itself. told: the weights that it is to adopt. work: number -> attempt, oldest and newest version."""

    capacity: int
    life: str
    fence: int = 0
    version: int = -1
    told: tuple[int, int] | None = None
    work: dict[int, tuple[int, int, int]] = field(default_factory=dict)


def one_of(names: Collection[Any], chance: Random) -> Any:
    return sorted(names)[chance.randrange(len(names))]


class Run:
    """Three actors, a learner, a hub, and what its journal and its weight store hold."""

    def __init__(self, bound: Bound, max_attempts: int, constant_share: float) -> None:
        self.bound, self.max_attempts, self.constant_share = bound, max_attempts, constant_share
        self.hub = Admission(bound, max_attempts=max_attempts, lease_s=10.0)
        self.now, self.lives = 0.0, itertools.count()
        self.processes: dict[str, Process] = {}
        self.state = QueueSnapshot()
        self.entries: dict[int, Entry] = {}
        self.takes: dict[int, list[int]] = {}
        self.weights: dict[int, int] = {}  # version -> fence
        # The learner: steps done, newest checkpoint, whether it has a batch.
        self.step = self.saved = 0
        self.registered = self.holds_batch = False
        # What was ever seen, whatever died since.
        self.versions: set[int] = set()
        self.batch_of: dict[int, list[int]] = {}
        self.made_of: dict[int, list[int]] = {}
        self.trained_in: dict[int, int] = {}
        self.sent: list[tuple[int, Entry]] = []
        self.filtered: set[int] = set()
        self.taken_back: set[int] = set()
        self.register()
        for name in NAMES[:2]:
            self.processes[name] = Process(4, str(next(self.lives)))
            self.say_hello(name)

    def happen(self, kind: str, seed: int) -> None:
        note(kind)
        getattr(self, kind)(Random(seed))
        self.pump()
        self.check()

    # -- what the hub's shell does after each event --------------------------------------------------------------------

    def pump(self) -> None:
        found = self.hub.remember()
        dead, known = ((s.quarantined, s.filtered, s.removed) for s in (found, self.state))
        if dead != known:
            self.state = found
        for name in self.hub.fleet.actors:
            target, process = self.hub.target(name), self.processes[name]
            if target in self.weights:
                is_serving = (self.hub.fence, target) == (process.fence, process.version)
                process.told = None if is_serving else (self.hub.fence, target)
        for name, credits in self.hub.credits().items():
            process = self.processes[name]
            for credit in credits:
                self.check_credit(credit.number, process)
                process.work[credit.number] = credit.attempt, process.version, process.version
        if self.hub.published is not None:
            lowest = self.hub.lowest_needed_version()
            self.weights = {version: fence for version, fence in self.weights.items() if version >= lowest}

    def check_credit(self, number: int, process: Process) -> None:
        """By the definition of the bound, not by its code: when can this group be trained on at the latest?"""
        lowest = self.last_step(number) - self.bound.max_staleness
        assert not self.hub.draining and process.version in self.versions and process.version >= lowest
        assert not self.bound.exact or process.version == max(0, lowest)

    def last_step(self, number: int) -> int:
        position = number - sum(below < number for below in {*self.hub.remember().quarantined, *self.filtered})
        return (position + self.bound.window - 1) // self.bound.groups_per_batch

    # -- actors --------------------------------------------------------------------------------------------------------

    def a_new_process_joins(self, chance: Random) -> None:
        """Also one that takes the name of an actor that was killed: it holds nothing."""
        name = one_of(NAMES, chance)
        self.processes[name] = Process(chance.randrange(13), str(next(self.lives)))
        self.say_hello(name)

    def an_actor_says_hello_again(self, chance: Random) -> None:
        if self.processes:
            self.say_hello(one_of(self.processes, chance))

    def say_hello(self, name: str) -> None:
        process = self.processes[name]
        actor = Actor(process.capacity, process.fence, process.version, self.now, life=process.life)
        holding = [(number, attempt) for number, (attempt, *_) in process.work.items()]
        self.hub.fleet.join(name, actor, holding)
        assert {(credit.number, credit.attempt) for credit in actor.leases.values()} <= set(holding)
        self.pump()

    def the_supervisor_saw_an_actor_die(self, chance: Random) -> None:
        if self.processes:
            name = one_of(self.processes, chance)
            del self.processes[name]
            self.hub.fleet.leave(name)

    def an_actor_is_silent_for_too_long(self, chance: Random) -> None:
        """The hub takes it for dead; it lives and goes on."""
        if self.hub.fleet.actors:
            name = one_of(self.hub.fleet.actors, chance)
            self.now += 11.0
            for other, actor in self.hub.fleet.actors.items():
                if other != name:
                    actor.last_seen = self.now
            counted = self.hub.num_quarantined, set(self.hub.fleet.failures.suspects)
            assert self.hub.fleet.expire(self.now) == [name]
            assert (self.hub.num_quarantined, self.hub.fleet.failures.suspects) == counted, "silence counted against a group"

    def actors_adopt_what_they_were_told(self, chance: Random) -> None:
        for name, process in self.processes.items():
            if process.told and chance.random() < 0.7:
                self.adopt(name, process)

    def adopt(self, name: str, process: Process) -> None:
        assert process.told is not None
        (fence, version), process.told = process.told, None
        if version < process.version:
            self.hub.release(name, list(process.work))
            process.work.clear()
        process.fence, process.version = fence, version
        process.work = {number: (attempt, oldest, version) for number, (attempt, oldest, _) in process.work.items()}
        if name in self.hub.fleet.actors:
            self.hub.fleet.actors[name].fence, self.hub.fleet.actors[name].version = fence, version

    def an_actor_says_how_much_it_can_hold(self, chance: Random) -> None:
        if self.hub.fleet.actors:
            name = one_of(self.hub.fleet.actors, chance)
            self.processes[name].capacity = self.hub.fleet.actors[name].capacity = chance.randrange(-1, 13)

    def an_actor_puts_a_group(self, chance: Random) -> None:
        if busy := [name for name, process in self.processes.items() if process.work and name in self.hub.fleet.actors]:
            name = one_of(busy, chance)
            self.send(name, one_of(self.processes[name].work, chance))

    def send(self, name: str, number: int) -> None:
        attempt, oldest, newest = self.processes[name].work.pop(number)
        entry = Entry(attempt, oldest, newest, num_tokens=1 + newest - oldest)
        self.sent.append((number, entry))
        reason = self.put(name, number, entry)
        assert reason in {"", "duplicate", "superseded"} or self.bound.exact, "an honest group was thrown away"

    def put(self, name: str, number: int, entry: Entry) -> str:
        """Why it was refused, or nothing."""
        was_queued = number in self.entries and not self.bound.exact
        constant = Random(number).random() < self.constant_share
        try:
            entered = self.hub.put(name, number, entry, constant=constant)
        except RefusedError as error:
            return error.reason
        if not entered:
            assert constant and self.bound.refills and number not in self.filtered
            assert number not in self.trained_in, "a trained group was filtered"
            self.filtered.add(number)
            return ""
        assert not was_queued, "a group was accepted twice"
        assert number not in self.batch_of.get(self.trained_in.get(number, -1), []), "a trained group was accepted again"
        self.entries[number] = entry
        return ""

    def something_arrives_that_was_sent_before(self, chance: Random) -> None:
        """Late, repeated, from another actor, or of another attempt: refused, and what is leased stays leased."""
        name, attempt = one_of(NAMES, chance), chance.randrange(-1, 3)
        leased = [(number, who) for who, actor in self.hub.fleet.actors.items() for number in actor.leases]
        if leased and chance.random() < 0.5:
            number, name = chance.choice(leased)
            entry = Entry(attempt, self.step, self.step, 1)
        elif self.sent:
            number, entry = chance.choice(self.sent)
        else:
            return
        credit = self.hub.fleet.actors[name].leases.get(number) if name in self.hub.fleet.actors else None
        if credit is not None and credit.attempt == attempt:
            return  # that is no late duplicate but the work itself
        before = self.hub.ledger
        reason = self.put(name, number, Entry(attempt, entry.oldest_version, entry.newest_version, 1))
        after = self.hub.ledger
        assert reason in {"duplicate", "superseded"} and after.duplicates_refused == before.duplicates_refused + 1
        assert (after.credited, after.leased, after.queued) == (before.credited, before.leased, before.queued)

    def a_group_of_impossible_versions_is_made_again(self, chance: Random) -> None:
        if leasing := [name for name, actor in self.hub.fleet.actors.items() if actor.leases]:
            name = one_of(leasing, chance)
            number = one_of(self.hub.fleet.actors[name].leases, chance)
            attempt = self.hub.fleet.actors[name].leases[number].attempt
            low = max(0, self.last_step(number) - self.bound.max_staleness)
            future = max([self.step + 1, *self.versions]) + chance.randrange(1, 5)
            reason = chance.choice(("future", "stale"))
            newest = future if reason == "future" else low
            before = self.hub.ledger
            assert self.put(name, number, Entry(attempt, low - (reason == "stale"), newest, 1)) == reason
            assert self.hub.ledger.stale == before.stale + 1
            self.processes[name].work.pop(number, None)

    # -- learner -------------------------------------------------------------------------------------------------------

    def the_learner_registers(self, chance: Random) -> None:
        if not self.registered:
            self.register()

    def register(self) -> None:
        deleted = self.hub.register(self.hub.fence + 1, self.step, self.saved, str(next(self.lives)))
        self.forget_removed()
        self.journal_state(deleted)
        self.registered, self.holds_batch = True, False
        assert self.hub.ledger.in_flight == 0
        with pytest.raises(RefusedError, match="order"):
            self.hub.trained(self.step)  # what the former learner took is not this one's
        self.pump()
        self.publish()

    def publish(self) -> None:
        self.hub.publish(self.step)
        self.versions.add(self.step)
        passed = {version: fence for version, fence in self.weights.items() if version < self.step}
        self.weights = passed | {self.step: self.hub.fence}

    def the_learner_dies_and_resumes_from_its_checkpoint(self, chance: Random) -> None:
        self.step, self.holds_batch, self.registered = self.saved, False, False
        self.register()
        self.pump()

    def the_learner_takes(self, chance: Random) -> None:
        if self.registered:
            self.take()

    def take(self) -> bool:
        step = self.step
        fresh = self.hub.batch(step) is None
        batch = self.hub.take(step)
        if batch is None:
            return False
        if fresh:
            self.made_of[step] = self.takes[step] = batch
            self.state = self.hub.remember()
        assert batch == sorted(set(batch))
        full = len(batch) + len(set(self.hub.remember().removed).intersection(self.made_of.get(step, ())))
        assert full == self.bound.groups_per_batch or self.hub.num_left == 0
        assert self.batch_of.setdefault(step, batch) == batch, "a batch was offered again, but another one"
        for number in batch:
            entry = self.entries[number]
            ages = [abs(step - version) for version in range(entry.oldest_version, entry.newest_version + 1)]
            assert max(ages) <= self.bound.max_staleness
            if self.bound.exact:
                assert entry.oldest_version == entry.newest_version == max(0, step - self.bound.max_staleness)
            assert self.trained_in.get(number, step) == step, f"group {number} is in two batches"
        self.holds_batch = True
        return True

    def forget_removed(self) -> None:
        for number in self.hub.remember().removed:
            if number in self.entries:
                assert number in self.taken_back, "a good group was taken out"
                del self.entries[number]
            for step, batch in self.batch_of.items():
                if number in batch:
                    self.batch_of[step] = self.takes[step] = [other for other in batch if other != number]

    def an_operator_takes_a_group_back(self, chance: Random) -> None:
        number = chance.randrange(-1, self.bound.num_groups + 3)
        before = self.hub.num_quarantined
        given = {n for step, batch in self.takes.items() for n in batch if step < self.step or step in self.hub._batches.taken}
        gone = {*self.trained_in, *self.filtered, *self.hub.remember().quarantined, *self.hub.remember().removed}
        try:
            self.hub.quarantine(number, "bad", None if self.registered else self.step)
        except RefusedError as error:
            impossible = not 0 <= number < self.hub.order.next
            assert impossible or number in given | gone or (self.bound.exact and number in self.entries), error
            assert self.hub.num_quarantined == before
            return
        assert number not in given and self.hub.num_quarantined == before + 1
        self.taken_back.add(number)
        self.trained_in.pop(number, None)  # by a learner that was restored since
        self.forget_removed()
        self.entries.pop(number, None)

    def the_learner_trains(self, chance: Random) -> None:
        if self.registered and self.holds_batch:
            self.train()

    def train(self) -> None:
        for number in self.batch_of[self.step]:
            self.trained_in[number] = self.step
        self.hub.trained(self.step)
        self.step, self.holds_batch = self.step + 1, False
        if self.step % self.bound.publish_every == 0:
            self.pump()  # the hub looks round before the weights have come
            self.publish()

    def the_learner_writes_a_checkpoint(self, chance: Random) -> None:
        """It is durable; the hub may hear of it only when the learner registers the next time."""
        if self.registered:
            self.saved = self.step
            if chance.random() < 0.5:
                self.journal_state(self.hub.commit(self.step))
            self.pump()

    def journal_state(self, deleted: list[int]) -> None:
        self.state = self.hub.remember()
        for number in deleted:
            del self.entries[number]
            assert self.trained_in[number] < self.state.committed_step
        self.takes = {step: numbers for step, numbers in self.takes.items() if step >= self.state.committed_step}

    def a_learner_out_of_step_with_an_old_fence_or_of_another_run_is_refused(self, chance: Random) -> None:
        fence, committed, calls = self.hub.fence, self.state.committed_step, list[tuple[str, Callable[[], object]]]()
        calls += [("fenced", lambda: self.hub.register(fence, self.step, self.saved))]
        calls += [("unknown-step", lambda: self.hub.register(fence + 1, self.bound.num_groups + 1, 0))]
        if committed > 0:
            calls += [("committed", lambda: self.hub.register(fence + 1, committed - 1, 0))]
        if self.registered:
            asked = (self.hub.take, self.hub.trained, self.hub.publish)
            calls += [("order", partial(ask, step)) for step in (self.step - 1, self.step + 1) for ask in asked]
            calls += [("order", lambda: self.hub.commit(self.step + 1))]
        for reason, call in calls:
            with pytest.raises(RefusedError, match=reason):
                call()

    # -- hub -----------------------------------------------------------------------------------------------------------

    def the_hub_is_restarted(self, chance: Random) -> None:
        self.hub = Admission(self.bound, max_attempts=self.max_attempts, lease_s=10.0)
        self.hub.restore(self.state, {number: self.entries[number] for number in sorted(self.entries)})
        for step in sorted(self.takes):
            self.hub.assign(step, self.takes[step])
        self.registered = self.holds_batch = False
        self.weights = self.weights if self.bound.exact else {}
        for process in self.processes.values():
            process.told = None

    def the_operator_drains(self, chance: Random) -> None:
        if chance.random() < 0.1:
            self.hub.draining = True

    # -- all of them ---------------------------------------------------------------------------------------------------

    def all_is_well_for_a_while(self, chance: Random) -> None:
        if self.registered:
            self.all_do_their_work()

    def all_do_their_work(self) -> bool:
        """Actors adopt and put what they hold, the learner takes and trains; whether there was a batch."""
        for name, process in self.processes.items():
            if process.told is not None:
                self.adopt(name, process)
            self.pump()
            for number in sorted(process.work) if name in self.hub.fleet.actors else ():
                self.send(name, number)
            self.pump()
        if not (self.holds_batch or self.take()):
            return False
        self.train()
        return True

    # -- what holds after every event ----------------------------------------------------------------------------------

    def check(self) -> None:
        ledger = self.hub.ledger
        assert ledger.closes, ledger
        assert all(value >= 0 for value in ledger.as_dict().values())
        step = self.step if self.registered else self.hub.step
        assert ledger.trained == ledger.committed + sum(len(batch) for k, batch in self.takes.items() if k < step)
        in_batches = {number for batch in self.takes.values() for number in batch}
        queued = self.entries.keys() - in_batches
        leased = [number for actor in self.hub.fleet.actors.values() for number in actor.leases]
        assert ledger.leased == len(leased) == len(set(leased))
        assert ledger.filtered == len(self.filtered) and self.filtered.isdisjoint({*leased, *self.entries})
        assert not in_batches & set(leased)
        if not self.bound.exact:  # there, a quarantine may have dropped queued groups that the journal still holds
            assert ledger.queued + ledger.in_flight == len(queued) + sum(len(b) for k, b in self.takes.items() if k >= step)
            assert not queued & set(leased)
            for number in queued:  # so the second net has nothing to catch
                assert self.last_step(number) - self.entries[number].oldest_version <= self.bound.max_staleness
        reached = max([self.step, *(step + 1 for step in self.trained_in.values())])
        begun = {*queued, *leased, *(number for k, batch in self.takes.items() if k >= reached for number in batch)}
        assert len(begun) <= self.bound.max_ahead
        past = self.hub.remember()
        assert len({*past.consumed} - {*past.removed}) < self.bound.window, "what is remembered grows"

    def settle(self) -> None:
        """Nothing dies any more, and one actor with room joins: the run ends."""
        if not self.registered:
            self.register()
        self.processes["dora"] = Process(self.bound.groups_per_batch, str(next(self.lives)))
        for name in self.processes:
            self.say_hello(name)
        for _ in range(10 * self.bound.num_groups * (1 + self.bound.refills) + 100):
            trained = self.all_do_their_work()
            self.check()
            if self.hub.at_end and not trained:
                break
        assert self.hub.at_end, f"the run hangs: {self.hub.ledger}"
        trained_ever, dead = set(self.trained_in), {*self.hub.remember().quarantined, *self.filtered}
        removed = set(self.hub.remember().removed)
        assert not trained_ever & (dead | removed)
        most = min(self.bound.num_groups, self.bound.num_numbers - len(dead)) - len(removed)
        assert self.hub.num_left == most - len(trained_ever)
        assert self.hub.draining or len(trained_ever) == most
        assert self.bound.refills or trained_ever | dead | removed <= set(range(self.bound.num_groups))
        assert self.hub.ledger.in_flight == 0
        self.journal_state(self.hub.commit(self.step))
        assert self.hub.ledger.committed == self.hub.ledger.trained == len(trained_ever)


# Each as often as it is named.
EVENTS = (
    *["an_actor_puts_a_group"] * 8,
    *["actors_adopt_what_they_were_told"] * 6,
    *["all_is_well_for_a_while", "the_learner_takes", "the_learner_trains"] * 3,
    *["the_learner_writes_a_checkpoint", "a_new_process_joins", "something_arrives_that_was_sent_before"] * 2,
    *("an_actor_says_hello_again", "the_supervisor_saw_an_actor_die", "an_actor_is_silent_for_too_long"),
    *("an_operator_takes_a_group_back", "an_actor_says_how_much_it_can_hold", "a_group_of_impossible_versions_is_made_again"),
    *("the_learner_registers", "the_learner_dies_and_resumes_from_its_checkpoint", "the_hub_is_restarted"),
    *("a_learner_out_of_step_with_an_old_fence_or_of_another_run_is_refused", "the_operator_drains"),
)


@st.composite
def bounds(draw: st.DrawFn) -> Bound:
    exact = draw(st.booleans())
    groups_per_batch = draw(st.integers(1, 4))
    publish_every = 1 if exact else draw(st.integers(1, 3))
    window = 1 if exact else draw(st.integers(1, 9))
    lowest = publish_every - 1 + -(-(window - 1) // groups_per_batch)
    max_staleness = lowest + draw(st.integers(0, 3))
    num_groups = draw(st.integers(1, 60))
    refills = 0 if exact else draw(st.integers(0, 2))
    numbers = draw(st.sampled_from((num_groups + 7, 1 << 40))) if refills else None
    return Bound(groups_per_batch, max_staleness, num_groups, publish_every, window, exact, refills, numbers)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Events, and what their random numbers come from."""
    at_least = draw(st.sampled_from((0, 30, 150)))
    event = st.tuples(st.sampled_from(EVENTS), st.integers(0, (1 << 20) - 1))
    return draw(st.lists(event, min_size=at_least, max_size=2 * at_least + 10))


# Found here: two actors, each told in turn to go where the other's work needed it, left their own work for ever.
@example(
    Bound(2, 1, 6, exact=True), 1, 0.0,
    [("an_actor_is_silent_for_too_long", 1), ("an_actor_says_how_much_it_can_hold", 207067)],
)  # fmt: skip
@given(bounds(), st.integers(1, 3), st.sampled_from((0.0, 0.4, 1.0)), histories())
def test_whatever_happens_the_promises_hold_and_the_run_ends(
    bound: Bound, max_attempts: int, constant_share: float, history: list[tuple[str, int]]
) -> None:
    run = Run(bound, max_attempts, constant_share)
    for event in history:
        run.happen(*event)
    run.settle()


@pytest.mark.parametrize("actor", [{"version": 1 << 40}, {"version": -1}, {"fence": 2}])
def test_an_actor_that_serves_no_published_version_is_given_no_work(actor: dict[str, int]) -> None:
    hub = Ready(Bound(2, 1, 10))
    hub.join(**actor)
    assert hub.credits() == {}


def test_work_that_no_version_can_have_begun_is_not_leased_to_who_claims_it() -> None:
    hub = Ready(Bound(2, 0, 1 << 40))
    liar = hub.join("liar", [(1, 0), (2, 0), ((1 << 40) - 1, 0), (1 << 50, 0), (-1, 0)], capacity=0)
    assert list(liar.leases) == [1]
    assert hub.ledger.leased == 1


def test_a_credit_that_was_lost_on_the_way_is_given_again_under_a_new_attempt() -> None:
    """Anna works on attempt 0 in vain; attempt 1 is credited to her while she is cut off. Her hello tells it apart."""
    hub = Ready(Bound(1, 0, 10))
    hub.join(capacity=1)
    hub.credits()
    hub.fleet.leave("anna")
    hub.join("ben", capacity=1)
    assert hub.credits()["ben"][0].attempt == 1
    assert not hub.join("anna", [(0, 0)], capacity=1).leases
    hub.fleet.leave("ben")
    assert hub.credits()["anna"][0].attempt == 2
    anna = hub.join("anna", [(0, 0)], capacity=1)
    assert anna.leases[0].attempt == 0 and hub.ledger.failed == 3  # what she works on is wanted again


def test_a_group_may_overtake_those_in_its_window_and_no_others() -> None:
    hub = Ready(Bound(groups_per_batch=2, max_staleness=3, num_groups=20, window=3))
    hub.join()
    hub.credits()
    hub.make(3, 4)
    assert hub.take(0) is None, "0 is the head: its window ends with 2"
    hub.make(2)
    assert hub.take(0) is None
    hub.make(0)
    assert hub.take(0) == [0, 2]
    hub.trained(0)
    assert hub.take(1) is None, "1 is the head: its window ends with 3, though 2 is consumed"
    hub.make(1)
    assert hub.take(1) == [1, 3]


def test_the_actor_with_most_room_is_given_work_first() -> None:
    hub = Ready(Bound(4, 0, 100))
    hub.join("anna", capacity=2)
    hub.join("ben", capacity=5)
    assert hub.give() == {"ben": [0, 1, 2], "anna": [3]}


def test_what_was_lost_is_given_again_the_lowest_number_first() -> None:
    hub = Ready(Bound(4, 0, 100))
    hub.join("anna", capacity=2)
    hub.join("ben", capacity=2)
    assert hub.give() == {"anna": [0, 2], "ben": [1, 3]}
    hub.fleet.leave("ben")
    hub.fleet.leave("anna")
    hub.join("carl")
    assert hub.give() == {"carl": [0, 1, 2, 3]}


def test_in_exact_mode_a_quarantine_makes_groups_of_the_wrong_version_again() -> None:
    """Groups 0 and 1 are step 0, 2 and 3 step 1; when 1 is quarantined, 2 moves to step 0 and its version 0 is too new."""
    hub = Ready(Bound(1, 1, 10, exact=True))
    hub.join()
    hub.credits()
    hub.make(0)
    assert hub.take(0) == [0]
    hub.trained(0)
    hub.publish(1)
    hub.join("ben", version=1)
    assert hub.give()["ben"] == [2]
    hub.make(2, name="ben")
    for _ in range(3):
        hub.fleet.leave("anna")
        hub.join(capacity=1)
        given = hub.give()
    assert hub.remember().quarantined == (1,)
    assert given["anna"] == [2]
    assert hub.lowest_needed_version() == 0
    hub.put("anna", 2, entry(num_tokens=5))
    assert hub.take(1) == [2]
    ledger = hub.ledger
    assert ledger.closes
    assert (ledger.stale, ledger.tokens_stale, ledger.tokens_put) == (1, 1, 1 + 1 + 5)


def test_in_exact_mode_a_restarted_hub_does_not_take_up_what_a_quarantine_dropped() -> None:
    """The journal still holds group 2 as it was put, of version 1; since group 1 is quarantined it needs version 0."""
    hub = Admission(Bound(1, 1, 10, exact=True))
    hub.restore(QueueSnapshot(fence=1, quarantined=(1,)), {0: entry(), 2: entry(version=1)})
    hub.assign(0, [0])
    hub.register(2, 1, 0)
    hub.publish(1)
    assert hub.take(1) is None
    hub.fleet.join("anna", Actor(1, 2, 0, 0.0))
    assert [credit.number for credit in hub.credits()["anna"]] == [2]


def test_a_hub_that_was_restarted_takes_the_work_of_its_actors_before_the_learner_is_back() -> None:
    hub = Ready(Bound(1, 1, 10))
    hub.join()
    hub.credits()
    hub.make(0)
    assert hub.take(0) == [0]
    # The learner trained and published version 1, the actor serves it and has begun group 2: then the hub dies.
    again = Admission(hub.bound)
    again.restore(hub.remember(), {0: entry()})
    again.assign(0, [0])
    again.fleet.join("anna", Actor(100, 1, 1, 0.0), [(1, 0), (2, 0)])
    again.put("anna", 1, Entry(0, 0, 1, 1))
    again.put("anna", 2, entry(version=1))
    again.register(2, 1, 0)
    again.publish(1)
    assert again.take(1) == [1]
    assert again.ledger.stale == 0


def test_a_run_that_is_to_go_no_further_than_it_went_is_at_its_end() -> None:
    """Its journal holds batches of steps that it is no longer to make, the last of them taken and not trained."""
    hub = Admission(Bound(groups_per_batch=2, max_staleness=1, num_groups=2))
    hub.restore(QueueSnapshot(fence=1), {number: entry() for number in range(4)})
    hub.assign(0, [0, 1])
    hub.assign(1, [2, 3])
    hub.register(2, 1, 0)
    hub.publish(1)
    assert hub.at_end and hub.take(1) is None and hub.num_left == 0
    assert not hub.credits() and hub.ledger.closes


def test_what_is_committed_is_remembered_by_number_only_where_it_must_be() -> None:
    hub = Ready(Bound(2, 2, 100, window=4))
    hub.join(capacity=100)
    hub.make(*(number for number in hub.give()["anna"] if number != 0))
    assert hub.train() == [1, 2]
    assert hub.commit(1) == [1, 2]
    state = hub.remember()
    assert (state.head, state.consumed, state.committed_groups) == (0, (1, 2), 2)


def test_beyond_the_limit_only_what_the_next_batch_needs_is_begun_or_let_in() -> None:
    hub, large = Ready(Bound(groups_per_batch=2, max_staleness=3, num_groups=20), max_bytes=100), entry(num_bytes=90)
    hub.join(capacity=20)
    assert len(hub.credits()["anna"]) == 8  # nothing is known of sizes yet
    hub.put("anna", 5, large)
    for late in (4, 7):
        with pytest.raises(RefusedError, match=r"later: .* 100"):
            hub.put("anna", late, large)
    for due in (0, 1):
        hub.put("anna", due, large)
    assert hub.train() == [0, 1] and hub.ledger.leased == 5
    assert hub.credits() == {}, "seven groups of up to 90 bytes do not fit"
