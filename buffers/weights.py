"""The weight channel's substance: a versioned set of tensors that is whole and verified, or does not exist.

A set travels as a manifest (name, dtype, shape and xxh3-128 digest of every tensor) and chunks of one byte string, the
tensors one after the other in manifest order. `Assembly` puts chunks together and checks every digest before anybody
sees a tensor. Knows no socket: `hub` and `client` move the messages made here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgpack
import xxhash

from buffers.errors import WeightsError
from buffers.files import DISK, Files
from buffers.tensors import ITEM_BYTES, RawTensor
from buffers.wire import Canary, Manifest, Publish, TensorSpec

# Large enough that headers cost nothing, small enough that a credit never waits long behind one.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class WeightSet:
    """One whole, verified set: version `version` of the learner incarnation `fence`."""

    fence: int
    version: int
    specs: tuple[TensorSpec, ...]
    blob: bytes
    canary: Canary | None = None

    @classmethod
    def of(cls, fence: int, version: int, tensors: Mapping[str, RawTensor], canary: Canary | None = None) -> WeightSet:
        """Copy the tensors into one set and take their digests."""
        specs = tuple(
            TensorSpec(name=name, dtype=tensor.dtype, shape=list(tensor.shape), digest=_digest(tensor.data))
            for name, tensor in tensors.items()
        )
        return cls(fence, version, specs, b"".join(tensor.data for tensor in tensors.values()), canary)

    @property
    def num_chunks(self) -> int:
        return -(-len(self.blob) // CHUNK_BYTES)

    def chunk(self, index: int) -> bytes:
        """Bytes of chunk `index`; raises WeightsError for one that does not exist."""
        if not 0 <= index < self.num_chunks:
            raise WeightsError(f"version {self.version} has chunks 0 to {self.num_chunks - 1}, asked for {index}")
        return self.blob[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    def announcement(self) -> Publish:
        return Publish(
            fence=self.fence, version=self.version, num_bytes=len(self.blob), tensors=list(self.specs), canary=self.canary
        )

    def manifest(self) -> Manifest:
        return Manifest(
            fence=self.fence,
            version=self.version,
            num_bytes=len(self.blob),
            tensors=list(self.specs),
            canary=self.canary,
        )

    def tensors(self) -> dict[str, RawTensor]:
        """Views into the set's bytes, by name."""
        view, start, tensors = memoryview(self.blob), 0, {}
        for spec in self.specs:
            size = _num_bytes(spec)
            tensors[spec.name] = RawTensor(spec.dtype, tuple(spec.shape), view[start : start + size])
            start += size
        return tensors


class Assembly:
    """Collects the chunks of one announced set, in any order; `whole()` gives the set once all came and all fit."""

    def __init__(self, announced: Publish | Manifest) -> None:
        wanted = sum(_num_bytes(spec) for spec in announced.tensors)
        if wanted != announced.num_bytes:
            raise WeightsError(f"version {announced.version}: tensors need {wanted} bytes, announced {announced.num_bytes}")
        if len({spec.name for spec in announced.tensors}) != len(announced.tensors):
            raise WeightsError(f"version {announced.version}: a tensor name occurs twice")
        self.fence, self.version = announced.fence, announced.version
        self.num_chunks = -(-announced.num_bytes // CHUNK_BYTES)
        self._specs, self._canary = tuple(announced.tensors), announced.canary
        try:
            self._blob = bytearray(announced.num_bytes)
        except (MemoryError, OverflowError) as error:
            raise WeightsError(f"version {announced.version}: no room for {announced.num_bytes} bytes") from error
        self._missing = set(range(self.num_chunks))

    def add(self, index: int, data: bytes) -> None:
        """Put chunk `index` in its place; raises WeightsError when it does not fit there."""
        place = slice(index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, len(self._blob)))
        if not 0 <= index < self.num_chunks or len(data) != place.stop - place.start:
            raise WeightsError(f"version {self.version}: chunk {index} of {len(data)} bytes does not fit")
        self._blob[place] = data
        self._missing.discard(index)

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def whole(self) -> WeightSet:
        """The set, every digest checked; raises WeightsError naming the first tensor that differs."""
        if self._missing:
            raise WeightsError(f"version {self.version} is not complete: {len(self._missing)} chunks are missing")
        weights = WeightSet(self.fence, self.version, self._specs, bytes(self._blob), self._canary)
        for spec, tensor in zip(self._specs, weights.tensors().values(), strict=True):
            if _digest(tensor.data) != spec.digest:
                raise WeightsError(f"version {self.version}: tensor {spec.name!r} is not what its digest says")
        return weights


class WeightStore:
    """The sets the hub can serve. With a directory they also survive it (exact mode needs older versions again)."""

    def __init__(self, directory: Path | None = None, files: Files = DISK) -> None:
        self._directory, self._files = directory, files
        self._sets: dict[int, WeightSet] = {}
        if directory is not None:
            files.make(directory)
            for name in sorted(name for name in files.names(directory) if name.endswith(".weights")):
                weights = _load(directory / name, files.read(directory / name))
                self._sets[weights.version] = weights

    def add(self, weights: WeightSet) -> None:
        """Keep a set. One of a newer learner takes the place of an older one's, and of those that learner went on to."""
        for other in [v for v, old in self._sets.items() if v > weights.version and old.fence < weights.fence]:
            self._forget(other)
        self._sets[weights.version] = weights
        if self._directory is not None:
            _save(weights, self._directory / f"{weights.version:08d}.weights", self._files)

    def get(self, version: int) -> WeightSet:
        """Raises WeightsError when the version is not here (any more)."""
        if version not in self._sets:
            raise WeightsError(f"version {version} is not here; there are {sorted(self._sets)}")
        return self._sets[version]

    def __contains__(self, version: int) -> bool:
        return version in self._sets

    def drop_below(self, version: int) -> None:
        """Forget every set older than `version`."""
        for old in [old for old in self._sets if old < version]:
            self._forget(old)

    def _forget(self, version: int) -> None:
        del self._sets[version]
        if self._directory is not None:
            self._files.unlink(self._directory / f"{version:08d}.weights")


def _num_bytes(spec: TensorSpec) -> int:
    if spec.dtype not in ITEM_BYTES or any(size < 0 for size in spec.shape):
        raise WeightsError(f"tensor {spec.name!r}: {spec.dtype} {spec.shape} cannot travel")
    return math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


def _digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _save(weights: WeightSet, path: Path, files: Files) -> None:
    head = msgpack.packb(weights.manifest().model_dump())
    temporary = path.with_suffix(".tmp")
    file = files.create(temporary)
    try:
        file.write(len(head).to_bytes(8, "little") + head + weights.blob)
        file.flush()
        files.sync(file)
    finally:
        file.close()
    files.replace(temporary, path)
    files.sync_path(path.parent)  # exact mode needs the set again after a crash, and the learner sends only its newest


def _load(path: Path, data: bytes) -> WeightSet:
    length = int.from_bytes(data[:8], "little")
    blob = data[8 + length :]
    try:
        assembly = Assembly(Manifest.model_validate(msgpack.unpackb(data[8 : 8 + length])))
        for index in range(assembly.num_chunks):
            assembly.add(index, blob[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
        return assembly.whole()
    except (ValueError, msgpack.exceptions.UnpackException, WeightsError) as error:
        raise WeightsError(f"{path} is damaged: {error}. Restore it, or start a new run directory.") from error
