"""The address of the page and its access: decided and bound before anything is read or shown.

This machine only, unless there is a token; a page that another machine can ask for without one is refused. What takes something
is not open to all of this machine either, whose browser shows pages of any site: it has a token, or a socket of this user's.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from contextlib import closing
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.run_files import read_small

DEFAULT = "127.0.0.1:8265"
UNIX = "unix:"
"""The prefix of an address that is the path of a socket."""
_MIN_TOKEN = 16
_NEAR = 50
_BACKLOG = 128


def parse(address: str) -> tuple[str, int]:
    """HOST:PORT, [IPv6]:PORT or a port alone, as an IP address and a port. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else ""
    host = "127.0.0.1" if host in ("", "localhost") else host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f"--address {address!r}: {host!r} is no IP address. Choose one of this machine: {DEFAULT}, or 0.0.0.0:8265 for all"
        ) from None
    if not (port.isdecimal() and port.isascii() and int(port) <= 65535):
        raise ConfigError(f"--address {address!r}: {port!r} is no port from 0 to 65535. For example {DEFAULT}")
    return host, int(port)


def read_token(path: Path | None) -> str | None:
    """The token in a file that only its owner can read. Raises ConfigError."""
    if path is None:
        return None
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"--token-file {str(path)!r} can be read by others: chmod 600 {path}")
        token = read_small(path, 4096).strip()
    except FileNotFoundError:
        raise ConfigError(f"--token-file {str(path)!r} does not exist. Make one: openssl rand -hex 32 > {path}") from None
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token or ":" in token:
        raise ConfigError(
            f"--token-file {str(path)!r}: a token has {_MIN_TOKEN} or more printable characters, no space and no colon; "
            f"this has {len(token)}. Make one: openssl rand -hex 32 > {path}"
        )
    return token


def listen(address: str, token: str | None, *, takes: bool = False) -> socket.socket:
    """A listening socket. Raises ConfigError before it listens: beyond this machine without a token, or taken.

    takes: something can be changed through it, so without a token only a `unix:PATH` will do, which this user alone can open.
    """
    if address.startswith(UNIX):
        return _private(address, Path(address.removeprefix(UNIX)))
    host, port = parse(address)
    if token is None and takes:
        raise ConfigError(
            f"--address {address!r} is open to every user of this machine, and there is no token. Give --token-file FILE, or "
            f"--address {UNIX}PATH, a socket that only you can open"
        )
    if token is None and not ipaddress.ip_address(host).is_loopback:
        raise ConfigError(
            f"--address {address!r} can be reached from other machines, and there is no token. Give --token-file FILE, "
            f"or choose {DEFAULT} and forward it: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE"
        )
    try:
        listener = _bound(host, port)
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"--address {address!r} cannot be used: {error.strerror}. For example {DEFAULT}") from error
    free = next((near for near in range(port + 1, min(port + _NEAR, 65535) + 1) if _is_free(host, near)), 0)
    raise ConfigError(
        f"--address {address!r}: port {port} is in use. {url(host, free)[7:-1]} is free" + " (any port)" * (not free)
    )


def shown(bound: socket.socket) -> tuple[str, str]:
    """The host name of requests to a listening socket, and its address for people."""
    if bound.family == socket.AF_UNIX:
        return "localhost", f"{UNIX}{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return host, url(host, port)


def url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _private(address: str, path: Path) -> socket.socket:
    """A socket at a path that only this user can open; a socket of an ended process is replaced."""
    listener, mask = socket.socket(socket.AF_UNIX), os.umask(0o177)
    try:
        if path.is_socket() and listener.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        raise ConfigError(f"--address {address!r} cannot be used: {error}; choose another path") from error
    finally:
        os.umask(mask)


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


def _is_free(host: str, port: int) -> bool:
    try:
        with closing(_bound(host, port)):
            return True
    except OSError:
        return False
