"""Addresses of this process at which several files lie side by side, as if they were one. Knows memory, nothing of sets.

Python's `mmap` chooses where a file lies; a weight set in several parts needs them one behind the other, and each at a multiple
of the size of a huge page, so that it can have some. Linux only.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

_HUGE_BYTES = 2 << 20  # of a page, where a usual one has 4 KiB; where that has more none is asked for
_FIXED, _NO_RESERVE, _POPULATE_WRITE, _COLLAPSE = 0x10, 0x4000, 23, 25  # of Linux
_FAILED = ctypes.c_void_p(-1).value


class Addresses:
    """Room for so many bytes, one at least; zeros where no file is mapped yet.

    Owns the range, which is given back with the last view of it. Raises OSError when there is none.
    """

    def __init__(self, num_bytes: int) -> None:
        reserved = num_bytes + _HUGE_BYTES
        began = _map(None, reserved, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1)
        self._start = -(-began // _HUGE_BYTES) * _HUGE_BYTES
        room = memoryview((ctypes.c_char * num_bytes).from_address(self._start))
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(room, np.uint8)
        """A write to bytes that were not mapped for writing ends the process."""
        # Not when the interpreter ends: a thread may still read it, and the kernel frees it anyway.
        weakref.finalize(self.bytes, _libc().munmap, began, reserved).atexit = False

    def lent(self) -> npt.NDArray[np.uint8]:
        """All bytes, read-only."""
        lent = self.bytes.view()
        lent.flags.writeable = False
        return lent

    def map(self, offset: int, num_bytes: int, descriptor: int, *, written: bool = False, private: bool = False) -> None:
        """Bytes from `offset` on, a multiple of the page, are those of a file from now on, to be read. written: and to be
        written; private: and so that the file does not change with them. Raises OSError."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if written or private else 0)
        kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        _map(self._start + offset, num_bytes, protection, kind | _FIXED, descriptor)
        if written:  # a process that is forked now would keep it writable, and from being sealed
            _libc().madvise(self._start + offset, num_bytes, mmap.MADV_DONTFORK)

    def protect(self, offset: int, num_bytes: int, *, written: bool) -> None:
        """Whether these bytes, which were mapped to be written, may be. Raises OSError."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if written else 0)
        if _libc().mprotect(self._start + offset, num_bytes, protection):
            raise _system_error()

    def fill(self, offset: int, num_bytes: int) -> bool:
        """Give memory to these bytes, which are to be written: no write waits for it then, or ends the process for want of it.
        Whether that could be done: not before Linux 5.14, and not when there is none.

        In huge pages where whole ones fit and the kernel has some: 512 times fewer are then found, cleared and mapped, here and
        by all who map the file. So asked (Linux 6.1) it gives them to files in memory for which they are off by default, too,
        where something has been written in each.
        """
        size = num_bytes // _HUGE_BYTES * _HUGE_BYTES
        if mmap.PAGESIZE == 4096 and size:
            for at in range(offset, offset + size, _HUGE_BYTES):
                _libc().madvise(self._start + at, mmap.PAGESIZE, _POPULATE_WRITE)
            _libc().madvise(self._start + offset, size, _COLLAPSE)
        return bool(_libc().madvise(self._start + offset, num_bytes, _POPULATE_WRITE) == 0)


def lay(paths: Sequence[str]) -> memoryview:
    """Files mapped one behind the other, each but the last of whole pages. Writes stay private. Raises OSError."""
    files = list[int]()
    try:
        for path in paths:
            files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            fcntl.flock(files[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)  # while they are mapped none is written (`shared`)
        sizes = [os.fstat(file).st_size for file in files]
        if not any(sizes):
            return memoryview(bytearray())
        addresses, offset = Addresses(sum(sizes)), 0
        for file, size in zip(files, sizes, strict=True):
            addresses.map(offset, size, file, private=True)
            offset += size
        return addresses.bytes.data
    finally:
        for file in files:
            os.close(file)


def _map(at: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    address: int | None = _libc().mmap(at, num_bytes, protection, flags, descriptor, 0)
    if address is None or address == _FAILED:
        raise _system_error()
    return address


def _system_error() -> OSError:
    error = ctypes.get_errno()
    return OSError(error, os.strerror(error))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long), pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = libc.mprotect.argtypes = (pointer, size, ctypes.c_int)
    return libc
