"""Everything wrong that a peer can send: it is told which field has which value, it is counted, and the hub goes on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.errors import DeadlineError, RefusedError
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.transport.link import SocketLink
from tests.buffers.hub.place import DEADLINE_S, Actor, Place, a_group, delivered, learner_of, peers, taken, tensors, until

LIMIT = 1 << 20
HEADER, ARRAYS = packing.pack_group(a_group(0, 0, 0, "ghost"))
FIELDS = HEADER.model_dump()


def put(arrays: list[bytes] | None = None, **changed: Any) -> wire.Frames:
    """The group the ghost was credited, with something wrong."""
    return said({"type": "put", "group": FIELDS | changed}, arrays)


def said(message: Any, arrays: list[bytes] | None = None, protocol: Any = wire.PROTOCOL) -> wire.Frames:
    return [msgpack.packb([protocol, 9, message]), *(arrays if arrays is not None else ARRAYS if "group" in message else [])]


def logprobs(value: float) -> list[bytes]:
    return [ARRAYS[0], np.array([-1, -1, value, -1, -1, -1], "<f4").tobytes()]


def first(name: str, value: Any) -> dict[str, Any]:
    return {name: [value, *FIELDS[name][1:]]}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


OLD = {"fence": 1, "step": 0}
WRONG: dict[str, tuple[wire.Frames, str, str]] = {
    "another protocol": (said({"type": "bye"}, protocol=99), "protocol", "protocol 99; this side speaks"),
    "a protocol of text": (said({"type": "bye"}, protocol="two"), "protocol", "protocol two"),
    "an unknown type": (said({"type": "exec"}), "unknown-type", "'exec' is no message of ours"),
    "no type": (said({}), "unknown-type", "is no message of ours"),
    "a message for others": (said({"type": "stop", "reason": "x"}), "unknown-type", "'stop' is not for the hub"),
    "an empty header": ([b""], "malformed", "no MessagePack"),
    "a header cut short": ([put()[0][:-9], *ARRAYS], "malformed", "no MessagePack"),
    "a header with more behind it": ([put()[0] + b"more", *ARRAYS], "malformed", "no MessagePack"),
    "arrays and no header": (ARRAYS, "malformed", "no MessagePack"),
    "no envelope": ([msgpack.packb({"type": "bye"})], "malformed", "no [protocol, request, message]"),
    "an oversized frame": (put([ARRAYS[0], bytes(LIMIT + 1)]), "oversized", f"the largest of {LIMIT + 1} bytes"),
    "an oversized header": ([bytes(LIMIT + 1)], "oversized", "the limits are"),
    "an unknown field": (put(extra=1), "field", "'put.group.extra' = '1'"),
    "a missing field": (said({"type": "release"}), "field", "'release.numbers'"),
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
    "restarts of other members": (put(restarts=[[]]), "lengths", "'restarts' has 1 items for 2 members"),
    "a negative number": (put(number=-1), "field", "'put.group.number' = '-1'"),
    "a sampling mask of other tokens": (
        put(**first("num_support", -3)),
        "field",
        "'put.group.num_support.0' = '-3'",
    ),
    "a number of thirty digits": (put(attempt=str(10**29)), "field", "'put.group.attempt' = '1000"),
    "a number beyond 63 bits": (said({"type": "fetch", "fence": (1 << 64) - 1, "version": 0}), "field", "'fetch.fence' = '184"),
    "a version beyond 32 bits": (put(**first("spans", [(1 << 31, 3, None)])), "field", "'put.group.spans.0.0.0' = '2147"),
    "a whole number as a float": (said({"type": "take", "fence": 2.0, "step": 0}), "field", "'take.fence' = '2.0'"),
    "a truth value as a number": (said({"type": "take", "fence": True, "step": 0}), "field", "'take.fence' = 'True'"),
    "a number as a truth value": (said({"type": "fetch", "fence": 2, "version": 0, "maps": 1}), "field", "'fetch.maps' = '1'"),
    "an absurd score": (put(scores={"right": [1e308, 1.0]}), "field", "'1e+308'"),
    "telemetry of its own": (
        said({"type": "beat", "capacity": 1, "fence": 2, "version": 0, "telemetry": {"x": 1.0}}),
        "field",
        "x",
    ),
    "a column nested too deep": (put(columns={"a": nested(400)}), "field", "put.group.columns.a"),
    "a chunk at the wrong time": (said({"type": "chunk", "fence": 2, "version": 5, "index": 0}), "malformed", "wrong time"),
    "weights that are gone": (said({"type": "fetch", "fence": 2, "version": 77}), "weights", "version 77 is not here"),
    "an old learner's take": (said({"type": "take"} | OLD), "fenced", "fence 1 is over"),
    "an old learner's step": (said({"type": "trained"} | OLD), "fenced", "fence 1 is over"),
    "an old learner's commit": (said({"type": "commit"} | OLD), "fenced", "fence 1 is over"),
    "a fence of the future": (said({"type": "take", "fence": 99, "step": 0}), "unregistered", "fence 99"),
    "a step out of order": (said({"type": "trained", "fence": 2, "step": 5}), "order", "batch 5"),
}


class Ghost:
    """A peer that is known as an actor and says what it likes."""

    def __init__(self, place: Place, fence: int) -> None:
        self.link = SocketLink(place.address, "ghost")
        self.say(wire.encode(wire.Hello(actor="ghost", life="1", capacity=1, fence=fence, version=0), request=9))

    def say(self, frames: wire.Frames) -> wire.Message:
        """The answer; what the hub says by itself is not."""
        assert self.link.send(frames)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            answer = self.link.receive(1.0)  # nothing, too, when the connection was made
            if answer is not None:
                request, message, _ = wire.decode(answer, max_frame_bytes=1 << 30)
                if request == 9 or isinstance(message, wire.Refused):
                    return message
        raise DeadlineError("no answer")

    def close(self) -> None:
        self.link.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, Ghost, LearnerClient]]:
    """One hub for the whole table: whatever was said before, the next is refused as it should be."""
    folder: Path = tmp_path_factory.mktemp("hub")
    with tempfile.TemporaryDirectory(prefix="rlhf-") as short:
        hub = Place(folder, f"ipc://{short}/hub", Bound(1, 1, 100), max_frame_bytes=LIMIT)
        hub.begin()
        yield from _scene(hub)


def _scene(hub: Place) -> Iterator[tuple[Place, Ghost, LearnerClient]]:
    old, learner = learner_of(hub), learner_of(hub)
    learner.publish(0, tensors(0))
    ghost = Ghost(hub, learner.fence)
    yield hub, ghost, learner
    for each in (old, learner, ghost):
        each.close()
    hub.close()


@pytest.mark.parametrize("what", WRONG)
def test_it_is_refused_with_its_reason_counted_and_the_peer_is_told(
    what: str, scene: tuple[Place, Ghost, LearnerClient]
) -> None:
    hub, ghost, _ = scene
    frames, reason, detail = WRONG[what]
    before = hub.status()["refused"].get(reason, 0)
    answer = ghost.say(frames)
    assert isinstance(answer, wire.Refused), answer
    assert answer.reason == reason and detail in answer.detail, answer
    assert hub.status()["refused"][reason] == before + 1


PUTS: dict[str, tuple[wire.Frames, str]] = {
    "an unknown group": (put(number=100), "unknown"),
    "a group of somebody else": (put(number=3), "superseded"),
    "another attempt": (put(attempt=5), "superseded"),
    "a version of the future": (put(spans=[[(9, 3, None)], [(0, 3, None)]]), "future"),
}


@pytest.mark.parametrize("what", PUTS)
def test_a_put_that_may_not_enter_is_answered_with_why(what: str, scene: tuple[Place, Ghost, LearnerClient]) -> None:
    hub, ghost, _ = scene
    frames, reason = PUTS[what]
    before = hub.status()["refused"].get(reason, 0)
    answer = ghost.say(frames)
    assert isinstance(answer, wire.Rejected) and answer.reason == reason, answer
    assert hub.status()["refused"][reason] == before + 1


def test_after_all_that_an_honest_actor_and_the_learner_go_on(scene: tuple[Place, Ghost, LearnerClient]) -> None:
    hub, ghost, learner = scene
    ghost.say(wire.encode(wire.Bye(), request=9))
    anna = Actor(hub, capacity=1)
    with peers(anna):
        until(lambda: anna.begun, anna)
        again = a_group(0, anna.begun[0], 0, "anna")
        anna.put(0)
        until(delivered(anna), anna)
        assert taken(learner, 0) == [0]
        for _ in range(2):  # a replayed sequence number, and a replayed group
            header, arrays = packing.pack_group(again)
            assert anna.client._connection.link.send(wire.encode(wire.Put(group=header), arrays, 1))
        until(lambda: len(anna.client.refused) == 2, anna)
        assert set(anna.client.refused) == {(0, "duplicate")}
        learner.trained(0)
        learner.trained(0)  # said twice, done once
        learner.commit(0)  # answered after both
        status = hub.status()
        assert status["step"] == 1 and status["ledger"]["trained"] == 1


def test_two_living_learners_do_not_take_the_hub_from_each_other(tmp_path: Path, socket_dir: Path) -> None:
    hub = Place(tmp_path, f"ipc://{socket_dir}/hub", Bound(1, 1, 8))
    hub.begin()
    first, second = learner_of(hub), learner_of(hub)
    with peers(first, second):
        for call in (lambda: first.take(0), lambda: first.register(0, 0), lambda: first.commit(0)):
            with pytest.raises(RefusedError, match="fenced: fence 1 is over: another learner holds 2"):
                call()
        hub.restart()
        with pytest.raises(RefusedError, match="fenced"):
            first.register(0, 0)
        second.register(0, 0)
        assert second.fence == 3
    hub.close()
