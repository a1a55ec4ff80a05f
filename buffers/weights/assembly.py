"""Brings the bytes of one announced weight set together, wherever they come from; nothing unverified leaves it.

Work is done in pieces, when `advance` is called: an actor goes on decoding and the hub goes on serving while a large set is
verified. What arrives in order is verified while it is still in the processor's cache. Sealed memory is verified once, by the
process that announces it to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol.message import TensorSpec
from async_rlhf.buffers.protocol.wire import Manifest, Publish, SealedPart
from async_rlhf.buffers.tensors import ITEM_BYTES, num_bytes
from async_rlhf.buffers.weights import delta
from async_rlhf.buffers.weights.digests import Digests
from async_rlhf.buffers.weights.shared import HeapMemory, MakeMemory, Memory, num_parts, part_bytes
from async_rlhf.buffers.weights.weight_set import WeightSet, chunk_bytes, num_chunks

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
        if index in self.missing:  # never write over bytes that may be verified already
            self.memory.write(start, data)
            self.missing.discard(index)

    def front(self) -> int:
        """Bytes from the start on that have come without a gap."""
        while self._front < num_chunks(self._size) and self._front not in self.missing:
            self._front += 1
        return min(self._front * chunk_bytes(), self._size)


class Assembly:
    """One set that is on its way; `whole()` gives it once all its bytes are there and are right.

    given: memory in which all its bytes lie already; else there will be room for them, made with `make`. begun: the
    verification of these tensors in that memory. threads: to verify with, at most.
    Raises WeightsError for an announcement that cannot be, or when there is no room.
    """

    def __init__(
        self,
        announced: Publish | Manifest,
        make: MakeMemory = HeapMemory,
        given: Memory | None = None,
        begun: Verifier | None = None,
        threads: int = 1,
    ) -> None:
        _check(announced)
        self.fence, self.version, self._canary = announced.fence, announced.version, announced.canary
        self.specs, self.num_bytes = tuple(announced.tensors), announced.num_bytes
        self._memory = make(self.num_bytes) if given is None else given
        self._chunks = ChunkedBytes(f"version {self.version}", self.num_bytes, self._memory)
        if given is not None:
            self._chunks.missing.clear()
        self._patching: Iterator[int] | None = None
        if begun is None:
            begun = Verifier(self.version, self._memory, threads)
            begun.expect(self.specs)
        self._verifier = begun

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
        """Whether all bytes, or all deltas for them, have come."""
        return not self._chunks.missing

    @property
    def is_verified(self) -> bool:
        return self._patching is None and self._verifier.is_done

    def advance(self, max_bytes: int = PIECE_BYTES) -> None:
        """Patch or verify about `max_bytes` of the bytes that have come.

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
        for number, encoded in enumerate(deltas):
            old = self._memory.view if number else base
            for start, end, width, block in delta.decode(memoryview(encoded), self.specs):
                self._memory.write(start, delta.patch(old[start:end], block, width))
                yield _PATCH_COST * (end - start)


def mapped(announced: Manifest, memory: Memory) -> WeightSet:
    """The set in sealed memory that the process which announced it has verified. It cannot have changed since, so it is not
    verified again. Raises WeightsError for an announcement that cannot be."""
    _check(announced)
    return WeightSet(announced.fence, announced.version, tuple(announced.tensors), memory.view, announced.canary, memory)


class Verifier:
    """Compares digests from the first tensor to the last."""

    def __init__(self, version: int, memory: Memory, threads: int = 1) -> None:
        self._version, self._memory, self._digests = version, memory, Digests(threads=threads)
        self._specs: list[TensorSpec] = []

    def expect(self, specs: Sequence[TensorSpec]) -> None:
        """The tensors that come next."""
        self._specs += specs
        self._digests.extend(num_bytes(spec.dtype, spec.shape) for spec in specs)

    @property
    def is_done(self) -> bool:
        """Whether all that are known have been verified."""
        return not self._digests.num_open

    @property
    def num_verified(self) -> int:
        """Bytes that have been read, from the first on."""
        return self._digests.done

    def advance(self, front: int, max_bytes: int) -> None:
        """Verify up to `front` or `max_bytes` more. Raises WeightsError."""
        first, view = len(self._specs) - self._digests.num_open, self._memory.view
        digests = self._digests.advance(min(front, self._digests.done + max_bytes), lambda start, end: view[start:end])
        for spec, digest in zip(self._specs[first:], digests, strict=False):
            if spec.digest != digest:
                raise WeightsError(f"version {self._version}: tensor {spec.name!r} does not match its digest")


class EarlyParts:
    """The parts of a set that were sealed before it was announced: mapped as they come, and verified as there is time.

    They are a beginning and nothing more: a set that is announced is made of them only where they are all there, and its
    announcement names the same tensors, digests and places (`fits`); else it comes as if they had not. memory: for the set.
    """

    def __init__(self, first: SealedPart, memory: Memory, threads: int = 1) -> None:
        self.fence, self.version, self._num_bytes, self.memory = first.fence, first.version, first.num_bytes, memory
        self.verifier = Verifier(self.version, memory, threads)
        self._parts: dict[int, SealedPart] = {}
        self._num_joined = 0

    def is_of(self, part: SealedPart) -> bool:
        """Whether they are parts of one set."""
        return (part.fence, part.version, part.num_bytes) == (self.fence, self.version, self._num_bytes)

    def add(self, part: SealedPart) -> bool:
        """Whether this part, which may come twice, could be mapped. Raises WeightsError for tensors that cannot travel."""
        _check_tensors(part.tensors)
        if part.index not in self._parts and not self.memory.take(part.index, part.place):
            return False
        self._parts.setdefault(part.index, part)
        while (joined := self._parts.get(self._num_joined)) is not None:
            self.verifier.expect(joined.tensors)
            self._num_joined += 1
        return True

    def advance(self, max_bytes: int) -> bool:
        """Verify up to `max_bytes` of the whole tensors; returns whether there is more to do. Raises WeightsError."""
        front = min(self._num_bytes, self._num_joined * part_bytes(self._num_bytes))
        self.verifier.advance(front, max_bytes)
        return not self.verifier.is_done and self.verifier.num_verified < front

    def fits(self, announced: Publish) -> bool:
        """Whether the announced set consists of these parts."""
        parts = [self._parts[index] for index in sorted(self._parts)]
        return (
            (announced.fence, announced.version, announced.num_bytes) == (self.fence, self.version, self._num_bytes)
            and self._num_joined == num_parts(self._num_bytes)
            and [part.place for part in parts] == announced.places
            and [spec for part in parts for spec in part.tensors] == announced.tensors
        )


def _check(announced: Publish | Manifest) -> None:
    _check_tensors(announced.tensors)
    wanted = sum(num_bytes(spec.dtype, spec.shape) for spec in announced.tensors)
    if wanted != announced.num_bytes:
        raise WeightsError(f"version {announced.version}: tensors need {wanted} bytes, announced {announced.num_bytes}")
    if len({spec.name for spec in announced.tensors}) != len(announced.tensors):
        raise WeightsError(f"version {announced.version}: a tensor name occurs twice")


def _check_tensors(tensors: Sequence[TensorSpec]) -> None:
    for spec in tensors:
        if spec.dtype not in ITEM_BYTES or any(size < 0 for size in spec.shape):
            raise WeightsError(f"tensor {spec.name!r}: {spec.dtype} {spec.shape} cannot travel")
