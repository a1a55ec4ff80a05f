"""The memory of a weight set: on the heap, or sealed memory that other processes of the machine map.

Sealed memory has no name in any file system: a set is one to sixteen anonymous files (memfd), its *parts*, that others open by
process, descriptor and a random token, as the same user only. The kernel frees each with the last process that has it open or
mapped, so that no kill leaves anything behind. A sealed part does not change or shrink as long as another process has it: one
that has verified it may read it meanwhile, also while the next part is still being written. Where there is no such memory (only
Linux has it) everything stays on the heap, and sets travel as chunks.

Fresh memory costs more than the copy into it, so a process writes its next set into a set that it has dropped and that no other
process has any more. That is decided by the kernel's lock of each part (flock), which ends with the last mapping, however its
process ends: shared while a process has the part, exclusive while it is written. The token of what is in a part is its time of
modification, so that a place that was told before does not lead to what is written there later.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt

from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol.message import SealedPlace
from async_rlhf.buffers.weights.addresses import Addresses

Bytes = npt.NDArray[np.uint8]
PART_BYTES, _MAX_PARTS = 64 << 20, 16
"""For sets up to 1 GiB; larger sets have larger parts, for each part costs every process that has the set a descriptor."""
_BLOCK_BYTES = 8 << 20  # that memory is given to in one go: about a millisecond
_NAME = "async-rlhf-weights"
_MAX_DROPPED = 3  # sets: as many as actors that are late may have beside the newest
_TOKEN_BITS = 62  # of a time in ns that all file systems know
# Of Linux, whose names other systems' `fcntl` lacks: neither shrinks nor grows; and, since 5.1, only mappings for writing that
# are there already may write, and no seal is added.
_FIXED_SIZE = 0x2 | 0x4
_SEALS = _FIXED_SIZE | 0x10 | 0x1
HAS_SEALS = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def part_bytes(num_bytes: int) -> int:
    """Bytes of every part but the last of a set of so many."""
    return PART_BYTES * max(1, -(-num_bytes // (PART_BYTES * _MAX_PARTS)))


def num_parts(num_bytes: int) -> int:
    """One at least."""
    return max(1, -(-num_bytes // part_bytes(num_bytes)))


class Memory(Protocol):
    """Memory for one set: written part by part, sealed, then only read."""

    @property
    def view(self) -> memoryview:
        """All bytes, read-only; of parts that are not there yet they mean nothing."""

    @property
    def places(self) -> Sequence[SealedPlace]:
        """The sealed parts' places for processes of this machine; empty where they cannot map them."""

    def write(self, offset: int, data: bytes | memoryview) -> None: ...
    def seal(self, index: int | None = None) -> None:
        """Part `index`, or all of them, will not change any more."""

    def take(self, index: int, place: SealedPlace) -> bool:
        """Whether another process's sealed part, which lies there, is part `index` from now on. It is not when it is not on
        this machine, not of this user, not sealed or of another size."""


MakeMemory = Callable[[int], Memory]
"""Makes memory for this many bytes. Raises WeightsError when there is none."""


class HeapMemory:
    """This process alone reads it. `freed` is called with the bytes when no view of them is left."""

    places: Sequence[SealedPlace] = ()

    def __init__(self, num_bytes: int, data: Bytes | None = None, freed: Callable[[Bytes], None] | None = None) -> None:
        try:
            data = np.empty(num_bytes, np.uint8) if data is None else data  # in huge pages, unlike a bytearray
        except (MemoryError, OverflowError, ValueError) as error:
            raise WeightsError(f"no room for {num_bytes} bytes of weights") from error
        lent = data.view()  # every view into the set keeps this one alive
        if freed is not None:
            weakref.finalize(lent, freed, data)
        self.room = lent
        """uint8 [n]: all bytes, to be written."""
        self.view = lent.data.toreadonly()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        # Copies like a slice, without holding Python's lock.
        np.copyto(self.room[offset : offset + len(data)], np.frombuffer(data, np.uint8))

    def seal(self, index: int | None = None) -> None: ...

    def take(self, index: int, place: SealedPlace) -> bool:
        return False


class HeapPool:
    """Makes memory on the heap, each time the same when it is free again: fresh memory costs more than the copy into it.

    Owns what was freed last.
    """

    def __init__(self) -> None:
        self._spare: Bytes | None = None

    def make(self, num_bytes: int) -> HeapMemory:
        spare, self._spare = self._spare, None
        return HeapMemory(num_bytes, spare if spare is not None and len(spare) == num_bytes else None, self._keep)

    def _keep(self, data: Bytes) -> None:
        self._spare = data


class SealedMemory:
    """Memory for one set. parts: those to write into; they are lent, and `freed` is called with them when no view is left."""

    def __init__(
        self, num_bytes: int, parts: SealedParts | None = None, freed: Callable[[SealedParts], None] | None = None
    ) -> None:
        self._parts = SealedParts(num_bytes) if parts is None else parts
        lent = self._parts.addresses.lent()
        if freed is not None:
            weakref.finalize(lent, freed, self._parts).atexit = False
        self.view = lent.data
        self.write, self.seal, self.take = self._parts.write, self._parts.seal, self._parts.take

    @property
    def places(self) -> list[SealedPlace]:
        return self._parts.places


class SealedPool:
    """Makes memory for sets, not sealed yet; on the heap where there is no sealed memory.

    Owns the parts of the sets that were dropped last, which other processes may still have. Of those that none has it writes
    into one, and gives the others back.
    """

    def __init__(self) -> None:
        self._dropped = deque[SealedParts](maxlen=_MAX_DROPPED)

    def make(self, num_bytes: int) -> Memory:
        if not HAS_SEALS or num_bytes == 0:
            return HeapMemory(num_bytes)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        free = [parts for parts in dropped if parts.reopen()]
        self._dropped.extend(parts for parts in dropped if parts not in free)
        found = next((parts for parts in free if parts.num_bytes == num_bytes), None)
        return SealedMemory(num_bytes, found, self._dropped.append)


class SealedParts:
    """Owns the addresses of a whole set, and of each part that is there one descriptor; all end with the last reference."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self._part_bytes = num_bytes, part_bytes(num_bytes)
        try:
            self.addresses = Addresses(num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise _no_room(num_bytes, error) from error
        self._descriptors: dict[int, int] = {}
        self._tokens: dict[int, str] = {}
        self._filled: set[tuple[int, int]] = set()
        self._opening = threading.Lock()
        weakref.finalize(self, _close, self._descriptors)

    @property
    def places(self) -> list[SealedPlace]:
        """Of the sealed parts."""
        tokens = sorted(self._tokens.items())
        return [SealedPlace(pid=os.getpid(), descriptor=self._descriptors[index], token=token) for index, token in tokens]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        try:
            while left:
                index, start = divmod(offset, self._part_bytes)
                piece = left[: min(self._part_bytes - start, _BLOCK_BYTES - start % _BLOCK_BYTES)]
                self._open(index, start)
                np.copyto(self.addresses.bytes[offset : offset + len(piece)], np.frombuffer(piece, np.uint8))
                left, offset = left[len(piece) :], offset + len(piece)
        except OSError as error:
            raise _no_room(self.num_bytes, error) from error

    def seal(self, index: int | None = None) -> None:
        for number in {*(self._descriptors if index is None else [index])} - self._tokens.keys():
            descriptor, token = self._descriptors[number], secrets.randbits(_TOKEN_BITS)
            self._protect(number, written=False)
            with suppress(OSError):  # sealed before, or an older Linux, where only the readers' mappings cannot write
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            os.utime(descriptor, ns=(token, token))
            self._tokens[number] = _as_text(token)
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def reopen(self) -> bool:
        """Whether no other process has a part; all of them may then be written. For parts that this process wrote."""
        locked = list[int]()
        try:
            for descriptor in self._descriptors.values():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked.append(descriptor)
        except OSError:
            for descriptor in locked:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            return False
        for index, descriptor in self._descriptors.items():
            os.utime(descriptor, ns=(0, 0))
            self._protect(index, written=True)
        self._tokens.clear()
        return True

    def take(self, index: int, place: SealedPlace) -> bool:
        if not 0 <= index < num_parts(self.num_bytes) or index in self._descriptors:
            return False
        size = self._size(index)
        descriptor = _open_sealed(place, size)
        if descriptor is None:
            return False
        try:
            self.addresses.map(index * self._part_bytes, size, descriptor)
        except OSError:
            os.close(descriptor)
            return False
        self._descriptors[index], self._tokens[index] = descriptor, place.token
        return True

    def _size(self, index: int) -> int:
        return min(self._part_bytes, self.num_bytes - index * self._part_bytes)

    def _protect(self, index: int, *, written: bool) -> None:
        self.addresses.protect(index * self._part_bytes, self._size(index), written=written)

    def _open(self, index: int, start: int) -> None:
        """Make this part, unless it exists, so that it can be written from byte `start` on. Raises OSError."""
        with self._opening:
            if index not in self._descriptors:
                self._descriptors[index] = self._made(index)
        if index in self._tokens:
            raise PermissionError(errno.EPERM, "it is sealed")
        at = start // _BLOCK_BYTES * _BLOCK_BYTES
        if (index, at) not in self._filled:  # by two threads, perhaps, to no harm
            size = min(_BLOCK_BYTES, self._size(index) - at)
            if not self.addresses.fill(index * self._part_bytes + at, size):
                os.posix_fallocate(self._descriptors[index], at, size)
            self._filled.add((index, at))

    def _made(self, index: int) -> int:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, self._size(index))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
            self.addresses.map(index * self._part_bytes, self._size(index), descriptor, written=True)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def _as_text(token: int) -> str:
    return f"{token:032x}"


def attach(places: Sequence[SealedPlace], num_bytes: int) -> SealedMemory | None:
    """A set whose parts lie at these places; None when one of them is not there (see `Memory.take`), or is missing."""
    if not HAS_SEALS or num_bytes == 0 or len(places) != num_parts(num_bytes):
        return None
    memory = SealedMemory(num_bytes)
    return memory if all(memory.take(index, place) for index, place in enumerate(places)) else None


def _open_sealed(place: SealedPlace, num_bytes: int) -> int | None:
    """A descriptor of the part at this place, if it is one, which keeps it from being written."""
    path = path_of(place)
    try:
        # Checked before opening: other descriptors of a process (a pipe, a device) must not be touched.
        if os.readlink(path) != f"/memfd:{_NAME} (deleted)":
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_fixed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _FIXED_SIZE == _FIXED_SIZE
        found = os.fstat(descriptor)
        if is_fixed and found.st_size == num_bytes and _as_text(found.st_mtime_ns) == place.token:
            return descriptor
    os.close(descriptor)
    return None


def _no_room(num_bytes: int, error: Exception) -> WeightsError:
    return WeightsError(f"no room for {num_bytes} bytes of weights: {error}")


def path_of(place: SealedPlace) -> str:
    """A file that processes of this user can open."""
    return f"/proc/{place.pid}/fd/{place.descriptor}"


def is_local(address: str) -> bool:
    """Whether the hub at this address is on this machine, as far as the address shows."""
    return address.startswith(("ipc://", "tcp://127.", "tcp://localhost:"))
