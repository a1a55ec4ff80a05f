"""Twenty-three defects to plant, each a mistake that could really be made: the simulation must find every one."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.hub.learner_session import LearnerSession
from async_rlhf.buffers.hub.sessions import ActorSessions
from async_rlhf.buffers.queue.admission import Admission
from async_rlhf.buffers.queue.failures import Trials
from async_rlhf.buffers.queue.fleet import Fleet
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.weights.assembly import EarlyParts
from async_rlhf.buffers.weights.broadcast import Membership
from async_rlhf.buffers.weights.receiver import WeightReceiver
from async_rlhf.buffers.weights.relay import WeightCache
from async_rlhf.buffers.weights.server import WeightServer
from async_rlhf.buffers.weights.standby import Standby
from tests.simulation.disk import MemoryDisk
from tests.simulation.learner_role import LearnerRole
from tests.simulation.memory import Machine, SimMemory


class Edit(NamedTuple):
    """In the source of this method, `old`, which is there once, becomes `new`."""

    method: Callable[..., Any]
    old: str
    new: str


class Mutation(NamedTuple):
    """What is then so, and the rules that it may break."""

    says: str
    rules: set[str]
    edits: tuple[Edit, ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        honest = [(edit.method, edit.method.__code__) for edit in self.edits]
        try:
            for edit in self.edits:
                edit.method.__code__ = _mutant(edit)
            yield
        finally:
            for method, code in honest:
                method.__code__ = code


def _mutant(edit: Edit) -> Any:
    source = textwrap.dedent(inspect.getsource(edit.method))
    assert source.count(edit.old) == 1, f"{edit.old!r} is not once in {edit.method.__qualname__}: write it anew"
    made: dict[str, Any] = {}
    code = compile(source.replace(edit.old, edit.new), edit.method.__qualname__, "exec")  # with this file's __future__ too
    exec(code, vars(sys.modules[edit.method.__module__]), made)
    return made[edit.method.__name__].__code__


def mutation(says: str, rules: str, *edits: tuple[Callable[..., Any], str, str]) -> Mutation:
    return Mutation(says, set(rules.split()), tuple(Edit(*each) for each in edits))


# fmt: off
MUTATIONS = {
    "skip_an_fsync": mutation(
        "Groups are acknowledged when they were written, not when they are durable.", "lost restart refused",
        (MemoryDisk.sync, 'self.spend("sync")', "return")),
    "forget_a_dedup": mutation(
        "A finished group is admitted without asking whose lease it is.", "ledger memory twice",
        (Admission.put, "self._duplicates += 1", "self._queued[number] = entry; self.fleet.credited += 1; return True")),
    "count_staleness_at_completion": mutation(
        "A group may enter when its tokens are young enough at that moment, however late it will be trained on.", "bound",
        (Admission.may_begin, "and self.bound.allows(version, number, self.order.dead_below(number), self.target_staleness)",
         "and self.step - self.bound.max_staleness <= version and number < self.bound.groups_per_batch * self.step"
         " + self.bound.max_ahead"),
        (Admission.put, "self.order.lowest_version(number)", "max(0, self.step - self.bound.max_staleness)"),
        (Admission._drop_too_old, "old = [", "return False; old = [")),
    "free_a_slot_at_take": mutation(
        "A group's slot is free as soon as its batch is taken, not when it has been trained on.", "memory",
        (Admission.may_begin, "dead_below(number)",
         "dead_below(number) + self.bound.groups_per_batch * (self.step in self._batches.taken)")),
    "commit_a_label_before_the_load": mutation(
        "An actor takes on the version's name when it is told of it, before the weights have come and were verified.",
        "truth crash",  # before its first weights an engine has no tokens to give
        (WeightReceiver.adopt, "self._target = self._weights = None",
         'self._target, self._weights = None, WeightSet(*target, specs=(), blob=b"")')),
    "ignore_the_fence": mutation(
        "Whoever speaks as the learner is believed.", "refused twice ledger replay",
        (LearnerSession.handle, "self._check_fence(message)",
         'if hasattr(message, "fence"): message = message.model_copy(update={"fence": admission.fence})')),
    "serve_another_set_under_the_name": mutation(
        "A relay that is asked for a set it does not have gives out the newest it has.", "truth",
        (WeightCache.request, "target not in self._kept", "not self._kept"),
        (WeightCache._answer, "self._weight_server.serve(wanted)",
         'self._weight_server.serve(wanted.model_copy(update={"version": self._kept[-1][1]}))'),
        (WeightCache._answer, "self._queue(identity, message, request, arrays)",
         'self._queue(identity, message.model_copy(update={"version": wanted.version}), request, arrays)')),
    "write_what_others_map": mutation(
        "The learner writes each version into the memory of the one before, which was mapped although it is not sealed.",
        "truth crash refused",
        (Machine.make, "return SimMemory(self, num_bytes)",
         'rooms = vars(self).setdefault("rooms", {}) if self._running == "learner" else {}'
         "; return rooms.setdefault(self._pids[self._running], SimMemory(self, num_bytes))"),
        (SimMemory.write, "if self.parts[index].is_sealed:", "self.parts[index].is_sealed = False\n        if False:")),
    "announce_before_the_last_part": mutation(
        "A set is made of the parts that came before its announcement, whether they are all there or not.",
        "truth crash restart progress",
        (EarlyParts.fits, "parts = [", "return True; parts = [")),
    "take_a_part_of_an_older_set": mutation(
        "Parts are told apart by their numbers alone, and kept when their set is whole.", "truth crash",
        (WeightServer._given, "early, self._early = self._early, None", "early = self._early"),
        (EarlyParts.is_of, "return (", "return True or ("),
        (EarlyParts.fits, "parts = [", "return self._num_joined == num_parts(announced.num_bytes); parts = [")),
    "forget_what_was_filtered": mutation(
        "A filtered group is acknowledged, and the journal is not told that its number is dead.", "lost",
        (Admission.remember, "filtered=tuple(line.filtered), filtered_before=line.filtered_before, "
         "filtered_tokens=self._filtered_tokens", "filtered=(), filtered_before=0, filtered_tokens=0")),
    "give_up_what_was_trained": mutation(
        "A commit deletes everything that was trained on, and not only what the oldest kept checkpoint holds.", "refused lost",
        (Admission.commit, "if step > self.step:", "if (step := self.step) > self.step:")),
    "count_silence": mutation(
        "A lease that ended because nothing was heard counts against its groups.", "guilt",
        (Fleet.leave, "    if seen:", "    if seen := True:")),
    "let_two_hold_a_name": mutation(
        "The last to say hello has the name.", "guilt",
        (ActorSessions._check_name, "holder is None or", "True or")),
    "wait_for_a_stuck_actor": mutation(
        "An actor that beats keeps its groups for ever.", "progress",
        (Fleet.overdue, "late = [", "return []; late = [")),
    "call_a_missing_page_damage": mutation(
        "Only the very end of the journal may be unfinished.", "restart",
        (Journal._cut_off, "!= self._segments[-1] or", "!= self._segments[-1] or behind or")),
    "blame_the_first_of_the_batch": mutation(
        "The learner ended again and again with a batch: its first group is taken out without a trial.", "guilt",
        (Trials.ended, "guilty, self.trying = self.trying, None",
         "self._ended[step] += 1; return self.trying if self._ended[step] >= self._max_attempts else None"),
        (Trials.next, "self.trying = None", "self.trying = min(numbers, default=None); return None")),
    "finish_a_step_before_the_weights_are_there": mutation(
        "A learner says that its next step is done while the hub still takes in the version of the one before.", "refused",
        (LearnerClient.trained, "self._end_upload()", "pass")),
    "go_on_while_a_version_may_be_lost": mutation(
        "In exact mode, too, the next step begins before the hub has the version of the one before.", "progress",
        (LearnerRole._publish, "if whole:", "if whole and not self._registered:")),
    "adopt_what_came_without_a_look_at_its_digest": mutation(
        "Whatever was received under the name of the version is adopted.", "truth",
        (Standby.take, "weights = self._set", "weights, self._set = self._set, None; return weights")),
    "wait_for_who_hangs_again_and_again": mutation(
        "Whoever is connected takes part in the next epoch, whether it left the one that failed or not.", "waits",
        (Membership._may_come, "return given is None", "return True or given is None")),
    "take_an_engine_of_an_old_epoch_for_a_member": mutation(
        "An engine that left some epoch is taken for one that left the epoch that failed.", "waits",
        (Membership._may_come, "or is_in_whole or (states[member].epoch_id == given and",
         "or self._is_whole or (True and")),
    "go_on_with_the_number_of_an_epoch_that_is_over": mutation(
        "Those who come are put into the epoch that is there.", "epoch",
        (Membership.gather, "newest.id[1] + 1", "newest.id[1]")),
}
