"""Which address and interface of this machine reach other hosts. Asks the kernel's routes and the resolver; sends nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import psutil

from async_rlhf.buffers.errors import ConfigError, did_you_mean

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9


def own_address(hosts: Iterable[str], interface: str | None) -> str:
    """The IPv4 address by which these hosts, names or addresses, reach this machine. Raises ConfigError."""
    if interface is not None:
        return _of_interface(interface)
    found = {}
    for host in hosts:
        try:
            found[host] = _towards(host)
        except OSError as error:
            raise ConfigError(
                f"host {host!r} cannot be reached from here ({error}): give the hub's address, or choose launch.interface"
            ) from error
    if len(addresses := sorted(set(found.values()))) != 1:
        shown = ", ".join(f"{host} from {address}" for host, address in found.items())
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
        raise ConfigError(f"launch.interface = {name!r}: there is none; {did_you_mean(name, interfaces)}")
    for each in interfaces[name]:
        if each.family == socket.AF_INET:
            return str(each.address)
    raise ConfigError(f"launch.interface = {name!r} has no IPv4 address; choose another, or give the hub's address")


def _towards(host: str) -> str:
    """The address from which the kernel would send to a host. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))  # of a datagram socket: a route is looked up, nothing is sent
        return str(probe.getsockname()[0])
