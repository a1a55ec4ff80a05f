"""A hub without a socket: the test sends the messages of its peers and reads the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.hub.prompts import Prompts
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.spool.claims import Spool
from async_rlhf.buffers.spool.stream import Stream
from async_rlhf.buffers.weights.store import WeightStore
from async_rlhf.buffers.weights.weight_set import WeightSet

ACTOR, LEARNER = b"a", b"c"


class Spoken:
    """`spool`: where prompts come from, or None."""

    def __init__(
        self,
        bound: Bound,
        journal: Journal,
        store: WeightStore | None = None,
        prompts: Prompts | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        **config: Any,
    ) -> None:
        settings = QueueConfig(max_staleness=bound.max_staleness, exact=bound.exact, **config)
        self.exchange = Exchange(settings, bound, journal, store or WeightStore(), clock, "x", prompts=prompts)
        self.spool = None if prompts is None else prompts.spool

    def status(self) -> dict[str, Any]:
        return self.exchange.status()

    def begin(self, step: int = 0) -> list[Any]:
        """The learner registers and publishes, and an actor that serves its version joins."""
        self.hear(LEARNER, wire.Register(step=step, committed=0, learner="l"))
        self.publish(step)
        return self.hello(step)

    def hello(self, version: int = 0, holding: Sequence[tuple[int, int]] = ()) -> list[Any]:
        return self.hear(ACTOR, wire.Hello(actor="anna", life="1", capacity=9, fence=1, version=version, holding=[*holding]))

    def publish(self, version: int) -> None:
        self.hear(LEARNER, WeightSet.of(1, version, {}).announcement())

    def take(self, step: int) -> list[Any]:
        return self.hear(LEARNER, wire.Take(fence=1, step=step))

    def hear(self, who: bytes, message: wire.Message, arrays: Sequence[bytes] = ()) -> list[Any]:
        """The answers, to all peers."""
        self.exchange.receive(who, wire.encode(message, [*arrays], 1))
        return self.turn()

    def turn(self) -> list[Any]:
        while self.spool is not None and self.spool.turn():
            pass
        self.exchange.settle()
        frames, self.exchange.outbox.messages = self.exchange.outbox.messages, []
        return [wire.decode(rest, max_frame_bytes=1 << 24)[1] for _, *rest in frames]


def spool_of(folder: Path, stream: Stream) -> Spool:
    """Takes every row of the spool in this folder as it is."""
    (folder / "spool").mkdir(exist_ok=True)
    return Spool(folder / "spool", folder / "own", stream, lambda lines: [line.decode() for line in lines])
