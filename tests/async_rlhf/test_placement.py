"""Where processes go: laws over inventories from one machine with one device to 64 hosts of 8."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.placement import Host, Inventory, Placement, Slot, Wanted, place

BOX = (Host(devices=8, cpus=64),)
TWO = (Host(devices=8, cpus=64), Host("b", devices=8, cpus=64))
GPU = Wanted(rank_devices=1, actor_devices=1, evaluation_devices=1)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    num_hosts = draw(st.integers(1, 64) | st.integers(1, 4))
    devices = draw(st.lists(st.integers(1, 8), min_size=num_hosts, max_size=num_hosts))
    cpus = draw(st.integers(1, 32))
    return tuple(Host(f"h{n}" if n else "", devices=count, cpus=cpus) for n, count in enumerate(devices))


@st.composite
def runs(draw: st.DrawFn) -> Wanted:
    each = draw(st.sampled_from([0, 1, 2, 4]))
    return Wanted(
        ranks=draw(st.integers(1, 16)),
        rank_devices=draw(st.sampled_from([0, 1])),
        actors=draw(st.just("fill") | st.integers(1, 64)),
        actor_devices=each,
        scorer=draw(st.booleans()),
        scorer_devices=draw(st.sampled_from([0, 1])),
        evaluation_devices=each,
        evaluates_beside=draw(st.booleans()),
        colocate=draw(st.booleans()),
        actor_share=0.4,
    )


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


@given(runs(), inventories())
def test_every_process_has_its_devices_and_no_device_two_processes_or_the_reason_names_the_numbers(
    wanted: Wanted, inventory: Inventory
) -> None:
    there = sum(host.devices for host in inventory)
    try:
        found = place(wanted, inventory)
    except ConfigError as error:
        text = str(error)
        assert any(word in text for word in ("learner.ranks = ", "actors.count = ", "evaluation.every"))
        if "learner.ranks = " in text.partition(":")[0] and wanted.rank_devices:
            assert wanted.ranks > there and f"need {wanted.ranks} devices" in text
        assert f"of {inventory[0].devices} on this machine" in text
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
    assert scorers == (on if wanted.scorer else set())
    assert relays == {host: 1 for host, count in actors_of.items() if host and count > 1}


@given(runs(), inventories(), st.integers(1, 8))
def test_another_host_moves_nothing(wanted: Wanted, inventory: Inventory, devices: int) -> None:
    if not wanted.actor_devices:  # more actors than CPUs are what another host is for
        wanted = wanted if wanted.actors == "fill" else replace(wanted, actors=1)
        inventory = (replace(inventory[0], cpus=64), *inventory[1:])
    try:
        before = place(wanted, inventory)
    except ConfigError:
        return
    after = place(wanted, (*inventory, Host("new", devices=devices, cpus=4)))
    assert {name: after.slots[name] for name in before.slots} == dict(before.slots)


@given(runs(), inventories())
def test_fill_leaves_no_room_for_another_actor(wanted: Wanted, inventory: Inventory) -> None:
    wanted = replace(wanted, actors="fill", actor_devices=wanted.actor_devices or 1)
    try:
        found = place(wanted, inventory)
    except ConfigError:
        return
    with pytest.raises(ConfigError, match=f"highest: actors.count = {found.num_actors}"):
        place(replace(wanted, actors=found.num_actors + 1), inventory)
    assert place(replace(wanted, actors=found.num_actors), inventory) == found


def devices_of(placement: Placement, *names: str) -> list[Any]:
    return [(placement.slots[name].host, placement.slots[name].devices) for name in names]


def test_a_box_of_eight_gives_the_learner_the_first_devices_and_actors_the_rest() -> None:
    found = place(replace(GPU, ranks=2, actors="fill"), BOX)
    assert devices_of(found, "learner", "learner-rank-1", "actor-0", "actor-5") == [("", (n,)) for n in (0, 1, 2, 7)]
    assert found.num_actors == 6 and found.slots["evaluation"].devices == (0,) and found.evaluation_waits


def test_an_evaluation_beside_training_has_a_device_of_its_own() -> None:
    found = place(replace(GPU, evaluates_beside=True, actors="fill"), BOX)
    assert devices_of(found, "learner", "evaluation", "actor-0") == [("", (0,)), ("", (1,)), ("", (2,))]
    assert not found.evaluation_waits
    with pytest.raises(ConfigError, match=r"evaluation\.every\) need 1 devices .* 0 free of 1 .*set evaluation\.every = 0"):
        place(replace(GPU, evaluates_beside=True), (Host(devices=1),))


def test_two_nodes_with_engines_of_four_devices_and_a_scorer_with_one_on_each() -> None:
    wanted = replace(GPU, ranks=3, actors="fill", actor_devices=4, scorer=True, scorer_devices=1)
    found = place(wanted, TWO)
    assert devices_of(found, "scorer", "actor-0", "scorer-1", "actor-1") == [
        ("", (3,)), ("", (4, 5, 6, 7)), ("b", (0,)), ("b", (1, 2, 3, 4)),
    ]  # fmt: skip
    assert "relay-1" not in found.slots and found.num_actors == 2
    smaller = place(replace(wanted, actor_devices=2), TWO)
    assert smaller.slots["relay-1"] == Slot("b", ()) and smaller.num_actors == 5


@given(st.integers(1, 20), st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True), st.booleans())
def test_actors_in_turn_on_hosts_bring_their_scorers_and_where_there_are_two_a_relay(
    actors: int, hosts: list[str], scorer: bool
) -> None:
    found = place(Wanted(actors=actors, scorer=scorer, away=True), (Host(cpus=2), *(Host(name, cpus=3) for name in hosts)))
    count = Counter(slot.host for name, slot in found.slots.items() if kind(name) == "actor")
    assert found.num_actors == actors and max(count.values()) - min(count[host] for host in hosts) <= 1
    scorers = [slot.host for name, slot in found.slots.items() if kind(name) == "scorer"]
    relays = [slot.host for name, slot in found.slots.items() if kind(name) == "relay"]
    assert scorers == ([host for host in hosts if count[host]] if scorer else [])
    assert relays == [host for host in hosts if count[host] > 1]


def test_one_device_for_all_is_given_only_when_it_is_wanted_and_the_shares_add_up() -> None:
    one = (Host(devices=1, cpus=8),)
    with pytest.raises(ConfigError, match=r"actors.count = 1: actors need a device each; .*0 free of 1.*placement.colocate"):
        place(GPU, one)
    found = place(replace(GPU, colocate=True, actor_share=0.4, evaluates_beside=True), one)
    assert devices_of(found, "learner", "actor-0", "evaluation") == [("", (0,))] * 3
    with pytest.raises(ConfigError, match=r"share = 0\.5: device 0 .* actor-0, evaluation, learner.* 1 of its.*below 0\.5"):
        place(replace(GPU, colocate=True, actor_share=0.5, evaluates_beside=True), one)


def test_the_learner_fills_the_hosts_that_it_is_given_in_their_order() -> None:
    found = place(replace(GPU, ranks=10, learner_hosts=("b", ""), actors="fill"), TWO)
    ranks = [found.slots["learner"], *(found.slots[f"learner-rank-{rank}"] for rank in range(1, 10))]
    assert [slot.host for slot in ranks] == ["b"] * 8 + [""] * 2
    assert all(a.host != b.host or a.devices < b.devices for a, b in pairwise(ranks))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"learner_hosts names 'c', which is no host .*: this machine, b"):
        place(replace(GPU, learner_hosts=("c",)), TWO)
    with pytest.raises(ConfigError, match=r"learner.ranks = 9 .* need 9 devices.*8 free of 8 on b; highest: learner.ranks = 8"):
        place(replace(GPU, ranks=9, learner_hosts=("b",)), TWO)


def test_actors_on_cpus_fill_hosts_and_more_of_them_stay_with_the_supervisor() -> None:
    cpus = (Host(cpus=4), Host("b", cpus=2))
    found = place(Wanted(actors="fill"), cpus)
    assert devices_of(found, "actor-0", "actor-1", "actor-2", "actor-3") == [("", ()), ("", ()), ("b", ()), ("b", ())]
    assert found.num_actors == 4
    more = place(Wanted(actors=6), cpus)
    assert devices_of(more, "actor-4", "actor-5") == [("", ()), ("", ())]
    assert place(Wanted(actors="fill"), (Host(cpus=1),)).num_actors == 1


def test_actors_away_are_on_other_hosts_in_turn_with_devices_of_their_own() -> None:
    hosts = (Host(devices=8, cpus=8), Host("a", devices=2, cpus=4), Host("b", devices=1, cpus=4))
    found = place(replace(GPU, actors="fill", away=True), hosts)
    assert devices_of(found, "actor-0", "actor-1", "actor-2") == [("a", (0,)), ("b", (0,)), ("a", (1,))]
    assert found.num_actors == 3
    with pytest.raises(ConfigError, match=r"there are 2 free of 2 on a, 1 free of 1 on b; highest: actors\.count = 3"):
        place(replace(GPU, actors=4, away=True), hosts)
    on_cpus = place(Wanted(actors=10, away=True), hosts)
    assert [slot.host for name, slot in on_cpus.slots.items() if kind(name) == "actor"] == ["a", "b"] * 5


def test_the_supervisors_machine_under_another_name_has_the_devices_that_the_learner_leaves() -> None:
    hosts = (Host(devices=4, cpus=8), Host("ray-0", devices=4, cpus=8, own=True))
    found = place(replace(GPU, ranks=2, actors="fill", away=True), hosts)
    assert devices_of(found, "learner", "learner-rank-1") == [("", (0,)), ("", (1,))]
    assert devices_of(found, "actor-0", "actor-1") == [("ray-0", (2,)), ("ray-0", (3,))] and found.num_actors == 2
    assert devices_of(place(replace(GPU, learner_hosts=("ray-0",), away=True), hosts), "learner") == [("", (0,))]


def test_what_is_not_cuda_is_left_as_it_is_found() -> None:
    found = place(Wanted(rank_devices=None, actor_devices=None, actors=2), BOX)
    assert devices_of(found, "learner", "actor-1") == [("", None), ("", None)]
