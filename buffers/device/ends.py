"""Both ends of the device channel: what is broadcast, and the digests that are taken of it on either side.

A set travels as it lies in its memory, all tensors one after the other, in buckets: while some are under way the digests of
those before are taken. Ahead of them come the names, dtypes and shapes. The learner broadcasts the copy that it has made for
the hub, so that training goes on meanwhile; an engine receives into memory of its own, the same for version after version.
Where a group serves a device, buckets pass through a few buffers there, and digests are taken of those.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.device.digest import SetDigest
from async_rlhf.buffers.device.group import LEARNER, DeviceGroup, EpochSeat, GlooGroup, MakeGroup, open_store, reach_store
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol import broadcasts, wire
from async_rlhf.buffers.protocol.message import TensorSpec
from async_rlhf.buffers.weights.shared import HeapPool
from async_rlhf.buffers.weights.standby import Received, Target
from async_rlhf.buffers.weights.weight_set import WeightSet, content_digest

_BUCKET_BYTES = 16 << 20
_AHEAD = 4  # buckets under way
_MOST_HEADER_BYTES = 64 << 20
_log = logging.getLogger(__name__)


class LearnerEnd:
    """Broadcasts (`clients.learner.Broadcaster`). Owns the store, and the seat in the newest epoch. Waits for the engines of an
    epoch, `timeout_s` at most for each set."""

    def __init__(self, timeout_s: float, make: MakeGroup = GlooGroup) -> None:
        self._timeout_s, self._make = timeout_s, make
        self._store, self.store = open_store(timeout_s)
        self._epoch: tuple[int, int] | None = None
        self._seat: EpochSeat[WeightSet, str] | None = None

    def send(self, epoch: tuple[int, int], size: int, weights: WeightSet) -> str | None:
        if self._seat is None or epoch != self._epoch:
            self.close()
            self._epoch, self._results = epoch, SimpleQueue[str | None]()
            make = partial(self._make, self._store, _name(*epoch), LEARNER, size, self._timeout_s)
            self._seat = EpochSeat(make, _send, self._results.put)
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


class EngineEnd:
    """Takes a seat in each epoch that it is called with (`weights.standby.TakeSeat`). Owns the memory that sets come into."""

    def __init__(self, timeout_s: float, make: MakeGroup = GlooGroup) -> None:
        self._timeout_s, self._make, self._pool = timeout_s, make, HeapPool()

    def __call__(self, epoch: broadcasts.Receive, done: Received) -> EpochSeat[Target, WeightSet]:
        def make() -> DeviceGroup:
            store, name = reach_store(epoch.store, self._timeout_s), _name(epoch.fence, epoch.epoch)
            return self._make(store, name, epoch.rank, epoch.size, self._timeout_s)

        return EpochSeat(make, self._receive, done)

    def _receive(self, group: DeviceGroup, target: Target) -> WeightSet:
        length = int(_pass(group, torch.zeros(1, dtype=torch.int64)))
        if not 0 < length <= _MOST_HEADER_BYTES:
            raise WeightsError(f"the head of a broadcast has {length} bytes; most: {_MOST_HEADER_BYTES}")
        header = _pass(group, torch.empty(length, dtype=torch.uint8))
        manifest = wire.Manifest.model_validate_json(header.numpy().tobytes())
        if (manifest.fence, manifest.version) != target:
            raise WeightsError(f"version {manifest.version} is broadcast where {target[1]} was announced")
        memory = self._pool.make(manifest.num_bytes)
        specs = _pass_on(group, torch.frombuffer(memory.room, dtype=torch.uint8), manifest.tensors, sends=False)
        return WeightSet(*target, tuple(specs), memory.view, memory=memory)


def _send(group: DeviceGroup, weights: WeightSet) -> str:
    manifest = weights.manifest().model_copy(update={"place": None, "canary": None})
    header = torch.frombuffer(bytearray(manifest.model_dump_json().encode()), dtype=torch.uint8)
    _pass(group, torch.tensor([len(header)]))
    _pass(group, header)
    # By its address, because torch knows no read-only memory; the code below only reads.
    memory = (ctypes.c_ubyte * len(weights.blob)).from_address(np.frombuffer(weights.blob, np.uint8).ctypes.data)
    return content_digest(_pass_on(group, torch.frombuffer(memory, dtype=torch.uint8), weights.specs, sends=True))


def _pass(group: DeviceGroup, tensor: Tensor) -> Tensor:
    """Broadcast one tensor, from and to the host."""
    there = tensor.to(group.device)
    group.broadcast(there).wait()
    return there.cpu()


def _pass_on(group: DeviceGroup, flat: Tensor, specs: Sequence[TensorSpec], *, sends: bool) -> Sequence[TensorSpec]:
    """Broadcast uint8 [n], the tensors of `specs` one after the other. These with the digests that were taken of them here."""
    coming, digests = deque[_Coming](), SetDigest(specs)
    buckets, size = torch.split(flat, _BUCKET_BYTES)[: len(flat)], min(_BUCKET_BYTES, len(flat))
    buffers = [torch.empty(size, dtype=torch.uint8, device=group.device) for _ in buckets[:_AHEAD] if group.device is not None]
    for index, bucket in enumerate(buckets):
        if index >= _AHEAD:
            coming.popleft().take(digests)
        there = buffers[index % _AHEAD][: len(bucket)] if buffers else bucket
        if sends:
            there.copy_(bucket)
        coming.append(_Coming(group.broadcast(there), there, None if sends else bucket))
    for each in coming:
        each.take(digests)
    return digests.specs


class _Coming(NamedTuple):
    """A bucket under way. to: where it belongs."""

    work: torch.distributed.Work
    there: Tensor
    to: Tensor | None

    def take(self, digests: SetDigest) -> None:
        self.work.wait()
        digests.add(self.there)
        if self.to is not None:
            self.to.copy_(self.there)


def _name(fence: int, number: int) -> str:
    return f"epoch-{fence}-{number}"
