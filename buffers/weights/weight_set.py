"""The weight channel's substance: a versioned set of tensors that is whole and verified, or does not exist.

A set is named by its manifest (name, dtype, shape and xxh3-128 digest of every tensor); its bytes are the tensors one
after the other in that order. They come as chunks of the set, as chunks of deltas to a set that is there, or lie in sealed
memory. `assembly` brings them together and checks every digest before a tensor is given out. Knows no socket:
`clients.learner`, `server` and `receiver` are the learner's, the hub's and the actor's end.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgpack
import xxhash

from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol.message import Canary, TensorSpec
from async_rlhf.buffers.protocol.wire import Manifest, Publish, SealedPart
from async_rlhf.buffers.tensors import FilePart, RawTensor, num_bytes
from async_rlhf.buffers.weights.digests import Digests, num_threads
from async_rlhf.buffers.weights.shared import HeapMemory, MakeMemory, Memory, num_parts, part_bytes, path_of

# Large enough that headers cost nothing, small enough that a credit never waits long behind one.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class WeightSet:
    """One whole, verified set: version `version` of the learner incarnation `fence`.

    memory keeps `blob` alive where it is not on the heap, and has the place where other processes find it.
    """

    fence: int
    version: int
    specs: tuple[TensorSpec, ...]
    blob: bytes | memoryview
    canary: Canary | None = None
    memory: Memory | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        fence: int,
        version: int,
        tensors: Mapping[str, RawTensor],
        canary: Canary | None = None,
        make: MakeMemory = HeapMemory,
        sealed: Callable[[SealedPart], object] = lambda part: None,
    ) -> WeightSet:
        """Copy the tensors into one set, once, and take their digests; part by part, each of which is sealed when it is whole.

        sealed: called with each part that lies where others find it, before the next is copied.
        """
        data = [memoryview(tensor.data) for tensor in tensors.values()]
        ends = list(itertools.accumulate(map(len, data)))
        total = ends[-1] if ends else 0
        memory, digests, waiting = make(total), Digests(map(len, data), num_threads()), iter(tensors.items())

        def copied(start: int, end: int) -> memoryview:
            index = bisect_right(ends, start)
            first = ends[index] - len(data[index])
            memory.write(start, piece := data[index][start - first : end - first])
            return piece

        specs: list[TensorSpec] = []
        for index in range(num_parts(total)):
            digested = digests.advance(min(total, (index + 1) * part_bytes(total)), copied)
            whole = [
                TensorSpec(name=name, dtype=tensor.dtype, shape=list(tensor.shape), digest=digest)
                for digest, (name, tensor) in zip(digested, waiting, strict=False)
            ]
            specs += whole
            memory.seal(index)
            if memory.places:
                place = memory.places[index]
                sealed(SealedPart(fence=fence, version=version, index=index, num_bytes=total, tensors=whole, place=place))
        return cls(fence, version, tuple(specs), memory.view, canary, memory)

    @cached_property
    def digest(self) -> str:
        """Names the content: equal for two sets exactly when all tensors and their names are equal."""
        return content_digest(self.specs)

    @property
    def num_chunks(self) -> int:
        return num_chunks(len(self.blob))

    def chunk(self, index: int) -> memoryview:
        """Bytes of chunk `index`; raises WeightsError for one that does not exist."""
        return chunk_of(self.blob, index, f"version {self.version}")

    def announcement(self) -> Publish:
        return Publish(
            fence=self.fence,
            version=self.version,
            num_bytes=len(self.blob),
            tensors=list(self.specs),
            canary=self.canary,
            places=[] if self.memory is None else list(self.memory.places),
        )

    def manifest(self) -> Manifest:
        return Manifest.model_validate(self.announcement().model_dump(exclude={"delta"}))

    def tensors(self) -> dict[str, RawTensor]:
        """Views into the set's bytes, by name."""
        view, start, tensors = memoryview(self.blob), 0, {}
        paths = () if self.memory is None else tuple(map(path_of, self.memory.places))
        for spec in self.specs:
            size = num_bytes(spec.dtype, spec.shape)
            part = FilePart(paths, start, self.memory) if paths else None
            tensors[spec.name] = RawTensor(spec.dtype, tuple(spec.shape), view[start : start + size], part)
            start += size
        return tensors


def chunk_bytes() -> int:
    """Bytes of every chunk but the last of a set or delta."""
    return CHUNK_BYTES


def num_chunks(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def chunks_of(manifest: Manifest) -> Iterator[tuple[str | None, int]]:
    """(result of a delta, or None; index) of the chunks that a manifest stands for, in the order in which they are sent."""
    if not manifest.deltas:
        yield from ((None, index) for index in range(num_chunks(manifest.num_bytes)))
    for delta in manifest.deltas:
        yield from ((delta.result, index) for index in range(num_chunks(delta.num_bytes)))


def chunk_of(data: bytes | memoryview, index: int, name: str) -> memoryview:
    """Chunk `index` of these bytes; raises WeightsError for one that does not exist."""
    if not 0 <= index < num_chunks(len(data)):
        raise WeightsError(f"{name} has chunks 0 to {num_chunks(len(data)) - 1}, not {index}")
    return memoryview(data)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def content_digest(specs: Sequence[TensorSpec]) -> str:
    """One digest for names, dtypes, shapes and digests of all tensors in their order."""
    return xxhash.xxh3_128_hexdigest(msgpack.packb([[spec.name, spec.dtype, spec.shape, spec.digest] for spec in specs]))
