"""Messages: frozen records whose fields are checked before anything reads them, and their two encodings.

`Framing`: a MessagePack header, [protocol, request, fields], then raw little-endian arrays. `Codec`: one frame, [protocol,
fields], with columns of users in it. Types are strict: a text is no number, a float no integer, 1 no truth value. Every
integer fits what it is made of again: 64 bits in a header, 32 bits where it becomes an array. The messages of the hub are in
`wire`; here is what several of them hold of a weight set.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from async_rlhf.buffers.errors import WireError

Name = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Version = Annotated[int, Field(ge=-(1 << 31), le=(1 << 31) - 1)]
Amount = Annotated[float, Field(ge=-1e18, le=1e18)]
"""A number so small that sums and squares of all of them stay finite."""
Digest = Annotated[str, Field(min_length=1, max_length=32)]
GroupId = Annotated[tuple[Count, Count], Field(strict=False)]
"""(number, attempt)"""
Frames = list[bytes]
"""Or views of them, which are sent and read like bytes."""

MAX_HEADER_BYTES = 4 << 20
"""The largest honest header of the hub's protocol is a Put: a few hundred bytes a member plus the texts."""
MAX_FRAME_BYTES = 1 << 30
"""The largest frame that a trusting side receives, whatever the hub's own limit."""
_MAX_ITEMS = 1 << 16


class MessageBase(BaseModel):
    """Refuses unknown fields, other types, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TensorSpec(MessageBase):
    name: Name
    dtype: Name
    shape: list[Count] = Field(max_length=16)
    digest: Name


class Canary(MessageBase):
    """A text and its log-probabilities under the publisher's own model, of each token but the first.

    An engine that adopts the weights must compute the same, to the precision of its arithmetic. behind_images: the text stands
    behind the prompt with made-up images that every processor has (`ImageProcessor.sample`).
    """

    ids: list[Annotated[int, Field(ge=0, le=(1 << 31) - 1)]] = Field(min_length=2, max_length=4096)
    logprobs: list[Amount] = Field(max_length=4096)
    behind_images: bool = False


class SealedPlace(MessageBase):
    """Sealed memory of a living process of the same machine (see `shared`)."""

    pid: Count = Field(ge=1)
    descriptor: Count
    token: Digest


class DeltaSpec(MessageBase):
    """`num_bytes` that make, of the set with content digest `base`, the one with content digest `result`."""

    base: Digest
    result: Digest
    num_bytes: Count


class Message(MessageBase):
    """`type`: its name in the header, the class name in snake case (`FetchChunk`: `fetch_chunk`)."""

    type: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.type = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class OfSet(Message):
    """About the weight set of this version, published by the learner incarnation `fence`."""

    fence: Count
    version: Version


M = TypeVar("M", bound=Message)


class Framing(Generic[M]):
    """The messages `kinds` of a protocol as frames, with arrays behind them. Anything else raises WireError, which the receiver
    counts and answers: unknown fields, wrong types, oversized frames, other protocol numbers. Nothing is unpickled."""

    def __init__(self, protocol: int, kinds: Iterable[type[M]]) -> None:
        self._protocol, self._kinds = protocol, {kind.type: kind for kind in kinds}

    def encode(self, message: M, arrays: Frames | None = None, request: int = 0) -> Frames:
        """request: the sender's number, returned in the answer."""
        return [msgpack.packb([self._protocol, request, {"type": message.type, **message.model_dump()}]), *(arrays or [])]

    def decode(self, frames: Frames, *, max_frame_bytes: int, oldest: int | None = None) -> tuple[int, M, Frames]:
        """Request number, message, array frames. oldest: the protocol it may be of; None: the present one.

        Raises WireError with one of the reasons `oversized`, `malformed`, `protocol`, `unknown-type` and `field`.
        """
        if not frames or any(len(frame) > max_frame_bytes for frame in frames) or len(frames[0]) > MAX_HEADER_BYTES:
            header, largest = (len(frames[0]), max(len(frame) for frame in frames)) if frames else (0, 0)
            raise WireError(
                f"{len(frames)} frames, a header of {header} and the largest of {largest} bytes; the limits are "
                f"{MAX_HEADER_BYTES} for a header and {max_frame_bytes} a frame",
                "oversized",
            )
        try:
            envelope = msgpack.unpackb(
                frames[0],
                strict_map_key=True,
                max_array_len=_MAX_ITEMS,
                max_map_len=_MAX_ITEMS,
                max_ext_len=0,
                max_bin_len=0,
                ext_hook=_no_extension,
            )
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise WireError(f"a header that is no MessagePack within the limits: {error}") from error
        if not isinstance(envelope, list) or len(envelope) != 3 or not isinstance(envelope[1], int):
            raise WireError("a header that is no [protocol, request, message]")
        protocol, request, fields = envelope
        if not isinstance(protocol, int) or not (oldest or self._protocol) <= protocol <= self._protocol:
            shown = _shown(protocol).strip("'")
            raise WireError(f"protocol {shown}; this side has protocol {self._protocol}", "protocol", request)
        return request, _of_fields(self._kinds, fields, request), frames[1:]


def check_size(frames: Frames, *, max_frame_bytes: int) -> None:
    """Raise WireError for frames that the receiver would refuse, or cut the connection for."""
    sizes = [len(frame) for frame in frames]
    if sizes[0] > MAX_HEADER_BYTES or max(sizes) > max_frame_bytes:
        raise WireError(
            f"a message of frames of {sizes} bytes cannot be sent: the limits are {MAX_HEADER_BYTES} for the first and "
            f"{max_frame_bytes} a frame. Make completions or groups smaller.",
            "oversized",
        )


CODEC_PROTOCOL = 2
_SURROGATES = "surrogatepass"  # text may hold halves of surrogate pairs, as JSON lines of a data set may


class Codec(Generic[M]):
    """The messages of one protocol, a frame each. Raises WireError both ways, and nothing else.

    types: their union. about: whose columns they carry, for the reason of a failure. max_bytes: of a packed message.
    converts: columns unknown to MessagePack travel as their text, else they are refused by the sender. has_plain_keys:
    dictionaries have texts as keys only: colliding numbers would cost a server time.
    """

    def __init__(self, types: Any, about: str, max_bytes: int, *, converts: bool = False, has_plain_keys: bool = False) -> None:
        self._kinds: dict[str, type[M]] = {kind.type: kind for kind in get_args(types)}
        self.max_bytes, self._about = max_bytes, about
        self._converts, self._has_plain_keys = converts, has_plain_keys

    def pack(self, message: M) -> bytes:
        """Raises WireError for a message that is too large, and for a column that cannot travel."""
        fields = {"type": message.type, **dict(message)}
        try:
            packed: bytes = msgpack.packb([CODEC_PROTOCOL, fields], default=self._plain, unicode_errors=_SURROGATES)
        except (TypeError, ValueError, OverflowError) as error:
            raise WireError(f"the columns of {self._about} cannot travel ({error})") from error
        if len(packed) > self.max_bytes:
            raise WireError(f"a message of {self._about} has {len(packed)} bytes; at most {self.max_bytes} are sent")
        return packed

    def unpack(self, data: bytes) -> M:
        """Raises WireError for anything that is not one of these."""
        try:
            protocol, fields = msgpack.unpackb(
                data, max_ext_len=0, strict_map_key=self._has_plain_keys, unicode_errors=_SURROGATES
            )
            if protocol != CODEC_PROTOCOL:
                raise ValueError(f"protocol {str(protocol)[:40]}")
            return _of_fields(self._kinds, fields)
        except (WireError, ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            what = f"what is no message of protocol {CODEC_PROTOCOL} of {self._about}"
            raise WireError(f"{what}: {error}") from error

    def _plain(self, value: Any) -> Any:
        """A MessagePack value for a nested record, or for a column of another type."""
        if isinstance(value, MessageBase):
            return dict(value)
        if self._converts:
            return str(value)
        raise TypeError(f"a {type(value).__name__} is neither number, text, list nor dictionary")


def _of_fields(kinds: Mapping[str, type[M]], fields: Any, request: int = 0) -> M:
    """The message that has been unpacked into these fields, `type` among them. Raises WireError, `unknown-type` or `field`."""
    tag = fields.pop("type", None) if isinstance(fields, dict) else fields
    if not isinstance(tag, str) or (kind := kinds.get(tag)) is None:
        expected = ", ".join(kinds)
        raise WireError(f"type {_shown(tag)} is no message of this protocol, which has {expected}", "unknown-type", request)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, (tag, *problem["loc"][:8])))[:200]
        detail = f"field {where!r} = {_shown(problem['input'])}: {problem['msg'][:200]}"
        raise WireError(detail, "field", request) from error


def _shown(value: Any) -> str:
    """A short form of a value that may be nested a thousand deep."""
    return repr(str(value)[:100] if isinstance(value, str | int | float | None) else reprlib.repr(value)[:100])


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")
