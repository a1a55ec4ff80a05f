"""Where processes go: laws over inventories from one machine with one device to 64 hosts of 8."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.placement import Host, Inventory, Placement, WantedNodes, place

BOX = (Host(devices=8, cpus=64),)
TWO = (Host(devices=8, cpus=64), Host(name="b", devices=8, cpus=64))
GPU = WantedNodes(rank_devices=1, actor_devices=1, evaluation_devices=1)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    num_hosts = draw(st.integers(1, 64) | st.integers(1, 4))
    devices = draw(st.lists(st.integers(1, 8), min_size=num_hosts, max_size=num_hosts))
    cpus = draw(st.integers(1, 32))
    return tuple(Host(name=f"h{n}" if n else "", devices=count, cpus=cpus) for n, count in enumerate(devices))


@st.composite
def runs(draw: st.DrawFn) -> WantedNodes:
    each = draw(st.sampled_from([0, 1, 2, 4]))
    return WantedNodes(
        ranks=draw(st.integers(1, 16)),
        rank_devices=draw(st.sampled_from([0, 1])),
        actors=draw(st.just("fill") | st.integers(1, 64)),
        actor_devices=each, scorer=draw(st.booleans()), scorer_devices=draw(st.sampled_from([0, 1])), evaluation_devices=each,
        evaluates_beside=draw(st.booleans()), colocate=draw(st.booleans()), actor_share=0.4,
    )  # fmt: skip


def kind(name: str) -> str:
    return name.partition("-")[0]


def used(placement: Placement) -> Counter[Any]:
    """How often each device of each host is given to each kind of process; a waiting evaluation uses what others have left."""
    return Counter(
        (slot.host, device, kind(name))
        for name, slot in placement.slots.items()
        for device in slot.devices or ()
        if not (name == "evaluation" and placement.evaluation_waits)
    )


@given(runs(), inventories(), st.booleans())
def test_every_process_has_its_devices_and_no_device_two_processes_or_the_reason_names_the_numbers(
    wanted: WantedNodes, inventory: Inventory, away: bool
) -> None:
    wanted, there = replace(wanted, away=away and len(inventory) > 1), sum(host.devices for host in inventory)
    try:
        found = place(wanted, inventory)
    except ConfigError as error:
        text = str(error)
        assert any(word in text for word in ("learner.ranks = ", "actors.count = ", "evaluation.every"))
        if "learner.ranks = " in text.partition(":")[0] and wanted.rank_devices:
            assert wanted.ranks > there and f"need {wanted.ranks} devices" in text
        assert f"of {inventory[0].devices} on this machine" in text or wanted.away
        return
    counts = used(found)
    assert max(counts.values(), default=1) == 1
    if not wanted.colocate:
        assert max(Counter(key[:2] for key in counts).values(), default=1) == 1
    sizes = {"learner": wanted.rank_devices, "actor": wanted.actor_devices, "evaluation": wanted.evaluation_devices}
    sizes |= {"scorer": wanted.scorer_devices if wanted.scorer else 0, "hub": 0, "relay": 0}
    hosts = {(host.name if n else ""): host for n, host in enumerate(inventory)}
    for name, slot in found.slots.items():
        assert slot.devices is not None and len(slot.devices) == sizes[kind(name)], name
        assert all(device < hosts[slot.host].devices for device in slot.devices)
    assert sum(kind(name) == "learner" for name in found.slots) == wanted.ranks
    assert wanted.actors in ("fill", found.num_actors)
    on = {slot.host for name, slot in found.slots.items() if kind(name) == "actor"}
    scorers = {slot.host for name, slot in found.slots.items() if kind(name) == "scorer"}
    actors_of = Counter(slot.host for name, slot in found.slots.items() if kind(name) == "actor")
    relays = Counter(slot.host for name, slot in found.slots.items() if kind(name) == "relay")
    if wanted.away and not wanted.actor_devices:
        assert "" not in on and max(actors_of.values()) - min(actors_of[host] for host in hosts if host) <= 1
    assert scorers == (on if wanted.scorer else set())
    assert relays == {host: 1 for host, count in actors_of.items() if host and count > 1}


@given(runs(), inventories(), st.integers(1, 8))
def test_another_host_moves_nothing(wanted: WantedNodes, inventory: Inventory, devices: int) -> None:
    if not wanted.actor_devices:  # more actors than CPUs are what another host is for
        wanted = wanted if wanted.actors == "fill" else replace(wanted, actors=1)
        inventory = (inventory[0].model_copy(update={"cpus": 64}), *inventory[1:])
    try:
        before = place(wanted, inventory)
    except ConfigError:
        return
    after = place(wanted, (*inventory, Host(name="new", devices=devices, cpus=4)))
    assert {name: after.slots[name] for name in before.slots} == dict(before.slots)


@given(runs(), inventories())
def test_fill_leaves_no_room_for_another_actor(wanted: WantedNodes, inventory: Inventory) -> None:
    wanted = replace(wanted, actors="fill", actor_devices=wanted.actor_devices or 1)
    try:
        found = place(wanted, inventory)
    except ConfigError:
        return
    with pytest.raises(ConfigError, match=f"highest: actors.count = {found.num_actors}"):
        place(replace(wanted, actors=found.num_actors + 1), inventory)
    assert place(replace(wanted, actors=found.num_actors), inventory) == found


ONE = (Host(devices=1, cpus=8),)
CPUS = (Host(cpus=4), Host(name="b", cpus=2))
RAY = (Host(devices=8, cpus=8), Host(name="a", devices=2, cpus=4), Host(name="b", devices=1, cpus=4))
OWN = (Host(devices=4, cpus=8), Host(name="ray-0", devices=4, cpus=8, own=True))
COLOCATED = replace(GPU, colocate=True, evaluates_beside=True)
SCORED = replace(GPU, ranks=3, actors="fill", actor_devices=4, scorer=True, scorer_devices=1)
SPREAD = replace(GPU, ranks=10, learner_hosts=("b", ""), actors="fill")

# By what they show: what is wanted, of what hosts, some of the places, and how many actors there are.
EXAMPLES: dict[str, tuple[WantedNodes, Inventory, dict[str, tuple[str, Any]], int]] = {
    "the learner has the first devices of a box, actors the rest, and an evaluation waits": (
        replace(GPU, ranks=2, actors="fill"), BOX,
        {"learner": ("", (0,)), "learner-rank-1": ("", (1,)), "actor-0": ("", (2,)), "actor-5": ("", (7,)),
         "evaluation": ("", (0,))}, 6),
    "an evaluation beside training has a device of its own": (
        replace(GPU, evaluates_beside=True, actors="fill"), BOX,
        {"learner": ("", (0,)), "evaluation": ("", (1,)), "actor-0": ("", (2,))}, 6),
    "engines of four devices, and a scorer with one on each of two nodes": (
        SCORED, TWO,
        {"scorer": ("", (3,)), "actor-0": ("", (4, 5, 6, 7)), "scorer-1": ("b", (0,)), "actor-1": ("b", (1, 2, 3, 4))}, 2),
    "a relay where there are two": (replace(SCORED, actor_devices=2), TWO, {"relay-1": ("b", ())}, 5),
    "one device for all, where that is wanted": (
        replace(COLOCATED, actor_share=0.4), ONE, dict.fromkeys(("learner", "actor-0", "evaluation"), ("", (0,))), 1),
    "ranks fill hosts in the order that is given": (
        SPREAD, TWO, {"learner": ("b", (0,)), "learner-rank-7": ("b", (7,)), "learner-rank-8": ("", (0,))}, 6),
    "actors fill CPUs": (
        WantedNodes(actors="fill"), CPUS, {"actor-1": ("", ()), "actor-2": ("b", ()), "actor-3": ("b", ())}, 4),
    "more of them stay with the supervisor": (WantedNodes(actors=6), CPUS, {"actor-4": ("", ()), "actor-5": ("", ())}, 6),
    "one CPU has one actor": (WantedNodes(actors="fill"), (Host(cpus=1),), {}, 1),
    "away they are on other hosts in turn": (
        replace(GPU, actors="fill", away=True), RAY,
        {"actor-0": ("a", (0,)), "actor-1": ("b", (0,)), "actor-2": ("a", (1,))}, 3),
    "on CPUs too": (WantedNodes(actors=10, away=True), RAY, {"actor-8": ("a", ()), "actor-9": ("b", ())}, 10),
    "this machine under another name has the devices that the learner leaves": (
        replace(GPU, ranks=2, actors="fill", away=True), OWN,
        {"learner": ("", (0,)), "learner-rank-1": ("", (1,)), "actor-0": ("ray-0", (2,)), "actor-1": ("ray-0", (3,))}, 2),
    "and may be named": (replace(GPU, learner_hosts=("ray-0",), away=True), OWN, {"learner": ("", (0,))}, 1),
    "what is not CUDA's is left as it is found": (
        WantedNodes(rank_devices=None, actor_devices=None, actors=2), BOX, {"learner": ("", None), "actor-1": ("", None)}, 2),
}  # fmt: skip


@pytest.mark.parametrize(("wanted", "inventory", "places", "actors"), EXAMPLES.values(), ids=EXAMPLES)
def test_places(wanted: WantedNodes, inventory: Inventory, places: dict[str, tuple[str, Any]], actors: int) -> None:
    found = place(wanted, inventory)
    assert {name: (found.slots[name].host, found.slots[name].devices) for name in places} == places
    assert found.num_actors == actors
    assert found.evaluation_waits == (bool(wanted.evaluation_devices) and not wanted.evaluates_beside)


@pytest.mark.parametrize(
    ("wanted", "inventory", "message"),
    [
        (GPU, ONE, r"actors.count = 1: actors need a device each; .*0 free of 1.*placement.colocate"),
        (COLOCATED, ONE, r"share = 0\.5: device 0 .* actor-0, evaluation, learner.* 1 of its.*below 0\.5"),
        (replace(GPU, evaluates_beside=True), ONE, r"every\) need 1 devices .* 0 free of 1 .*evaluation\.every = 0"),
        (replace(GPU, learner_hosts=("c",)), TWO, r"learner_hosts names 'c', which is no host .*: this machine, b"),
        (replace(GPU, ranks=9, learner_hosts=("b",)), TWO, r"= 9 .* 9 devices.*8 free of 8 on b; highest: learner.ranks = 8"),
        (replace(GPU, actors=4, away=True), RAY, r"there are 2 free of 2 on a, 1 free of 1 on b; highest: actors\.count = 3"),
    ],
)
def test_what_finds_no_room_is_refused_with_what_there_is(wanted: WantedNodes, inventory: Inventory, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(wanted, inventory)
