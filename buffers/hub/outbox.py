"""Messages of the hub, and those held back until the journal is durable. Sends nothing: `hub` empties `messages`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from async_rlhf.buffers.protocol import packing, wire


@dataclass(frozen=True)
class _Held:
    """A message that waits for the journal; the groups `numbers` are sent with it."""

    identity: bytes
    message: wire.Message
    request: int
    numbers: Sequence[int]


@dataclass
class _Kept:
    """What one actor put since the last release; request: its newest Put, which the one Ack answers."""

    groups: list[tuple[int, int]] = field(default_factory=list)
    request: int = 0


class Outbox:
    """messages: to be sent now, each [identity, header, arrays...], in order."""

    def __init__(self) -> None:
        self.messages: list[wire.Frames] = []
        self._held: list[_Held] = []
        self._kept: dict[bytes, _Kept] = {}

    def send(self, identity: bytes, message: wire.Message, arrays: wire.Frames | None = None, request: int = 0) -> None:
        """At once."""
        self.messages.append([identity, *wire.encode(message, arrays, request)])

    def hold(self, identity: bytes, message: wire.Message, request: int = 0, numbers: Sequence[int] = ()) -> None:
        """With the next release, together with these groups."""
        self._held.append(_Held(identity, message, request, numbers))

    def acknowledge(self, identity: bytes, group: tuple[int, int], request: int) -> None:
        """With the next release: one Ack an actor, for all its groups."""
        kept = self._kept.setdefault(identity, _Kept())
        kept.groups.append(group)
        kept.request = request

    @property
    def acknowledging(self) -> list[tuple[int, int]]:
        """The groups that the next release acknowledges, as (number, attempt)."""
        return [group for kept in self._kept.values() for group in kept.groups]

    def release(self, read: Callable[[int], memoryview]) -> None:
        """The journal is durable: send what was held back. read: the bytes of a group, by number."""
        for identity, kept in self._kept.items():
            self.send(identity, wire.Ack(groups=kept.groups), request=kept.request)
        self._kept.clear()
        for held in self._held:
            groups = [frame for number in held.numbers for frame in packing.from_bytes(read(number))]
            self.send(held.identity, held.message, groups, held.request)
        self._held.clear()
