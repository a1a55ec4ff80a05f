"""Whatever messages reach the hub, in whatever order: it answers, the ledger closes, and it goes on."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.errors import DiskFullError
from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.weights.store import WeightStore
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.buffers.hub.in_process import ACTOR, LEARNER, InProcessHub
from tests.buffers.hub.place import a_group
from tests.buffers.protocol.any_message import MESSAGES, like

SMALL = st.integers(0, 4)
LARGE = st.sampled_from((1.0, 9e17, -9e17))


def a_put(number: int, attempt: int, version: int) -> wire.Frames:
    header, arrays = packing.pack_group(a_group(number, attempt, version, "anna"))
    return wire.encode(wire.Put(group=header), arrays, 1)


def encoded(message: wire.Message, arrays: list[bytes] | None = None) -> wire.Frames:
    return wire.encode(message, arrays, 1)


FENCE, VERSION = st.sampled_from((1, 1, 1, 0, 2)), st.sampled_from((0, 0, 1, 2))
NEARLY_RIGHT: list[st.SearchStrategy[wire.Frames]] = [
    st.builds(a_put, SMALL, st.integers(0, 1), VERSION),
    st.builds(lambda step: encoded(wire.Register(step=step, committed=0, learner="a")), st.integers(0, 2)),
    st.builds(
        lambda f, v: encoded(wire.Hello(actor="anna", life="1", capacity=3, fence=f, version=v, holding=[(1, 0)])),
        FENCE,
        VERSION,
    ),
    st.builds(
        lambda f, v, x: encoded(wire.Beat(capacity=3, fence=f, version=v, telemetry=wire.Telemetry(busy_s=x))),
        FENCE,
        VERSION,
        LARGE,
    ),
    st.builds(lambda f, v: encoded(WeightSet.of(f, v, {}).announcement()), FENCE, VERSION),
    st.builds(lambda f, step: encoded(wire.Take(fence=f, step=step)), FENCE, SMALL),
    st.builds(lambda f, step: encoded(wire.Trained(fence=f, step=step)), FENCE, SMALL),
    st.builds(lambda f, step: encoded(wire.Commit(fence=f, step=step)), FENCE, SMALL),
]
ANYTHING = st.one_of(
    *NEARLY_RIGHT,
    st.builds(wire.encode, st.one_of(*map(like, MESSAGES)), st.lists(st.binary(max_size=16), max_size=3), st.integers(0, 3)),
    st.lists(st.binary(max_size=30), max_size=3),
)
HONEST = st.sampled_from(("anna serves the newest", "anna puts", "anna puts", "the learner takes", "the learner trains"))
EVENT = st.tuples(st.sampled_from((b"a", b"b", b"c")), ANYTHING | HONEST | HONEST | st.floats(0, 6))
EVENTS = st.lists(EVENT, min_size=30, max_size=90)


def honest(event: str, status: dict[str, Any], credited: list[wire.CreditItem]) -> list[tuple[bytes, wire.Frames]]:
    """What the actor and the learner of a good run say now."""
    fence, step, version = status["fence"], status["step"], status["version"]
    if event == "anna serves the newest":
        hello = wire.Hello(actor="anna", life="1", capacity=4, fence=fence, version=-1 if version is None else version)
        return [(b"a", encoded(hello.model_copy(update={"holding": [(c.number, c.attempt) for c in credited]})))]
    if event == "anna puts":
        puts = [(b"a", a_put(credit.number, credit.attempt, version or 0)) for credit in credited]
        credited.clear()
        return puts
    if event == "the learner takes":
        return [(b"c", encoded(wire.Take(fence=fence, step=step)))]
    trained = encoded(wire.Trained(fence=fence, step=step))
    return [(b"c", trained), (b"c", encoded(WeightSet.of(fence, step + 1, {}).announcement()))]


@settings(max_examples=120, deadline=None)
@given(EVENTS, st.booleans())
def test_no_message_ends_the_hub(events: list[tuple[bytes, Any]], exact: bool) -> None:
    now = 0.0
    bound = Bound(groups_per_batch=2, max_staleness=1, num_groups=20, exact=exact)

    @contextmanager
    def opened(folder: str) -> Iterator[Exchange]:
        with closing(Journal(Path(folder) / "queue", segment_bytes=1 << 12, fsync="off")) as journal:
            limits = {"lease_s": 10.0, "segment_bytes": 1 << 12, "fsync": "off"}
            yield InProcessHub(bound, journal, clock=lambda: now, **limits).exchange

    with tempfile.TemporaryDirectory() as folder:
        with opened(folder) as exchange:
            credited: list[wire.CreditItem] = []
            morning = [encoded(wire.Register(step=0, committed=0, learner="a")), encoded(WeightSet.of(1, 0, {}).announcement())]
            for identity, event in [*((b"c", frames) for frames in morning), (b"a", "anna serves the newest"), *events]:
                if isinstance(event, float):
                    now += event
                    exchange.tick()
                else:
                    heard = honest(event, exchange.status(), credited) if isinstance(event, str) else [(identity, event)]
                    for who, frames in heard:
                        exchange.receive(who, frames)
                exchange.settle()
                status = exchange.status()
                json.dumps(status, allow_nan=False)
                assert status["ledger"]["closes"]
                for identity, *frames in exchange.outbox.messages:
                    _, message, _ = wire.decode(frames, max_frame_bytes=1 << 20)
                    if isinstance(message, wire.Credits) and identity == b"a":
                        credited += message.credits
                exchange.outbox.messages.clear()
        before = status["ledger"]
        with opened(folder) as again:
            after = again.status()["ledger"]
        for kept in ("committed", "quarantined"):
            assert after[kept] == before[kept]
        waiting = before["trained"] + before["in_flight"] + before["queued"]
        assert after["trained"] + after["queued"] == waiting or exact


def test_in_exact_mode_weights_stay_until_their_last_group_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(tmp_path / "weights")
    with closing(Journal(tmp_path / "queue", segment_bytes=1 << 20, fsync="off")) as journal:
        hub = InProcessHub(Bound(1, 1, 9, exact=True), journal, store, fsync="off")
        hub.begin()
        hub.exchange.receive(ACTOR, a_put(0, 0, 0))
        hub.turn()
        hub.take(0)
        hub.receive(LEARNER, wire.Trained(fence=1, step=0))
        hub.publish(1)
        hub.exchange.receive(ACTOR, a_put(1, 0, 0))  # the last that version 0 makes
        with monkeypatch.context() as patched:
            patched.setattr(journal, "sync", no_room)
            hub.turn()
        assert 0 in store
        hub.exchange.tick()
        hub.turn()
        assert 0 not in store and 1 in store


def no_room(*, durable: bool = False) -> None:
    raise DiskFullError("no room")
