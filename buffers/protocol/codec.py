"""One frame of MessagePack for one message: the protocol's number and the fields, validated against the types of a protocol.

Text may hold halves of surrogate pairs, as JSON lines of a data set may.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol.message import MessageBase

PROTOCOL = 1
_SURROGATES = "surrogatepass"

Message = TypeVar("Message", bound=MessageBase)


class Codec(Generic[Message]):
    """The messages of one protocol, told apart by their field `type`. Raises WireError both ways, and nothing else.

    types: their union. about: whose columns they carry, for the reason of a failure. max_bytes: of a packed message.
    converts: columns unknown to MessagePack travel as their text, else they are refused by the sender. has_plain_keys:
    dictionaries have texts as keys only: colliding numbers would cost a server time.
    """

    def __init__(self, types: Any, about: str, max_bytes: int, *, converts: bool = False, has_plain_keys: bool = False) -> None:
        self._messages: TypeAdapter[Message] = TypeAdapter(Annotated[types, Field(discriminator="type")])
        self.max_bytes, self._about = max_bytes, about
        self._converts, self._has_plain_keys = converts, has_plain_keys

    def pack(self, message: Message) -> bytes:
        """Raises WireError for a message that is too large, and for a column that cannot travel."""
        try:
            packed: bytes = msgpack.packb([PROTOCOL, dict(message)], default=self._plain, unicode_errors=_SURROGATES)
        except (TypeError, ValueError, OverflowError) as error:
            raise WireError(f"the columns of {self._about} cannot travel ({error})") from error
        if len(packed) > self.max_bytes:
            raise WireError(f"a message of {self._about} has {len(packed)} bytes; at most {self.max_bytes} are sent")
        return packed

    def unpack(self, data: bytes) -> Message:
        """Raises WireError for anything that is not one of these."""
        try:
            protocol, fields = msgpack.unpackb(
                data, max_ext_len=0, strict_map_key=self._has_plain_keys, unicode_errors=_SURROGATES
            )
            if protocol != PROTOCOL:
                raise ValueError(f"protocol {str(protocol)[:40]}")
            return self._messages.validate_python(fields)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException, ValidationError) as error:
            raise WireError(f"what is no message of protocol {PROTOCOL} of {self._about}: {str(error)[:200]}") from error

    def _plain(self, value: Any) -> Any:
        """What a message holds and MessagePack does not know: a record within it, or a column."""
        if isinstance(value, MessageBase):
            return dict(value)
        if self._converts:
            return str(value)
        raise TypeError(f"a {type(value).__name__} is neither number, text, list nor dictionary")
