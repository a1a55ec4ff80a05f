"""`plan --from-run`: a run whose constants are known is found again, and what it has reached serves a plan; `try machine`."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.stages import StageTime
from async_rlhf.cli.commands import app
from async_rlhf.experiments.planning.calibration import machine, of_run
from async_rlhf.experiments.planning.calibration.of_run import RunCosts, costs_of_run, reached
from async_rlhf.experiments.planning.calibration.what_if import as_json, lines, scaled, what_if
from async_rlhf.experiments.planning.model.stages import Layout, decode_step_s, training_s
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.experiments.planning.placement.spec import Spec
from async_rlhf.experiments.planning.simulation.run import simulate
from async_rlhf.experiments.planning.simulation.workload import Costs, Workload
from async_rlhf.run.config import Config, validated
from async_rlhf.run.run_dir import RunDir
from tests.formats.sample import copied
from tests.planning.specs import spec

COSTS = Costs(decode=(2e-3, 1e-4, 1e-6), training=(0.05, 0.0, 1e-4), copy_s=0.01, travel_s=0.03, adopt_s=0.004)
LOAD = Workload(groups_per_batch=8, group_size=4, lengths=(10, 20, 60), prompt_tokens=16, max_staleness=2, slots=32)
MEAN = 30


def made(load: Workload, costs: Costs, truth: Costs) -> RunCosts:
    """A run by `truth`, of which `costs` were read."""
    run = simulate(load, truth, steps=40)
    idle = run.roles["learner"].idle
    return RunCosts(workload=load, costs=costs, steps=40, samples_per_s=run.samples_per_s, learner_idle=idle)


def test_a_run_is_met_and_the_least_staleness_that_is_as_fast_is_named() -> None:
    _, truth = scaled(LOAD, COSTS, {"generation": 1.5, "training": 1.2, "publication": 1.0, "scoring": 1.0})
    measured = made(LOAD, COSTS, truth)
    found = what_if(measured)
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
    assert set(what_if(made(every, COSTS, COSTS)).by_bound) == {2, 4, 8}


def question(**efficiency: float) -> Spec:
    return spec(lengths={"prompt": 16, "mean": MEAN, "longest": 60}, efficiency=efficiency)


def config() -> Config:
    return validated({"name": "run", "model": "MODEL", "data": {"source": "DATA"}, "learner": {"micro_batch_tokens": 64}})


def of(spec: Spec, *, faster: float = 1.0) -> RunCosts:
    """A run on one device for each role, as the stages give for the spec."""
    roles, row = Roles(spec), LOAD.prompt_tokens + MEAN
    step_s = training_s(roles.place("train", Layout()), LOAD.samples, row, micro_batches=LOAD.samples)
    decode_s = decode_step_s(roles.place("generate", Layout()), LOAD.samples // 2, LOAD.prompt_tokens + MEAN / 2)
    costs = Costs(decode=(decode_s / faster, 0.0, 0.0), training=(step_s / faster, 0.0, 0.0), travel_s=2.0)
    return made(LOAD, costs, costs)


def test_the_shares_that_a_run_has_reached_are_found() -> None:
    truth = question(training=0.3, launch_s=0.006)
    found = reached(question(), config(), of(truth))
    assert found.training == pytest.approx(0.3, rel=1e-3) and found.launch_s == pytest.approx(0.006, rel=1e-3)
    assert found.decode == question().efficiency.decode
    assert found.weights_bytes_per_s == pytest.approx(Roles(truth).policy.weight_bytes / 2.0)
    # An engine that is faster than its share allows has a larger one.
    found = reached(question(decode=0.2), config(), of(question(decode=0.5, launch_s=0.0)))
    assert found.launch_s == 0 and found.decode == pytest.approx(0.5, rel=1e-3)
    with pytest.raises(ConfigError, match=r"a decode step of the run took .* by the peaks of the spec's device 'A100-80GB'"):
        reached(question(), config(), of(question(), faster=100.0))


intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=8)


@given(intervals)
def test_rows_beside_a_completion_and_the_most_at_once_are_those_of_each_second(pairs: list[tuple[int, int]]) -> None:
    times = [StageTime(1.7e9 + began, 1.7e9 + began + took) for began, took in pairs]
    alive = [sum(began <= at < began + took for began, took in pairs) for at in range(80)]
    means = [np.mean(alive[began : began + took]) for began, took in pairs]
    assert of_run._rows_beside(times) == pytest.approx(means, abs=1e-5)
    assert of_run._peak(times) == max(alive)


@pytest.mark.rest
def test_the_costs_of_a_real_run_simulate_a_run_of_about_its_speed(small: Callable[..., Any]) -> None:
    config = small(max_steps=100, **{"queue.keep_rollouts": True, "engine.slots": 8, "checkpoint.save_every": 100})
    ended = RunDir.existing(train(config, quiet=True).run_dir)
    found = costs_of_run(ended)
    workload, costs = found.workload, found.costs
    assert (workload.groups_per_batch, workload.group_size, workload.slots, workload.max_staleness) == (4, 4, 8, 1)
    assert len(workload.lengths) == len(workload.reward_s) == 100 * 16 and max(workload.lengths) <= 12
    assert 0 < workload.prompt_tokens <= 96
    assert costs.decode_s(8, 60) > 0 and costs.copy_s > 0 and costs.adopt_s > 0 and 0 <= found.learner_idle < 1
    assert 0.4 < simulate(workload, costs, steps=found.steps).samples_per_s / found.samples_per_s < 2.5
    shown = CliRunner().invoke(app, ["plan", "--from-run", str(ended.path)])
    assert shown.exit_code == 0 and "100 steps of 16 completions by 1 actor(s), max_staleness 1" in shown.output
    shutil.rmtree(ended.path / "queue")
    without = costs_of_run(ended)
    assert without.samples_per_s == found.samples_per_s and without.costs.training_s(4, 0, 100, 1) > 0
    first, row, token = without.costs.decode
    assert first == token == 0 and row > 0  # a cost for each token, whatever is decoded beside it
    assert simulate(without.workload, without.costs, steps=without.steps).samples_per_s > 0


def test_a_run_of_too_few_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has done 3 steps: at least 4 are needed"):
        costs_of_run(copied(tmp_path, 3))


def test_a_machine_that_was_measured_is_the_device_of_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rlhf.experiments.planning.command._MEASURED_S", 0.01)
    shown = CliRunner().invoke(app, ["try", "machine"])
    assert shown.exit_code == 0, shown.output
    roles = Roles(spec(cluster=tomllib.loads(shown.stdout)["cluster"]))
    assert roles.device.is_cpu and min(roles.device.model_dump().values()) > 0
    with pytest.raises(ConfigError, match=r"'meteor' cannot be used.*use 'cpu'"):
        machine.measure("meteor", "float32", 1, 0.01)
