"""Why an actor does not serve the version it should: each state, and that exactly one announces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.queue.admission import Actor
from async_rlhf.buffers.weights.adoption import Adoption, Version, adoption_of, fetched_for_credit


class Place:
    """What the hub has, of whom, and how far the run is."""

    def __init__(self, published: int | None, stored: set[int], received: bool = False, expected: bool = False) -> None:
        self._stored, self._received, self._expected = stored, received, expected
        self.fence, self.published, self.bound = 1, published, SimpleNamespace(exact=False)
        self.lowest = 0

    def target(self, name: str) -> int | None:
        return self.published

    def may_begin(self, version: int) -> bool:
        return version >= self.lowest

    def has(self, version: Version) -> bool:
        return version[0] == self.fence and version[1] in self._stored

    def was_broadcast(self, actor: Actor, version: Version) -> bool:
        return self._received

    def is_in_broadcast(self, name: str, actor: Actor, version: Version) -> bool:
        return self._expected


def state(place: Any, actor: Actor) -> Adoption:
    return adoption_of("anna", actor, place, place).state


def actor(version: int, announced: int | None = None, fence: int = 1) -> Actor:
    return Actor(4, fence, version, 0.0, announced=None if announced is None else (1, announced))


@pytest.mark.parametrize(
    ("place", "anna", "expected"),
    [
        (Place(None, set()), actor(0), Adoption.NONE_YET),
        (Place(3, {3}), actor(3), Adoption.SERVES),
        (Place(3, set()), actor(3), Adoption.SERVES),
        (Place(3, {2}), actor(2), Adoption.NOT_STORED),
        (Place(3, {3}, expected=True), actor(2), Adoption.IN_BROADCAST),
        (Place(3, set(), received=True), actor(2), Adoption.DUE),
        (Place(3, {3}), actor(2), Adoption.DUE),
        (Place(3, {3}), actor(3, fence=0), Adoption.DUE),
        (Place(3, {3}), actor(1, announced=3), Adoption.FETCHES),
        (Place(3, {2, 3}), actor(1, announced=2), Adoption.FETCHES),
        (Place(3, {3}), actor(1, announced=2), Adoption.DUE),
        (Place(3, {2, 3}), actor(3, announced=2), Adoption.FETCHES),
    ],
)
def test_the_first_reason_that_holds_is_the_actors(place: Place, anna: Actor, expected: Adoption) -> None:
    assert state(place, anna) is expected


def test_a_fetch_that_can_earn_no_credit_gives_way_to_the_newest_version_and_what_was_announced_is_announced_once() -> None:
    place = Place(3, {2, 3})
    place.lowest = 3
    assert state(place, actor(1, announced=2)) is Adoption.DUE
    place.lowest = 4
    assert state(place, actor(1, announced=3)) is Adoption.ANNOUNCED


@given(
    st.builds(Place, st.none() | st.integers(0, 3), st.sets(st.integers(0, 3)), st.booleans(), st.booleans()),
    st.builds(actor, st.integers(0, 3), st.none() | st.integers(0, 3), st.integers(0, 1)),
    st.integers(0, 4),
)
def test_an_actor_is_announced_what_the_hub_can_give_and_never_the_same_twice(place: Any, anna: Actor, lowest: int) -> None:
    place.lowest = lowest
    found, target = adoption_of("anna", anna, place, place)
    assert fetched_for_credit(anna, place, place) is None or found is not Adoption.DUE
    assert (target is None) == (found is Adoption.NONE_YET)
    if found is Adoption.DUE:
        assert target is not None and (place.has(target) or place.was_broadcast(anna, target))
        assert target != (anna.announced or (anna.fence, anna.version))
        anna.announced = target
        assert state(place, anna) is not Adoption.DUE
