"""`plan --from-run`: a run whose constants are known is found again, and what it has reached serves a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.calibration.of_run import RunCosts
from async_rlhf.experiments.planning.calibration.reached import reached
from async_rlhf.experiments.planning.calibration.what_if import as_json, lines
from async_rlhf.experiments.planning.calibration.what_if import what_if as again
from async_rlhf.experiments.planning.model.costs import Costs
from async_rlhf.experiments.planning.model.stages import decode_step_s, optimizer_s, training_s
from async_rlhf.experiments.planning.placement.layouts import Layout
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.experiments.planning.placement.spec import Spec, parse
from async_rlhf.experiments.planning.simulation.refitting import scale
from async_rlhf.experiments.planning.simulation.run import simulate
from async_rlhf.experiments.planning.simulation.workload import Workload
from async_rlhf.run.config import Config, validated
from tests.planning.specs import LLAMA_1B

COSTS = Costs(decode=(2e-3, 1e-4, 1e-6), training=(0.05, 0.0, 1e-4), copy_s=0.01, travel_s=0.03, adopt_s=0.004)
LOAD = Workload(groups_per_batch=8, group_size=4, lengths=(10, 20, 60), prompt_tokens=16, max_staleness=2, slots=32)


def made(load: Workload, costs: Costs, truth: Costs) -> RunCosts:
    """A run by `truth`, of which `costs` were read."""
    run = simulate(load, truth, steps=40)
    return RunCosts(
        workload=load,
        costs=costs,
        fits={},
        steps=40,
        seconds_per_step=run.seconds_per_step,
        samples_per_s=run.samples_per_s,
        learner_idle=run.roles["learner"].idle,
    )


def test_a_run_is_met_and_the_least_staleness_that_is_as_fast_is_named() -> None:
    truth = scale(COSTS, {"generation": 1.5, "completion": 1.0, "training": 1.2, "publication": 1.0})
    measured = made(LOAD, COSTS, truth)
    found = again(measured)
    assert found.own.samples_per_s == pytest.approx(measured.samples_per_s, rel=0.03)
    assert set(found.by_bound) == {0, 1, 2, 4, 8}
    speeds = [found.by_bound[bound].samples_per_s for bound in sorted(found.by_bound)]
    assert all(later > 0.98 * earlier for earlier, later in pairwise(speeds))
    assert found.by_bound[found.best].samples_per_s >= 0.98 * max(speeds)
    for bound, each in found.by_bound.items():
        true = simulate(replace(LOAD, max_staleness=bound), truth, steps=40).samples_per_s
        assert each.samples_per_s == pytest.approx(true, rel=0.1)
    text = "\n".join(lines(found))
    assert f"[queue]\nmax_staleness = {found.best}" in text and "(this run;" in text and "an actor more" in text
    assert json.loads(json.dumps(as_json(found), allow_nan=False))["settings"] == {"queue": {"max_staleness": found.best}}


def test_a_bound_under_which_the_run_would_hang_is_left_out() -> None:
    every = replace(LOAD, publish_every=3)
    assert set(again(made(every, COSTS, COSTS)).by_bound) == {2, 4, 8}


def asked(**efficiency: float) -> Spec:
    values = {
        "models": {"policy": LLAMA_1B},
        "cluster": {"device": "A100-80GB", "devices_per_node": 8},
        "lengths": {"prompt": 16, "mean": 30, "longest": 60},
        "efficiency": efficiency,
    }
    return parse(values, Path())


def config() -> Config:
    return validated({"name": "run", "model": "MODEL", "data": {"source": "DATA"}, "learner": {"micro_batch_tokens": 64}})


def of(spec: Spec, *, faster: float = 1.0) -> RunCosts:
    """A run on one device for each role, as the stages say of the spec."""
    roles, mean = Roles.of(spec), sum(LOAD.lengths) / len(LOAD.lengths)
    row = round(LOAD.prompt_tokens + mean)
    train, engine = (roles.place(role, Layout()) for role in ("train", "generate"))  # type: ignore[arg-type]
    step_s = training_s(train, LOAD.samples, row, micro_batches=LOAD.samples) + optimizer_s(train)
    decode_s = decode_step_s(engine, LOAD.samples // 2, LOAD.prompt_tokens + mean / 2)
    costs = Costs(decode=(decode_s / faster, 0.0, 0.0), training=(step_s / faster, 0.0, 0.0), travel_s=2.0)
    return made(LOAD, costs, costs)


def test_the_shares_that_a_run_has_reached_are_found() -> None:
    truth = asked(training=0.3, launch_s=0.006)
    found = reached(asked(), config(), of(truth))
    assert found.training == pytest.approx(0.3, rel=1e-3) and found.launch_s == pytest.approx(0.006, rel=1e-3)
    assert found.decode == asked().efficiency.decode
    assert found.weights_bytes_per_s == pytest.approx(Roles.of(truth).policy.weight_bytes / 2.0)


def test_an_engine_that_is_faster_than_its_share_allows_has_a_larger_one() -> None:
    found = reached(asked(decode=0.2), config(), of(asked(decode=0.5, launch_s=0.0)))
    assert found.launch_s == 0 and found.decode == pytest.approx(0.5, rel=1e-3)


def test_a_run_that_no_such_device_can_have_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a decode step of the run took .* by the peaks of the spec's device 'A100-80GB'"):
        reached(asked(), config(), of(asked(), faster=100.0))
