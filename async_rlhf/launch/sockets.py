"""The addresses of a run's processes: sockets of one host in a private directory, and addresses that other hosts reach.

In the directory the host's processes find the hub's socket, or the relay's, and the scorer's. It lies in the temporary
directory, or in `/tmp` where that has a long path (a socket's has at most 107 bytes), and its maker holds a lock on it: the
supervisor on its machine, the agent on another host. What a killed one left is removed when its run, or another agent, is
started. For addresses the kernel's routes and the resolver are asked; nothing is sent.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.files import LOCK, lock_directory

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9
_PREFIX = "async-rlhf-"
LONGEST = 107  # bytes of a socket's path (unix(7), without the zero behind it)
_ROOM = 40  # for `/async-rlhf-XXXXXXXX/environment`, and vLLM's `/` and UUID
ON_HOST = Path("{sockets}")
"""The directory of a node's own host, in the arguments of one that an agent starts: only the agent knows it."""


def hub_address(directory: Path) -> str:
    return f"ipc://{directory}/hub"


def scorer_address(directory: Path) -> str:
    return f"ipc://{directory}/scorer"


def socket_root(room: int = _ROOM) -> Path:
    """The temporary directory, or `/tmp` where that leaves no `room` (bytes) for a socket's path below it. Raises ConfigError
    when neither will do."""
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        raise ConfigError(f"no temporary directory can be written: {error}; set TMPDIR to one") from error
    for root in (folder, "/tmp"):
        if root.isprintable() and len(os.fsencode(root)) <= LONGEST - room and os.access(root, os.W_OK | os.X_OK):
            return Path(root)
    raise ConfigError(
        f"TMPDIR = {folder!r} has {len(os.fsencode(folder))} bytes; sockets need a printable path of at most {LONGEST - room}, "
        "and /tmp cannot be written. Set TMPDIR to a shorter directory"
    )


@contextmanager
def socket_directory() -> Iterator[Path]:
    """A new directory until the end of the block. Raises OSError when there is no room, ConfigError as `socket_root`."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=socket_root()))
    with closing(lock_directory(directory)):
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def is_private(directory: Path) -> bool:
    """Whether this is a directory of sockets that this user made and no other can enter."""
    with suppress(OSError, ValueError):
        status = directory.lstat()
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        return ours and directory.is_absolute() and directory.name.startswith(_PREFIX)
    return False


def remove_left(directory: Path) -> None:
    """Remove the sockets of a killed process, and the directory if it is then empty and has no owner."""
    if not is_private(directory):
        return
    with suppress(OSError), closing(lock_directory(directory)):
        for path in directory.iterdir():
            if path.is_socket() or path.name == LOCK:
                path.unlink()
        directory.rmdir()


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


def own_address(hosts: Iterable[str], interface: str | None) -> str:
    """The IPv4 address by which these hosts, names or addresses, reach this machine. Raises ConfigError."""
    if interface is not None:
        return _of_interface(interface)
    reached = {}
    for host in hosts:
        try:
            reached[host] = _towards(host)
        except OSError as error:
            raise ConfigError(
                f"host {host!r} cannot be reached from here ({error}): give the hub's address, or choose launch.interface"
            ) from error
    if len(addresses := sorted(set(reached.values()))) != 1:
        shown = ", ".join(f"{host} from {address}" for host, address in reached.items())
        raise ConfigError(f"the hosts are reached from several addresses of this machine ({shown}); choose launch.interface")
    return addresses[0]


def interface_towards(address: str) -> str:
    """The interface of this machine that has the address from which it sends to that one. Raises OSError without a route."""
    own = _towards(address)
    return str(next(name for name, all_of_it in psutil.net_if_addrs().items() if own in (each.address for each in all_of_it)))


def free_port(address: str) -> int:
    """A port of this address that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _of_interface(name: str) -> str:
    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        raise ConfigError(f"launch.interface = {name!r}: no such interface; {did_you_mean(name, interfaces)}")
    for address in interfaces[name]:
        if address.family == socket.AF_INET:
            return str(address.address)
    raise ConfigError(f"launch.interface = {name!r} has no IPv4 address; choose another, or give the hub's address")


def _towards(host: str) -> str:
    """The address from which the kernel would send to a host. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))  # of a datagram socket: a route is looked up, nothing is sent
        return str(probe.getsockname()[0])
