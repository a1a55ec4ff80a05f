"""The weight channel's substance: a versioned set of tensors that is whole and verified, or does not exist.

A set is named by its manifest (name, dtype, shape and xxh3-128 digest of every tensor); its bytes are the tensors one
after the other in that order. They come as chunks of the set, as chunks of deltas to a set that is there, or lie in sealed
memory. `assembly` brings them together and checks every digest before a tensor is given out. Knows no socket:
`clients.learner`, `server` and `receiver` are the learner's, the hub's and the actor's end.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import msgpack
import xxhash

from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol.message import Canary, TensorSpec
from async_rlhf.buffers.protocol.wire import Manifest, Publish
from async_rlhf.buffers.tensors import Part, RawTensor, num_bytes
from async_rlhf.buffers.weights.shared import HeapMemory, MakeMemory, Memory

# Large enough that headers cost nothing, small enough that a credit never waits long behind one.
CHUNK_BYTES = 1 << 20
CACHED_BYTES = 1 << 18
"""Copied and digested at a time, so that the second finds it in the processor's cache."""
# Fresh memory is cleared by the kernel page by page, which costs more than the copy and goes on in several threads at once.
_MANY_BYTES, _MAX_THREADS = 64 << 20, min(4, os.cpu_count() or 1)


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
    ) -> WeightSet:
        """Copy the tensors into one set, once, and take their digests."""
        ends = list(itertools.accumulate((len(tensor.data) for tensor in tensors.values()), initial=0))
        memory = make(ends[-1])

        def copied(offset: int, tensor: RawTensor) -> str:
            hasher, data = xxhash.xxh3_128(), memoryview(tensor.data)
            for start in range(0, len(data), CACHED_BYTES):
                part = data[start : start + CACHED_BYTES]
                hasher.update(part)
                memory.write(offset + start, part)
            return hasher.hexdigest()

        if ends[-1] < _MANY_BYTES:
            digests = list(map(copied, ends[:-1], tensors.values()))
        else:
            with ThreadPoolExecutor(_MAX_THREADS) as threads:
                digests = list(threads.map(copied, ends[:-1], tensors.values()))
        memory.seal()
        specs = tuple(
            TensorSpec(name=name, dtype=tensor.dtype, shape=list(tensor.shape), digest=digest)
            for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
        )
        return cls(fence, version, specs, memory.view, canary, memory)

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
        place = self.memory.place if self.memory is not None else None
        return Publish(
            fence=self.fence,
            version=self.version,
            num_bytes=len(self.blob),
            tensors=list(self.specs),
            canary=self.canary,
            place=place,
        )

    def manifest(self) -> Manifest:
        return Manifest.model_validate(self.announcement().model_dump(exclude={"delta"}))

    def tensors(self) -> dict[str, RawTensor]:
        """Views into the set's bytes, by name."""
        view, start, tensors = memoryview(self.blob), 0, {}
        path = None if self.memory is None else self.memory.path
        for spec in self.specs:
            size = num_bytes(spec.dtype, spec.shape)
            part = None if path is None else Part(path, start, self.memory)
            tensors[spec.name] = RawTensor(spec.dtype, tuple(spec.shape), view[start : start + size], part)
            start += size
        return tensors


def chunk_bytes() -> int:
    """Bytes of every chunk but the last of a set or delta."""
    return CHUNK_BYTES


def num_chunks(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def chunk_of(data: bytes | memoryview, index: int, name: str) -> memoryview:
    """Chunk `index` of these bytes; raises WeightsError for one that does not exist."""
    if not 0 <= index < num_chunks(len(data)):
        raise WeightsError(f"{name} has chunks 0 to {num_chunks(len(data)) - 1}, not {index}")
    return memoryview(data)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def content_digest(specs: Sequence[TensorSpec]) -> str:
    """One digest for names, dtypes, shapes and digests of all tensors in their order."""
    return xxhash.xxh3_128_hexdigest(msgpack.packb([[spec.name, spec.dtype, spec.shape, spec.digest] for spec in specs]))
