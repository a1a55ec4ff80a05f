"""The network between hosts, a process in user space, because few kernels have every kind of damage.

It has the other end of each host's Ethernet device (a TAP), and sends each frame over the link between its two hosts. A line of
JSON on standard input sets a link, and a line on standard output answers it.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import selectors
import struct
import sys
import time
from contextlib import suppress
from random import Random

from tests.hosts.link import Conditions, Link

DEVICE = "eth0"
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
LARGEST_FRAME = 65_600
TCP, SYN, RST = 6, 0x02, 0x04


def mac(host: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, host + 1])


def enter(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{namespace}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def tap_in(process: int) -> int:
    """A new Ethernet device in the network namespace of a process; frames are read from and written to what is returned."""
    enter(f"/proc/{process}/ns/net")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def say(row: object) -> None:
    """A line of JSON on standard output, at once."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


class Connections:
    """TCP connections that a stateful router knows. It forgets those that were idle: their segments are lost from then on."""

    def __init__(self) -> None:
        self.forgets_s = 0.0
        self._heard: dict[frozenset[bytes], float] = {}

    def passes(self, frame: bytes, now: float) -> bool:
        if not self.forgets_s or len(frame) < 54 or frame[12:14] != b"\x08\x00" or frame[23] != TCP:
            return True
        tcp = 14 + 4 * (frame[14] & 15)
        connection = frozenset((frame[26:30] + frame[tcp : tcp + 2], frame[30:34] + frame[tcp + 2 : tcp + 4]))
        heard = self._heard.get(connection)
        if not frame[tcp + 13] & SYN and (heard is None or now - heard > self.forgets_s):
            return False
        self._heard[connection] = now
        return True


class Switch:
    def __init__(self, processes: list[int], seed: int) -> None:
        own = f"/proc/{os.getppid()}/ns/net"
        self._taps = [tap_in(process) for process in processes]
        enter(own)  # it is on none of the hosts
        hosts = range(len(self._taps))
        self._links = {(a, b): Link(Conditions(), Random(f"{seed}/{a}/{b}")) for a in hosts for b in hosts if a != b}
        self._host_of = {mac(host): host for host in hosts}
        self._connections = Connections()
        self._flying: list[tuple[float, int, int, bytes]] = []
        self._order = 0
        self._sent = dict.fromkeys(self._links, 0)

    def run(self) -> None:
        """Until standard input ends."""
        selector = selectors.DefaultSelector()
        for host, tap in enumerate(self._taps):
            selector.register(tap, selectors.EVENT_READ, host)
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        rest = b""
        while True:
            wait = max(self._flying[0][0] - time.monotonic(), 0) if self._flying else None
            for key, _ in selector.select(wait):
                if key.data is not None:
                    self._take(key.data)
                    continue
                received = os.read(0, 65_536)
                if not received:
                    return
                *lines, rest = (rest + received).split(b"\n")
                for line in lines:
                    say(self._obey(json.loads(line)))
            self._deliver()

    def _obey(self, order: dict[str, object]) -> dict[str, object]:
        """`links`: pairs of hosts, and their `conditions`; or `forgets_s`. The answer has bytes sent."""
        if "forgets_s" in order:
            self._connections.forgets_s = float(str(order["forgets_s"]))
        for a, b in order.get("links", []):  # type: ignore[attr-defined]
            self._links[a, b].conditions = Conditions(**order["conditions"])  # type: ignore[arg-type]
        return {"sent": [[*pair, count] for pair, count in self._sent.items()]}

    def _take(self, host: int) -> None:
        """All frames that a host has sent."""
        while True:
            try:
                frame = os.read(self._taps[host], LARGEST_FRAME)
            except BlockingIOError:
                return
            now = time.monotonic()
            other = self._host_of.get(frame[:6])
            if not self._connections.passes(frame, now):
                continue
            for to in [other] if other is not None else range(len(self._taps)):
                if to != host:
                    self._send(host, to, frame, now)

    def _send(self, host: int, to: int, frame: bytes, now: float) -> None:
        arrivals = self._links[host, to].arrivals(now, len(frame))
        self._sent[host, to] += len(frame)
        for arrival in arrivals:
            self._order += 1
            heapq.heappush(self._flying, (arrival, self._order, to, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._flying and self._flying[0][0] <= now:
            _, _, to, frame = heapq.heappop(self._flying)
            with suppress(OSError):  # the device is down, or its queue is full: the frame is lost
                os.write(self._taps[to], frame)


if __name__ == "__main__":
    made = Switch([int(each) for each in sys.argv[2:]], int(sys.argv[1]))
    say({})
    made.run()
