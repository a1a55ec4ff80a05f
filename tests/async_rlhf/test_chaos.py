"""Faults of real processes, and the bookkeeper that judges a chaos run."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

from async_rlhf.inspect.chaos import FaultInjector, problems
from async_rlhf.preparation import prepare
from async_rlhf.run.run_dir import RunDir
from tests.conftest import wait_for


@pytest.mark.rest
def test_long_freezes_on_both_sides_of_the_watchdog_cost_no_group(small: Any) -> None:
    """With a watchdog of 20 s, freezes of 15 to 25 s; every fault is one, so that none may quarantine anything."""
    config = small(**{"max_steps": 250, "watchdog_s": 20.0, "actors.count": 2, "queue.lease_s": 2.0})
    supervisor, run = prepare(config, max_deaths=20)
    # This seed targets the learner, the hub, and only then an actor, without which the run goes on.
    long = {"num_long": 3, "long_freeze_s": (15.0, 25.0)}
    with FaultInjector(supervisor.processes, lambda: supervisor.num_records, 3, 75, **long) as injector:  # type: ignore[arg-type]
        supervisor.run()
    assert [fault.kind for fault in injector.faults] == ["long freeze"] * 3
    assert problems(run, config) == [] and run.read_ledger()["ledger"]["quarantined"] == 0


@pytest.mark.rest
def test_kills_and_freezes_beside_the_device_channel_cost_no_group_and_versions_go_on_being_broadcast(small: Any) -> None:
    settings = {"max_steps": 120, "actors.count": 2, "checkpoint.save_every": 2, "weights.transport": "device"}
    config = small(**settings, **{"weights.device_timeout_s": 2.0})
    supervisor, run = prepare(config, max_deaths=50)
    with FaultInjector(supervisor.processes, lambda: supervisor.num_records, 16, 5) as injector:
        supervisor.run()
    found = injector.faults
    assert len(found) == 16 and {fault.kind for fault in found} == {"kill", "freeze"}, found
    assert {"hub", "learner", "actor-0", "actor-1"} <= {fault.target for fault in found}
    assert problems(run, config) == []
    weights = run.read_ledger()["weights"]
    assert weights["broadcasts"] > 0 and weights["broadcasts_refused"] == 0, weights


def test_no_process_is_a_target_again_before_the_others_and_no_fault_comes_before_it_is_due() -> None:
    """Each is started again when it was killed, as a supervisor does."""
    lives = {name: [subprocess.Popen(["sleep", "600"])] for name in ("actor", "hub", "learner")}
    steps = 0

    def processes() -> dict[str, subprocess.Popen[bytes]]:
        for life in lives.values():
            if life[-1].poll() is not None:
                life.append(subprocess.Popen(["sleep", "600"]))
        return {name: life[-1] for name, life in lives.items()}

    def reach(step: int) -> None:
        nonlocal steps
        steps = step
        wait_for(lambda: len(injector.faults) >= step, f"{step} faults")

    injector = FaultInjector(processes, lambda: steps, 6, 0, freeze_share=0.0, is_due=lambda number: steps > number)
    try:
        with injector:
            for step in range(1, 7):
                reach(step)
        order = [fault.target for fault in injector.faults]
        assert set(order[:3]) == set(order[3:]) == set(lives)
        assert all(fault.kind == "kill" and fault.step > number for number, fault in enumerate(injector.faults))
        assert all(each.wait() == -signal.SIGKILL for life in lives.values() for each in life[:2])
    finally:
        for life in lives.values():
            life[-1].kill()
            life[-1].wait()


GOOD = [[0, 1, 2, 3], [4, 5, 6, 7]]
SILENT, ENDED = "attempt 0: anna was silent for 2 s", "attempt 1: ben ended: its process is gone"


@pytest.mark.parametrize(
    ("groups", "ledger", "reasons", "found"),
    [
        (GOOD, {}, [], []),
        ([[0, 1, 2, 3], [4, 5, 6]], {}, [], ["groups never trained: [7] (0 were quarantined)"]),
        ([[0, 1, 2, 3], [3, 5, 6, 7]], {}, [], ["groups trained more than once: [3]", "groups never trained: [4]"]),
        (GOOD, {"closes": False}, [], ["the ledger does not close"]),
        (GOOD, {"trained": 9}, [], ["the ledger has 9 trained groups"]),
        (GOOD, {}, [SILENT, ENDED], []),
        (GOOD, {}, [SILENT], ["group 7 was quarantined, and no actor ended with it"]),
    ],
)
def test_the_bookkeeper_sees_what_is_lost_repeated_or_left_open(
    small: Any, groups: list[list[int]], ledger: dict[str, Any], reasons: list[str], found: list[str]
) -> None:
    config = small(max_steps=2)
    run = RunDir.create(config)
    records = [{"step": i, "groups": each, "staleness/violations": 0} for i, each in enumerate(groups, 1)]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    total = sum(map(len, groups))
    run.ledger.write_text(json.dumps({"ledger": {"closes": True, "trained": total, "quarantined": 0, **ledger}}))
    if reasons:
        (run.path / "quarantine.jsonl").write_text(json.dumps({"group": 7, "reasons": reasons}) + "\n")
    seen = problems(run, config)
    assert len(seen) == len(found) and all(each.startswith(words) for each, words in zip(seen, found, strict=True)), seen
