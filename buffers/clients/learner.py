"""The learner's end of the hub."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from async_rlhf.buffers.clients.connection import Connection
from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.transport.link import Connect, SocketLink
from async_rlhf.buffers.weights.sender import WeightSender


@dataclass(frozen=True)
class TakenBatch:
    """One batch of groups, with the actors' counters at that moment."""

    step: int
    groups: tuple[Group, ...]
    telemetry: Mapping[str, float]


@dataclass(frozen=True)
class SuspectGroup:
    """One group of a batch that ended learners: to be tried alone, without an update, and then named in `tried`."""

    step: int
    number: int
    frames: wire.Frames

    def group(self) -> Group:
        """Raises WireError when it cannot be read."""
        return packing.decode_put(self.frames)


class LearnerClient:
    """The learner's end: take batches, say what was trained and what is durable, publish weights. Blocks, with deadlines.

    Raises HubRestartedError when the hub lost its memory of this learner: `register` and `publish` again. Raises RefusedError
    with the reason `fenced` when another learner has taken its place, which is for good.
    """

    def __init__(
        self, address: str, *, timeout_s: float, connect: Connect = SocketLink, weights: WeightsConfig | None = None
    ) -> None:
        self._connection = Connection(connect(address, "learner"))
        self._weight_sender = WeightSender(self._connection, address, weights or WeightsConfig(), timeout_s)
        self._timeout_s = timeout_s
        self._life = secrets.token_hex(8)
        self.fence = 0

    def register(self, step: int, committed: int) -> None:
        """(Re)start at `step`; a new fence holds from now on. committed: as `commit` takes it."""
        register = wire.Register(step=step, committed=committed, learner=self._life, fence=self.fence)
        answer, _ = self._connection.ask(register, timeout_s=self._timeout_s)
        assert isinstance(answer, wire.Registered)
        self.fence = answer.fence

    def take(self, step: int, target_staleness: int | None = None) -> TakenBatch | SuspectGroup | str:
        """Batch `step`, a group of it to be tried first, or the reason why none will come. Waits while it is coming."""
        taken = self._take(step, target_staleness)
        if isinstance(taken, str | SuspectGroup):
            return taken
        batch, frames = taken
        groups = tuple(packing.decode_put(frames[i : i + 3]) for i in range(0, len(frames), 3))
        return TakenBatch(step, groups, batch.telemetry)

    def take_packed(self, step: int) -> wire.Frames | str:
        """As `take`, but the groups as they came: three frames each, header and arrays of its Put."""
        taken = self._take(step)
        assert not isinstance(taken, SuspectGroup)
        return taken if isinstance(taken, str) else taken[1]

    def tried(self, suspect: SuspectGroup) -> None:
        """The group alone was no trouble."""
        message = wire.Tried(fence=self.fence, step=suspect.step, number=suspect.number, done=True)
        self._connection.ask(message, timeout_s=self._timeout_s)

    def _take(self, step: int, target_staleness: int | None = None) -> tuple[wire.Batch, wire.Frames] | SuspectGroup | str:
        answer, frames = self._connection.ask(
            wire.Take(fence=self.fence, step=step, target_staleness=target_staleness), timeout_s=self._timeout_s
        )
        if isinstance(answer, wire.Ended):
            return answer.reason
        if isinstance(answer, wire.Trial):
            self._connection.send(wire.Tried(fence=self.fence, step=step, number=answer.number, done=False))
            return SuspectGroup(step, answer.number, frames)
        assert isinstance(answer, wire.Batch)
        return answer, frames

    def trained(self, step: int) -> None:
        """Batch `step` has been trained on. Does not wait: should it be lost, the next request implies it."""
        self._connection.send(wire.Trained(fence=self.fence, step=step))

    def commit(self, step: int) -> None:
        """The oldest checkpoint that is kept has `step` steps; the groups of earlier steps may be deleted."""
        self._connection.ask(wire.Commit(fence=self.fence, step=step), timeout_s=self._timeout_s)

    def publish(self, version: int, tensors: Mapping[str, RawTensor], canary: wire.Canary | None = None) -> None:
        """Send a weight set; returns when the hub has verified it whole. Raises RefusedError when it is not."""
        self._weight_sender.publish(self.fence, version, tensors, canary)

    def close(self) -> None:
        self._connection.close()
