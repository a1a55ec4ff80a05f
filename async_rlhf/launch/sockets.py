"""The private directory in which a run's processes on a host find the hub's socket, or the relay's, and the scorer's.

It lies in the temporary directory (a run directory's own path can be longer than the 107 bytes a socket's may have), and its
maker holds a lock on it: the supervisor on its machine, the agent on another host. What a killed one left is removed when its
run, or another agent, is started.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import lock_directory

_PREFIX = "async-rlhf-"
ON_HOST = Path("{sockets}")
"""The directory of a node's own host, in the arguments of one that an agent starts: only the agent knows it."""


def hub_address(directory: Path) -> str:
    return f"ipc://{directory}/hub"


def relay_address(directory: Path) -> str:
    return f"ipc://{directory}/relay"


def scorer_address(directory: Path) -> str:
    return f"ipc://{directory}/scorer"


@contextmanager
def socket_directory() -> Iterator[Path]:
    """A new one, until the end of the block. Raises OSError when there is no room."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    descriptor = lock_directory(directory)
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
    """Remove what one left that was killed: sockets, and the directory when it is empty then and has no owner."""
    if not is_private(directory):
        return
    with suppress(OSError):
        descriptor = lock_directory(directory)
        try:
            for path in directory.iterdir():
                if path.is_socket():
                    path.unlink()
            directory.rmdir()
        finally:
            os.close(descriptor)


def check_free(address: str) -> None:
    """Raises ConfigError when a tcp port is taken."""
    if not address.startswith("tcp://"):
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"address = {address!r} cannot be used: {error}. Choose a free port, or leave it empty"
            ) from error
