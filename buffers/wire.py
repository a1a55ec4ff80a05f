"""Messages and framing: what the processes say to each other, and nothing about when or why.

A message is a list of frames: a MessagePack header, then raw little-endian arrays. The header is validated against the
types below before anything looks at it: unknown fields, wrong types, oversized frames and other protocol numbers raise
WireError, which the receiver counts and answers; nothing is ever unpickled.

    actor   -> hub  Hello, Beat, Put (+ ids, logprobs), Release, Bye   hub -> actor    Welcome, Credits, Adopt, Ack, Stop
    learner -> hub  Register, Take, Trained, Commit                    hub -> learner  Registered, Batch (+ arrays),
                                                                                       Waiting, Ended, Done
    weights -> hub  Publish, Chunk (+ bytes), Fetch, FetchChunk        hub -> peer     Manifest, Chunk (+ bytes), Done
    anybody -> hub  GetStatus, Drain, Gone, Halt                       hub -> anybody  Status, Done

    every request may be answered with Refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from buffers.errors import WireError
from buffers.record import FinishReason

PROTOCOL = 2
# Header limits. The largest honest header is a Put: a few hundred bytes a member plus the texts.
MAX_HEADER_BYTES = 4 << 20
# What a side takes that trusts the other: no frame is larger, whatever the hub's own limit.
MAX_FRAME_BYTES = 1 << 30
_MAX_ITEMS = 1 << 16

Name = Annotated[str, Field(min_length=1, max_length=200)]
Frames = list[bytes]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Hello(_Message):
    """An actor joins, or comes back to a restarted hub: what it serves and which (number, attempt) it works on."""

    type: Literal["hello"] = "hello"
    actor: Name
    capacity: int
    fence: int
    version: int
    holding: list[tuple[int, int]] = []


class Beat(_Message):
    """An actor lives: how many groups it can hold now, which weights it serves, and its counters."""

    type: Literal["beat"] = "beat"
    capacity: int
    fence: int
    version: int
    telemetry: dict[str, float] = {}


class ScoreHeader(_Message):
    value: float | None = None
    failure: str | None = None
    metrics: dict[str, float] = {}


class RolloutHeader(_Message):
    num_tokens: int = Field(ge=1)
    spans: list[tuple[int, int, int | None]]
    num_support: int | None = None
    finish_reason: FinishReason
    scores: dict[str, ScoreHeader]
    text: str
    timings: dict[str, float]


class GroupHeader(_Message):
    """Everything of a Group but its arrays, which follow as two frames.

    int32: prompt ids, the members' ids, then of each member with a support its sizes and its ids. float32: logprobs.
    """

    number: int
    attempt: int
    num_prompt_tokens: int = Field(ge=1)
    rollouts: list[RolloutHeader]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    actor: str
    prompt: str
    columns: dict[str, JsonValue]


class Put(_Message):
    type: Literal["put"] = "put"
    group: GroupHeader


class Release(_Message):
    """An actor gives groups up because they can no longer keep the bound."""

    type: Literal["release"] = "release"
    numbers: list[int]


class Bye(_Message):
    type: Literal["bye"] = "bye"


class Welcome(_Message):
    """The actor is known; whatever it was credited before and did not name in its Hello is somebody else's now."""

    type: Literal["welcome"] = "welcome"
    incarnation: str
    max_frame_bytes: int


class CreditItem(_Message):
    number: int
    attempt: int
    lowest_version: int


class Credits(_Message):
    type: Literal["credits"] = "credits"
    credits: list[CreditItem]


class Adopt(_Message):
    """Serve this version, published by the learner incarnation `fence`."""

    type: Literal["adopt"] = "adopt"
    fence: int
    version: int


class Ack(_Message):
    """What became of a Put; `accepted` means it is durable."""

    type: Literal["ack"] = "ack"
    number: int
    attempt: int
    accepted: bool
    reason: str = ""


class Stop(_Message):
    type: Literal["stop"] = "stop"
    reason: str


class Register(_Message):
    """A learner (re)starts with `step` steps done and a durable checkpoint of `committed`; its fence is in the answer."""

    type: Literal["register"] = "register"
    step: int
    committed: int


class Registered(_Message):
    type: Literal["registered"] = "registered"
    fence: int
    incarnation: str


class Take(_Message):
    type: Literal["take"] = "take"
    fence: int
    step: int


class Batch(_Message):
    """Followed by three frames a group: its Put as the actor sent it, header and arrays."""

    type: Literal["batch"] = "batch"
    step: int
    telemetry: dict[str, float]


class Waiting(_Message):
    """The batch is not there yet: for whom the learner waits."""

    type: Literal["waiting"] = "waiting"
    step: int
    detail: str


class Ended(_Message):
    """No batch will come: the data ended, or the run drains."""

    type: Literal["ended"] = "ended"
    reason: str


class Trained(_Message):
    type: Literal["trained"] = "trained"
    fence: int
    step: int


class Commit(_Message):
    """A checkpoint of `step` steps is durable."""

    type: Literal["commit"] = "commit"
    fence: int
    step: int


class GetStatus(_Message):
    type: Literal["get_status"] = "get_status"


class Status(_Message):
    type: Literal["status"] = "status"
    status: dict[str, Any]


class Drain(_Message):
    type: Literal["drain"] = "drain"


class Gone(_Message):
    """The supervisor saw this actor's process end."""

    type: Literal["gone"] = "gone"
    actor: Name


class Halt(_Message):
    """The supervisor ends the hub: it writes its ledger and exits."""

    type: Literal["halt"] = "halt"


class Done(_Message):
    type: Literal["done"] = "done"


class Refused(_Message):
    type: Literal["refused"] = "refused"
    reason: str
    detail: str


class TensorSpec(_Message):
    name: Name
    dtype: Name
    shape: list[int]
    digest: Name


class Canary(_Message):
    """A fixed probe and what the publisher's own model says of it: log-probability of each token but the first.

    Whoever adopts the weights must find the same, to the precision of its arithmetic.
    """

    ids: list[int] = Field(min_length=2, max_length=4096)
    logprobs: list[float] = Field(max_length=4096)


class Publish(_Message):
    """The learner announces a weight set of `num_bytes`, sent next as chunks in order."""

    type: Literal["publish"] = "publish"
    fence: int
    version: int
    num_bytes: int = Field(ge=0)
    tensors: list[TensorSpec]
    canary: Canary | None = None


class Chunk(_Message):
    """Followed by one frame of bytes: part `index` of the set."""

    type: Literal["chunk"] = "chunk"
    fence: int
    version: int
    index: int = Field(ge=0)


class Fetch(_Message):
    type: Literal["fetch"] = "fetch"
    fence: int
    version: int


class Manifest(_Message):
    type: Literal["manifest"] = "manifest"
    fence: int
    version: int
    num_bytes: int
    num_chunks: int
    tensors: list[TensorSpec]
    canary: Canary | None = None


class FetchChunk(_Message):
    type: Literal["fetch_chunk"] = "fetch_chunk"
    fence: int
    version: int
    index: int = Field(ge=0)


Message = (
    Hello | Beat | Put | Release | Bye | Welcome | Credits | Adopt | Ack | Stop
    | Register | Registered | Take | Batch | Waiting | Ended | Trained | Commit
    | GetStatus | Status | Drain | Gone | Halt | Done | Refused
    | Publish | Chunk | Fetch | Manifest | FetchChunk
)  # fmt: skip
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encode(message: Message, arrays: Frames | None = None, request: int = 0) -> Frames:
    """Frames of a message. `request` is the asker's number, echoed in the answer."""
    header = msgpack.packb([PROTOCOL, request, message.model_dump()])
    return [header, *(arrays or [])]


def decode(frames: Frames, *, max_frame_bytes: int) -> tuple[int, Message, Frames]:
    """Request number, message, array frames. Raises WireError with the reason."""
    if not frames or any(len(frame) > max_frame_bytes for frame in frames) or len(frames[0]) > MAX_HEADER_BYTES:
        header, largest = (len(frames[0]), max(len(frame) for frame in frames)) if frames else (0, 0)
        raise WireError(
            f"{len(frames)} frames, a header of {header} and the largest of {largest} bytes; the limits are "
            f"{MAX_HEADER_BYTES} for a header and {max_frame_bytes} a frame (queue.max_frame_bytes)"
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
    if envelope[0] != PROTOCOL:
        raise WireError(f"protocol {envelope[0]!r}; this side speaks {PROTOCOL}")
    try:
        return envelope[1], _MESSAGES.validate_python(envelope[2]), frames[1:]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][:8])
        raise WireError(f"a message that is not one of ours: {first['msg'][:200]} at {where[:200]!r}") from error


def check_size(frames: Frames, *, max_frame_bytes: int) -> None:
    """Raise WireError for what the receiver would refuse (or cut the connection for), before it is sent."""
    sizes = [len(frame) for frame in frames]
    if sizes[0] > MAX_HEADER_BYTES or max(sizes) > max_frame_bytes:
        raise WireError(
            f"a message of frames of {sizes} bytes cannot be sent: the limits are {MAX_HEADER_BYTES} for the first and "
            f"{max_frame_bytes} a frame. Raise queue.max_frame_bytes, or make completions or groups smaller."
        )


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")
