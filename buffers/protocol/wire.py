"""The hub's protocol: its messages, and nothing about when or why they are sent (framing: `message`).

    actor   -> hub  Hello, Beat, Put (+ ids, logprobs), Release, Bye   hub -> actor    Welcome, Credits, Adopt, Ack,
                                                                                       Rejected, Later, Stop
    learner -> hub  Register, Take, Tried, Trained, Commit             hub -> learner  Registered, Batch (+ arrays),
                                                                                       Trial (+ arrays), Waiting, Ended, Done
    control -> hub  GetStatus, Drain, Gone, Quarantine, Halt           hub -> control  Status, Done
    learner -> hub  SealedPart, Publish, Chunk (+ bytes), Check        hub -> learner  Wanted, Checked, Done
    learner -> hub  Gather, Broadcast                                  hub -> learner  Receive, Done
    actor   -> hub  Fetch, FetchChunk                  hub -> actor  Adopt, Manifest, Chunk (+ bytes), Receive, Broadcast

Every request may be answered with Refused. The same holds between an actor and a relay, which is the hub to it.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field, JsonValue

from async_rlhf.buffers.protocol import broadcasts, message
from async_rlhf.buffers.protocol.message import Amount, Canary, Count, DeltaSpec, Digest, GroupId, MessageBase, Name, Version
from async_rlhf.buffers.record import FinishReason
from async_rlhf.buffers.sampling import Sampling

PROTOCOL = 19
MAX_FRAME_BYTES, MAX_HEADER_BYTES = message.MAX_FRAME_BYTES, message.MAX_HEADER_BYTES
Frames = message.Frames


class CreditItem(MessageBase):
    """Permission to begin a group."""

    number: Count
    attempt: Count
    lowest_version: Version
    row: str = ""
    """Prompt and columns as JSON, of a spool."""
    place: Count | None = None
    """A place in the first epoch, of a curriculum."""


class Telemetry(MessageBase):
    """An actor's counters and gauges, the same of every actor. `*_total` and `*_s` only rise in an actor's life.
    `selection_*`: the difference in length between trained and begun groups (`async_rlhf.actors.loop.length_bias`)."""

    busy_s: Amount = 0.0
    idle_s: Amount = 0.0
    tokens_total: Amount = 0.0
    completions_total: Amount = 0.0
    groups_total: Amount = 0.0
    dropped_tokens_total: Amount = 0.0
    canary_drift: Amount = 0.0
    """Nats between engine and learner at the newest adoption."""
    selection_mean_ratio: Amount = 0.0
    selection_correlation: Amount = 0.0
    selection_alarm: Amount = 0.0
    selection_turns_mean_ratio: Amount = 0.0
    selection_turns_correlation: Amount = 0.0
    selection_turns_alarm: Amount = 0.0
    oldest_group_age: Amount = 0.0
    scoring: Amount = 0.0
    """Completions that wait for scores."""
    scores_failed_total: Amount = 0.0
    failures: dict[Name, Amount] = Field(default_factory=dict, max_length=32)
    """Of scores and episodes, by `FailureKind`."""
    scores_asked_again_total: Amount = 0.0
    shown_total: Amount = 0.0
    shown_not_read_total: Amount = 0.0
    episodes_failed_total: Amount = 0.0
    """Episodes whose environment failed."""
    episodes_lost_total: Amount = 0.0
    """Episodes that began again because their process ended."""
    cleanups_failed_total: Amount = 0.0
    """Environments whose `finally` failed."""


class Hello(message.Message):
    """An actor joins, or comes back to a restarted hub: what it serves and which (number, attempt) it works on."""

    actor: Name
    life: Digest  # names the process, however often it connects
    shared: dict[Name, Digest] = Field(default_factory=dict, max_length=32)
    """Digests that hub and actor must share, by name."""
    bits: Annotated[tuple[str, str], Field(strict=False)] = ("", "")
    """As `ActorClient` takes them."""
    capacity: Count
    fence: Count
    version: Version
    device: broadcasts.EngineDevice | None = None
    """Its part in the device channel."""
    holding: list[GroupId] = Field(default_factory=list)


class Beat(message.Message):
    """An actor lives: how many groups it can hold now, which weights it serves, and its counters."""

    capacity: Count
    fence: Count
    version: Version
    telemetry: Telemetry = Telemetry()
    device: broadcasts.EngineDevice | None = None
    progress: list[GroupId] = Field(default_factory=list)
    """(number, amount) of each group it works on; an amount that does not rise is no progress."""


def _complete(sampling: Any) -> Any:
    """Refuse sampling settings that are not complete: another release may have another default."""
    if isinstance(sampling, dict) and (missing := Sampling.model_fields.keys() - sampling.keys()):
        raise ValueError(f"{sorted(missing)} not given")
    return sampling


class GroupHeader(MessageBase):
    """Everything of a Group but its arrays, which follow as two frames. Lists have one item a member.

    int32: prompt ids, the members' ids, then of each member with a sampling mask its sizes and its ids. float32: logprobs
    of sampled tokens, then of each member that has them the reference's. images, images_of_pieces: digests, as in the records.
    """

    number: Count
    attempt: Count
    num_prompt_tokens: Count = Field(ge=1)
    images: list[Digest] = Field(default_factory=list)
    images_of_pieces: list[list[list[Digest]]] = Field(default_factory=list)
    num_tokens: list[Annotated[Count, Field(ge=1)]] = Field(min_length=1)  # behind the prompt
    spans: list[list[Annotated[tuple[Version | None, Count, Version | None], Field(strict=False)]]]
    """(version or None of an observation, tokens, oldest version in the cache or None)"""
    restarts: list[list[Count]] = Field(default_factory=list)
    """Indices of spans that begin a row anew; like turn_scores empty where no member has any."""
    num_support: list[Count | None]
    has_reference: list[bool]
    routing: list[Annotated[Count, Field(ge=1)]] = Field(default_factory=list)
    """Layers, experts in each, bytes of a number. They follow the ids: of the prompt (first member's), of each member."""
    turn_scores: list[list[Amount | None]] = Field(default_factory=list)
    finish_reasons: list[FinishReason]
    scores: dict[str, list[Amount | str | None]]
    """A number, the text of a failure, or None where the reward does not apply."""
    metrics: dict[str, list[dict[str, Amount]]]
    texts: list[str]
    timings: list[dict[str, Amount]]
    sampling: Annotated[Sampling, BeforeValidator(_complete)]
    actor: str
    prompt: str
    columns: dict[str, JsonValue]


class _OfLearner(message.Message):
    """A message of the learner that holds this fence. step: the number of steps done."""

    fence: Count
    step: Count


class Put(message.Message):
    """A finished group. `constant`: by the actor's account no member is better than another, and with refill the hub may
    take another group in its place; it is acknowledged all the same."""

    group: GroupHeader
    constant: bool = False


class Release(message.Message):
    """An actor gives groups up because they can no longer keep the bound."""

    numbers: list[Count]


class Bye(message.Message): ...


class Welcome(message.Message):
    """The actor is known; whatever it was credited before and did not name in its Hello belongs to other actors now."""

    incarnation: str
    max_frame_bytes: Count


class Credits(message.Message):
    credits: list[CreditItem]


class Ack(message.Message):
    """These groups (number, attempt) are durable. It answers their last Put."""

    groups: list[GroupId]


class Rejected(message.Message):
    """This Put is well formed, but its group may not enter."""

    number: Count
    attempt: Count
    reason: str


class Later(message.Message):
    """No room for this Put now: the actor keeps the group and puts it again after `wait_s`. Nothing was decided about it."""

    number: Count
    attempt: Count
    wait_s: Amount
    reason: str


class Stop(message.Message):
    reason: str


class Register(message.Message):
    """A learner (re)starts with `step` steps done. committed: as `Commit.step`. learner: the name of this life of it. fence:
    the one it was given last, 0 when it never was. The answer has its fence, and `begun`: groups of lower numbers may have been
    made by weights of an earlier life."""

    step: Count
    committed: Count
    learner: Name
    fence: Count = 0


class Registered(message.Message):
    fence: Count
    incarnation: str
    begun: Count


class Take(_OfLearner):
    """`target_staleness`: what new groups are to stay within; None: the bound. `enough`: no batch is wanted any more."""

    target_staleness: Count | None = None
    enough: bool = False


class Batch(message.Message):
    """Followed by three frames a group: its Put as the actor sent it, header and arrays."""

    step: Count
    telemetry: dict[str, float]


class Trial(message.Message):
    """The batch ended the learner again and again. Followed by three frames, one of its groups: to be tried alone, without an
    update; then `Tried`, then Take again."""

    step: Count
    number: Count


class Tried(_OfLearner):
    """The learner begins to try this group alone; `done`: that did not end it."""

    number: Count
    done: bool


class Waiting(message.Message):
    """The batch does not exist yet: why the learner waits."""

    step: Count
    detail: str


class Ended(message.Message):
    """No batch will come: the data ended, the run drains, or the learner has enough."""

    reason: str


class Trained(_OfLearner):
    """The batch of this step has been trained on."""


class Commit(_OfLearner):
    """The oldest checkpoint that is kept has `step` steps: no learner goes back behind it."""


class GetStatus(message.Message): ...


class Status(message.Message):
    status: dict[str, Any]


class Drain(message.Message): ...


class Gone(message.Message):
    """The supervisor saw this actor's process end."""

    actor: Name


class Quarantine(message.Message):
    """An operator takes a group back: it is not trained on, or not once more."""

    number: Count
    reason: Annotated[str, Field(max_length=300)]


class Halt(message.Message):
    """The supervisor ends the hub: it writes its ledger and exits."""


class Done(message.Message): ...


class Refused(message.Message):
    reason: str
    detail: str


class Announced(message.OfSet):
    """The description of a weight set that precedes its bytes."""

    num_bytes: Count
    tensors: list[message.TensorSpec]
    canary: Canary | None = None
    places: list[message.SealedPlace] = Field(default_factory=list)
    """The parts' places in sealed memory."""


class SealedPart(message.OfSet):
    """Part `index` of a set of `num_bytes` lies there, and these tensors end in it. Sent while the next part is copied, before
    the set is announced, so that the hub has verified it by then. It has no answer, and a set may come without."""

    index: Count
    num_bytes: Count
    tensors: list[message.TensorSpec]
    place: message.SealedPlace


class Publish(Announced):
    """The learner announces a weight set: its places in sealed memory, or the chunks of it or of a delta to request."""

    delta: DeltaSpec | None = None


class Wanted(message.Message):
    """The hub's request for the chunks of an announced set, or for those of its delta."""

    chunks: bool
    delta: bool
    delta_next: bool
    """A delta would be of use with the next set."""


class Chunk(message.OfSet):
    """Followed by one frame of bytes: part `index` of the set, or of the delta that results in content digest `delta`."""

    index: Count
    delta: Digest | None = None


class Check(message.OfSet):
    """Everything was sent: verify one more piece."""


class Checked(message.Message):
    done: bool
    """The whole set is verified and published."""


class Adopt(message.OfSet):
    """Serve this version, published by the learner incarnation `fence`. digest, canary: of what was broadcast, to an actor that
    has received it."""

    digest: Digest | None = None
    canary: Canary | None = None


class Fetch(message.OfSet):
    maps: bool = False
    """The asker can map memory of the hub's machine."""
    holds: Digest | None = None
    """Content digest of the set it has, for a delta."""
    ahead: int = Field(default=0, ge=0, le=64)
    """Chunks that are sent right behind the manifest, in the order of `weight_set.chunks_of`: a round trip less."""


class Manifest(Announced):
    deltas: list[DeltaSpec] = Field(default_factory=list)
    """Deltas to apply to the asker's set, one after the other, instead of fetching the whole set."""


class FetchChunk(message.OfSet):
    """Part `index` of the set, or of the delta that results in content digest `delta`."""

    index: Count
    delta: Digest | None = None


Message = (
    Hello | Beat | Put | Release | Bye | Welcome | Credits | Adopt | Ack | Rejected | Later | Stop
    | Register | Registered | Take | Batch | Trial | Tried | Waiting | Ended | Trained | Commit
    | GetStatus | Status | Drain | Gone | Quarantine | Halt | Done | Refused
    | SealedPart | Publish | Wanted | Chunk | Check | Checked | Fetch | Manifest | FetchChunk
    | broadcasts.Gather | broadcasts.Receive | broadcasts.Broadcast
)  # fmt: skip
_FRAMING: message.Framing[Message] = message.Framing(PROTOCOL, get_args(Message))
encode, decode, check_size = _FRAMING.encode, _FRAMING.decode, message.check_size
