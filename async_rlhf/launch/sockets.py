"""The private directory in which a run's processes find the hub's socket and the scorer's.

It lies in the temporary directory (a run directory's own path can be longer than the 107 bytes a socket's may have), and its
maker holds a lock on it. What a killed supervisor left is removed when its run is started again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "async-rlhf-"


def hub_address(directory: Path) -> str:
    return f"ipc://{directory}/hub"


def scorer_address(directory: Path) -> str:
    return f"ipc://{directory}/scorer"


@contextmanager
def socket_directory() -> Iterator[Path]:
    """A new one, until the end of the block. Raises OSError when there is no room."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def is_private(directory: Path) -> bool:
    """Whether this is such a directory, made by this user, that no other can enter."""
    with suppress(OSError, ValueError):
        found = directory.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        return ours and directory.is_absolute() and directory.name.startswith(_PREFIX)
    return False


def remove_left(directory: Path) -> None:
    """Remove what a supervisor left that was killed: sockets, and the directory when it is empty then and has no owner."""
    if not is_private(directory):
        return
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in directory.iterdir():
                if path.is_socket():
                    path.unlink()
            directory.rmdir()
        finally:
            os.close(descriptor)
