"""Where the bytes of a weight set lie: on the heap, or in sealed memory that other processes of the machine map.

Sealed memory has no name in any file system: it is an anonymous file (memfd) that others open by process, descriptor and a
random token, as the same user only. The kernel frees it with the last process that has it open or mapped, so that no kill
leaves anything behind. Once sealed it cannot change or shrink: a process that has verified it may read it ever after. Where
there is no such memory (only Linux has it) everything stays on the heap, and sets travel as chunks.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol.message import Place

Bytes = npt.NDArray[np.uint8]
_NAME = "async-rlhf-weights-"
# The kernel takes a page that it is just moving for one that may be written; it waits for 0.15 s itself, then returns EBUSY.
_SEAL_TRIES, _SEAL_PAUSE_S = 40, 0.05
HAS_SEALS = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class Memory(Protocol):
    """Memory for one set: written, sealed, then only read."""

    place: Place | None
    """Where processes of this machine find it once it is sealed; None when they cannot."""
    path: str | None
    """The same as a file that processes of this user can open."""

    @property
    def view(self) -> memoryview:
        """All bytes, read-only."""
        ...

    def write(self, offset: int, data: bytes | memoryview) -> None: ...
    def seal(self) -> None: ...


MakeMemory = Callable[[int], Memory]
"""Memory for so many bytes. Raises WeightsError when there is none."""


class HeapMemory:
    """This process alone reads it. `freed` is called with the bytes when no view of them is left."""

    place: Place | None = None
    path: str | None = None

    def __init__(self, num_bytes: int, data: Bytes | None = None, freed: Callable[[Bytes], None] | None = None) -> None:
        try:
            data = np.empty(num_bytes, np.uint8) if data is None else data  # in huge pages, unlike a bytearray
        except (MemoryError, OverflowError, ValueError) as error:
            raise WeightsError(f"no room for {num_bytes} bytes of weights") from error
        lent = data.view()  # every view into the set keeps this one alive
        if freed is not None:
            weakref.finalize(lent, freed, data)
        self.room = lent.data
        """All bytes, to be written."""
        self.view = self.room.toreadonly()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self.room[offset : offset + len(data)] = data

    def seal(self) -> None: ...


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
    """Owns one descriptor and one read-only mapping; both end with the last reference."""

    def __init__(self, descriptor: int, num_bytes: int, token: str, *, is_sealed: bool) -> None:
        self._descriptor, self._num_bytes, self._is_sealed = descriptor, num_bytes, is_sealed
        self.place: Place | None = Place(pid=os.getpid(), descriptor=descriptor, token=token)
        self.path: str | None = _path(self.place)
        # Of a descriptor that may only read: a writable one would keep the seals away.
        reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.view = memoryview(mmap.mmap(reader, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        finally:
            os.close(reader)
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def make(cls, num_bytes: int) -> Memory:
        """Memory for a set, not sealed yet; on the heap where there is no sealed memory."""
        if not HAS_SEALS or not 0 < num_bytes <= sys.maxsize:
            return HeapMemory(num_bytes)
        token = secrets.token_hex(16)
        descriptor = os.memfd_create(_NAME + token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(descriptor, num_bytes, token, is_sealed=False)
        except (OSError, ValueError, OverflowError) as error:
            os.close(descriptor)
            raise WeightsError(f"no room for {num_bytes} bytes of weights: {error}") from error

    def write(self, offset: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        try:
            while left:
                written = os.pwrite(self._descriptor, left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            raise WeightsError(f"no room for {self._num_bytes} bytes of weights: {error}") from error

    def seal(self) -> None:
        for left in reversed(range(0 if self._is_sealed else _SEAL_TRIES)):
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
                self._is_sealed = True
                return
            except OSError as error:
                if error.errno != errno.EBUSY or not left:
                    raise
                time.sleep(_SEAL_PAUSE_S)


def attach(place: Place, num_bytes: int) -> SealedMemory | None:
    """The sealed memory at a place another process named; None when it is not on this machine, not of this user, not
    sealed or of another size."""
    path = _path(place)
    if not HAS_SEALS or num_bytes == 0:
        return None
    try:
        # Before it is opened: what else a process may hold (a pipe, a device) is better not touched.
        if os.readlink(path) != f"/memfd:{_NAME}{place.token} (deleted)":
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        sealed = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & sealed == sealed and os.fstat(descriptor).st_size == num_bytes:
            return SealedMemory(descriptor, num_bytes, place.token, is_sealed=True)
    except OSError:
        pass
    os.close(descriptor)
    return None


def _path(place: Place) -> str:
    return f"/proc/{place.pid}/fd/{place.descriptor}"


def is_local(address: str) -> bool:
    """Whether the hub at this address is on this machine, as far as the address shows."""
    return address.startswith(("ipc://", "tcp://127.", "tcp://localhost:"))
