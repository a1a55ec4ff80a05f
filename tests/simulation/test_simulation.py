"""Thousands of tiny runs with kills, cuts, torn writes and full disks: no rule breaks, and planted defects are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.simulation import mutations, schedule

BLOCK = 1000
REST = pytest.mark.rest
# Found only after hundreds of schedules.
LATE = {mutations.call_a_missing_page_damage, mutations.go_on_while_a_version_may_be_lost}


@cache
def ran(seed: int) -> schedule.Result:
    """What several tests look at is run once."""
    return schedule.run(seed)


def test_the_schedules_break_no_rule() -> None:
    for seed in range(250):
        if ran(seed).violation is not None:
            pytest.fail(schedule.story(schedule.shrink(ran(seed))))


@REST
@pytest.mark.parametrize("start", range(250, 250 + 4 * BLOCK, BLOCK))
def test_none_of_thousands_breaks_a_rule(start: int) -> None:
    *_, failed = schedule.run_block((start, start + BLOCK))
    if failed is not None:
        pytest.fail(schedule.story(schedule.shrink(schedule.run(failed))))


@pytest.mark.parametrize(
    "plant",
    [pytest.param(plant, marks=REST if plant in LATE else ()) for plant in mutations.MUTATIONS],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_defect_is_found_within_a_thousand_schedules(plant: Callable[[], AbstractContextManager[Any]]) -> None:
    for seed in range(BLOCK):
        with plant():
            result = schedule.run(seed)
        if result.violation is not None:
            assert result.violation.rule in mutations.MUTATIONS[plant], result.violation
            return
    pytest.fail(f"{plant.__name__} broke no rule in {BLOCK} schedules")


def test_a_failing_schedule_shrinks_to_a_story_that_still_fails() -> None:
    with mutations.skip_an_fsync():
        failing = next(r for r in map(schedule.run, range(BLOCK)) if r.violation is not None and len(r.faults) >= 3)
        shrunk = schedule.shrink(failing)
    assert shrunk.violation is not None and 0 < len(shrunk.faults) < len(failing.faults)
    assert f"seed {failing.seed}" in schedule.story(shrunk) and "FAULT" in schedule.story(shrunk, last=400)


def test_a_seed_gives_the_same_trace_in_every_process() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seeds", "0:12"],
            cwd=REPOSITORY, env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, text=True, timeout=300, check=True,
        ).stdout
        for salt in ("1", "2")
    }  # fmt: skip
    assert len(printed) == 1 and "no rule broken" in printed.pop()


def test_the_schedules_reach_what_they_are_for() -> None:
    """Every kind of fault strikes, and many runs end only after a hub, an actor and a learner have come back."""
    labels = [label for seed in range(150) for _, label in ran(seed).trace]
    told = " ".join(labels)
    for kind in ("hub", "learner", "zombie", "actor", "cut", "freeze", "full", "slow", "still", "load", "stuck", "double"):
        assert f"s: {kind} (" in told, kind
    for event in ("hub killed", "the disk is full", "learner ended", "the learner goes back", "the network is calm", "poison"):
        assert event in labels, event


def test_the_schedules_map_weights_and_kill_relays() -> None:
    """Of the learner's sets some are mapped and some cannot be; behind relays too, which die in between."""
    drawn = [ran(seed) for seed in range(120)]
    killed = [run for run in drawn if "relay killed" in [label for _, label in run.trace]]
    mapped = [run for run in drawn if run.mapped]
    assert len(killed) > 5 and len(mapped) > 20
    assert any(run.shape.shares and run.shape.refusals for run in mapped)
    assert any(run.shape.shares for run in killed) and not all(run.shape.shares for run in killed)


def test_the_schedules_feed_prompts_while_hubs_are_killed() -> None:
    """As many rows as were brought, each once, whatever became of the hub; some runs end by the end of the spool."""
    shapes = {seed: schedule.Shape.of(seed) for seed in range(140)}
    fed = [ran(seed) for seed, shape in shapes.items() if shape.fed and not shape.chosen]
    killed = [result for result in fed if "hub killed" in [label for _, label in result.trace]]
    assert len(fed) > 12 and len(killed) > 3
    assert any(result.hub["spool"]["ended"] for result in fed)
    assert {result.hub["spool"]["rows"] - result.shape.bound.num_numbers for result in fed} == {0}


def test_what_a_curriculum_chooses_does_not_depend_on_what_dies_or_who_is_faster() -> None:
    """Scores here follow from the number alone, as they do from its seeds in exact mode; quarantine takes numbers away."""
    compared = killed = 0
    for seed in range(600):
        shape = schedule.Shape.of(seed)
        if shape.chosen and not shape.fed and not shape.bound.refills and shape.bound.window == 1 and not shape.poison:
            faulty, calm = schedule.run(seed), schedule.run(seed, [])
            if not faulty.hub["ledger"]["quarantined"]:
                assert faulty.places == calm.places and len(faulty.places) > shape.bound.num_groups
                compared += 1
                killed += "hub killed" in [label for _, label in faulty.trace]
    assert compared > 20 and killed > 5


def test_the_schedules_send_deltas_and_drop_late_actors() -> None:
    """The weights of a run change in few elements, and slow links and frozen actors are late to adopt them."""
    totals = Counter[str]()
    for seed in range(60):
        totals.update(ran(seed).hub.get("weights", {}))
    assert totals["deltas"] > totals["sets"] / 3
    assert totals["dropped_actors"] > 0
