"""The messages between a supervisor and its agent on another host, and nothing about when or how it travels.

    supervisor -> agent   Open, Look, Want, Piece, Start, Kill, Alive
    agent -> supervisor   Opened, Looked, Missing, Started, Beats, Wrote, Ended, Alive

A message is one MessagePack frame, [protocol, fields], checked against the types below before anything looks at it.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

import msgpack
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol.message import Count, MessageBase, Name

T = TypeVar("T")
PROTOCOL = 1
MAX_FRAME_BYTES = 4 << 20
PIECE_BYTES = 1 << 20
"""Of a file, in one message."""
HUB_CACHE = "{hub}"
"""In a path: the folder in which the agent's user has models of the Hugging Face Hub."""
_MAX_FILES = 4096
_MAX_INLINE_BYTES = 2 << 20


def _relative(name: str) -> str:
    """A name that stays below the folder it is seen from, on every system."""
    if not re.fullmatch(r"[\w@+-][\w.@+-]*(/[\w@+-][\w.@+-]*)*", name) or len(name) > 1000:
        raise ValueError("no plain relative name (letters, digits, '.', '_', '-', '@', '+', parts between '/')")
    return name


RelativeName = Annotated[str, AfterValidator(_relative)]
FileDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, Field(max_length=1 << 16)]
Data = Annotated[bytes, Field(max_length=PIECE_BYTES)]
Exit = Annotated[int, Field(ge=-255, le=255)]


class Open(MessageBase):
    """The first order. directory: where the agent keeps files; `~` is the home of its user. lost_after_s: of silence.
    accelerators: whether the agent queries the driver for them."""

    type: Literal["open"] = "open"
    directory: Text
    lost_after_s: float = Field(gt=0)
    accelerators: bool = False


class Look(MessageBase):
    """Are these files there, below `path`, with these digests? It may begin with `~` or with `HUB_CACHE`."""

    type: Literal["look"] = "look"
    path: Text
    files: dict[RelativeName, FileDigest] = Field(max_length=_MAX_FILES)


class Want(MessageBase):
    """Which of these contents has the agent not got?"""

    type: Literal["want"] = "want"
    digests: list[FileDigest] = Field(max_length=_MAX_FILES)


class Piece(MessageBase):
    """The next bytes of a content; with `last` it is whole."""

    type: Literal["piece"] = "piece"
    digest: FileDigest
    data: Data
    last: bool


class Start(MessageBase):
    """Start a node. life: its number in all that follows. arguments: in them the agent names its directory of sockets
    (`sockets.ON_HOST`). files: contents the agent has; inline: small ones, which it keeps with mode 0600; returns: what it
    writes there and the supervisor keeps a copy of."""

    type: Literal["start"] = "start"
    life: Count
    name: RelativeName
    role: Name
    arguments: list[Text] = Field(max_length=64)
    devices: list[Count] | None = Field(default=None, max_length=1024)
    cpus: list[Count] | None = Field(default=None, max_length=1 << 13)
    threads: int | None = Field(default=None, ge=1)
    files: dict[RelativeName, FileDigest] = Field(max_length=_MAX_FILES)
    inline: dict[RelativeName, Annotated[bytes, Field(max_length=_MAX_INLINE_BYTES)]] = Field(max_length=64)
    returns: list[RelativeName] = Field(max_length=8)


class Kill(MessageBase):
    type: Literal["kill"] = "kill"
    life: Count


class Alive(MessageBase):
    """Nothing to report: the sender is there."""

    type: Literal["alive"] = "alive"


class Machine(MessageBase):
    """What a host has; see `placement.Host`."""

    devices: int = Field(ge=0, le=1024)
    device_memory: Count | None
    device_name: Text
    cpus: int = Field(ge=1)
    memory: Count | None
    holds: bool = True


class Opened(MessageBase):
    """version: of async-rlhf there. host: what the agent calls it. directory: of this agent alone, absolute."""

    type: Literal["opened"] = "opened"
    version: Name
    host: Name
    directory: Text
    has: Machine


class Looked(MessageBase):
    """path: as it is there. problem: the first thing that is not as it should be; empty when all is there."""

    type: Literal["looked"] = "looked"
    path: Text
    problem: Text


class Missing(MessageBase):
    type: Literal["missing"] = "missing"
    digests: list[FileDigest] = Field(max_length=_MAX_FILES)


class Started(MessageBase):
    type: Literal["started"] = "started"
    life: Count
    pid: Count


class Beats(MessageBase):
    """Beats and progress, one byte each (`tether`)."""

    type: Literal["beats"] = "beats"
    life: Count
    words: Data


class Wrote(MessageBase):
    """What was appended to one of the files it returns. number: which of them."""

    type: Literal["wrote"] = "wrote"
    life: Count
    number: Count
    data: Data


class Ended(MessageBase):
    """code: as `Process.poll`; words: as `Process.failure_message`. Also of a node that could not be started."""

    type: Literal["ended"] = "ended"
    life: Count
    code: Exit
    words: Text


Order = Annotated[Open | Look | Want | Piece | Start | Kill | Alive, Field(discriminator="type")]
Event = Annotated[Opened | Looked | Missing | Started | Beats | Wrote | Ended | Alive, Field(discriminator="type")]
ORDERS: TypeAdapter[Order] = TypeAdapter(Order)
EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


def encode(message: Order | Event) -> bytes:
    """One frame. Raises WireError for one that is too large."""
    frame: bytes = msgpack.packb([PROTOCOL, message.model_dump()])
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a message {message.type!r} of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}", "oversized")
    return frame


def order(frame: bytes) -> Order:
    """Raises WireError."""
    return _checked(ORDERS, frame)


def event(frame: bytes) -> Event:
    """Raises WireError."""
    return _checked(EVENTS, frame)


def _checked(kinds: TypeAdapter[T], frame: bytes) -> T:
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}", "oversized")
    try:
        envelope = msgpack.unpackb(frame, max_ext_len=0, max_array_len=1 << 14, max_map_len=1 << 14)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"a frame that is no MessagePack within the limits: {error}") from error
    if not isinstance(envelope, list) or len(envelope) != 2:
        raise WireError("a frame that is no [protocol, message]")
    if envelope[0] != PROTOCOL:
        raise WireError(f"protocol {envelope[0]!r}; this is {PROTOCOL}", "protocol")
    try:
        return kinds.validate_python(envelope[1])
    except ValidationError as error:
        first = error.errors()[0]
        raise WireError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", "field") from error
