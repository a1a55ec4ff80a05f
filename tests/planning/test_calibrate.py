"""A short real calibration and its file; the constants of a real run. That they are found is held, not how near they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_rlhf.api import run
from async_rlhf.buffers.errors import ConfigError, FormatError
from async_rlhf.cli.commands import app
from async_rlhf.experiments.planning.calibration.of_run import costs_of_run
from async_rlhf.experiments.planning.model.calibration import FORMAT, Calibration, load, save
from async_rlhf.experiments.planning.model.costs import Costs, Fit
from async_rlhf.experiments.planning.model.devices import Device
from async_rlhf.experiments.planning.simulation.run import simulate
from async_rlhf.experiments.planning.simulation.workload import Workload
from async_rlhf.run.run_dir import RunDir
from tests.formats.sample import copied

MADE = Calibration(
    measured="2026-01-01T00:00:00+0000",
    machine="made",
    model="tiny",
    engine_device="cpu",
    dtype="float32",
    threads=1,
    seconds=1.0,
    device=Device(
        peak_flops=1e11, memory_bytes=1e10, memory_bytes_per_s=1e10, link_bytes_per_s=1e9, link_latency_s=1e-5,
        network_bytes_per_s=1e9, network_latency_s=1e-5, host_bytes_per_s=1e10,
    ),
    costs=Costs(decode=(1e-3, 1e-5, 1e-8), training=(0.1, 0.0, 1e-5), travel_s=0.01),
    fits={"decode": Fit(constants=(1e-3, 1e-5, 1e-8), points=9, error=0.1, worst=0.3)},
)  # fmt: skip


def test_a_short_calibration_measures_every_stage_and_a_run_is_simulated_with_it(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    arguments = ["try", "machine", "--seconds", "2", "--slots", "8", "--out", str(out), "--json"]
    invoked = CliRunner().invoke(app, arguments)
    assert invoked.exit_code == 0, invoked.output
    assert json.loads(invoked.stdout) == json.loads(out.read_text())
    assert "matrix product" in invoked.stderr and "weights: copied" in invoked.stderr
    found = load(out)
    assert all(value > 0 for value in found.device.model_dump().values())
    costs = found.costs
    assert costs.decode_s(8, 64) >= costs.decode_s(1, 64) > 0
    assert costs.training_s(4, 32, 200, 1) > 0 and costs.prefill_s(4, 32) > 0
    assert min(costs.copy_s, costs.travel_s, costs.adopt_s) > 0
    assert all(each.points > 0 for each in found.fits.values())
    load_of_run = Workload(groups_per_batch=4, group_size=2, lengths=(8,), prompt_tokens=32, max_staleness=1, slots=8)
    assert simulate(load_of_run, costs, steps=4).samples_per_s > 0


def test_a_calibration_reads_back(tmp_path: Path) -> None:
    save(MADE, tmp_path / "made.json")
    assert load(tmp_path / "made.json") == MADE


def test_files_that_are_no_calibration_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"

    def refused(content: str, match: str, error: type[Exception] = ConfigError) -> None:
        path.write_text(content)
        with pytest.raises(error, match=match):
            load(path)

    values = json.loads(MADE.model_dump_json())
    with pytest.raises(ConfigError, match="does not exist; async-rlhf try machine --out FILE makes one"):
        load(path)
    refused("{", "cannot be read")
    refused("[]", "is no calibration")
    refused("{}", "is no calibration")
    refused(json.dumps({**values, "format": FORMAT.newest + 1}), "format 2.*use a newer version", FormatError)
    refused(json.dumps({**values, "costs": {**values["costs"], "decode": [1, 2]}}), "costs.decode.2: Field required")
    refused(json.dumps({**values, "device": {**values["device"], "peak_flops": -1}}), "device.peak_flops: .*greater than 0")
    refused(json.dumps({**values, "speed": 1}), "speed: Extra inputs are not permitted")
    refused(json.dumps(values).replace("1e-05", "NaN"), "cannot be read|finite number")


def test_a_calibration_that_cannot_be_written_or_made_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    nowhere = CliRunner().invoke(app, ["try", "machine", "--out", str(tmp_path / "none" / "a.json")])
    assert nowhere.exit_code == 3 and "its folder does not exist" in nowhere.output
    no_model = CliRunner().invoke(app, ["try", "machine", "--model", str(tmp_path), "--out", str(tmp_path / "a.json")])
    assert no_model.exit_code == 3 and "is no model directory" in no_model.output
    no_device = CliRunner().invoke(app, ["try", "machine", "--device", "meteor", "--out", str(tmp_path / "a.json")])
    assert no_device.exit_code == 3 and "'meteor' cannot be used" in no_device.output


@pytest.mark.rest
def test_the_costs_of_a_real_run_simulate_a_run_of_about_its_speed(small: Callable[..., Any]) -> None:
    config = small(max_steps=100, **{"queue.keep_rollouts": True, "engine.slots": 8, "checkpoint.save_every": 100})
    ended = RunDir.existing(run(config, quiet=True).run_dir)
    found = costs_of_run(ended)
    workload, costs = found.workload, found.costs
    assert (workload.groups_per_batch, workload.group_size, workload.slots, workload.max_staleness) == (4, 4, 8, 1)
    assert len(workload.lengths) == len(workload.reward_s) == 100 * 16 and max(workload.lengths) <= 12
    assert 0 < workload.prompt_tokens <= 96
    assert costs.decode_s(8, 60) > 0 and costs.copy_s > 0 and costs.adopt_s > 0
    assert found.observed.workload is workload and 0 <= found.learner_idle < 1
    simulated = simulate(workload, costs, steps=found.steps)
    assert 0.4 < simulated.samples_per_s / found.samples_per_s < 2.5
    said = CliRunner().invoke(app, ["plan", "--from-run", str(ended.path)])
    assert said.exit_code == 0 and "100 steps of 16 completions by 1 actor(s), max_staleness 1" in said.output
    shutil.rmtree(ended.path / "queue")
    without = costs_of_run(ended)
    assert without.samples_per_s == found.samples_per_s and without.costs.training_s(4, 0, 100, 1) > 0
    first, row, token = without.costs.decode
    assert first == token == 0 and row > 0  # a cost for each token, whatever is decoded beside it
    assert simulate(without.workload, without.costs, steps=found.steps).samples_per_s > 0


def test_a_run_of_too_few_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has done 3 steps: at least 4 are needed"):
        costs_of_run(copied(tmp_path, 3))
