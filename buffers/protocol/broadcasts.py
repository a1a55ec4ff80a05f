"""The messages of the device channel (see `buffers.weights.broadcast`), which are part of the hub's protocol."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_rlhf.buffers.protocol.message import Canary, Count, Digest, GroupId, MessageBase, Name, OfSet, Version


class EngineDevice(MessageBase):
    """An engine's report on the device channel.

    epoch_id: the epoch, (fence, number), that it was given last. is_member: it has not left that one. received: fence and
    version of the newest set that came whole. num_refused: sets that came and were not adopted, because their digests differ.
    """

    epoch_id: GroupId = (0, 0)
    is_member: bool = False
    received: Annotated[tuple[Count, Version], Field(strict=False)] = (0, -1)
    num_refused: Count = 0


class Gather(OfSet):
    """The learner is about to broadcast this version: to whom? store: IP:PORT, where they meet."""

    store: Name


class Receive(OfSet):
    """Take part, with this rank, in the epoch `epoch`, in which this version is broadcast; the learner has rank 0."""

    epoch: Count
    store: Name
    rank: Count
    size: Count


class Broadcast(OfSet):
    """This version was broadcast. digest: of the content, as the learner sent it; None: that failed, and the epoch is over,
    as its engines are informed."""

    epoch: Count
    digest: Digest | None = None
    canary: Canary | None = None
