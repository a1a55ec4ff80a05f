"""Messages about weights. Framing, and all other messages, are in `wire`.

    learner -> hub    Publish, Chunk (+ bytes), Check      hub -> learner    Wanted, Checked, Done
    actor   -> hub    Fetch, FetchChunk                    hub -> actor      Adopt, Manifest, Chunk (+ bytes)

The same holds between an actor and a relay, which is the hub to it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rlhf.buffers.protocol.message import Amount, Count, MessageBase, Name, Version

Digest = Annotated[str, Field(min_length=1, max_length=32)]


class TensorSpec(MessageBase):
    name: Name
    dtype: Name
    shape: list[Count] = Field(max_length=16)
    digest: Name


class Canary(MessageBase):
    """A text and its log-probabilities under the publisher's own model, of each token but the first.

    An engine that adopts the weights must compute the same, to the precision of its arithmetic.
    """

    ids: list[Annotated[int, Field(ge=0, le=(1 << 31) - 1)]] = Field(min_length=2, max_length=4096)
    logprobs: list[Amount] = Field(max_length=4096)


class Place(MessageBase):
    """Sealed memory of a living process of the same machine (see `shared`)."""

    pid: Count = Field(ge=1)
    descriptor: Count
    token: Digest


class DeltaSpec(MessageBase):
    """`num_bytes` that make, of the set with content digest `base`, the one with content digest `result`."""

    base: Digest
    result: Digest
    num_bytes: Count


class Publish(MessageBase):
    """The learner announces a weight set: where it lies, or that chunks of it, or of a delta, can be had."""

    type: Literal["publish"] = "publish"
    fence: Count
    version: Version
    num_bytes: Count
    tensors: list[TensorSpec]
    canary: Canary | None = None
    place: Place | None = None
    delta: DeltaSpec | None = None


class Wanted(MessageBase):
    """What the hub wants of an announced set: its chunks, or only those of the delta.

    delta_next: a delta would be of use with the next set.
    """

    type: Literal["wanted"] = "wanted"
    chunks: bool
    delta: bool
    delta_next: bool


class Chunk(MessageBase):
    """Followed by one frame of bytes: part `index` of the set, or of the delta that results in content digest `delta`."""

    type: Literal["chunk"] = "chunk"
    fence: Count
    version: Version
    index: Count
    delta: Digest | None = None


class Check(MessageBase):
    """Everything was sent: verify one more piece."""

    type: Literal["check"] = "check"
    fence: Count
    version: Version


class Checked(MessageBase):
    """done: the whole set is verified and published."""

    type: Literal["checked"] = "checked"
    done: bool


class Adopt(MessageBase):
    """Serve this version, published by the learner incarnation `fence`."""

    type: Literal["adopt"] = "adopt"
    fence: Count
    version: Version


class Fetch(MessageBase):
    """maps: the asker can map memory of the hub's machine. holds: content digest of the set it has, for a delta."""

    type: Literal["fetch"] = "fetch"
    fence: Count
    version: Version
    maps: bool = False
    holds: Digest | None = None


class Manifest(MessageBase):
    """deltas: to be applied to what the asker holds, one after the other, instead of fetching the whole set."""

    type: Literal["manifest"] = "manifest"
    fence: Count
    version: Version
    num_bytes: Count
    tensors: list[TensorSpec]
    canary: Canary | None = None
    place: Place | None = None
    deltas: list[DeltaSpec] = Field(default_factory=list)


class FetchChunk(MessageBase):
    """Part `index` of the set, or of the delta that results in content digest `delta`."""

    type: Literal["fetch_chunk"] = "fetch_chunk"
    fence: Count
    version: Version
    index: Count
    delta: Digest | None = None
