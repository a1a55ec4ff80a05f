"""Runs whose constants are known are found again, and predict runs that were not looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.costs import Costs
from async_rlhf.experiments.planning.simulation.refitting import KINDS, Observed, refit, scale, slowed
from async_rlhf.experiments.planning.simulation.run import simulate
from async_rlhf.experiments.planning.simulation.workload import Pool, Workload

GUESS = Costs(decode=(2e-3, 1e-4, 0.0), training=(0.1, 0.0, 1e-4), copy_s=0.01, travel_s=0.02, adopt_s=0.01)
BASE = Workload(
    groups_per_batch=4, group_size=4, lengths=(10, 20, 60), prompt_tokens=20, max_staleness=0, slots=16, reward_s=(0.01,)
)
TOGETHER = Pool(1, ("actor", "scoring", "learner"))
SEEN = [BASE, replace(BASE, max_staleness=4), replace(BASE, max_staleness=2, pools=(TOGETHER,))]
OTHERS = [
    replace(BASE, max_staleness=1, actors=2),
    replace(BASE, max_staleness=4, lengths=(5, 200)),
    replace(BASE, reward_s=(0.1,)),
]
STEPS = 10


def observed(costs: Costs) -> list[Observed]:
    found = [simulate(each, costs, steps=STEPS) for each in SEEN]
    return [Observed(each, run.samples_per_s, run.roles["learner"].idle) for each, run in zip(SEEN, found, strict=True)]


def test_the_constants_of_simulated_runs_are_found_and_predict_others() -> None:
    truth = scale(GUESS, {"generation": 3.1, "completion": 1.0, "training": 0.6, "publication": 1.0})
    found = refit(GUESS, observed(truth), steps=STEPS)
    assert found.factors["generation"] == pytest.approx(3.1, rel=0.1)
    assert found.factors["training"] == pytest.approx(0.6, rel=0.1)
    assert max(map(abs, found.errors)) < 0.02
    for each in OTHERS:
        predicted, measured = (simulate(each, costs, steps=STEPS).samples_per_s for costs in (found.costs, truth))
        assert predicted == pytest.approx(measured, rel=0.05)


def test_rewards_that_take_longer_beside_other_processes_are_found_and_those_that_only_wait_stay() -> None:
    factors = {**dict.fromkeys(KINDS, 1.0), "scoring": 1.6}
    free = replace(BASE, reward_s=(0.0,))
    seen = [free, replace(free, max_staleness=4), replace(BASE, reward_s=(0.03,))]
    found = [simulate(slowed(each, factors), GUESS, steps=STEPS) for each in seen]
    pairs = zip(seen, found, strict=True)
    observed = [Observed(each, run.samples_per_s, run.roles["learner"].idle) for each, run in pairs]
    refitted = refit(GUESS, observed, steps=STEPS)
    assert max(map(abs, refitted.errors)) < 0.02
    slow = replace(BASE, reward_s=(0.05,))
    predicted = simulate(slowed(slow, refitted.factors), refitted.costs, steps=STEPS).samples_per_s
    assert predicted == pytest.approx(simulate(slowed(slow, factors), GUESS, steps=STEPS).samples_per_s, rel=0.1)
    waits = replace(BASE, reward_cores=False)
    assert slowed(waits, factors) == waits


def test_constants_that_are_right_stay_as_they_are() -> None:
    found = refit(GUESS, observed(GUESS), steps=STEPS)
    assert found.costs == GUESS and found.errors == (0.0,) * len(SEEN)


def test_without_a_measured_speed_there_is_nothing_to_refit_to() -> None:
    with pytest.raises(ConfigError, match="nothing to refit to: 0 runs"):
        refit(GUESS, [])
    with pytest.raises(ConfigError, match="each with a speed above 0"):
        refit(GUESS, [Observed(BASE, 0.0, 0.5)])
