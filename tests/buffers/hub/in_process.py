"""A hub without a socket: the test sends the messages of its peers and reads the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.hub.prompts import Prompts
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.record import Score
from async_rlhf.buffers.spool.claims import Spool
from async_rlhf.buffers.spool.stream import PromptStream
from async_rlhf.buffers.weights.store import WeightStore
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.buffers.hub.place import a_group

ACTOR, OTHER, LEARNER, OPERATOR = b"a", b"b", b"c", b"s"
Kind = TypeVar("Kind")


class InProcessHub:
    """credits: those of all actors, by number. sent: what the hub has sent, and to whom. wanted: of the exchange."""

    def __init__(
        self,
        bound: Bound,
        journal: Journal,
        store: WeightStore | None = None,
        prompts: Prompts | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        wanted: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        settings = QueueConfig(max_staleness=bound.max_staleness, exact=bound.exact, window=bound.window, **config)
        given = {"prompts": prompts, **(wanted or {})}
        self.exchange = Exchange(settings, bound, journal, store or WeightStore(), clock, "x", **given)
        self.spool = None if prompts is None else prompts.spool
        self.credits: dict[int, wire.CreditItem] = {}
        self.sent: list[tuple[bytes, Any]] = []
        self.fence = 0

    def status(self) -> dict[str, Any]:
        status = self.exchange.status()
        assert status["ledger"]["closes"]
        return status

    def begin(self, step: int = 0) -> list[Any]:
        """The learner registers and publishes, and an actor that serves its version joins."""
        self.register(step)
        self.publish(step)
        return self.hello(step)

    def register(self, step: int = 0, learner: str = "l", who: bytes = LEARNER) -> list[Any]:
        answers = self.receive(who, wire.Register(step=step, committed=0, learner=learner))
        self.fence = self.status()["fence"]
        return answers

    def hello(
        self, version: int = 0, holding: Sequence[tuple[int, int]] = (), name: str = "anna", who: bytes = ACTOR, **fields: Any
    ) -> list[Any]:
        given = {"life": "1", "capacity": 9, "fence": self.fence} | fields
        return self.receive(who, wire.Hello(actor=name, version=version, holding=[*holding], **given))

    def publish(self, version: int) -> list[Any]:
        return self.receive(LEARNER, WeightSet.of(self.fence, version, {}).announcement())

    def take(self, step: int, **fields: Any) -> list[Any]:
        return self.receive(LEARNER, wire.Take(fence=self.fence, step=step, **fields))

    def make(
        self, number: int, score: float | str = 1.0, *, constant: bool = False, text: str = "", version: int | None = None
    ) -> list[Any]:
        """A group that was credited is put; its members are sampled by this version, else by the one published last."""
        sampled_by = (self.exchange._admission.published or 0) if version is None else version
        group = a_group(number, self.credits[number].attempt, sampled_by, "anna", text)
        given = Score(failure=score) if isinstance(score, str) else Score(score)
        group = replace(group, rollouts=tuple(replace(rollout, scores={"right": given}) for rollout in group.rollouts))
        header, arrays = packing.pack_group(group)
        return self.receive(ACTOR, wire.Put(group=header, constant=constant), arrays)

    def train(self, step: int) -> None:
        self.take(step)
        self.receive(LEARNER, wire.Trained(fence=self.fence, step=step))
        self.publish(step + 1)

    def receive(
        self, who: bytes, message: wire.Message | wire.Frames, arrays: Sequence[bytes] = (), request: int = 1
    ) -> list[Any]:
        """The answers, to all peers."""
        self.exchange.receive(who, message if isinstance(message, list) else wire.encode(message, [*arrays], request))
        return self.turn()

    def turn(self) -> list[Any]:
        while self.spool is not None and self.spool.turn():
            pass
        self.exchange.settle()
        frames, self.exchange.outbox.messages = self.exchange.outbox.messages, []
        sent = [(who, wire.decode(rest, max_frame_bytes=1 << 26)[1]) for who, *rest in frames]
        self.sent += sent
        for _, message in sent:
            if isinstance(message, wire.Credits):
                self.credits |= {item.number: item for item in message.credits}
        return [message for _, message in sent]

    def tick(self) -> list[Any]:
        self.exchange.tick()
        return self.turn()

    def sent_of(self, kind: type[Kind], who: bytes | None = None) -> list[Kind]:
        """All messages of one kind that the hub has sent, to all or to one."""
        return [message for to, message in self.sent if isinstance(message, kind) and who in (None, to)]

    def credited_to(self, who: bytes) -> list[int]:
        return [item.number for message in self.sent_of(wire.Credits, who) for item in message.credits]


def spool_of(folder: Path, stream: PromptStream) -> Spool:
    """Takes every row of the spool in this folder as it is."""
    (folder / "spool").mkdir(exist_ok=True)
    return Spool(folder / "spool", folder / "own", stream, lambda lines: [line.decode() for line in lines])
