"""Messages of the hub, and those held back until the journal is durable. Sends nothing: `hub` empties `messages`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from async_rlhf.buffers.protocol import packing, wire


class Outbox:
    """messages: to be sent now, each [identity, header, arrays...], in order."""

    def __init__(self) -> None:
        self.messages: list[wire.Frames] = []
        self._held: list[tuple[bytes, wire.Message, int, Sequence[int]]] = []
        # By actor: what it put since the last release, and its newest Put, which the one Ack answers.
        self._put: dict[bytes, tuple[list[tuple[int, int]], int]] = {}

    def send(self, identity: bytes, message: wire.Message, arrays: wire.Frames | None = None, request: int = 0) -> None:
        """At once."""
        self.messages.append([identity, *wire.encode(message, arrays, request)])

    def hold(self, identity: bytes, message: wire.Message, request: int = 0, numbers: Sequence[int] = ()) -> None:
        """With the next release, together with the groups `numbers`."""
        self._held.append((identity, message, request, numbers))

    def acknowledge(self, identity: bytes, group: tuple[int, int], request: int) -> None:
        """With the next release: one Ack an actor, for all its groups."""
        self._put[identity] = [*self._put.get(identity, ([], 0))[0], group], request

    @property
    def acknowledging(self) -> list[tuple[int, int]]:
        """The groups that the next release acknowledges, as (number, attempt)."""
        return [group for groups, _ in self._put.values() for group in groups]

    def release(self, read: Callable[[int], memoryview]) -> None:
        """The journal is durable: send what was held back. read: the bytes of a group, by number."""
        for identity, (groups, request) in self._put.items():
            self.send(identity, wire.Ack(groups=groups), request=request)
        self._put.clear()
        for identity, message, request, numbers in self._held:
            arrays = [frame for number in numbers for frame in packing.from_bytes(read(number))]
            self.send(identity, message, arrays, request)
        self._held.clear()
