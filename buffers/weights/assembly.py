"""Brings the bytes of one announced weight set together, wherever they come from; nothing unverified leaves it.

Work is done in pieces, when `advance` is called: an actor goes on decoding and the hub goes on serving while a large set is
verified. What arrives in order is verified while it is still in the processor's cache. Sealed memory is verified once, by the
process that announces it to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol.message import TensorSpec
from async_rlhf.buffers.protocol.wire import Manifest, Publish
from async_rlhf.buffers.tensors import ITEM_BYTES, num_bytes
from async_rlhf.buffers.weights import delta
from async_rlhf.buffers.weights.shared import HeapMemory, MakeMemory, Memory
from async_rlhf.buffers.weights.weight_set import CACHED_BYTES, WeightSet, chunk_bytes, num_chunks

PIECE_BYTES = 16 << 20
"""Verified in one go: a few milliseconds."""
_PATCH_COST = 8  # times the work of verifying as many bytes


class ChunkedBytes:
    """A string of bytes that comes in chunks, in any order, some of them twice."""

    def __init__(self, name: str, size: int, memory: Memory | None = None) -> None:
        self.memory = HeapMemory(size) if memory is None else memory
        self._name, self._size = name, size
        self.missing = set(range(num_chunks(size)))
        self._front = 0

    def add(self, index: int, data: bytes | memoryview) -> None:
        """Put chunk `index` in its place; raises WeightsError when it does not fit there."""
        start = index * chunk_bytes()
        if not 0 <= index < num_chunks(self._size) or len(data) != min(chunk_bytes(), self._size - start):
            raise WeightsError(f"{self._name}: chunk {index} of {len(data)} bytes does not fit")
        if index in self.missing:  # what may be verified already is not written over
            self.memory.write(start, data)
            self.missing.discard(index)

    def front(self) -> int:
        """Bytes from the first on that are there without a gap."""
        while self._front < num_chunks(self._size) and self._front not in self.missing:
            self._front += 1
        return min(self._front * chunk_bytes(), self._size)


class Assembly:
    """One set that is on its way; `whole()` gives it once all its bytes are there and are right.

    given: memory in which all its bytes lie already; else there will be room for them, made with `make`.
    Raises WeightsError for an announcement that cannot be, or when there is no room.
    """

    def __init__(self, announced: Publish | Manifest, make: MakeMemory = HeapMemory, given: Memory | None = None) -> None:
        _check(announced)
        self.fence, self.version, self._canary = announced.fence, announced.version, announced.canary
        self.specs, self.num_bytes = tuple(announced.tensors), announced.num_bytes
        self._memory = make(self.num_bytes) if given is None else given
        self._chunks = ChunkedBytes(f"version {self.version}", self.num_bytes, self._memory)
        if given is not None:
            self._chunks.missing.clear()
        self._patching: Iterator[int] | None = None
        self._verifier = _Verifier(self.version, self.specs, self._memory.view)

    def add(self, index: int, data: bytes | memoryview) -> None:
        """Put chunk `index` in its place; raises WeightsError when it does not fit there."""
        self._chunks.add(index, data)

    def patch(self, base: WeightSet, deltas: Sequence[bytes | memoryview]) -> None:
        """The set is `base` with these deltas applied one after the other; no chunk is needed any more."""
        self._chunks.missing.clear()
        self._patching = self._patch(memoryview(base.blob), deltas)

    @property
    def missing(self) -> set[int]:
        """Chunks that have not come."""
        return self._chunks.missing

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are there, or what they are made of."""
        return not self._chunks.missing

    @property
    def is_verified(self) -> bool:
        return self._patching is None and self._verifier.is_done

    def advance(self, max_bytes: int = PIECE_BYTES) -> None:
        """Patch or verify about so many bytes of what is there.

        Raises WeightsError naming the first tensor that does not match its digest, or for a damaged delta.
        """
        while self._patching is not None:
            done = next(self._patching, None)
            if done is None:
                self._patching = None
            elif (max_bytes := max_bytes - done) <= 0:
                return
        self._verifier.advance(self._chunks.front(), max_bytes)

    def whole(self) -> WeightSet:
        """The set, every digest checked; raises WeightsError as `advance` does, or when something has not come."""
        if self._chunks.missing:
            raise WeightsError(f"version {self.version} is not complete: {len(self._chunks.missing)} chunks are missing")
        while not self.is_verified:
            self.advance(max(1, self.num_bytes))
        self._memory.seal()
        return WeightSet(self.fence, self.version, self.specs, self._memory.view, self._canary, self._memory)

    def _patch(self, base: memoryview, deltas: Sequence[bytes | memoryview]) -> Iterator[int]:
        """Yields how much was done, in bytes that could have been verified instead."""
        for number, each in enumerate(deltas):
            old = self._memory.view if number else base
            for start, end, width, block in delta.decode(memoryview(each), self.specs):
                self._memory.write(start, delta.patch(old[start:end], block, width))
                yield _PATCH_COST * (end - start)


def mapped(announced: Manifest, memory: Memory) -> WeightSet:
    """The set in sealed memory that the process which announced it has verified. It cannot have changed since, so it is not
    verified again. Raises WeightsError for an announcement that cannot be."""
    _check(announced)
    return WeightSet(announced.fence, announced.version, tuple(announced.tensors), memory.view, announced.canary, memory)


class _Verifier:
    """Compares digests from the first tensor to the last."""

    def __init__(self, version: int, specs: Sequence[TensorSpec], view: memoryview) -> None:
        self._version, self._specs, self._view = version, iter(specs), view
        self._done = self._end = 0
        self._spec: TensorSpec | None = None
        self._begin()

    @property
    def is_done(self) -> bool:
        return self._spec is None

    def advance(self, front: int, max_bytes: int) -> None:
        """Verify up to `front` or `max_bytes` more. Raises WeightsError."""
        stop = min(front, self._done + max_bytes)
        while self._spec is not None and (self._done < stop or self._done == self._end):
            until = min(self._end, stop, self._done + CACHED_BYTES)
            self._hasher.update(self._view[self._done : until])
            self._done = until
            if self._done == self._end:
                if self._hasher.hexdigest() != self._spec.digest:
                    raise WeightsError(f"version {self._version}: tensor {self._spec.name!r} does not match its digest")
                self._begin()

    def _begin(self) -> None:
        self._spec, self._hasher = next(self._specs, None), xxhash.xxh3_128()
        if self._spec is not None:
            self._end += num_bytes(self._spec.dtype, self._spec.shape)


def _check(announced: Publish | Manifest) -> None:
    for spec in announced.tensors:
        if spec.dtype not in ITEM_BYTES or any(size < 0 for size in spec.shape):
            raise WeightsError(f"tensor {spec.name!r}: {spec.dtype} {spec.shape} cannot travel")
    wanted = sum(num_bytes(spec.dtype, spec.shape) for spec in announced.tensors)
    if wanted != announced.num_bytes:
        raise WeightsError(f"version {announced.version}: tensors need {wanted} bytes, announced {announced.num_bytes}")
    if len({spec.name for spec in announced.tensors}) != len(announced.tensors):
        raise WeightsError(f"version {announced.version}: a tensor name occurs twice")
