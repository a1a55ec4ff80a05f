"""Whoever has most room has the next group, however many actors there are: as a look at all of them for each group decides."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.queue.admission import Admission, Credit
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.queue.ready import Ready

ACTOR = st.fixed_dictionaries(
    {
        "fence": st.sampled_from([1, 1, 1, 2]),
        "version": st.integers(0, 3),
        "capacity": st.integers(0, 4),
        "doubted": st.booleans(),
    }
)
FLEETS = st.lists(ACTOR, max_size=6)
LOST = st.lists(st.integers(0, 5), max_size=4)


def one_by_one(hub: Admission) -> dict[str, list[Credit]]:
    """The slow twin of `Admission.credits`."""
    given: dict[str, list[Credit]] = {}
    while not hub.draining and (number := hub.order.next_number()) is not None:
        able = [
            (len(actor.leases) - actor.capacity, name)
            for name, actor in hub.fleet.with_room(number).items()
            if actor.fence == hub.fence > 0 and actor.version <= hub.fleet.newest and hub.may_begin(actor.version)
        ]
        if not able:
            break
        name = min(able)[1]
        credit = hub.fleet.lease(hub.fleet.actors[name], number, hub.fleet.failures.attempt(number))
        given.setdefault(name, []).append(credit)
    return given


@given(FLEETS, FLEETS, LOST, st.sets(st.integers(0, 20), max_size=3), st.integers(0, 4), st.booleans(), st.integers(0, 3))
def test_credits_go_where_a_look_at_all_actors_would_give_them(
    first: Sequence[dict[str, int]],
    second: Sequence[dict[str, int]],
    lost: Sequence[int],
    suspects: set[int],
    staleness: int,
    exact: bool,
    newest: int,
) -> None:
    hub = Ready(Bound(3, staleness, 24, exact=exact), max_attempts=4)
    hub.fleet.newest, hub.fleet.failures.suspects = newest, suspects
    for round_of in (first, second):
        for number, actor in enumerate(round_of):
            hub.join(f"{len(round_of)}-{number}", **actor)
        twin = deepcopy(hub)
        assert hub.credits() == one_by_one(twin) and hub.ledger == twin.ledger
        assert {name: actor.leases for name, actor in hub.fleet.actors.items()} == {
            name: actor.leases for name, actor in twin.fleet.actors.items()
        }
        for number in lost:
            if number < len(hub.fleet.actors):
                hub.fleet.leave([*hub.fleet.actors][number])
