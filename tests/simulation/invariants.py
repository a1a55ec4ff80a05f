"""What must be true at every moment, checked from outside: an observer with a memory of its own.

bound         a token trained on is at most S steps from the learner's step; in exact mode of exactly the version due
truth         a token's recorded version is that of the weights that really sampled it, and a group's row is its own; where a
              curriculum chooses it, the same whenever the group is made
ledger        every credit is in exactly one place
lost          an acknowledged group is queued, in a batch, in every checkpoint that is kept, or known to be filtered
twice         no group is trained on twice by the surviving optimizer state, and none that was filtered
replay        a batch offered again holds the same attempts of the same groups
memory        never more begun than (S + 1) B, plus what a restored learner must train again
monotone      an actor never goes back to an older fence, nor to an older version of one fence
refused       an honest learner is never refused
epoch         processes that broadcast together were put together by the hub, each with a rank of its own
waits         a learner waits once for an engine that does nothing, not with one broadcast after the other
guilt         nothing counts against a group but ends of actors that were seen, and lacks of progress; one is taken out of a
              batch only when a learner ended that had it alone; an operator may take any back that is not trained on
progress      once faults stop, the run ends with every group trained on or quarantined; with refill, with as many groups
              trained on as were wanted, or as there were
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.record import Group
from tests.simulation.world import ViolationError

ANOTHER = "another"
"""The life of a process that claims the name of an actor."""
SILENT_S = 1.49
"""An actor whose name is claimed is taken for ended after three beats without a word; less what rounding takes."""


class Observer:
    """Remembers what was promised (acknowledgements, batches, checkpoints) and compares."""

    def __init__(self, bound: Bound, max_attempts: int, *, chooses: bool = False) -> None:
        self._bound, self._max_attempts, self._chooses = bound, max_attempts, chooses
        self._rows: dict[int, int] = {}  # of groups that were trained on, where a curriculum chooses
        self.ends = self.claims = 0  # of actors, names that went to another process included; names that one claimed
        self._holders: dict[str, tuple[str, float]] = {}  # name -> the process that had it last, and when that was heard
        self._waited: set[object] = set()  # for whom a broadcast was in vain, and since when they do nothing
        self.trying: int | None = None  # the group that the learner has alone
        self.blamed: set[int] = set()  # those that it ended with
        self.taken_back: set[int] = set()  # those that an operator wanted out
        self._promised: dict[int, tuple[int, int]] = {}  # number -> attempt, oldest version
        self._batches: dict[int, list[tuple[int, int]]] = {}
        self._adopted: dict[str, tuple[int, int]] = {}
        self._highest_step = 0
        self.durable: frozenset[int] = frozenset()  # numbers in the oldest checkpoint that is kept
        self.quarantined: frozenset[int] = frozenset()
        self.removed: frozenset[int] = frozenset()  # taken out of a batch
        self.filtered: set[int] = set()  # numbers acknowledged and replaced by others
        self._num_filtered = 0

    def acknowledged(self, groups: Iterable[tuple[int, int, int]]) -> None:
        for number, attempt, oldest in groups:
            self._promised[number] = (attempt, oldest)

    def hub_changed(self, exchange: Exchange, journal: Journal) -> None:
        admission, bound = exchange._admission, self._bound
        ledger = admission.ledger
        if not ledger.closes:
            raise ViolationError("ledger", f"does not close: {ledger}")
        self._highest_step = max(self._highest_step, admission.step)
        again = max(0, self._highest_step - admission.step)
        begun = ledger.leased + ledger.queued + ledger.in_flight
        limit = bound.max_ahead + again * bound.groups_per_batch
        if begun > limit:
            raise ViolationError("memory", f"{begun} groups begun and not trained, the limit is {limit}: {ledger}")
        kept, most = (
            len(journal._places),
            bound.max_ahead + bound.groups_per_batch * (self._highest_step - admission.committed_step),
        )
        if kept > most:
            raise ViolationError("memory", f"the journal keeps {kept} groups, the limit is {most}")
        sets = len(exchange._weight_server.store._sets)
        if sets > bound.max_staleness + 2 + self._highest_step - admission.committed_step:
            raise ViolationError("memory", f"{sets} weight sets are kept")
        for name, actor in admission.fleet.actors.items():
            before, last_seen = self._holders.get(name, (actor.life, 0.0))
            silent = exchange._clock() - last_seen >= SILENT_S
            self.ends += silent and before != actor.life and ANOTHER in (before, actor.life)
            self._holders[name] = actor.life, actor.last_seen
        self.quarantined, self._num_filtered = frozenset(admission.order.quarantined), admission.num_filtered
        self.removed = frozenset(admission._batches.removed)
        if self.quarantined - self.taken_back and self.ends < self._max_attempts:
            raise ViolationError("guilt", f"groups {sorted(self.quarantined)} are quarantined after {self.ends} ends of actors")
        if (counted := admission.fleet.failures._counts) and not self.ends:
            raise ViolationError("guilt", f"what no end of an actor was seen of counts against groups: {counted}")
        if self.removed - self.blamed - self.taken_back:
            raise ViolationError("guilt", f"groups {sorted(self.removed)} are taken out, the learner ended with {self.blamed}")
        if unforeseen := exchange._refusals.counts["unforeseen"]:
            raise ViolationError("crash", f"{unforeseen} messages ran into a defect of the hub")
        if self._num_filtered < len(self.filtered):
            raise ViolationError("lost", f"{len(self.filtered)} groups were filtered, {self._num_filtered} are remembered")
        self._check_promises(exchange)

    def _check_promises(self, exchange: Exchange) -> None:
        admission = exchange._admission
        for number, (attempt, oldest) in list(self._promised.items()):
            entry = admission._queued.get(number) or next(
                (batch[number] for batch in admission._batches.of.values() if number in batch), None
            )
            if number in self.removed | (self.quarantined & self.taken_back) or (
                entry is not None and entry.attempt == attempt
            ):
                continue
            if number in self.durable:
                del self._promised[number]  # for good
                continue
            low = admission.order.lowest_version(number)
            foreign = abs(admission.step - oldest) > self._bound.max_staleness
            if not (foreign or oldest < low or (self._bound.exact and oldest != low)):
                raise ViolationError("lost", f"attempt {attempt} of group {number} was acknowledged and is gone")
            del self._promised[number]  # it could not be trained on any more, so it may be made again

    def trained(self, step: int, groups: Sequence[Group], already: Iterable[int]) -> None:
        """The learner is about to train on a batch at `step`; its optimizer has seen the groups `already`."""
        made_up = [(group.number, group.attempt) for group in groups]
        if taken_out := {number for number, _ in made_up} & self.removed:
            raise ViolationError("twice", f"step {step} was given groups {sorted(taken_out)}, which were taken out")
        twice = sorted({number for number, _ in made_up} & {*already, *self.filtered})
        if twice or len(set(made_up)) < len(made_up):
            raise ViolationError("twice", f"step {step} was given groups {made_up}; trained on before: {twice}")
        before = [each for each in self._batches.get(step, made_up) if each[0] not in self.removed]
        if before != made_up:
            raise ViolationError("replay", f"batch {step} was {before} and is now {made_up}")
        self._batches[step] = made_up
        for group in groups:
            row = group.columns.get("n", group.number)
            if row != (self._rows.setdefault(group.number, row) if self._chooses else group.number):
                raise ViolationError("truth", f"group {group.number} was made of the row of group {group.columns['n']}")
            for rollout in group.rollouts:
                versions = rollout.versions.tolist()
                if rollout.sampled_ids.tolist() != versions:
                    sampled = rollout.sampled_ids.tolist()
                    raise ViolationError("truth", f"group {group.number}: tokens of {sampled} are recorded as {versions}")
                due = max(0, step - self._bound.max_staleness)
                if max(abs(step - v) for v in versions) > self._bound.max_staleness or (
                    self._bound.exact and set(versions) != {due}
                ):
                    raise ViolationError("bound", f"group {group.number} has versions {versions} at step {step}")

    def tried(self, number: int) -> None:
        """The learner is given this group alone."""
        self.trying = number
        if number in self.removed:
            raise ViolationError("twice", f"group {number} is tried, and was taken out")

    def learner_ended(self) -> None:
        if self.trying is not None:
            self.blamed.add(self.trying)
        self.trying = None

    def serves(self, process: str, fence: int, version: int, *, wild: bool) -> None:
        """An actor's process serves these weights now."""
        before = self._adopted.get(process, (0, -1))
        now = (fence, version) if not self._bound.exact else (fence, 0)
        if now < before and not wild:
            raise ViolationError("monotone", f"{process} went from (fence, version) {before} to {now}")
        self._adopted[process] = now

    def waited(self, engine: object) -> None:
        """A broadcast was in vain because of this engine."""
        if engine in self._waited:
            raise ViolationError("waits", f"the learner waited again for {engine}")
        self._waited.add(engine)

    def ended(self, trained: Iterable[int]) -> None:
        """The learner was told that nothing more comes."""
        trained, bound = set(trained), self._bound
        missing = set(range(bound.num_groups)) - trained - self.quarantined - self.removed
        if missing and not bound.refills:
            raise ViolationError("progress", f"the run ended without groups {sorted(missing)}")
        wanted = min(bound.num_groups, bound.num_numbers - len(self.quarantined) - self._num_filtered) - len(self.removed)
        if len(trained) != wanted:
            raise ViolationError("progress", f"the run ended with {len(trained)} groups trained on, of {wanted}")
