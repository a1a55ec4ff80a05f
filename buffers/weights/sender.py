"""The learner's half of the weight channel: one copy of the tensors, and the hub takes of it what it cannot see.

The set is put into sealed memory when the hub is on this machine, which then maps it; else the hub requests its chunks, or
only for those of a delta to the set published before. Returns when the hub has verified the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.protocol.message import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.transport.link import Connection
from async_rlhf.buffers.weights import delta
from async_rlhf.buffers.weights.shared import HeapMemory, SealedMemory, is_local
from async_rlhf.buffers.weights.store import MAX_DELTA_SHARE, Delta
from async_rlhf.buffers.weights.weight_set import WeightSet, chunk_of, num_chunks

_CHUNKS_AHEAD = 8  # chunks sent before the first is acknowledged


class WeightSender:
    """Owns the set published last, while a delta to it may be requested."""

    def __init__(self, connection: Connection, address: str, config: WeightsConfig, timeout_s: float) -> None:
        self._connection, self._timeout_s, self._config = connection, timeout_s, config
        self._shares = config.transport == "auto" and is_local(address)
        self._before: WeightSet | None = None
        self._wants_delta = False

    def publish(self, fence: int, version: int, tensors: Mapping[str, RawTensor], canary: Canary | None) -> None:
        """Raises RefusedError when the hub does not take the set, DeadlineError when it does not answer."""
        weights = WeightSet.of(fence, version, tensors, canary, SealedMemory.make if self._shares else HeapMemory)
        step = self._delta(weights)
        announcement = weights.announcement().model_copy(update={"delta": step and step.spec})
        wanted, _ = self._connection.ask(announcement, timeout_s=self._timeout_s)
        if isinstance(wanted, wire.Wanted):
            chunks = _chunks(weights, wanted.chunks, step if wanted.delta else None)
            self._connection.ask_all(chunks, ahead=_CHUNKS_AHEAD, timeout_s=self._timeout_s)
            self._check(fence, version)
            self._wants_delta = self._config.delta and wanted.delta_next
        self._before = weights if self._wants_delta else None

    def _delta(self, weights: WeightSet) -> Delta | None:
        """From the set published before, when it is of use and small enough."""
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
