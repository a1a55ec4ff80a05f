"""Which CPUs each process of a run has: laws of the pure part, what is refused, and runs whose processes have them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch import machine
from async_rlhf.launch.exit_codes import InterruptedRunError
from async_rlhf.launch.local import LocalLauncher
from async_rlhf.launch.placement import Host, Part, Placement, Strategy, WantedNodes, cpu_sets, place, shares
from async_rlhf.launch.program import Node, Process
from async_rlhf.preparation import prepare
from async_rlhf.run.hosts.placement import placement_of, table, with_threads
from tests.conftest import wait_for

PARTS: tuple[Part, ...] = ("generation", "scoring", "learning")
parts_of_a_host = st.sets(st.sampled_from(PARTS), min_size=1)
strategies = st.sampled_from(["flattening", "interleaving", "separation"])


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(0, 200))
def test_shares_add_up_are_at_least_one_and_within_one_of_the_exact_share(weights: list[int], more: int) -> None:
    num_cpus = len(weights) + more
    found, exact = shares(weights, num_cpus), [weight * num_cpus / sum(weights) for weight in weights]
    assert sum(found) == num_cpus and min(found) >= 1
    if min(exact) >= 1:
        assert all(abs(has - share) < 1 for has, share in zip(found, exact, strict=True))
    heavier = sorted(zip(weights, found, strict=True))
    assert [has for _, has in heavier] == sorted(found), "more weight, not fewer CPUs"


@given(strategies, parts_of_a_host, st.integers(1, 64))
def test_sets_cover_the_host_and_are_disjoint_where_that_is_said(strategy: Strategy, parts: set[Part], num_cpus: int) -> None:
    try:
        sets = cpu_sets(strategy, parts, Host(cpus=num_cpus))
    except ConfigError as error:
        assert num_cpus == 1 and strategy != "flattening" and {"learning"} < parts and "has 1 for the run" in str(error)
        return
    assert set(sets) == parts
    assert {cpu for each in sets.values() for cpu in each} == set(range(num_cpus))
    assert all(each == tuple(range(each[0], each[-1] + 1)) for each in sets.values())
    distinct = {frozenset(each) for each in sets.values()}
    assert sum(map(len, distinct)) == num_cpus, "two sets are one and the same, or disjoint"
    if strategy == "flattening":
        assert len(distinct) == 1
    elif strategy == "interleaving" and {"scoring", "learning"} <= parts:
        assert sets["scoring"] == sets["learning"] != sets.get("generation")
    elif num_cpus >= len(parts):
        assert len(distinct) == len(parts)
    else:
        assert sets["generation"] == sets["scoring"] != sets.get("learning")


def test_on_two_cpus_scoring_is_with_the_learner_or_with_generation_and_on_four_it_has_its_own() -> None:
    found = {name: cpu_sets(name, PARTS, Host(cpus=2)) for name in ("interleaving", "separation")}
    assert found["interleaving"] == {"generation": (0,), "scoring": (1,), "learning": (1,)}
    assert found["separation"] == {"generation": (0,), "scoring": (0,), "learning": (1,)}
    assert cpu_sets("separation", PARTS, Host(cpus=4)) == {"generation": (0, 1), "scoring": (2,), "learning": (3,)}
    assert cpu_sets("interleaving", PARTS, Host(cpus=4))["learning"] == (2, 3)


def on(hosts: tuple[Host, ...], **wanted: Any) -> Placement:
    return place(WantedNodes(scorer=True, **wanted), hosts)


def test_without_a_strategy_a_process_is_held_to_nothing() -> None:
    assert {(slot.cpus, slot.threads) for slot in on((Host(cpus=8),)).slots.values()} == {(None, None)}


def test_processes_of_a_part_share_its_set_and_divide_its_threads_on_each_host() -> None:
    hosts = Host(cpus=8), Host(name="b", cpus=4)
    slots = on(hosts, strategy="separation", actors=4, away=True, evaluates_beside=True).slots
    assert (slots["learner"].cpus, slots["learner"].threads) == (tuple(range(8)), 8), "its host has no other part"
    assert {slots[f"actor-{n}"].cpus for n in range(4)} == {(0, 1, 2)} and slots["actor-0"].threads == 1
    assert slots["scorer-1"].cpus == (3,)
    assert slots["hub"].cpus is slots["relay-1"].cpus is slots["hub"].threads is None
    here = on(hosts[:1], strategy="separation", actors=2).slots
    assert here["actor-0"].threads == 2 and here["evaluation"].cpus == here["actor-0"].cpus == (0, 1, 2, 3)


def test_devices_follow_the_strategy() -> None:
    needs = {"rank_devices": 1, "actor_devices": 1, "scorer_devices": 1, "actor_share": 0.4}
    for count, strategy, wanted in ((1, "flattening", (0, 0, 0)), (2, "interleaving", (0, 0, 1)), (3, "separation", (0, 1, 2))):
        slots = on((Host(devices=count, cpus=8),), strategy=strategy, **needs).slots
        assert [slots[name].devices for name in ("learner", "scorer", "actor-0")] == [(device,) for device in wanted]
    with pytest.raises(ConfigError, match=r"actors.count = 1: actors need a device each"):
        on((Host(devices=2, cpus=8),), strategy="separation", **needs)


def test_a_host_under_two_names_divides_its_cpus_once() -> None:
    hosts = Host(cpus=4), Host(name="me", cpus=4, own=True)
    slots = on(hosts, strategy="separation", actors=1, away=True).slots
    assert (slots["actor-0"].cpus, slots["scorer-1"].cpus, slots["learner"].cpus) == ((0, 1), (2,), (3,))


runs_with_a_scorer = st.builds(
    WantedNodes, ranks=st.integers(1, 3), rank_devices=st.sampled_from([0, 1]), actors=st.integers(1, 6),
    actor_devices=st.sampled_from([0, 1, 2]), scorer=st.just(True), scorer_devices=st.sampled_from([0, 1]),
    actor_share=st.just(0.4),
)  # fmt: skip
hosts_with_devices = st.lists(st.tuples(st.integers(4, 8), st.integers(2, 32)), min_size=1, max_size=4).map(
    lambda found: tuple(Host(name=f"h{n}" if n else "", devices=devices, cpus=cpus) for n, (devices, cpus) in enumerate(found))
)


@given(runs_with_a_scorer, hosts_with_devices, strategies)
def test_whatever_is_placed_parts_that_are_apart_share_neither_cpus_nor_devices(
    wanted: WantedNodes, inventory: tuple[Host, ...], strategy: Strategy
) -> None:
    try:
        slots = place(replace(wanted, strategy=strategy), inventory).slots
    except ConfigError:
        return
    together = {"flattening": {"learner", "scorer", "actor"}, "interleaving": {"learner", "scorer"}, "separation": set[str]()}
    cpus = {host.name: host.cpus for host in inventory}
    for (one, a), (other, b) in combinations(slots.items(), 2):
        kinds = {one.partition("-")[0], other.partition("-")[0]}
        if a.host != b.host or not kinds <= {"learner", "scorer", "actor"}:
            continue
        assert a.cpus and b.cpus and max(*a.cpus, *b.cpus) < cpus[a.host]
        if len(kinds) == 1:
            assert a.cpus == b.cpus and not set(a.devices or ()) & set(b.devices or ())
        elif not kinds <= together[strategy]:
            assert not set(a.devices or ()) & set(b.devices or ())
            assert (kinds == {"actor", "scorer"} and a.cpus == b.cpus) or not set(a.cpus) & set(b.cpus)
    for kind, host in {(name.partition("-")[0], slot.host) for name, slot in slots.items() if slot.cpus}:
        same = [slot for name, slot in slots.items() if name.partition("-")[0] == kind and slot.host == host]
        assert sum(slot.threads or 0 for slot in same) <= max(len(same), len(same[0].cpus or ()))


@pytest.mark.parametrize(
    ("hosts", "wanted", "says"),
    [
        ((Host(cpus=1),), {"strategy": "separation"}, r"'separation' needs 2 CPUs of this machine .* has 1 .*'flattening'"),
        ((Host(cpus=8),), {"strategy": "flattening", "actors": "fill"}, "actors.count = 'fill' .* set a number"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_with_the_nearest(
    hosts: tuple[Host, ...], wanted: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        on(hosts, **wanted)


def test_settings_that_contradict_a_strategy_are_refused(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"colocate = true lets all share devices, and strategy = 'separation' does not"):
        small(**{"placement.strategy": "separation", "placement.colocate": True})
    with pytest.raises(ConfigError, match=r"'seperation': .* 'flattening', 'interleaving' or 'separation'"):
        small(**{"placement.strategy": "seperation"})
    with pytest.raises(ConfigError, match=r"there is none: .* scoring.placement = 'process'"):
        placement_of(small(**{"placement.strategy": "interleaving"}), (Host(cpus=2),))
    many = len(os.sched_getaffinity(0)) + 8
    with pytest.raises(ConfigError, match=rf"may use only {many - 8} .*cpus = {many - 8}"):
        placement_of(small(**{"placement.strategy": "separation"}), (Host(cpus=many),))
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigError, match="cannot hold processes to CPUs"):
        placement_of(small(**{"placement.strategy": "flattening"}))


def test_threads_of_a_process_follow_its_set_but_a_batch_invariant_engine_keeps_one(small: Callable[..., Any]) -> None:
    late = with_threads(small(**{"queue.max_staleness": 4}), 6)
    assert (late.engine.threads, late.learner.threads) == (6, 6)
    exact = with_threads(small(**{"queue.max_staleness": 0}), 6)
    assert (exact.engine.threads, exact.learner.threads) == (1, 6)
    judged = {"loss.kl_coef": 0.1, "scoring.stages": {"reference": {"placement": "process"}}}
    assert with_threads(small(**judged), 3).scoring.reference.threads == 3
    assert with_threads(late, None) is late


def allowed(pid: int) -> set[int]:
    """Of every thread that it has now."""
    found: set[int] = set()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # a thread that has ended meanwhile
            listed = next(line for line in status.read_text().splitlines() if line.startswith("Cpus_allowed_list:"))
            for part in listed.split(":")[1].split(","):
                first, _, last = part.strip().partition("-")
                found |= set(range(int(first), int(last or first) + 1))
    return found


def test_a_launcher_holds_the_child_and_not_itself(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    node = Node("hub", "hub", (), tmp_path / "hub.log", cpus=(0,), threads=1)
    process = LocalLauncher().start(tmp_path, node)
    try:
        assert allowed(process.pid) == {min(before)} and os.sched_getaffinity(0) == before
    finally:
        process.kill()
    assert machine.assigned_threads(machine.with_threads(7)) == 7 and machine.assigned_threads({}) is None
    assert machine.with_threads(7, {})["OMP_WAIT_POLICY"] == "PASSIVE", "threads that wait leave their CPU to other parts"
    assert machine.with_threads(7, {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"
    assert machine.with_threads(None) == {}
    with pytest.raises(ConfigError, match="CPU 4096 of this machine"):
        LocalLauncher().start(tmp_path, Node("hub", "hub", (), tmp_path / "hub.log", cpus=(4096,)))
    assert os.sched_getaffinity(0) == before


def test_check_shows_the_cpus_of_each_process(small: Callable[..., Any]) -> None:
    config, inventory = small(**{"placement.strategy": "separation", "scoring.placement": "process"}), (Host(cpus=2),)
    placement = place(WantedNodes(scorer=True, strategy="separation"), inventory)
    assert [line.split() for line in table(config, inventory, placement)] == [
        ["process", "host", "devices", "CPUs"],
        ["hub", "this", "machine", "none", "all"],
        ["learner", "this", "machine", "none", "1"],
        ["scorer", "this", "machine", "none", "0"],
        ["actor-0", "this", "machine", "none", "0"],
    ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="sets of one CPU are all the same")
def test_every_process_of_a_run_has_the_cpus_of_its_placement_after_a_kill_too(small: Callable[..., Any]) -> None:
    config = small(**{"placement.strategy": "interleaving", "scoring.placement": "process", "max_steps": 100_000})
    usable = sorted(before := os.sched_getaffinity(0))
    inventory = (Host(cpus=len(usable)),)
    supervisor, _ = prepare(config, inventory=inventory)
    seen: list[dict[str, set[int]]] = []

    def all_of_them() -> dict[str, Process] | None:
        running = supervisor.processes()
        return running if len(running) == 4 else None

    def another_than(pid: int) -> Process | None:
        actor = supervisor.processes().get("actor-0")
        return None if actor is None or actor.pid == pid else actor

    def look() -> None:
        """At all processes; then an actor is killed, and at the next. The run goes on until it has been looked at."""
        try:
            processes = wait_for(all_of_them, "four processes")
            seen.append({name: allowed(process.pid) for name, process in processes.items()})
            struck = processes["actor-0"].pid
            os.kill(struck, signal.SIGKILL)
            seen.append({"actor-0": allowed(wait_for(lambda: another_than(struck), "another actor").pid)})
        finally:
            supervisor.interrupt()
            supervisor.interrupt()

    looking = threading.Thread(target=look)
    looking.start()
    with pytest.raises(InterruptedRunError):
        supervisor.run()
    looking.join(60)
    assert os.sched_getaffinity(0) == before, "of this process it is not"
    placement = placement_of(config, inventory)
    expected = {
        name: set(usable) if slot.cpus is None else {usable[cpu] for cpu in slot.cpus} for name, slot in placement.slots.items()
    }
    began, again = seen
    assert began == {name: expected[name] for name in ("hub", "learner", "scorer", "actor-0")}
    assert again == {"actor-0": expected["actor-0"]}
