"""A group that was lost with its actor again and again is tried alone before it is quarantined."""

from __future__ import annotations

from buffers.queue.admission import Actor, Admission
from buffers.queue.bound import Bound
from buffers.queue.ledger import Entry


def hub_with(max_attempts: int) -> Admission:
    hub = Admission(Bound(groups_per_batch=4, max_staleness=1, num_groups=40), max_attempts=max_attempts)
    hub.register(1, 0, 0)
    hub.publish(0)
    return hub


def join(hub: Admission, name: str) -> None:
    hub.join(name, Actor(capacity=8, fence=1, version=0, heard_at=0.0))


def numbers(hub: Admission) -> dict[str, list[int]]:
    return {name: [credit.number for credit in credits] for name, credits in hub.credits().items()}


def test_a_machine_that_breaks_quarantines_nothing() -> None:
    """Eight groups are lost twice with their actor; on a good machine all of them are made."""
    hub = hub_with(max_attempts=3)
    for _ in range(2):
        join(hub, "broken")
        assert numbers(hub) == {"broken": list(range(8))}
        hub.leave("broken")
    join(hub, "good")
    for number in range(8):
        assert numbers(hub) == {"good": [number]}  # one at a time
        hub.put("good", number, Entry(attempt=2, oldest_version=0, newest_version=0, num_tokens=1))
    assert hub.num_quarantined == 0 and hub.ledger.failed == 16 and hub.ledger.closes


def test_only_the_group_that_ends_an_actor_alone_is_quarantined() -> None:
    hub = hub_with(max_attempts=3)
    for _ in range(2):
        join(hub, "a")
        hub.credits()
        hub.leave("a")
    join(hub, "a")
    join(hub, "b")
    assert numbers(hub) == {"a": [0], "b": [1]}
    hub.leave("a")
    assert hub.remember().quarantined == (0,)
    hub.put("b", 1, Entry(attempt=2, oldest_version=0, newest_version=0, num_tokens=1))
    assert numbers(hub) == {"b": [2]}
    assert hub.ledger.closes


def test_an_actor_that_tries_a_suspect_is_given_nothing_else_and_others_go_on() -> None:
    hub = hub_with(max_attempts=2)
    join(hub, "a")
    hub.actors["a"].capacity = 1
    assert numbers(hub) == {"a": [0]}
    hub.leave("a")
    join(hub, "a")
    join(hub, "b")
    given = numbers(hub)
    assert given == {"a": [0], "b": [1, 2, 3, 4, 5, 6, 7]}
