"""What a reward server and its clients say to each other: one MessagePack frame each way, checked against these types.

client -> server   Ask(id, fields)        server -> client   Told(id, value, failure, metrics, retry_after_s)

Texts may hold halves of surrogate pairs, as JSON lines of a data set may, and a failure that quotes them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from async_rlhf.buffers.errors import WireError

PROTOCOL = 1
MAX_BYTES = 4 << 20
_HALVES = "surrogatepass"


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    protocol: int = Field(default=PROTOCOL, ge=PROTOCOL, le=PROTOCOL)


class Ask(_Message):
    """Score one completion. fields: as `ScoringPool.submit` takes them. timeout_s: after it nobody listens any more."""

    id: int
    fields: dict[str, Any]
    timeout_s: float = Field(gt=0)


class Told(_Message):
    """What the reward said. retry_after_s: seconds after which the server may be asked again; None: it would say the same."""

    id: int
    value: float | None = None
    failure: str | None = None
    metrics: dict[str, float] = {}
    retry_after_s: float | None = None


Kind = TypeVar("Kind", bound=_Message)


def pack(message: _Message) -> bytes:
    """Raises WireError for what is too large. Columns of kinds MessagePack does not know travel as their text."""
    packed: bytes = msgpack.packb(message.model_dump(), default=str, unicode_errors=_HALVES)
    if len(packed) > MAX_BYTES:
        raise WireError(f"a reward's request of {len(packed)} bytes; at most {MAX_BYTES} are sent")
    return packed


def unpack(kind: type[Kind], data: bytes) -> Kind:
    """Raises WireError for anything that is not one of these."""
    try:
        plain = msgpack.unpackb(data, max_ext_len=0, strict_map_key=True, unicode_errors=_HALVES)
        return kind.model_validate(plain)
    except (ValueError, msgpack.exceptions.UnpackException, ValidationError) as error:
        raise WireError(f"what is no {kind.__name__} of protocol {PROTOCOL}: {str(error)[:200]}") from error
