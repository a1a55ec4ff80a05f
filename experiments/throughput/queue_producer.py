"""A producer of the queue benchmark: an actor's end of the wire, without an engine."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import msgpack

from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport.link import SocketLink

_CAPACITY = 64
_BEAT_S = 1.0


def produce(name: str, address: str, group: dict[str, Any], arrays: list[bytes], rate: float) -> None:
    """Puts a group for every credit, at most `rate` a second when it is not 0; until it is killed."""
    link, credits = SocketLink(address, name), deque[tuple[int, int]]()
    rest = {key: value for key, value in group.items() if key not in ("number", "attempt", "timings")}
    encoded = msgpack.packb(rest)
    fields, size = encoded[_map_head(len(rest)) :], len(rest) + 3
    link.send(wire.encode(wire.Hello(actor=name, life=name, capacity=_CAPACITY, fence=0, version=-1), request=1))
    fence, version, beat_at, due = 0, -1, 0.0, time.monotonic()
    while True:
        now = time.monotonic()
        if now >= beat_at:
            beat_at = now + _BEAT_S
            link.send(wire.encode(wire.Beat(capacity=_CAPACITY, fence=fence, version=version), request=2))
        while credits and (not rate or now >= due):
            number, attempt = credits.popleft()
            due = max(due + 1 / rate, now - 0.1) if rate else now
            timings = [{"put_s": time.monotonic(), "generate_s": 1.5}] * len(group["timings"])
            link.send([_header(number, attempt, timings, fields, size), *arrays])
        wait = 0.05 if not credits else max(0.0, due - now)
        while (frames := link.receive(wait)) is not None:
            wait = 0.0
            message = msgpack.unpackb(frames[0])[2]
            if message["type"] == "credits":
                credits += [(credit["number"], credit["attempt"]) for credit in message["credits"]]
            elif message["type"] == "adopt":
                fence, version, beat_at = message["fence"], message["version"], 0.0


def _map_head(size: int) -> int:
    """Bytes before the first key of a map of so many entries."""
    return 1 if size < 16 else 3


def _header(number: int, attempt: int, timings: list[dict[str, float]], fields: bytes, size: int) -> bytes:
    """The header of a Put, of which only the beginning is encoded each time."""
    head = b"\x93" + msgpack.packb(wire.PROTOCOL) + msgpack.packb(number + 10) + b"\x82"
    head += msgpack.packb("type") + msgpack.packb("put") + msgpack.packb("group") + b"\xde" + size.to_bytes(2, "big")
    start = msgpack.packb({"number": number, "attempt": attempt, "timings": timings})
    return bytes(head + start[1:] + fields)
