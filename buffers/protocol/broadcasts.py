"""The messages of the device channel (see `buffers.weights.broadcast`), which are part of the hub's protocol."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_rlhf.buffers.protocol.message import Canary, Count, Digest, GroupId, MessageBase, Name, OfSet, Version


class EngineDevice(MessageBase):
    """An engine's report on the device channel."""

    epoch_id: GroupId = (0, 0)
    """The epoch, (fence, number), that it was given last."""
    is_member: bool = False
    """It has not left that epoch."""
    received: Annotated[tuple[Count, Version], Field(strict=False)] = (0, -1)
    """Fence and version of the newest set that came whole."""
    num_refused: Count = 0
    """Sets that came and were not adopted, because their digests differ."""
    out: Annotated[str, Field(max_length=200)] = ""
    """Why it takes no part any more; empty: it does."""


class Gather(OfSet):
    """The learner is about to broadcast this version and asks for the members."""

    store: Name
    """IP:PORT, where they meet."""


class Receive(OfSet):
    """Take part, with this rank, in the epoch `epoch`, in which this version is broadcast; the learner has rank 0."""

    epoch: Count
    store: Name
    rank: Count
    size: Count


class Broadcast(OfSet):
    """This version was broadcast."""

    epoch: Count
    digest: Digest | None = None
    """Content digest of the sent bytes; None: the broadcast failed, and the epoch is over, as its engines are informed."""
    canary: Canary | None = None
