"""Cells that were made up by simulation are predicted from those for fitting; the others are not looked at."""

from __future__ import annotations

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.measured.cells import CELLS, Cell
from async_rlhf.experiments.planning.measured.predictions import (
    COMPLETION_S,
    lengths,
    measure_rewards,
    pools,
    predict,
    workload,
)
from async_rlhf.experiments.planning.measured.results import Row
from async_rlhf.plan.costs import Costs
from async_rlhf.plan.refitting import scale
from async_rlhf.plan.simulation import simulate
from async_rlhf.plan.workload import Pool

COSTS = Costs(
    decode=(8e-4, 1.5e-4, 1e-6), prefill=(0.0, 0.0, 4e-5), training=(0.02, 0.02, 3e-4), copy_s=0.005, travel_s=0.004,
    adopt_s=0.006, completion_s=COMPLETION_S,
)  # fmt: skip
REWARDS_S = {100: 2e-5, 10_000: 5e-3}
STEPS = 16


def made_up(cell: Cell, **facts: float) -> Row:
    longest = 12 if cell.settings["generation.max_completion_length"] == 12 else 128
    known = {"prompt_characters": 50, "length_p50": 7, "length_p90": longest / 2, "length_p99": longest, "length_max": longest}
    return {"cell": cell.name, "use": cell.use, **{name: str(value) for name, value in {**known, **facts}.items()}}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    truth = scale(COSTS, {"generation": 1.4, "completion": 0.7, "training": 0.8, "publication": 1.5})
    shapes, found = [made_up(cell) for cell in CELLS], list[Row]()
    for cell in CELLS:
        run = simulate(workload(cell, shapes, 2, REWARDS_S), truth, steps=STEPS)
        found.append(made_up(cell, samples_per_s=run.samples_per_s, idle_learner=run.roles["learner"].idle))
    return found


@pytest.mark.rest
def test_held_out_cells_are_predicted_from_the_others(rows: list[Row]) -> None:
    told = [row if row["use"] == "fit" else {**row, "samples_per_s": "nan", "length_p50": "nan"} for row in rows]
    found = predict(told, COSTS, num_cpus=2, rewards_s=REWARDS_S, steps=STEPS)
    assert found.samples_per_s.keys() == {cell.name for cell in CELLS}
    for row in rows:
        assert found.samples_per_s[row["cell"]] == pytest.approx(float(row["samples_per_s"]), rel=0.05)


def test_without_a_cell_for_fitting_nothing_is_predicted(rows: list[Row]) -> None:
    with pytest.raises(ConfigError, match="have not been measured: tails-flattening"):
        predict(rows[1:], COSTS, num_cpus=2, rewards_s=REWARDS_S)


def test_parts_with_the_same_cpus_are_one_pool() -> None:
    by_name = {cell.name: pools(cell, 2) for cell in CELLS}
    assert by_name["words-0"] == (Pool(2, ("actor", "scoring", "learner")),)
    assert by_name["tails-flattening"] == (Pool(2, ("actor", "scoring", "learner"), (2, 1, 2)),), "as many threads as CPUs"
    assert by_name["tails-interleaving"] == (Pool(1, ("actor",), (1,)), Pool(1, ("scoring", "learner"), (1, 1)))
    assert by_name["tails-separation"] == (Pool(1, ("actor", "scoring"), (1, 1)), Pool(1, ("learner",), (1,)))


def test_lengths_have_the_quantiles_that_were_measured_and_rewards_take_their_rounds() -> None:
    found = sorted(lengths({"length_p50": 8, "length_p90": 30, "length_p99": 60, "length_max": 128}))
    assert (found[len(found) // 2], found[9 * len(found) // 10]) == (8, 30)
    seconds = measure_rewards()
    assert seconds.keys() == REWARDS_S.keys() and seconds[100] < seconds[10_000]
