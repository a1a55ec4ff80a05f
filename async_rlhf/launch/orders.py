"""The messages between a supervisor and its agent on another host, and nothing about when or how it travels.

    supervisor -> agent   Open, Want, Piece, Start, Kill, Alive
    agent -> supervisor   Opened, Missing, Started, Beats, Wrote, Ended, Alive

A message is one frame of a `Codec`, checked against the types below before anything looks at it.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from async_rlhf.buffers.protocol import message
from async_rlhf.buffers.protocol.message import Codec, Count, Name

MAX_FRAME_BYTES = 32 << 20
PIECE_BYTES = 1 << 20
"""The largest piece of a file in one message."""
HUB_CACHE = "{hub}"
"""Stands in a path for the agent's cache of the Hugging Face Hub."""
MAX_FILES = 1 << 16
"""Of a node: each image of a prompt is one."""
_MAX_INLINE_BYTES = 2 << 20


def _relative(name: str) -> str:
    """A name that stays below the folder it is seen from, on every system."""
    if not name.isprintable() or not re.fullmatch(r"[^.~/\\:][^/\\:]*(/[^.~/\\:][^/\\:]*)*", name) or len(name) > 1000:
        raise ValueError(r"no relative name: printable parts between '/', without '\' and ':', that begin with no '.' or '~'")
    return name


RelativeName = Annotated[str, AfterValidator(_relative)]
FileDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, Field(max_length=1 << 16)]
Data = Annotated[bytes, Field(max_length=PIECE_BYTES)]
Exit = Annotated[int, Field(ge=-255, le=255)]
Numbers = Annotated[tuple[Count, ...], Field(strict=False, max_length=1 << 13)]
OF_NODE = ("name", "role", "arguments", "devices", "cpus", "threads")
"""Fields that `Start` takes from a `program.Node`."""


class OpenAgent(message.Message):
    """The first order."""

    directory: Text
    """The agent's folder for files; `~` is the home of its user."""
    lost_after_s: float = Field(gt=0)
    """Seconds of silence after which the supervisor is lost."""
    accelerators: bool = False
    """Whether the agent queries the driver for accelerators."""


class Want(message.Message):
    """Asks which of these contents the host lacks."""

    places: dict[FileDigest, Text] = Field(max_length=MAX_FILES)
    """By digest a path at which the host may have the file; it may begin with `HUB_CACHE`."""


class ContentPiece(message.Message):
    """The next bytes of a content; with `last` it is whole."""

    digest: FileDigest
    data: Data
    last: bool


class Start(message.Message):
    """Start a node."""

    life: Count
    """Its number in all later messages."""
    name: RelativeName
    role: Name
    arguments: tuple[Text, ...] = Field(strict=False, max_length=64)
    """The agent replaces `sockets.ON_HOST` in them by its directory of sockets."""
    devices: Numbers | None = None
    cpus: Numbers | None = None
    threads: int | None = Field(default=None, ge=1)
    files: dict[RelativeName, FileDigest] = Field(max_length=MAX_FILES)
    """Contents that the agent has."""
    inline: dict[RelativeName, Annotated[bytes, Field(max_length=_MAX_INLINE_BYTES)]] = Field(max_length=64)
    """Small contents, which the agent keeps with mode 0600."""
    returns: list[RelativeName] = Field(max_length=8)
    """Files that the node writes and the supervisor keeps a copy of."""


class Kill(message.Message):
    life: Count


class Alive(message.Message):
    """The sender lives and has nothing to report."""


class Opened(message.Message):
    version: Name
    """The result of `machine.installed` there."""
    name: Name
    """The agent's name of its host."""
    directory: Text
    """The directory of this agent alone, absolute."""
    has: dict[Name, int | bool | str | None] = Field(max_length=16)
    """The fields of a `placement.Host`."""


class MissingContents(message.Message):
    digests: list[FileDigest] = Field(max_length=MAX_FILES)


class Started(message.Message):
    life: Count
    pid: Count


class Beats(message.Message):
    """Beats and progress, one byte each (`tether`)."""

    life: Count
    words: Data


class Wrote(message.Message):
    """Bytes appended to one of the files that the node returns."""

    life: Count
    number: Count
    """The file's place among them."""
    data: Data


class NodeEnded(message.Message):
    """A node has ended, or could not be started."""

    life: Count
    code: Exit
    """As `Process.poll` returns it."""
    words: Text
    """As `Process.failure_message` returns it."""


Order = OpenAgent | Want | ContentPiece | Start | Kill | Alive
Event = Opened | MissingContents | Started | Beats | Wrote | NodeEnded | Alive
ORDERS: Codec[Order] = Codec(Order, "an agent's orders", MAX_FRAME_BYTES, has_plain_keys=True)
EVENTS: Codec[Event] = Codec(Event, "an agent's events", MAX_FRAME_BYTES, has_plain_keys=True)
