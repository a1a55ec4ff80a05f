"""Everything wrong that a peer can send: the answer names the field and its value, it is counted, and the hub goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgpack
import numpy as np
import pytest

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from tests.buffers.hub.in_process import ACTOR, OTHER, InProcessHub
from tests.buffers.hub.place import a_group

LIMIT = 1 << 20
HEADER, ARRAYS = packing.pack_group(a_group(0, 0, 0, "ghost"))
FIELDS = HEADER.model_dump()


def put(arrays: list[bytes] | None = None, **changed: Any) -> wire.Frames:
    """The group the ghost was credited, with something wrong."""
    return encoded({"type": "put", "group": FIELDS | changed}, arrays)


def encoded(message: Any, arrays: list[bytes] | None = None, protocol: Any = wire.PROTOCOL) -> wire.Frames:
    return [msgpack.packb([protocol, 9, message]), *(arrays if arrays is not None else ARRAYS if "group" in message else [])]


def logprobs(value: float) -> list[bytes]:
    return [ARRAYS[0], np.array([-1, -1, value, -1, -1, -1], "<f4").tobytes()]


def first(name: str, value: Any) -> dict[str, Any]:
    return {name: [value, *FIELDS[name][1:]]}


def sent(kind: str, **fields: Any) -> wire.Frames:
    return encoded({"type": kind} | fields)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


OLD = {"fence": 1, "step": 0}
WRONG: dict[str, tuple[wire.Frames, str, str]] = {
    "another protocol": (encoded({"type": "bye"}, protocol=99), "protocol", "protocol 99; this side has protocol"),
    "a protocol of text": (encoded({"type": "bye"}, protocol="two"), "protocol", "protocol two"),
    "an unknown type": (sent("exec"), "unknown-type", "'exec' is no message of this protocol, which has hello, "),
    "no type": (encoded({}), "unknown-type", "is no message of this protocol"),
    "a message for others": (sent("stop", reason="x"), "unknown-type", "'stop' is not for the hub"),
    "an empty header": ([b""], "malformed", "no MessagePack"),
    "a header cut short": ([put()[0][:-9], *ARRAYS], "malformed", "no MessagePack"),
    "a header with more behind it": ([put()[0] + b"more", *ARRAYS], "malformed", "no MessagePack"),
    "nesting that overflows": ([b"\x93" * 500_000], "malformed", "no MessagePack"),
    "many frames of it": ([b"\xc1"] * 50, "malformed", "no MessagePack"),
    "arrays and no header": (ARRAYS, "malformed", "no MessagePack"),
    "no envelope": ([msgpack.packb({"type": "bye"})], "malformed", "no [protocol, request, message]"),
    "an oversized frame": (put([ARRAYS[0], bytes(LIMIT + 1)]), "oversized", f"the largest of {LIMIT + 1} bytes"),
    "an oversized header": ([bytes(LIMIT + 1)], "oversized", "the limits are"),
    "an unknown field": (put(extra=1), "field", "'put.group.extra' = '1'"),
    "a missing field": (sent("release"), "field", "'release.numbers'"),
    "a field of another type": (put(number="zero"), "field", "'put.group.number' = 'zero'"),
    "a score that is no number": (put(scores={"right": [float("nan"), 1.0]}), "field", "'nan'"),
    "an array cut short": (put([ARRAYS[0], ARRAYS[1][:-4]]), "lengths", "[32, 20] bytes, its header has [32, 24]"),
    "one array": (put(ARRAYS[:1]), "lengths", "[32] bytes"),
    "three arrays": (put([*ARRAYS, b""]), "lengths", "[32, 24, 0] bytes"),
    "ids of 64 bits": (put([np.zeros(8, "<i8").tobytes(), ARRAYS[1]]), "lengths", "[64, 24] bytes"),
    "log-probabilities of 64 bits": (put([ARRAYS[0], np.zeros(6, "<f8").tobytes()]), "lengths", "[32, 48] bytes"),
    "log-probabilities of 16 bits": (put([ARRAYS[0], np.zeros(6, "<f2").tobytes()]), "lengths", "[32, 12] bytes"),
    "a header of other lengths": (put(**first("num_tokens", 4)), "spans", "cover all 4 tokens"),
    "a header of other tokens": (put(num_prompt_tokens=3), "lengths", "its header has [36, 24]"),
    "tokens that were not sampled, and log-probabilities of them": (
        put(**first("spans", [(0, 1, None), (None, 1, None), (0, 1, None)])),
        "lengths",
        "[32, 24] bytes, its header has [32, 20]",
    ),
    "nothing that was sampled at the end": (put(**first("spans", [(0, 2, None), (None, 1, None)])), "spans", "the last"),
    "a header of no lengths": (put(num_tokens=[]), "field", "put.group.num_tokens"),
    "columns of other lengths": (put(texts=["one"]), "lengths", "'texts' has 1 items for 2 members"),
    "not a number": (put(logprobs(float("nan"))), "logprobs", "got nan at token 2"),
    "infinity": (put(logprobs(-float("inf"))), "logprobs", "got -inf at token 2"),
    "a positive log-probability": (put(logprobs(0.25)), "logprobs", "at most 0, got 0.25 at token 2"),
    "a negative token": (put([np.full(8, -1, "<i4").tobytes(), ARRAYS[1]]), "tokens", "at least 0, got -1"),
    "spans that leave tokens out": (put(**first("spans", [(0, 2, None)])), "spans", "cover all 3 tokens"),
    "an empty span": (put(**first("spans", [(0, 3, None), (1, 0, None)])), "spans", "non-empty"),
    "a row that begins anew with a span that is not there": (put(restarts=[[3], []]), "spans", "below 1, got [3]"),
    "a row that begins anew twice with one span": (put(restarts=[[0, 0], []]), "spans", "ascending and below 1"),
    "a row that begins anew with what was sampled": (put(restarts=[[0], []]), "record", "a span that restarts must be read"),
    "a reference of other lengths": (put(**first("has_reference", True)), "lengths", "[32, 24] bytes, its header has [32, 36]"),
    "a reference that is no number": (
        put([ARRAYS[0], ARRAYS[1] + np.array([0, np.nan, 0], "<f4").tobytes()], **first("has_reference", True)),
        "logprobs",
        "got nan at token 7",
    ),
    "references of other members": (put(has_reference=[True]), "lengths", "'has_reference' has 1 items for 2 members"),
    "scores of other members": (put(scores={"right": [1.0]}), "lengths", "'right' has 1 items for 2 members"),
    "metrics of another reward": (put(metrics={"other": [{}, {}]}), "lengths", "metrics of ['other'] and scores of ['right']"),
    "a sampling mask that is not there": (put(**first("num_support", 1)), "lengths", "its header has"),
    "a prompt of absurd length": (put(num_prompt_tokens=1 << 62), "lengths", "[32, 24] bytes"),
    "restarts of other members": (put(restarts=[[]]), "lengths", "'restarts' has 1 items for 2 members"),
    "a negative number": (put(number=-1), "field", "'put.group.number' = '-1'"),
    "a sampling mask of other tokens": (put(**first("num_support", -3)), "field", "'put.group.num_support.0' = '-3'"),
    "a number of thirty digits": (put(attempt=str(10**29)), "field", "'put.group.attempt' = '1000"),
    "a number beyond 63 bits": (sent("fetch", fence=(1 << 64) - 1, version=0), "field", "'fetch.fence' = '184"),
    "a version beyond 32 bits": (put(**first("spans", [(1 << 31, 3, None)])), "field", "'put.group.spans.0.0.0' = '2147"),
    "a whole number as a float": (sent("take", fence=2.0, step=0), "field", "'take.fence' = '2.0'"),
    "a truth value as a number": (sent("take", fence=True, step=0), "field", "'take.fence' = 'True'"),
    "a number as a truth value": (sent("fetch", fence=2, version=0, maps=1), "field", "'fetch.maps' = '1'"),
    "an absurd score": (put(scores={"right": [1e308, 1.0]}), "field", "'1e+308'"),
    "telemetry of its own": (sent("beat", capacity=1, fence=2, version=0, telemetry={"x": 1.0}), "field", "x"),
    "a column nested too deep": (put(columns={"a": nested(400)}), "field", "put.group.columns.a"),
    "a chunk at the wrong time": (sent("chunk", fence=2, version=5, index=0), "malformed", "wrong time"),
    "weights that are gone": (sent("fetch", fence=2, version=77), "weights", "version 77 is not here"),
    "a chunk of them": (sent("fetch_chunk", fence=1, version=5, index=1 << 60), "weights", "version 5 is not here"),
    "an old learner's take": (sent("take", **OLD), "fenced", "fence 1 is over"),
    "an old learner's step": (sent("trained", **OLD), "fenced", "fence 1 is over"),
    "an old learner's commit": (sent("commit", **OLD), "fenced", "fence 1 is over"),
    "a fence of the future": (sent("take", fence=99, step=0), "unregistered", "fence 99"),
    "a step out of order": (sent("trained", fence=2, step=5), "order", "batch 5"),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessHub]:
    """One for the whole table, with its second learner, and an actor that was credited group 0: whatever was sent before, the
    next is refused as it should be."""
    with closing(Journal(tmp_path_factory.mktemp("queue"))) as journal:
        made = InProcessHub(Bound(1, 1, 100), journal, wanted={"max_frame_bytes": LIMIT})
        made.register()
        made.register(learner="another", who=b"d")
        made.publish(0)
        made.hello(name="ghost", capacity=1)
        yield made


def refusals(hub: InProcessHub, reason: str) -> int:
    return int(hub.status()["refused"].get(reason, 0))


@pytest.mark.parametrize("what", WRONG)
def test_it_is_refused_with_its_reason_and_counted(what: str, hub: InProcessHub) -> None:
    frames, reason, detail = WRONG[what]
    before = refusals(hub, reason)
    (answer,) = hub.receive(ACTOR, frames)
    assert isinstance(answer, wire.Refused) and answer.reason == reason and detail in answer.detail, answer
    assert refusals(hub, reason) == before + 1


@pytest.mark.parametrize(
    "what", [what for what in WRONG if WRONG[what][1] in ("lengths", "spans", "logprobs", "tokens", "record")]
)
def test_nor_does_a_journal_or_a_learner_read_what_does_not_fit_its_header(what: str) -> None:
    _, message, arrays = wire.decode(WRONG[what][0], max_frame_bytes=LIMIT)
    assert isinstance(message, wire.Put)
    for read in (
        lambda: packing.unpack_group(message.group, arrays),
        lambda: packing.check_group(message.group, [b"", *arrays]),
    ):
        with pytest.raises(WireError, match="group 0: "):
            read()


PUTS: dict[str, tuple[wire.Frames, str]] = {
    "an unknown group": (put(number=100), "unknown"),
    "a group of another actor": (put(number=3), "superseded"),
    "another attempt": (put(attempt=5), "superseded"),
    "a version of the future": (put(spans=[[(9, 3, None)], [(0, 3, None)]]), "future"),
}


@pytest.mark.parametrize("what", PUTS)
def test_a_put_that_may_not_enter_is_answered_with_why(what: str, hub: InProcessHub) -> None:
    frames, reason = PUTS[what]
    before = refusals(hub, reason)
    answer, *_ = hub.receive(ACTOR, frames)
    assert isinstance(answer, wire.Rejected) and answer.reason == reason, answer
    assert refusals(hub, reason) == before + 1


@pytest.mark.parametrize(
    "frames", [put(), encoded({"type": "beat", "capacity": 1, "fence": 2, "version": 0}), encoded({"type": "bye"})]
)
def test_who_has_not_sent_hello_is_no_actor(frames: wire.Frames, hub: InProcessHub) -> None:
    (answer,) = hub.receive(OTHER, frames)
    assert isinstance(answer, wire.Refused) and answer.reason == "unknown-actor"


def test_after_all_that_the_ghost_has_its_lease_and_the_learner_goes_on(hub: InProcessHub) -> None:
    assert wire.Ack(groups=[(0, hub.credits[0].attempt)]) in hub.receive(ACTOR, put(attempt=hub.credits[0].attempt))
    for _ in range(2):  # a replayed request number, and a replayed group
        assert hub.receive(ACTOR, put())[0] == wire.Rejected(number=0, attempt=0, reason="duplicate")
    hub.receive(b"d", wire.Take(fence=2, step=0))
    for _ in range(2):  # sent twice, done once
        hub.receive(b"d", wire.Trained(fence=2, step=0), request=2)
    assert hub.status()["step"] == 1 and hub.status()["ledger"]["trained"] == 1
