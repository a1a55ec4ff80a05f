"""Four weeks of one run in seconds: no rule breaks, nothing grows, and defects that minutes do not show are found."""

from __future__ import annotations

from collections import Counter

import pytest

from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.queue.fleet import Actor
from tests.simulation import weeks
from tests.simulation.mutations import mutation

LEASE_BY_THE_WALL_CLOCK = mutation(
    "The hub counts silence by the clock that people set.", "lease",
    (Exchange.__init__, "= clock,", '= (lambda: __import__("time").time()),'),
)  # fmt: skip
REMEMBER_WHAT_EVERY_ACTOR_MADE = mutation(
    "The numbers of groups that are done are never forgotten as long as their actor stays.", "",
    (Actor.progressed, "known = dict(amounts)", "known = {**self._works_on, **dict(amounts)}"),
)  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize("kills", [0, 300], ids=["one hub", "hundreds of hubs"])
def test_four_weeks_break_no_rule_and_nothing_grows(kills: int) -> None:
    found = weeks.run(1, kills=kills)
    assert found.violation is None, found.violation
    assert found.grown == {}
    struck = Counter(label for label in found.labels if label.startswith("FAULT") or label == "hub killed")
    assert found.hub["state"] == "finished" and found.ended_at * 1000 > 1 << 32
    assert found.num_segments > 400 and struck["FAULT clock"] > 100 and struck["FAULT freeze"] > 40
    assert struck["hub killed"] >= 0.7 * kills


def test_a_lease_by_a_clock_that_is_set_is_found() -> None:
    with LEASE_BY_THE_WALL_CLOCK.planted():
        found = weeks.run(5, kills=0)
    assert found.violation is not None and found.violation.rule in LEASE_BY_THE_WALL_CLOCK.rules, found.violation


def test_numbers_that_are_never_forgotten_are_found() -> None:
    with REMEMBER_WHAT_EVERY_ACTOR_MADE.planted():
        found = weeks.run(1, kills=0, days=14)
    assert any(place.endswith("._works_on") for place in found.grown), found.grown
