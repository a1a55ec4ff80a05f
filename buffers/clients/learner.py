"""The learner's end of the hub: requests that wait for their answers, and one weight set at a time in a thread of its own.

owns        two connections, and while a set is on its way the thread that sends it (`WeightUpload`)
waits for   the hub's answers, each with a deadline; `WeightUpload.wait` for the thread
woken by    the hub's answers
on close    waits for the set on its way; one that did not come whole is not announced
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import AsyncRLHFError
from async_rlhf.buffers.protocol import broadcasts, packing, wire
from async_rlhf.buffers.protocol.message import Canary
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.transport.link import Connect, Connection, SocketLink
from async_rlhf.buffers.weights import delta
from async_rlhf.buffers.weights.shared import HeapMemory, SealedPool, is_local
from async_rlhf.buffers.weights.store import MAX_DELTA_SHARE, Delta
from async_rlhf.buffers.weights.weight_set import WeightSet, chunk_of, num_chunks

_CHUNKS_AHEAD = 8  # chunks sent before the first is acknowledged


@dataclass(frozen=True)
class TakenBatch:
    """One batch of groups, with the actors' counters at that moment."""

    step: int
    groups: tuple[Group, ...]
    telemetry: Mapping[str, float]


@dataclass(frozen=True)
class SuspectGroup:
    """One group of a batch that ended learners: to be tried alone, without an update, and then named in `tried`."""

    step: int
    number: int
    frames: wire.Frames

    def group(self) -> Group:
        """Raises WireError when it cannot be read."""
        return packing.decode_put(self.frames)


class WeightUpload:
    """A weight set on its way to the hub: runs `work`, which publishes it, in a thread. `blocked_s`: how long others waited for
    it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self.blocked_s = 0.0
        self._start(lambda: self._run(work))

    def check(self) -> None:
        """Raise its error if it has failed; it may still be under way."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Return when the hub has verified the whole set. Raises RefusedError when the hub refused it, DeadlineError without an
        answer."""
        self._await(self._ended)
        self.check()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (handed to the thread that waits)
            self._failure = error
        finally:
            self._ended.set()

    def _start(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name="weight-upload", daemon=True).start()

    def _await(self, event: threading.Event) -> None:
        began = time.monotonic()
        event.wait()
        self.blocked_s += time.monotonic() - began


class Broadcaster(Protocol):
    """The learner's end of the device channel. store: where its epochs meet. send: broadcasts a set to the `size` - 1 engines
    of an epoch; returns the content digest of the sent bytes, or None when the epoch is over."""

    store: str

    def send(self, epoch: tuple[int, int], size: int, weights: WeightSet) -> str | None: ...
    def close(self) -> None: ...


class LearnerClient:
    """The learner's end: take batches, report what was trained and what is durable, publish weights. Blocks, with deadlines.

    Weights have their own connection, so that a thread sends them while everything else goes on. The hub takes a version only
    from a learner that has done as many steps: `trained` waits until the hub has the weights of the step before, so at most one
    set is on its way. The next step may begin in the meantime: the bound depends only on the versions that actors serve when
    they are credited (`buffers.queue.bound`). A batch that needs the version under way waits in `take`.

    Raises HubRestartedError when the hub lost its memory of this learner: `register` and `publish` again. Raises RefusedError
    with the reason `fenced` when another learner has taken its place, which is for good.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        connect: Connect = SocketLink,
        weights: WeightsConfig | None = None,
        start: Callable[[Callable[[], None]], WeightUpload] = WeightUpload,
        broadcaster: Broadcaster | None = None,
    ) -> None:
        """start: begins an upload; a simulator has its own. broadcaster: with the device channel."""
        self._broadcaster = broadcaster
        self._connection, self._weight_connection = (
            Connection(connect(address, name)) for name in ("learner", "learner-weights")
        )
        self._weight_sender = WeightSender(self._weight_connection, address, weights or WeightsConfig(), timeout_s)
        self._start = start
        self._upload: WeightUpload | None = None
        self._timeout_s = timeout_s
        self._life = secrets.token_hex(8)
        self.fence = 0

    def register(self, step: int, committed: int) -> int:
        """(Re)start at `step`; a new fence holds from now on. committed: as `commit` takes it. Returns `Registered.begun`.

        A set that is still on its way no longer matters: all later messages have another fence.
        """
        with suppress(AsyncRLHFError):
            self._end_upload()
        register = wire.Register(step=step, committed=committed, learner=self._life, fence=self.fence)
        answer, _ = self._connection.ask(register, timeout_s=self._timeout_s)
        assert isinstance(answer, wire.Registered)
        self.fence = answer.fence
        return answer.begun

    def take(self, step: int, target_staleness: int | None = None) -> TakenBatch | SuspectGroup | str:
        """Batch `step`, a group of it to be tried first, or the reason why no batch will come. Waits until one of them exists.

        Raises the error of the upload under way, because the batch may wait for it.
        """
        taken = self._take(step, target_staleness)
        if isinstance(taken, str | SuspectGroup):
            return taken
        batch, frames = taken
        groups = tuple(packing.decode_put(frames[i : i + 3]) for i in range(0, len(frames), 3))
        return TakenBatch(step, groups, batch.telemetry)

    def take_packed(self, step: int) -> wire.Frames | str:
        """Like `take`, but with packed groups: three frames each, header and arrays of its Put."""
        taken = self._take(step)
        assert not isinstance(taken, SuspectGroup)
        return taken if isinstance(taken, str) else taken[1]

    def finish(self, step: int) -> None:
        """Refuse batch `step` and all later ones; the hub stops the actors. Groups in progress can be made another time."""
        take = wire.Take(fence=self.fence, step=step, enough=True)
        self._connection.ask(take, timeout_s=self._timeout_s, meanwhile=self._check_upload)

    def tried(self, suspect: SuspectGroup) -> None:
        """The group alone was no trouble."""
        message = wire.Tried(fence=self.fence, step=suspect.step, number=suspect.number, done=True)
        self._connection.ask(message, timeout_s=self._timeout_s)

    def _take(self, step: int, target_staleness: int | None = None) -> tuple[wire.Batch, wire.Frames] | SuspectGroup | str:
        answer, frames = self._connection.ask(
            wire.Take(fence=self.fence, step=step, target_staleness=target_staleness),
            timeout_s=self._timeout_s,
            meanwhile=self._check_upload,
        )
        if isinstance(answer, wire.Ended):
            return answer.reason
        if isinstance(answer, wire.Trial):
            self._connection.send(wire.Tried(fence=self.fence, step=step, number=answer.number, done=False))
            return SuspectGroup(step, answer.number, frames)
        assert isinstance(answer, wire.Batch)
        return answer, frames

    def trained(self, step: int) -> None:
        """Batch `step` has been trained on. Waits for the upload under way and raises its error, but does not wait for an
        answer: if the message is lost, the next request implies it."""
        self._end_upload()
        self._connection.send(wire.Trained(fence=self.fence, step=step))

    def commit(self, step: int) -> None:
        """The oldest checkpoint that is kept has `step` steps; the groups of earlier steps may be deleted."""
        self._connection.ask(wire.Commit(fence=self.fence, step=step), timeout_s=self._timeout_s)

    def publish(self, version: int, tensors: Mapping[str, RawTensor], canary: Canary | None = None) -> None:
        """Send a weight set; returns when the hub has verified it whole. Raises RefusedError when it is not."""
        self.begin_publish(version, tensors, canary)
        self._end_upload()

    def begin_publish(
        self,
        version: int,
        tensors: Mapping[str, RawTensor],
        canary: Canary | None = None,
        read: Callable[[], object] = lambda: None,
    ) -> WeightUpload:
        """Begin to send a weight set, when the one before is there. read: called when the tensors may change, once the upload
        has copied them or failed."""
        self._end_upload()
        fence = self.fence

        def work() -> None:
            try:
                weights = self._weight_sender.copied(fence, version, tensors, canary)
            finally:
                read()
            if self._broadcaster is not None:
                self._broadcast(self._broadcaster, weights)
            self._weight_sender.publish(weights)

        self._upload = self._start(work)
        return self._upload

    def _broadcast(self, broadcaster: Broadcaster, weights: WeightSet) -> None:
        """Broadcast the set to the engines that take part, which may adopt it before the hub has it."""
        name = {"fence": weights.fence, "version": weights.version}
        ask = partial(self._weight_connection.ask, timeout_s=self._timeout_s)
        gathered, _ = ask(broadcasts.Gather(**name, store=broadcaster.store))
        if isinstance(gathered, broadcasts.Receive) and gathered.size > 1:
            digest = broadcaster.send((weights.fence, gathered.epoch), gathered.size, weights)
            ask(broadcasts.Broadcast(**name, epoch=gathered.epoch, digest=digest, canary=weights.canary))

    def _check_upload(self) -> None:
        if self._upload is not None:
            self._upload.check()

    def _end_upload(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.wait()

    def close(self) -> None:
        """Wait for a set that is on its way, and ignore its errors."""
        with suppress(AsyncRLHFError):
            self._end_upload()
        if self._broadcaster is not None:
            self._broadcaster.close()
        self._connection.close()
        self._weight_connection.close()


class WeightSender:
    """Sends one copy of the tensors. When the hub is on this machine the copy lies in sealed memory, and the hub maps each part
    and verifies it while the next is copied; else the hub requests the chunks of the set, or those of a delta to the set
    published before.

    Owns the set published last, while a delta to it may be requested."""

    def __init__(self, connection: Connection, address: str, config: WeightsConfig, timeout_s: float) -> None:
        self._connection, self._timeout_s, self._config = connection, timeout_s, config
        shares = config.transport != "chunks" and is_local(address)
        self._make = SealedPool().make if shares else HeapMemory
        self._before: WeightSet | None = None
        self._wants_delta = False

    def copied(self, fence: int, version: int, tensors: Mapping[str, RawTensor], canary: Canary | None) -> WeightSet:
        """Waits for nothing: a sealed part is announced, and has no answer."""
        return WeightSet.of(fence, version, tensors, canary, self._make, self._connection.send)

    def publish(self, weights: WeightSet) -> None:
        """Raises RefusedError when the hub does not take the set, DeadlineError when it does not answer."""
        step = self._delta(weights)
        announcement = weights.announcement().model_copy(update={"delta": step and step.spec})
        wanted, _ = self._connection.ask(announcement, timeout_s=self._timeout_s)
        if isinstance(wanted, wire.Wanted):
            chunks = _chunks(weights, wanted.chunks, step if wanted.delta else None)
            self._connection.ask_all(chunks, ahead=_CHUNKS_AHEAD, timeout_s=self._timeout_s)
            self._check(weights.fence, weights.version)
            self._wants_delta = self._config.delta and wanted.delta_next
        self._before = weights if self._wants_delta else None

    def _delta(self, weights: WeightSet) -> Delta | None:
        """The delta from the set published before, when the hub can use it and it is small enough."""
        before = self._before
        if before is None or _layout(before) != _layout(weights):
            return None
        limit = int(MAX_DELTA_SHARE * len(weights.blob))
        data = delta.encode(memoryview(before.blob), memoryview(weights.blob), weights.specs, limit)
        return None if data is None else Delta(before.digest, weights.digest, data)

    def _check(self, fence: int, version: int) -> None:
        """The hub verifies as it has time, and answers when it is done."""
        while True:
            checked, _ = self._connection.ask(wire.Check(fence=fence, version=version), timeout_s=self._timeout_s)
            if not isinstance(checked, wire.Checked) or checked.done:
                return


def _chunks(weights: WeightSet, whole: bool, step: Delta | None) -> Iterator[tuple[wire.Message, wire.Frames]]:
    """The chunks of the set, if wanted, and of a delta."""
    parts = [(weights.blob, None)] * whole + ([(step.data, step.result)] if step is not None else [])
    for data, result in parts:
        for index in range(num_chunks(len(data))):
            chunk = wire.Chunk(fence=weights.fence, version=weights.version, index=index, delta=result)
            yield chunk, cast("wire.Frames", [chunk_of(data, index, "the set")])  # a view is sent like bytes


def _layout(weights: WeightSet) -> list[tuple[str, str, list[int]]]:
    return [(spec.name, spec.dtype, spec.shape) for spec in weights.specs]
