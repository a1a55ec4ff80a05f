"""Thousands of tiny runs with kills, cuts, torn writes and full disks: no rule breaks, and planted defects are found."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import pytest

from tests.conftest import python
from tests.simulation import schedule
from tests.simulation.mutations import MUTATIONS

BLOCK = 1000
REST = pytest.mark.rest
# Found only after hundreds of schedules.
LATE = {"call_a_missing_page_damage", "go_on_while_a_version_may_be_lost"}


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


@pytest.mark.parametrize("name", [pytest.param(name, marks=REST if name in LATE else ()) for name in MUTATIONS])
def test_a_planted_defect_is_found_within_a_thousand_schedules(name: str) -> None:
    for seed in range(BLOCK):
        with MUTATIONS[name].planted():
            result = schedule.run(seed)
        if result.violation is not None:
            assert result.violation.rule in MUTATIONS[name].rules, result.violation
            return
    pytest.fail(f"{name} broke no rule in {BLOCK} schedules: {MUTATIONS[name].says}")


def test_a_failing_schedule_shrinks_to_a_story_that_still_fails() -> None:
    with MUTATIONS["skip_an_fsync"].planted():
        failing = next(r for r in map(schedule.run, range(BLOCK)) if r.violation is not None and len(r.faults) >= 3)
        shrunk = schedule.shrink(failing)
    assert shrunk.violation is not None and 0 < len(shrunk.faults) < len(failing.faults)
    assert f"seed {failing.seed}" in schedule.story(shrunk) and "FAULT" in schedule.story(shrunk, last=400)


def test_a_seed_gives_the_same_trace_in_every_process() -> None:
    printed = {
        python("-m", "tests.simulation", "--seeds", "0:5", env={**os.environ, "PYTHONHASHSEED": salt}, check=True).stdout
        for salt in ("1", "2")
    }
    assert len(printed) == 1 and "no rule broken" in printed.pop()


def test_the_schedules_reach_what_they_are_for() -> None:
    """Every kind of fault strikes, and many runs end only after a hub, an actor and a learner have come back; weights are
    mapped, sent whole and sent as deltas, behind relays too, which die in between; spools are fed while hubs are killed."""
    drawn = [ran(seed) for seed in range(200)]
    seen = [{label for _, label in result.trace} for result in drawn]
    for kind in (*schedule.KINDS, "operator"):
        assert any(f"s: {kind} (" in label for labels in seen for label in labels), kind
    for event in ("hub killed", "the disk is full", "learner ended", "the learner goes back", "the network is calm", "poison"):
        assert any(event in labels for labels in seen), event
    relays = [result.shape.shares for result, labels in zip(drawn, seen, strict=True) if "relay killed" in labels]
    mapped = [result.shape.refusals for result in drawn if result.mapped]
    assert len(relays) > 5 and set(relays) == {True, False} and len(mapped) > 20 and any(mapped)
    fed = [(result, labels) for result, labels in zip(drawn, seen, strict=True) if result.shape.fed and not result.shape.chosen]
    assert len(fed) > 12 and sum("hub killed" in labels for _, labels in fed) > 3
    assert any(result.hub["spool"]["ended"] for result, _ in fed)
    assert {result.hub["spool"]["rows"] - result.shape.bound.num_numbers for result, _ in fed} == {0}, "each row once"
    totals = Counter[str]()
    for result in drawn:
        totals.update(result.hub.get("weights", {}))
    assert totals["deltas"] > totals["sets"] / 3 and totals["dropped_actors"] > 0
    cast = [result for result in drawn if result.shape.device]
    assert len(cast) > 40 and sum("learner ended" in {label for _, label in result.trace} for result in cast) > 5
    assert totals["broadcasts"] > 50 and totals["broadcasts_failed"] > 10 and totals["broadcasts_refused"] > 3
    assert totals["epochs"] > len(cast)


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
