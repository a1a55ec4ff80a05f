"""Actors and learners come, go, are slow, doubled, replaced or of another run: what the hub answers, without sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.protocol.packing import GroupSchema
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.record import Rollout, SamplingMask, Score, Span
from async_rlhf.buffers.routing import Routing
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES, WeightSet
from tests.buffers.hub.in_process import ACTOR, LEARNER, OPERATOR, OTHER, InProcessHub
from tests.buffers.hub.place import a_group, tensors
from tests.conftest import Clock

MakeHub = Callable[..., InProcessHub]


@pytest.fixture
def make_hub(tmp_path: Path, clock: Clock) -> Iterator[MakeHub]:
    """A hub in whose run two groups make a batch; the next is its next life."""
    with ExitStack() as journals:

        def make(bound: Bound = Bound(2, 1, 8), **options: Any) -> InProcessHub:  # noqa: B008 (frozen)
            journals.close()
            return InProcessHub(bound, journals.enter_context(closing(Journal(tmp_path / "queue"))), clock=clock, **options)

        yield make


# -- actors ----------------------------------------------------------------------------------------------------------


def test_an_actor_whose_end_the_supervisor_saw_loses_its_groups_at_once(make_hub: MakeHub) -> None:
    hub = make_hub()
    hub.begin()
    hub.hello(name="ben", who=OTHER)
    assert hub.credited_to(OTHER) == []
    hub.receive(OPERATOR, wire.Gone(actor="anna"))
    assert hub.credited_to(OTHER) == hub.credited_to(ACTOR) == [0, 1, 2, 3]
    assert list(hub.status()["actors"]) == ["ben"]


def test_a_name_belongs_to_the_process_that_sends_and_to_the_next_when_it_is_silent(make_hub: MakeHub, clock: Clock) -> None:
    hub = make_hub(lease_s=60.0, max_attempts=1)
    hub.begin()
    for _ in range(5):
        (refused,) = hub.hello(life="2", who=OTHER)
        assert isinstance(refused, wire.Refused) and refused.reason == "name-taken", refused
        assert "an actor called 'anna' is in the run" in refused.detail
        clock.now += 2.0
        hub.tick()
        hub.receive(ACTOR, wire.Beat(capacity=9, fence=1, version=0))
    clock.now += 3.1
    assert isinstance(hub.hello(life="2", who=OTHER)[0], wire.Welcome)
    assert hub.status()["ledger"]["quarantined"] == 4, "the end of the first was seen: it counts"
    hub.receive(OTHER, wire.Bye())
    assert hub.status()["ledger"]["quarantined"] == 4, "and an orderly end does not"


def test_one_connection_that_sends_hello_under_two_names_is_one_actor(make_hub: MakeHub) -> None:
    hub = make_hub()
    hub.register()
    for name in ("ghost", "spook", "ghost"):
        hub.hello(name=name)
        assert list(hub.status()["actors"]) == [name]


def test_an_actor_of_another_configuration_is_refused_by_name(make_hub: MakeHub) -> None:
    shared = {"model": "a1", "tokenizer": "b1", "data": "c1"}
    hub = make_hub(wanted={"shared": shared})
    hub.register()
    for given, other in (({"model": "a1", "tokenizer": "XX"}, "data, tokenizer"), ({}, "data, model, tokenizer")):
        (refused,) = hub.hello(name="stranger", shared=given)
        assert refused.reason == "shared" and f"stranger and this run differ in: {other}" in refused.detail
    assert isinstance(hub.hello(name="friend", shared=shared)[0], wire.Welcome)


def test_a_hub_that_stood_still_for_longer_than_a_lease_ends_none(make_hub: MakeHub, clock: Clock) -> None:
    hub = make_hub(max_attempts=1)
    hub.begin()
    hub.tick()
    clock.now += 1000.0
    hub.tick()
    assert hub.make(0) == [wire.Ack(groups=[(0, 0)])] and hub.status()["ledger"]["failed"] == 0
    for _ in range(9):  # it listens, and hears nothing
        clock.now += 1.9
        hub.tick()
    assert hub.status()["actors"] == {}


def test_what_gone_actors_counted_stays_and_they_do_not(make_hub: MakeHub) -> None:
    hub = make_hub(Bound(1, 0, 8))
    hub.begin()
    counted = wire.Telemetry(tokens_total=10.0, scoring=4.0)
    for number in range(5):
        hub.hello(name=f"ghost{number}", who=OTHER, capacity=0)
        hub.receive(OTHER, wire.Beat(capacity=0, fence=1, version=0, telemetry=counted))
        hub.receive(OTHER, wire.Bye())
    hub.receive(ACTOR, wire.Beat(capacity=9, fence=1, version=0, telemetry=counted))
    hub.hello()  # over the same connection: it goes on counting
    hub.make(0)
    hub.take(0)
    (batch,) = hub.sent_of(wire.Batch)
    assert (batch.telemetry["tokens_total"], batch.telemetry["scoring"], batch.telemetry["actors"]) == (60.0, 4.0, 1.0)


def test_a_slow_actor_is_given_a_newer_set_only_when_the_one_it_fetches_can_earn_nothing_more(make_hub: MakeHub) -> None:
    hub = make_hub(Bound(groups_per_batch=1, max_staleness=4, num_groups=40))
    hub.register()
    hub.publish(0)
    hub.hello(capacity=1)
    hub.hello(-1, name="slow", who=OTHER, fence=0, capacity=1)
    for step in range(12):
        hub.make(step)
        hub.train(step)
        hub.receive(ACTOR, wire.Beat(capacity=1, fence=1, version=step + 1))
        newest = hub.sent_of(wire.Adopt, OTHER)[-1].version
        if newest >= step - 1:  # within the bound of what is begun next
            (manifest,) = hub.receive(OTHER, wire.Fetch(fence=1, version=newest))
            assert isinstance(manifest, wire.Manifest), "the set is still there"
    announced = [adopt.version for adopt in hub.sent_of(wire.Adopt, OTHER)]
    assert announced == sorted(set(announced)) and announced[0] == 0 and 2 <= len(announced) <= 5


def test_a_corrupted_chunk_is_refused_and_the_old_version_stays_served(make_hub: MakeHub) -> None:
    hub = make_hub(Bound(1, 1, 8))
    hub.begin()
    hub.make(0)
    hub.take(0)
    hub.receive(LEARNER, wire.Trained(fence=1, step=0))
    good = WeightSet.of(1, 1, tensors(1, size=CHUNK_BYTES + 9))
    parts = [(wire.Chunk(fence=1, version=1, index=index), bytes(good.chunk(index))) for index in (0, 1)]
    hub.receive(LEARNER, good.announcement())
    hub.receive(LEARNER, parts[0][0], [parts[0][1]])
    (refused,) = hub.receive(LEARNER, parts[1][0], [bytes([parts[1][1][0] ^ 1]) + parts[1][1][1:]])
    assert (refused.reason, refused.detail) == ("weights", "version 1: tensor 'w' does not match its digest")
    assert hub.status()["version"] == 0 and not [adopt for adopt in hub.sent_of(wire.Adopt) if adopt.version == 1]
    hub.receive(LEARNER, good.announcement())
    for chunk, data in parts:
        hub.receive(LEARNER, chunk, [data])
    hub.receive(LEARNER, wire.Check(fence=1, version=1))
    assert hub.status()["version"] == 1 and hub.sent_of(wire.Adopt, ACTOR)[-1].version == 1


# -- the learner -----------------------------------------------------------------------------------------------------


def test_a_registration_that_was_sent_twice_is_one(make_hub: MakeHub) -> None:
    hub = make_hub()
    assert hub.register() == hub.register() == [wire.Registered(fence=1, incarnation="x", begun=0)]


def test_a_learner_that_registers_is_given_the_number_of_groups_that_were_begun_before(make_hub: MakeHub) -> None:
    hub = make_hub(Bound(1, 1, 8))
    hub.begin()
    assert hub.register(learner="m", who=b"m") == [wire.Registered(fence=2, incarnation="x", begun=2)]


@pytest.mark.parametrize("goes_on", ["take", "publish", "commit"])
def test_who_goes_on_has_trained_on_the_batch_before_whatever_was_lost(make_hub: MakeHub, goes_on: str) -> None:
    hub = make_hub(Bound(1, 1, 8))
    hub.begin()
    hub.make(0)
    hub.make(1)
    hub.take(0)
    if goes_on == "publish":
        hub.publish(1)
    elif goes_on == "commit":
        hub.receive(LEARNER, wire.Commit(fence=1, step=1))
    hub.take(1)
    assert [batch.step for batch in hub.sent_of(wire.Batch)] == [0, 1] and hub.status()["ledger"]["trained"] == 1


def test_a_learner_may_wait_before_the_first_actor_comes(make_hub: MakeHub) -> None:
    hub = make_hub(Bound(2, 0, 4))
    hub.register()
    hub.publish(0)
    hub.take(0)
    assert hub.status()["waiting_for"] == "no actor has joined"
    hub.tick()
    assert hub.sent_of(wire.Waiting)[-1].detail == "no actor has joined"
    hub.hello()
    assert hub.status()["waiting_for"] == "0 groups are ready, 2 are being made (anna: 2)"


def test_the_data_end_with_a_batch_of_what_is_left_and_every_actor_is_stopped(make_hub: MakeHub) -> None:
    hub = make_hub(Bound(groups_per_batch=2, max_staleness=1, num_groups=3))
    hub.begin()
    for number in (0, 1, 2):
        hub.make(number)
    hub.train(0)
    hub.train(1)
    assert hub.take(2) == [wire.Ended(reason="finished"), wire.Stop(reason="finished")]
    assert hub.hello(name="late", who=OTHER) == [wire.Stop(reason="finished")]


def test_a_drain_finishes_what_is_begun_and_ends(make_hub: MakeHub) -> None:
    hub = make_hub(Bound(groups_per_batch=2, max_staleness=1, num_groups=100))
    hub.register()
    hub.publish(0)
    hub.hello(capacity=3)
    hub.receive(OPERATOR, wire.Drain())
    assert hub.status()["state"] == "draining"
    hub.make(0)
    hub.make(1)
    hub.train(0)
    assert hub.take(1) == [wire.Ended(reason="drained"), wire.Stop(reason="drained")]
    assert hub.credited_to(ACTOR) == [0, 1, 2], "nothing was credited after the drain"


def test_a_learner_that_has_enough_stops_the_actors_and_no_group_is_blamed(make_hub: MakeHub) -> None:
    hub = make_hub(max_attempts=1)
    hub.begin()
    for number in (0, 1, 2):
        hub.make(number)
    hub.train(0)
    hub.take(1, enough=True)
    assert hub.sent_of(wire.Stop, ACTOR) == [wire.Stop(reason="finished")]
    hub.receive(OPERATOR, wire.Gone(actor="anna"))
    ledger = hub.status()["ledger"]
    assert (ledger["trained"], ledger["queued"], ledger["leased"], ledger["quarantined"]) == (2, 1, 0, 0)
    again = make_hub()
    again.begin(1)
    again.make(3)
    again.take(1)
    assert len(again.sent_of(wire.Batch)) == 1, "what was ready is trained on when the run goes on"


def test_many_long_texts_make_a_batch(make_hub: MakeHub) -> None:
    """Each group's header is within its limit; a batch of them is not one header."""
    hub = make_hub(Bound(groups_per_batch=4, max_staleness=0, num_groups=4))
    hub.begin()
    for number in range(4):
        hub.make(number, text="é" * (wire.MAX_HEADER_BYTES // 5))
    hub.take(0)
    assert len(hub.sent_of(wire.Batch)) == 1


# -- what is refused -------------------------------------------------------------------------------------------------

SCHEMA = GroupSchema(
    group_size=2, vocabulary=100, max_prompt_length=2, max_completion_length=3, rewards=frozenset({"right"}),
    sampling=Sampling(), environment=True,
    routing=Routing(layers=3, choices=2, experts=8), images={"1" * 32},
)  # fmt: skip


def rollout(token: int = 5, length: int = 3, **changed: Any) -> Rollout:
    ids, logprobs = np.full(length, token, np.int32), np.full(length, -0.5, np.float32)
    fields = {"logprobs": logprobs, "spans": (Span(0, length),), "scores": {"right": Score(1.0)}}
    return Rollout(ids, finish_reason="stop", **fields | changed)


def beside(*token: int, **changed: Any) -> dict[str, Any]:
    """This member, and one as it should be."""
    return {"rollouts": (rollout(*token, **changed), rollout())}


MASK = SamplingMask(np.array([1, 1, 2], np.int32), np.array([5, 5, 5, 777], np.int32))
ANEW = {"logprobs": np.full(2, -0.5, np.float32), "spans": (Span(0, 1), Span(None, 1, restarts=True), Span(0, 1))}
EXPERTS = np.arange(24, dtype=np.uint8).reshape(4, 3, 2) % 7
BEGINS = {"logprobs": np.full(2, -0.5, np.float32), "spans": (Span(None, 1), Span(0, 2))}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "one member instead of two": ({"rollouts": (rollout(),)}, "members: 1; this run's: 2"),
    "a token beyond the vocabulary": (beside(100), "largest token id: 100; at most 99"),
    "a prompt token beyond it": ({"prompt_ids": np.array([1 << 20], np.int32)}, "largest token id: 1048576"),
    "a sampling mask beyond it": (beside(sampling_mask=MASK), "largest token id in a sampling mask: 777"),
    "another reward": ({"rollouts": (rollout(scores={"other": Score(1.0)}),) * 2}, "rewards: ['other']; this run's: ['right']"),
    "a completion that is too long": (beside(length=4), "tokens of a completion: 4; at most 3"),
    "a prompt that is too long": ({"prompt_ids": np.zeros(3, np.int32)}, "prompt tokens: 3; at most 2"),
    "a row that begins anew": (beside(**ANEW), "a row that begins anew; this run has environment.render other"),
    "a prompt that goes on behind the group's": (beside(**BEGINS), "a completion that begins with what was read"),
    "an expert the model has not": ({"rollouts": (rollout(routing=EXPERTS + 2), rollout(routing=EXPERTS))}, "expert 8; the"),
    "experts of other layers": ({"rollouts": (rollout(routing=EXPERTS[:, 1:]),) * 2}, "2 experts in each of 2 layers; the"),
    "an image that the run has not": ({"images": ("1" * 32, "2" * 32)}, f"image {'2' * 32}, which this run does not have"),
    "another temperature": ({"sampling": Sampling(temperature=0.5)}, "sampling: temperature=0.5 top_k=0"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_group_that_the_learner_could_not_use_is_refused_at_the_door(make_hub: MakeHub, what: str) -> None:
    hub = make_hub(wanted={"schema": SCHEMA})
    hub.begin()
    changed, message = UNFIT[what]
    header, arrays = packing.pack_group(replace(a_group(0, 0, 0, "anna"), **changed))
    (refused,) = hub.receive(ACTOR, wire.Put(group=header), arrays)
    assert refused.reason == "schema" and refused.detail.startswith(f"group 0: {message}"), refused
    assert hub.status()["ledger"]["queued"] == 0


def test_what_of_an_agents_prompt_is_not_its_groups_may_be_as_long_as_one_and_its_chains_begin_anew(make_hub: MakeHub) -> None:
    hub = make_hub(wanted={"schema": replace(SCHEMA, calls=True)})
    hub.begin()
    one, spans = np.array([1], np.int32), (Span(None, 1), Span(0, 3))
    lead = rollout(length=4, logprobs=np.full(3, -0.5, np.float32), spans=spans)
    for prompt_ids, rollouts, refused in (
        (one, (lead, rollout(**ANEW)), None),
        (np.array([1, 2], np.int32), (lead, rollout()), "tokens of a completion: 4; at most 3"),
        (one, (rollout(length=4), rollout()), "tokens of a completion: 4; at most 3"),
        (one, (replace(lead, images=(("1" * 32,),)), rollout(**ANEW, images=((), ("1" * 32,)))), None),
        (one, (lead, rollout(**ANEW, images=((), ("2" * 32,)))), f"image {'2' * 32}, which this run does not have"),
        (one, (replace(lead, completion_ids=np.full(5, 5, np.int32), spans=(Span(None, 2), spans[1])), lead), "tokens of"),
    ):
        made = replace(a_group(0, 0, 0, "anna"), prompt_ids=prompt_ids, rollouts=rollouts)
        header, arrays = packing.pack_group(made)
        if refused is None:
            packing.check_group(header, [b"", *arrays], replace(SCHEMA, calls=True))
        else:
            (answer,) = hub.receive(ACTOR, wire.Put(group=header), arrays)
            assert answer.reason == "schema" and refused in answer.detail


def test_a_defect_of_the_hub_refuses_the_message_that_met_it_and_no_other(
    make_hub: MakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = Exchange._put

    def broken(self: Exchange, identity: bytes, request: int, put: wire.Put, frames: wire.Frames) -> wire.Message | None:
        if put.group.number == 1:
            raise OverflowError("int too big to convert")
        return honest(self, identity, request, put, frames)

    monkeypatch.setattr(Exchange, "_put", broken)
    hub = make_hub()
    hub.begin()
    hub.make(0)
    for _ in range(2):
        (refused,) = hub.make(1)
        assert refused.reason == "unforeseen" and "a defect of the hub: OverflowError" in refused.detail
    assert hub.status()["refused"] == {"unforeseen": 2} and hub.status()["ledger"]["queued"] == 1
    assert sum("OverflowError" in (record.exc_text or "") for record in caplog.records) == 1, "its traceback is logged once"
