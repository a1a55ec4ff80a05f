"""What an actor's end makes of messages that cross on the way; the test holds the other end of its link."""

from __future__ import annotations

import pytest

from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.errors import DeadlineError, RefusedError, WeightsError, WireError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.transport.link import Connection
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.buffers.hub.place import a_group, until

Sent = tuple[int, wire.Message]


class Wire:
    """A link whose far end and clock are in the test's hands."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.coming: list[wire.Frames] = []
        self.remade = self.trickles = False
        self.is_full = False
        self.now = self.trickles_until = 0.0

    def send(self, frames: wire.Frames) -> bool:
        self.sent.append(wire.decode(frames, max_frame_bytes=1 << 20)[:2])
        return not self.is_full

    def receive(self, timeout_s: float) -> wire.Frames | None:
        if self.coming:
            return self.coming.pop(0)
        self.trickles = self.now < self.trickles_until
        self.now += timeout_s
        return None

    def was_remade(self) -> bool:
        remade, self.remade = self.remade, False
        return remade

    def is_receiving(self) -> bool:
        trickles, self.trickles = self.trickles, False
        return trickles

    def wake(self) -> None: ...

    def clock(self) -> float:
        return self.now

    def close(self) -> None: ...

    def deliver(self, message: wire.Message, arrays: wire.Frames | None = None, request: int = 0) -> None:
        self.coming.append(wire.encode(message, arrays, request))

    def sent_of(self, kind: type[wire.Message]) -> list[Sent]:
        """What was sent of one kind since the last time."""
        found = [each for each in self.sent if isinstance(each[1], kind)]
        self.sent = [each for each in self.sent if not isinstance(each[1], kind)]
        return found


STATE = ActorState(capacity=4, fence=1, version=1, holding=())
WELCOME = wire.Welcome(incarnation="x", max_frame_bytes=1 << 20)
UNKNOWN = wire.Refused(reason="unknown-actor", detail="send Hello first")


def credit(number: int, attempt: int = 0) -> wire.Credits:
    return wire.Credits(credits=[wire.CreditItem(number=number, attempt=attempt, lowest_version=0)])


def joined(beat_s: float = 1.0) -> tuple[ActorClient, Wire]:
    link = Wire()
    client = ActorClient("nowhere", "anna", beat_s=beat_s, timeout_s=10.0, connect=lambda address, name: link)
    look(client)
    ((request, _),) = link.sent_of(wire.Hello)
    link.deliver(WELCOME, request=request)
    look(client)
    return client, link


def look(client: ActorClient) -> None:
    client.poll(STATE, wire.Telemetry())


def deliver_set(link: Wire, weights: WeightSet, data: bytes) -> None:
    """Its manifest, and its only chunk with these bytes."""
    link.deliver(weights.manifest())
    link.deliver(wire.Chunk(fence=weights.fence, version=weights.version, index=0), [data])


def a_set(version: int, data: bytes) -> WeightSet:
    return WeightSet.of(1, version, {"w": RawTensor("uint8", (3,), data)})


def test_a_credit_given_before_the_hub_heard_the_hello_does_not_count() -> None:
    """The hello did not name it, so the hub gives it to somebody again."""
    client, link = joined()
    link.deliver(credit(1))
    look(client)
    link.remade = True
    link.deliver(credit(2))
    look(client)
    assert client.credits() == []
    ((request, _),) = link.sent_of(wire.Hello)
    link.deliver(credit(3))
    link.deliver(WELCOME, request=request)
    link.deliver(credit(4))
    look(client)
    assert [item.number for item in client.credits()] == [4]


def test_refusals_of_what_was_sent_before_the_hello_bring_no_second_hello() -> None:
    client, link = joined()
    for _ in range(3):
        client.beat(STATE, {})
    beats = [request for request, _ in link.sent_of(wire.Beat)]
    link.deliver(UNKNOWN, request=beats[0])
    look(client)
    look(client)
    assert len(link.sent_of(wire.Hello)) == 1
    for request in beats[1:]:
        link.deliver(UNKNOWN, request=request)
    look(client)
    look(client)
    assert link.sent_of(wire.Hello) == []


def test_a_hello_names_what_is_held_and_repeats_what_was_not_acknowledged() -> None:
    client, link = joined()
    client.put(a_group(5, 0, 1, "anna"))
    client.put(a_group(6, 1, 1, "anna"))
    link.deliver(wire.Ack(groups=[(5, 0)]))
    link.deliver(wire.Rejected(number=6, attempt=0, reason="superseded"))  # of an attempt before
    look(client)
    assert client.unacknowledged == [(6, 1)]
    assert list(client.refused) == [(6, "superseded")]
    link.sent_of(wire.Put)
    link.remade = True
    client.poll(ActorState(4, 1, 1, ((7, 0),)), wire.Telemetry())
    ((_, hello),) = link.sent_of(wire.Hello)
    assert isinstance(hello, wire.Hello)
    assert hello.holding == [(6, 1), (7, 0)]
    ((_, put),) = link.sent_of(wire.Put)
    assert isinstance(put, wire.Put)
    assert (put.group.number, put.group.attempt) == (6, 1)


def test_a_damaged_set_is_fetched_again_and_at_last_given_up() -> None:
    client, link = joined()
    good, other = a_set(2, b"abc"), a_set(3, b"xyz")
    link.deliver(wire.Adopt(fence=1, version=2))
    for _ in range(3):
        deliver_set(link, good, b"abX")
    look(client)
    assert len(link.sent_of(wire.Fetch)) == 4
    assert client.weights() is None
    deliver_set(link, good, b"abc")
    look(client)
    assert client.weights() == good
    link.deliver(wire.Adopt(fence=1, version=3))
    for _ in range(4):
        deliver_set(link, other, b"abX")
    with pytest.raises(WeightsError, match="tensor 'w' does not match its digest"):
        look(client)


def test_parts_of_a_superseded_set_are_dropped() -> None:
    client, link = joined()
    old, new = a_set(2, b"abc"), a_set(3, b"xyz")
    link.deliver(wire.Adopt(fence=1, version=2))
    link.deliver(old.manifest())
    link.deliver(wire.Adopt(fence=1, version=3))
    link.deliver(wire.Chunk(fence=1, version=2, index=0), [b"abc"])
    link.deliver(wire.Refused(reason="weights", detail="version 2 is not here"))
    deliver_set(link, new, b"xyz")
    look(client)
    assert client.weights() == new


def test_a_silent_hub_ends_an_actor_and_so_does_a_full_link() -> None:
    client, link = joined()
    link.is_full = True
    with pytest.raises(DeadlineError, match="'put' cannot be sent"):
        client.put(a_group(1, 0, 1, "anna"))
    link.is_full = False
    with pytest.raises(DeadlineError, match="anna received nothing from the hub for 10 s"):
        for _ in range(11):
            client.poll(STATE, wire.Telemetry(), timeout_s=1.0)


def test_the_time_in_which_a_process_was_stopped_is_no_silence_of_the_hub() -> None:
    client, link = joined()
    for _ in range(2):
        link.now += 1000.0  # stopped, or in an engine that loads weights: what waits is heard first
        link.deliver(wire.Done())
        look(client)
    link.now += 1000.0
    client.poll(STATE, wire.Telemetry())  # one look is not enough to know
    with pytest.raises(DeadlineError, match="anna received nothing from the hub for 10 s"):
        for _ in range(6):
            client.poll(STATE, wire.Telemetry(), timeout_s=1.0)


def test_beats_go_out_while_the_actors_own_thread_is_busy() -> None:
    """An engine loads weights."""
    client, link = joined(beat_s=0.01)
    client.keep_beating()
    for _ in range(2):
        link.now += 1.0
        until(lambda: link.sent_of(wire.Beat))
    client.close()


def test_a_group_larger_than_the_hub_takes_is_refused_where_it_is_made() -> None:
    client, _ = joined()
    with pytest.raises(WireError, match="cannot be sent: the limits are"):
        client.put(a_group(1, 0, 1, "anna", "x" * wire.MAX_HEADER_BYTES))


def test_bytes_that_arrive_are_no_silence_and_the_question_is_not_repeated_behind_them() -> None:
    """A large batch over a slow link."""
    link = Wire()
    link.trickles_until = 60.0
    with pytest.raises(DeadlineError, match="waited 7 s for the answer to 'take'"):
        Connection(link).ask(wire.Take(fence=1, step=0), timeout_s=7.0)
    assert link.now >= 60.0 and len(link.sent_of(wire.Take)) <= 3


def test_a_question_is_repeated_as_soon_as_the_connection_was_made_anew() -> None:
    link = Wire()
    link.remade = True
    link.deliver(credit(1))  # unasked
    with pytest.raises(DeadlineError):
        Connection(link).ask(wire.Take(fence=1, step=0), timeout_s=1.0)
    assert len(link.sent_of(wire.Take)) == 2


def test_an_actor_whose_name_is_taken_claims_it_for_a_while_and_then_ends_with_the_reason() -> None:
    client, link = joined()
    link.sent_of(wire.Hello)
    taken = wire.Refused(reason="name-taken", detail="an actor called 'anna' is in the run")
    for _ in range(3):
        link.deliver(taken)
        look(client)
        link.now += 1.0
    assert len({hello.life for _, hello in link.sent_of(wire.Hello) if isinstance(hello, wire.Hello)}) == 1
    with pytest.raises(RefusedError, match="name-taken: an actor called 'anna' is in the run"):
        for _ in range(20):
            link.deliver(taken)
            look(client)
            link.now += 1.0


def test_a_question_is_repeated_until_its_answer_comes_and_not_longer_than_its_deadline() -> None:
    link = Wire()
    connection = Connection(link)
    with pytest.raises(DeadlineError, match="waited 7 s for the answer to 'get_status': the hub never answered"):
        connection.ask(wire.GetStatus(), timeout_s=7.0)
    requests = [request for request, _ in link.sent_of(wire.GetStatus)]
    assert requests == [1, 1, 1]  # at once, after 2 s and after 4 more
    link.deliver(wire.Done(), request=1)  # late
    link.deliver(credit(1))  # unasked
    link.deliver(wire.Status(status={"a": 1}), request=2)
    assert connection.ask(wire.GetStatus(), timeout_s=7.0)[0] == wire.Status(status={"a": 1})
    link.deliver(wire.Refused(reason="malformed", detail="protocol 1; this side has protocol 2"))
    with pytest.raises(RefusedError, match="malformed: protocol 1"):
        connection.ask(wire.GetStatus(), timeout_s=7.0)


def test_who_is_told_to_wait_waits_as_long_as_the_hub_lives() -> None:
    link = Wire()
    for _ in range(20):
        link.deliver(wire.Waiting(step=0, detail="3 groups are ready"), request=1)
    with pytest.raises(DeadlineError, match="waited 4 s for the answer to 'take': 3 groups are ready"):
        Connection(link).ask(wire.Take(fence=1, step=0), timeout_s=4.0)
    assert link.coming == []
