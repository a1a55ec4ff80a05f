"""The memory of a weight set: on the heap, or sealed memory that other processes of the machine map.

Sealed memory has no name in any file system: a set is one to sixteen anonymous files (memfd), its *parts*, that others open by
process, descriptor and a random token, as the same user only. The kernel frees each with the last process that has it open or
mapped, so that no kill leaves anything behind. Once sealed a part cannot change or shrink: a process that has verified it may
read it ever after, and may do so while the next is still being written. Where there is no such memory (only Linux has it)
everything stays on the heap, and sets travel as chunks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sys
import threading
import time
import weakref
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
_NAME = "async-rlhf-weights-"
# The kernel takes a page that it is just moving for one that may be written; it waits for 0.15 s itself, then returns EBUSY.
_SEAL_TRIES, _SEAL_PAUSE_S = 40, 0.05
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
    """Owns the addresses of the whole set, and of each part that is there one descriptor; all end with the last reference."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._part_bytes = num_bytes, part_bytes(num_bytes)
        try:
            self._addresses = Addresses(num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise _no_room(num_bytes, error) from error
        self.view = self._addresses.view
        self._parts: dict[int, SealedPlace] = {}
        self._sealed: set[int] = set()
        self._filled: set[tuple[int, int]] = set()
        self._opening = threading.Lock()
        weakref.finalize(self, _close, self._parts)

    @classmethod
    def make(cls, num_bytes: int) -> Memory:
        """Memory for a set, not sealed yet; on the heap where there is no sealed memory."""
        return cls(num_bytes) if HAS_SEALS and num_bytes > 0 else HeapMemory(num_bytes)

    @property
    def places(self) -> list[SealedPlace]:
        return [place for _, place in sorted(self._parts.items())]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        try:
            while left:
                index, start = divmod(offset, self._part_bytes)
                piece = left[: min(self._part_bytes - start, _BLOCK_BYTES - start % _BLOCK_BYTES)]
                self._open(index, start)
                np.copyto(self._addresses.bytes[offset : offset + len(piece)], np.frombuffer(piece, np.uint8))
                left, offset = left[len(piece) :], offset + len(piece)
        except OSError as error:
            raise _no_room(self._num_bytes, error) from error

    def seal(self, index: int | None = None) -> None:
        for number in {*(self._parts if index is None else [index])} - self._sealed:
            descriptor = self._parts[number].descriptor
            # Through a read-only descriptor: memory with a writable mapping cannot be sealed.
            reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._addresses.map(number * self._part_bytes, self._size(number), reader)
            finally:
                os.close(reader)
            _seal(descriptor)
            self._sealed.add(number)

    def take(self, index: int, place: SealedPlace) -> bool:
        if not 0 <= index < num_parts(self._num_bytes) or index in self._parts:
            return False
        size = self._size(index)
        descriptor = _open_sealed(place, size)
        if descriptor is None:
            return False
        try:
            self._addresses.map(index * self._part_bytes, size, descriptor)
        except OSError:
            os.close(descriptor)
            return False
        self._keep(index, descriptor, place.token)
        self._sealed.add(index)
        return True

    def _size(self, index: int) -> int:
        return min(self._part_bytes, self._num_bytes - index * self._part_bytes)

    def _keep(self, index: int, descriptor: int, token: str) -> None:
        self._parts[index] = SealedPlace(pid=os.getpid(), descriptor=descriptor, token=token)

    def _open(self, index: int, start: int) -> None:
        """Make this part, unless it exists, so that it can be written from byte `start` on. Raises OSError."""
        with self._opening:
            if index not in self._parts:
                self._make(index, secrets.token_hex(16))
        if index in self._sealed:
            raise PermissionError(errno.EPERM, "it is sealed")
        at = start // _BLOCK_BYTES * _BLOCK_BYTES
        if (index, at) not in self._filled:  # by two threads, perhaps, to no harm
            size = min(_BLOCK_BYTES, self._size(index) - at)
            if not self._addresses.fill(index * self._part_bytes + at, size):
                os.posix_fallocate(self._parts[index].descriptor, at, size)
            self._filled.add((index, at))

    def _make(self, index: int, token: str) -> None:
        descriptor = os.memfd_create(_NAME + token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, self._size(index))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._addresses.map(index * self._part_bytes, self._size(index), descriptor, written=True)
        except OSError:
            os.close(descriptor)
            raise
        self._keep(index, descriptor, token)


def _close(parts: dict[int, SealedPlace]) -> None:
    for place in parts.values():
        os.close(place.descriptor)


def _seal(descriptor: int) -> None:
    for left in reversed(range(_SEAL_TRIES)):
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or not left:
                raise
            time.sleep(_SEAL_PAUSE_S)


def attach(places: Sequence[SealedPlace], num_bytes: int) -> SealedMemory | None:
    """A set whose parts lie at these places; None when one of them is not there (see `Memory.take`), or is missing."""
    if not HAS_SEALS or num_bytes == 0 or len(places) != num_parts(num_bytes):
        return None
    memory = SealedMemory(num_bytes)
    return memory if all(memory.take(index, place) for index, place in enumerate(places)) else None


def _open_sealed(place: SealedPlace, num_bytes: int) -> int | None:
    """A descriptor of the part at this place, if it is one."""
    path = path_of(place)
    try:
        # Checked before opening: other descriptors of a process (a pipe, a device) must not be touched.
        if os.readlink(path) != f"/memfd:{_NAME}{place.token} (deleted)":
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):
        sealed = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & sealed == sealed and os.fstat(descriptor).st_size == num_bytes:
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
