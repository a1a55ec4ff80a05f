"""Messages and framing: what the processes say to each other, and nothing about when or why.

A message is a list of frames: a MessagePack header, then raw little-endian arrays. The header is validated against the
types below before anything looks at it: unknown fields, wrong types, oversized frames and other protocol numbers raise
WireError, which the receiver counts and answers; nothing is ever unpickled.

    actor   -> hub  Hello, Beat, Put (+ ids, logprobs), Release, Bye   hub -> actor    Welcome, Credits, Adopt, Ack,
                                                                                       Rejected, Later, Stop
    learner -> hub  Register, Take, Tried, Trained, Commit             hub -> learner  Registered, Batch (+ arrays),
                                                                                       Trial (+ arrays), Waiting, Ended, Done
    weights         see `weight_messages`
    control -> hub  GetStatus, Drain, Gone, Quarantine, Halt           hub -> control  Status, Done

    every request may be answered with Refused.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal

import msgpack
from pydantic import BeforeValidator, Field, JsonValue, TypeAdapter, ValidationError

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol.message import Amount, Count, GroupId, MessageBase, Name, Version
from async_rlhf.buffers.protocol.message import CreditItem as CreditItem
from async_rlhf.buffers.protocol.message import Telemetry as Telemetry
from async_rlhf.buffers.protocol.weight_messages import Adopt as Adopt
from async_rlhf.buffers.protocol.weight_messages import Canary as Canary
from async_rlhf.buffers.protocol.weight_messages import Check as Check
from async_rlhf.buffers.protocol.weight_messages import Checked as Checked
from async_rlhf.buffers.protocol.weight_messages import Chunk as Chunk
from async_rlhf.buffers.protocol.weight_messages import DeltaSpec as DeltaSpec
from async_rlhf.buffers.protocol.weight_messages import Digest
from async_rlhf.buffers.protocol.weight_messages import Fetch as Fetch
from async_rlhf.buffers.protocol.weight_messages import FetchChunk as FetchChunk
from async_rlhf.buffers.protocol.weight_messages import Manifest as Manifest
from async_rlhf.buffers.protocol.weight_messages import Place as Place
from async_rlhf.buffers.protocol.weight_messages import Publish as Publish
from async_rlhf.buffers.protocol.weight_messages import TensorSpec as TensorSpec
from async_rlhf.buffers.protocol.weight_messages import Wanted as Wanted
from async_rlhf.buffers.record import FinishReason
from async_rlhf.buffers.sampling import Sampling

PROTOCOL = 11
# Header limits. The largest honest header is a Put: a few hundred bytes a member plus the texts.
MAX_HEADER_BYTES = 4 << 20
# What a side takes that trusts the other: no frame is larger, whatever the hub's own limit.
MAX_FRAME_BYTES = 1 << 30
_MAX_ITEMS = 1 << 16

# Or views of them, which are sent and read like bytes.
Frames = list[bytes]


class Hello(MessageBase):
    """An actor joins, or comes back to a restarted hub: what it serves and which (number, attempt) it works on.

    life: names the process, however often it connects. shared: digests of what hub and actor must have in common, by name.
    """

    type: Literal["hello"] = "hello"
    actor: Name
    life: Digest
    shared: dict[Name, Digest] = Field(default_factory=dict, max_length=32)
    capacity: Count
    fence: Count
    version: Version
    holding: list[GroupId] = Field(default_factory=list)


class Beat(MessageBase):
    """An actor lives: how many groups it can hold now, which weights it serves, and its counters.

    progress: (number, amount) of each group it works on; an amount that does not rise is no progress.
    """

    type: Literal["beat"] = "beat"
    capacity: Count
    fence: Count
    version: Version
    telemetry: Telemetry = Telemetry()
    progress: list[GroupId] = Field(default_factory=list)


def _complete(sampling: Any) -> Any:
    """Refuses what leaves a setting out: another release may have meant another default."""
    if isinstance(sampling, dict) and (missing := Sampling.model_fields.keys() - sampling.keys()):
        raise ValueError(f"{sorted(missing)} not given")
    return sampling


class GroupHeader(MessageBase):
    """Everything of a Group but its arrays, which follow as two frames. Lists have one item a member.

    int32: prompt ids, the members' ids, then of each member with a sampling mask its sizes and its ids. float32: logprobs
    of sampled tokens, then of each member that has them the reference's.
    num_tokens: behind the prompt. spans: (version or None of an observation, tokens, oldest version in the cache or None).
    restarts: which spans begin a row anew, by index; like turn_scores empty where no member has any. scores: a number, the text
    of a failure, or None where the reward does not apply.
    """

    number: Count
    attempt: Count
    num_prompt_tokens: Count = Field(ge=1)
    num_tokens: list[Annotated[Count, Field(ge=1)]] = Field(min_length=1)
    spans: list[list[Annotated[tuple[Version | None, Count, Version | None], Field(strict=False)]]]
    restarts: list[list[Count]] = Field(default_factory=list)
    num_support: list[Count | None]
    has_reference: list[bool]
    turn_scores: list[list[Amount | None]] = Field(default_factory=list)
    finish_reasons: list[FinishReason]
    scores: dict[str, list[Amount | str | None]]
    metrics: dict[str, list[dict[str, Amount]]]
    texts: list[str]
    timings: list[dict[str, Amount]]
    sampling: Annotated[Sampling, BeforeValidator(_complete)]
    actor: str
    prompt: str
    columns: dict[str, JsonValue]


class Put(MessageBase):
    """A finished group. `constant`: by the actor's account no member is better than another, and with refill the hub may
    take another group in its place; it is acknowledged all the same."""

    type: Literal["put"] = "put"
    group: GroupHeader
    constant: bool = False


class Release(MessageBase):
    """An actor gives groups up because they can no longer keep the bound."""

    type: Literal["release"] = "release"
    numbers: list[Count]


class Bye(MessageBase):
    type: Literal["bye"] = "bye"


class Welcome(MessageBase):
    """The actor is known; whatever it was credited before and did not name in its Hello belongs to other actors now."""

    type: Literal["welcome"] = "welcome"
    incarnation: str
    max_frame_bytes: Count


class Credits(MessageBase):
    type: Literal["credits"] = "credits"
    credits: list[CreditItem]


class Ack(MessageBase):
    """These groups (number, attempt) are durable. Answers the last Put of them."""

    type: Literal["ack"] = "ack"
    groups: list[GroupId]


class Rejected(MessageBase):
    """This Put was well formed and may not enter."""

    type: Literal["rejected"] = "rejected"
    number: Count
    attempt: Count
    reason: str


class Later(MessageBase):
    """No room for this Put now: the actor keeps the group and puts it again after `wait_s`. Nothing was decided about it."""

    type: Literal["later"] = "later"
    number: Count
    attempt: Count
    wait_s: Amount
    reason: str


class Stop(MessageBase):
    type: Literal["stop"] = "stop"
    reason: str


class Register(MessageBase):
    """A learner (re)starts with `step` steps done; its fence is in the answer. committed: as `Commit.step`.

    learner: the name of this life of it. fence: the one it was given last, 0 when it never was.
    """

    type: Literal["register"] = "register"
    step: Count
    committed: Count
    learner: Name
    fence: Count = 0


class Registered(MessageBase):
    type: Literal["registered"] = "registered"
    fence: Count
    incarnation: str


class Take(MessageBase):
    """`target_staleness`: what new groups are to stay within; None: the bound. `enough`: no batch is wanted any more."""

    type: Literal["take"] = "take"
    fence: Count
    step: Count
    target_staleness: Count | None = None
    enough: bool = False


class Batch(MessageBase):
    """Followed by three frames a group: its Put as the actor sent it, header and arrays."""

    type: Literal["batch"] = "batch"
    step: Count
    telemetry: dict[str, float]


class Trial(MessageBase):
    """The batch ended the learner again and again. Followed by three frames, one of its groups: to be tried alone, without an
    update; then `Tried`, then Take again."""

    type: Literal["trial"] = "trial"
    step: Count
    number: Count


class Tried(MessageBase):
    """The learner begins to try this group alone; `done`: that did not end it."""

    type: Literal["tried"] = "tried"
    fence: Count
    step: Count
    number: Count
    done: bool


class Waiting(MessageBase):
    """The batch is not there yet: for whom the learner waits."""

    type: Literal["waiting"] = "waiting"
    step: Count
    detail: str


class Ended(MessageBase):
    """No batch will come: the data ended, the run drains, or the learner has enough."""

    type: Literal["ended"] = "ended"
    reason: str


class Trained(MessageBase):
    type: Literal["trained"] = "trained"
    fence: Count
    step: Count


class Commit(MessageBase):
    """The oldest checkpoint that is kept has `step` steps: no learner goes back behind it."""

    type: Literal["commit"] = "commit"
    fence: Count
    step: Count


class GetStatus(MessageBase):
    type: Literal["get_status"] = "get_status"


class Status(MessageBase):
    type: Literal["status"] = "status"
    status: dict[str, Any]


class Drain(MessageBase):
    type: Literal["drain"] = "drain"


class Gone(MessageBase):
    """The supervisor saw this actor's process end."""

    type: Literal["gone"] = "gone"
    actor: Name


class Quarantine(MessageBase):
    """An operator takes a group back: it is not trained on, or not once more."""

    type: Literal["quarantine"] = "quarantine"
    number: Count
    reason: Annotated[str, Field(max_length=300)]


class Halt(MessageBase):
    """The supervisor ends the hub: it writes its ledger and exits."""

    type: Literal["halt"] = "halt"


class Done(MessageBase):
    type: Literal["done"] = "done"


class Refused(MessageBase):
    type: Literal["refused"] = "refused"
    reason: str
    detail: str


Message = (
    Hello | Beat | Put | Release | Bye | Welcome | Credits | Adopt | Ack | Rejected | Later | Stop
    | Register | Registered | Take | Batch | Trial | Tried | Waiting | Ended | Trained | Commit
    | GetStatus | Status | Drain | Gone | Quarantine | Halt | Done | Refused
    | Publish | Wanted | Chunk | Check | Checked | Fetch | Manifest | FetchChunk
)  # fmt: skip
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encode(message: Message, arrays: Frames | None = None, request: int = 0) -> Frames:
    """Frames of a message. `request` is the asker's number, echoed in the answer."""
    header = msgpack.packb([PROTOCOL, request, message.model_dump()])
    return [header, *(arrays or [])]


def decode(frames: Frames, *, max_frame_bytes: int, oldest: int = PROTOCOL) -> tuple[int, Message, Frames]:
    """Request number, message, array frames. oldest: the protocol it may be of.

    Raises WireError with one of the reasons `oversized`, `malformed`, `protocol`, `unknown-type` and `field`.
    """
    if not frames or any(len(frame) > max_frame_bytes for frame in frames) or len(frames[0]) > MAX_HEADER_BYTES:
        header, largest = (len(frames[0]), max(len(frame) for frame in frames)) if frames else (0, 0)
        raise WireError(
            f"{len(frames)} frames, a header of {header} and the largest of {largest} bytes; the limits are "
            f"{MAX_HEADER_BYTES} for a header and {max_frame_bytes} a frame (queue.max_frame_bytes)",
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
    if not isinstance(protocol, int) or not oldest <= protocol <= PROTOCOL:
        raise WireError(f"protocol {_shown(protocol).strip(chr(39))}; this side speaks {PROTOCOL}", "protocol", request)
    # What is compared with the known types must be shown in an error, which goes wrong for what is nested too deep.
    if not isinstance(fields, dict) or not isinstance(tag := fields.get("type"), str):
        raise WireError(
            f"type {_shown(tag if isinstance(fields, dict) else fields)} is no message of ours", "unknown-type", request
        )
    try:
        return request, _MESSAGES.validate_python(fields), frames[1:]
    except ValidationError as error:
        raise _explained(error.errors()[0], request) from error


def _explained(problem: Any, request: int) -> WireError:
    """The first thing that is wrong with a message: which field, and the value it has."""
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found", "model_attributes_type", "dict_type"):
        tag = problem.get("ctx", {}).get("tag", problem["input"])
        return WireError(f"type {_shown(tag)} is no message of ours", "unknown-type", request)
    where = ".".join(str(part) for part in problem["loc"][:8])[:200]
    return WireError(f"field {where!r} = {_shown(problem['input'])}: {problem['msg'][:200]}", "field", request)


def _shown(value: Any) -> str:
    """Of a value that may be nested a thousand deep."""
    return repr(str(value)[:100] if isinstance(value, str | int | float | None) else reprlib.repr(value)[:100])


def check_size(frames: Frames, *, max_frame_bytes: int) -> None:
    """Raise WireError for what the receiver would refuse (or cut the connection for), before it is sent."""
    sizes = [len(frame) for frame in frames]
    if sizes[0] > MAX_HEADER_BYTES or max(sizes) > max_frame_bytes:
        raise WireError(
            f"a message of frames of {sizes} bytes cannot be sent: the limits are {MAX_HEADER_BYTES} for the first and "
            f"{max_frame_bytes} a frame. Raise queue.max_frame_bytes, or make completions or groups smaller.",
            "oversized",
        )


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")
