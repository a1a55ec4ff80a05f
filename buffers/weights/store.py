"""The weight sets the hub can serve, and the deltas that lead from one to the next.

With a directory the sets also survive the hub: exact mode needs older versions again. Deltas never do: who has no base
fetches the whole set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack

from async_rlhf.buffers.errors import DamagedError, DiskFullError, FormatError, WeightsError
from async_rlhf.buffers.files import DISK, FULL, WEIGHTS, Disk, write_whole
from async_rlhf.buffers.protocol.message import DeltaSpec
from async_rlhf.buffers.protocol.wire import Manifest
from async_rlhf.buffers.weights.assembly import Assembly
from async_rlhf.buffers.weights.weight_set import WeightSet, chunk_bytes

MAX_DELTA_SHARE = 0.5
"""Share of the set's bytes that deltas may have together; above it making and applying them costs more than they save."""


@dataclass(frozen=True)
class Delta:
    """The delta (see `delta`) from the set with content digest `base` to the one with content digest `result`."""

    base: str
    result: str
    data: bytes | memoryview

    @property
    def spec(self) -> DeltaSpec:
        return DeltaSpec(base=self.base, result=self.result, num_bytes=len(self.data))


class WeightStore:
    """Owns sets, newest deltas and the directory."""

    def __init__(self, directory: Path | None = None, files: Disk = DISK) -> None:
        self._directory, self._files = directory, files
        self._sets: dict[int, WeightSet] = {}
        self._deltas: dict[str, Delta] = {}
        if directory is not None:
            files.make(directory)
            for name in sorted(name for name in files.names(directory) if name.endswith(".weights")):
                weights = _load(directory / name, files.read(directory / name))
                self._sets[weights.version] = weights

    def add(self, weights: WeightSet, deltas: Sequence[Delta] = ()) -> None:
        """Keep a set, and of the deltas the newest.

        A set of a newer learner takes the place of an older one's, and of those that learner went on to. Raises DiskFullError
        when there is no room for it: it is not kept, and can be added again.
        """
        for other in [v for v, old in self._sets.items() if v > weights.version and old.fence < weights.fence]:
            self._forget(other)
        if self._directory is not None:
            _save(weights, self._directory / f"{weights.version:08d}.weights", self._files)
        self._sets[weights.version] = weights
        for step in deltas:
            self._deltas.pop(step.result, None)
            self._deltas[step.result] = step
        while sum(len(each.data) for each in self._deltas.values()) > MAX_DELTA_SHARE * len(weights.blob):
            del self._deltas[next(iter(self._deltas))]

    def get(self, version: int) -> WeightSet:
        """Raises WeightsError when the version is not here (any more)."""
        if version not in self._sets:
            raise WeightsError(f"version {version} is not here; there are {sorted(self._sets)}")
        return self._sets[version]

    def find(self, digest: str) -> WeightSet | None:
        """The set with this content."""
        return next((weights for weights in self._sets.values() if weights.digest == digest), None)

    def delta(self, result: str) -> Delta:
        """The delta to this content. Raises WeightsError when there is none, or none any more."""
        if result not in self._deltas:
            raise WeightsError(f"there is no delta that results in {result}")
        return self._deltas[result]

    def path(self, base: str, result: str) -> Sequence[Delta]:
        """The deltas that lead from one content to another, in order; empty when there is no such path."""
        path: list[Delta] = []
        while result != base and len(path) <= len(self._deltas):
            if result not in self._deltas:
                return []
            path.append(self._deltas[result])
            result = path[-1].base
        return [] if result != base else path[::-1]

    @property
    def versions(self) -> Iterable[int]:
        return self._sets.keys()

    def __contains__(self, version: int) -> bool:
        return version in self._sets

    def keep(self, is_kept: Callable[[int], bool]) -> None:
        """Forget the sets of every other version."""
        for other in [version for version in self._sets if not is_kept(version)]:
            self._forget(other)

    def _forget(self, version: int) -> None:
        del self._sets[version]
        if self._directory is not None:
            self._files.unlink(self._directory / f"{version:08d}.weights")


def _save(weights: WeightSet, path: Path, files: Disk) -> None:
    head = msgpack.packb(
        {"format": WEIGHTS.newest, "type": Manifest.type, **weights.manifest().model_dump(exclude={"places", "deltas"})}
    )
    try:  # durable: exact mode needs the set again after a crash, and the learner sends only its newest
        write_whole(path, len(head).to_bytes(8, "little"), head, weights.blob, files=files)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFullError(f"version {weights.version} cannot be kept in {path.parent}: {error}") from error


def _load(path: Path, data: bytes) -> WeightSet:
    length = int.from_bytes(data[:8], "little")
    blob = memoryview(data)[8 + length :]
    try:
        head = msgpack.unpackb(data[8 : 8 + length])
        WEIGHTS.check(head.pop("format", 1), path)
        del head["type"]
        assembly = Assembly(Manifest.model_validate(head))
        for index in range(len(assembly.missing)):
            assembly.add(index, blob[index * chunk_bytes() : (index + 1) * chunk_bytes()])
        return assembly.whole()
    except FormatError:
        raise
    except (ValueError, KeyError, AttributeError, msgpack.exceptions.UnpackException, WeightsError) as error:
        raise DamagedError(f"{path} is damaged: {error}. Restore it, or start a new run directory.") from error
