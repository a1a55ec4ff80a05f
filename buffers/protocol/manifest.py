"""What is announced of a weight set: its tensors, the probe that engines must agree on, where it lies, which delta makes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_rlhf.buffers.protocol.message import Amount, Count, Digest, MessageBase, Name


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
