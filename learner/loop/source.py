"""The source of the learner's batches, a hub (`LearnerClient`) or the archive of an earlier run, and the session with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from async_rlhf.buffers.clients.learner import LearnerClient, SuspectGroup, TakenBatch, WeightUpload
from async_rlhf.buffers.errors import HubRestartedError, NonFiniteError, RefusedError
from async_rlhf.buffers.protocol.message import Canary
from async_rlhf.buffers.queue.recovery import ArchivedBatch, read_batches
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.loop.recording import Recording
from async_rlhf.learner.step.controller import Controller

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ArchiveSource:
    """The batches of an earlier run, bit for bit and in the same order; publications are ignored."""

    def __init__(self, queue_dir: Path) -> None:
        self._batches: Iterator[ArchivedBatch] = read_batches(queue_dir)

    def take(self, step: int, target_staleness: int | None = None) -> TakenBatch | str:
        """Batch `step`, or the reason why there is none; raises RefusedError when it was deleted from the archive."""
        for batch in self._batches:
            if batch.step == step:
                return TakenBatch(step, batch.groups, {})
            if batch.step > step:
                raise RefusedError("not-kept", f"the archive has no batch {step}, it goes on at {batch.step}")
        return "end of the archive"

    def begin_publish(
        self, version: int, tensors: Mapping[str, RawTensor], canary: Canary | None, read: Callable[[], object]
    ) -> WeightUpload:
        read()
        return WeightUpload(lambda: None)

    def register(self, *args: object, **named: object) -> int:
        """Nothing that it is informed of matters to it."""
        return 0

    finish = tried = trained = commit = register


BatchSource = LearnerClient | ArchiveSource


class SourceSession:
    """Keeps a source informed of the learner's step, weights and checkpoints, also when the hub is restarted in between.

    Weights travel while the next step is made: a copy of them, which is at the hub before that step is reported as done. Only
    those that a registration begins with are waited for at once, and every version in exact mode: later groups are made by it,
    and a hub that dies before it has them whole could not be given them again.

    After a restart every call is left out until the next `take`, whose registration carries the present step and commit.
    """

    def __init__(
        self,
        source: BatchSource,
        backend: Controller,
        recording: Recording,
        step: int,
        committed: int,
        max_steps: int | None,
        *,
        exact: bool,
    ) -> None:
        self._source, self._backend, self._recording = source, backend, recording
        self._committed, self._max_steps, self._exact = committed, max_steps, exact
        self._registered = False
        self._text: Sequence[int] = ()  # the newest that was trained on: the canary that engines are compared by
        self._publication: WeightUpload | None = None
        self.published = step
        """The newest version that was published, or is being."""
        self._began_at = step
        self.begun = -1
        """Groups of lower numbers may be of weights that are not this learner's, whatever their version."""
        self.waited_s = self.broadcast_s = 0.0
        """Seconds of the last `take`, and seconds that publications kept the learner in this step: the start of its own, and
        the rest of the one before."""

    def take(self, step: int, target_staleness: int | None, try_group: Callable[[Group], None]) -> TakenBatch | str:
        """The next batch, or why there is none. Groups suspected of ending learners are tried alone first."""

        def next_batch() -> TakenBatch | str:
            began = time.monotonic()
            while isinstance(taken := self._source.take(step, target_staleness), SuspectGroup):
                _log.warning("step %d: group %d is tried alone, its batch has ended learners", step, taken.number)
                try_group(taken.group())
                self._source.tried(taken)
                began = time.monotonic()
            self.waited_s = time.monotonic() - began
            return taken

        return self._registered_at(step, next_batch)

    def finish(self, step: int) -> None:
        """Take no batch at `step` or later: the hub lets the actors go."""
        self._registered_at(step, lambda: self._source.finish(step))

    def _registered_at(self, step: int, call: Callable[[], T]) -> T:
        """Make a call that needs a registration; after a restart of the hub register again and repeat the call."""
        while True:
            try:
                if not self._registered:
                    self._register(step)
                return call()
            except HubRestartedError:
                _log.warning("the hub was restarted: registering again at step %d", step)
                self._registered = False

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        """Step `step` was made from these groups."""
        for group in groups[:1]:
            longest = max(group.rollouts, key=lambda rollout: rollout.num_tokens)
            if group.images or longest.images:  # places without their images are no text
                self._text = longest.sampled_ids.tolist()
            else:
                self._text = [*group.prompt_ids.tolist(), *longest.completion_ids.tolist()]
        self._inform(lambda: self._source.trained(step))
        self.broadcast_s = 0.0 if self._publication is None else self._publication.blocked_s
        self._publication = None

    def num_nominal(self, groups: Sequence[Group]) -> int:
        """Tokens whose versions this learner makes again, behind the checkpoint that it began with: they may have been sampled
        before, by other weights of the same number."""
        before = (group for group in groups if group.number < self.begun)
        return sum(tokens for group in before for version, tokens in group.sampled_spans() if version > self._began_at)

    def publish(self, step: int) -> None:
        """Begin to publish the weights after `step` steps."""
        self._inform(lambda: self._publish(step, whole=self._exact))

    def commit(self, step: int) -> None:
        """Give up the groups trained on before `step`."""
        if step > self._committed:
            self._committed = step
            self._inform(lambda: self._source.commit(step))

    def end(self, step: int) -> None:
        """The hub has the last commit, also when it was restarted just now."""
        if not self._registered:
            self._source.register(step, self._committed)

    def _register(self, step: int) -> None:
        begun = self._source.register(step, self._committed)
        if self.begun < 0:  # groups that a restarted hub has begun in the meantime have this learner's weights
            self.begun = begun
        self._recording.begin(step)  # nothing is cut off before the hub has taken this learner
        if self._max_steps is None or step < self._max_steps:
            self._publish(step, whole=True)
        self._registered = True

    def _publish(self, step: int, *, whole: bool) -> None:
        """whole: wait until the hub has it."""
        began = time.monotonic()
        tensors, canary = self._backend.tensors(), self.canary(step)
        copied = threading.Event()
        publication = self._source.begin_publish(step, tensors, canary, copied.set)
        self._backend.is_read(until=copied)
        if whole:
            publication.wait()
        self._publication = None if whole else publication
        self.published = step
        self.broadcast_s += time.monotonic() - began

    def canary(self, step: int) -> Canary:
        """The canary of the weights after `step` steps. Raises NonFiniteError where they cannot be used any more."""
        try:
            return self._backend.canary(self._text)
        except NonFiniteError as error:
            cause = "The most likely cause is learner.learning_rate: lower it." if step else "`model` is so from the start."
            raise NonFiniteError(f"the weights after step {step} cannot be used: {error}. {cause}") from error

    def _inform(self, call: Callable[[], object]) -> None:
        if not self._registered:
            return
        try:
            call()
        except HubRestartedError:
            self._registered = False
