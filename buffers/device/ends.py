"""Both ends of the device channel: what is broadcast, and the digests that are taken of it on either side.

A set travels as it lies in its memory, all tensors one after the other, in buckets: while one is under way the digests of that
before it are taken. Before them come the names, dtypes and shapes. The learner broadcasts the copy that it has made for the hub,
so that training goes on meanwhile; an engine receives into memory of its own, the same for version after version.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from async_rlhf.buffers.device.digest import SetDigest
from async_rlhf.buffers.device.group import Group, Seat, open_store, reach_store
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.protocol.message import TensorSpec
from async_rlhf.buffers.weights.shared import HeapPool
from async_rlhf.buffers.weights.standby import Received, Target
from async_rlhf.buffers.weights.weight_set import WeightSet, content_digest

_BUCKET_BYTES = 16 << 20
_AHEAD = 2  # buckets under way
_log = logging.getLogger(__name__)


class LearnerEnd:
    """Broadcasts from the learner. Owns the store that epochs meet in (`store`: IP:PORT) and the seat in the newest epoch.

    Waits for the others of an epoch, `timeout_s` at most for each set.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._store, self.store = open_store(timeout_s)
        self._epoch: tuple[int, int] | None = None
        self._seat: Seat[WeightSet, str] | None = None
        self._results: SimpleQueue[str | None] = SimpleQueue()

    def send(self, epoch: tuple[int, int], size: int, weights: WeightSet) -> str | None:
        """Broadcast a set to the `size` - 1 engines of an epoch. Its content digest, of the digests that were taken here; None
        when the epoch is over, because it failed or took too long."""
        if self._seat is None or epoch != self._epoch:
            self.close()
            self._epoch, self._results = epoch, SimpleQueue()
            self._seat = Seat(lambda: self._group(epoch, size), _send, self._results.put)
        self._seat.do(weights)
        try:
            digest = self._results.get(timeout=self._timeout_s)
        except Empty:
            _log.warning("version %d was not broadcast within %g s", weights.version, self._timeout_s)
            digest = None
        if digest is None:
            self.close()
        return digest

    def close(self) -> None:
        """Leave the epoch; nothing is waited for."""
        if self._seat is not None:
            self._seat.leave()
        self._seat = None

    def _group(self, epoch: tuple[int, int], size: int) -> Group:
        return Group(self._store, _name(*epoch), 0, size, self._timeout_s)


class EngineEnd:
    """Receives at an engine: takes a seat in each epoch that this is called with. Owns the memory that sets come into."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._pool = timeout_s, HeapPool()

    def __call__(self, epoch: wire.Receive, done: Received) -> EngineSeat:
        return EngineSeat(epoch, done, self._timeout_s, self._pool)


class EngineSeat:
    """An engine's part in one epoch (see `weights.standby.Seat`)."""

    def __init__(self, epoch: wire.Receive, done: Received, timeout_s: float, pool: HeapPool) -> None:
        self._pool = pool

        def make_group() -> Group:
            store, name = reach_store(epoch.store, timeout_s), _name(epoch.fence, epoch.epoch)
            return Group(store, name, epoch.rank, epoch.size, timeout_s)

        self._seat: Seat[Target, WeightSet] = Seat(make_group, self._receive, done)

    def receive(self, target: Target) -> None:
        self._seat.do(target)

    def leave(self) -> None:
        self._seat.leave()

    def _receive(self, group: Group, target: Target) -> WeightSet:
        length = torch.zeros(1, dtype=torch.int64)
        group.broadcast(length).wait()
        header = torch.empty(int(length), dtype=torch.uint8)
        group.broadcast(header).wait()
        manifest = wire.Manifest.model_validate_json(header.numpy().tobytes())
        memory = self._pool.make(manifest.num_bytes)
        specs = _pass_on(group, torch.frombuffer(memory.room, dtype=torch.uint8), manifest.tensors)
        return WeightSet(*target, tuple(specs), memory.view, memory=memory)


def _send(group: Group, weights: WeightSet) -> str:
    manifest = weights.manifest().model_copy(update={"place": None, "canary": None})
    header = torch.frombuffer(bytearray(manifest.model_dump_json().encode()), dtype=torch.uint8)
    group.broadcast(torch.tensor([len(header)])).wait()
    group.broadcast(header).wait()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        flat = torch.frombuffer(weights.blob, dtype=torch.uint8)  # the learner's own is only read
    return content_digest(_pass_on(group, flat, weights.specs))


def _pass_on(group: Group, flat: Tensor, specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
    """Broadcast uint8 [n], the tensors of `specs` one after the other. Returns these with the digests that were taken of them."""
    under_way, digests, front = deque[tuple[torch.distributed.Work, int]](), SetDigest(specs, flat), 0
    while front < len(flat) or under_way:
        if front < len(flat) and len(under_way) < _AHEAD:
            bucket = flat[front : front + _BUCKET_BYTES]
            front += len(bucket)
            under_way.append((group.broadcast(bucket), front))
            continue
        work, come = under_way.popleft()
        work.wait()
        digests.advance(come)
    digests.advance(front)
    return digests.specs


def _name(fence: int, number: int) -> str:
    return f"epoch-{fence}-{number}"
