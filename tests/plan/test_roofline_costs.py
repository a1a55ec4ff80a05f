"""A simulation of devices that nobody has measured, held against the stages that it is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from async_rlhf.plan.devices import device
from async_rlhf.plan.model_costs import read
from async_rlhf.plan.roofline_costs import RooflineCosts
from async_rlhf.plan.simulation import simulate
from async_rlhf.plan.stages import Place, decode_step_s, optimizer_s, training_s
from async_rlhf.plan.workload import Workload

MODEL = read(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
)
GENERATOR = Place(model=MODEL, device=device("H100"), tensor=2)
LEARNER = Place(model=MODEL, device=device("H100"), tensor=4, data=2)
LOAD = Workload(groups_per_batch=64, group_size=8, lengths=(1000,), prompt_tokens=200, max_staleness=4, judges=None)


def test_a_step_costs_its_passes_and_an_optimizer_for_each_update() -> None:
    costs = RooflineCosts(generator=GENERATOR, learner=LEARNER, completion_tokens=1000, zero_stage=1)
    passes = training_s(LEARNER, 512, 1200, zero_stage=1)
    assert costs.training_s(64, 200, 512_000, 2) == pytest.approx(passes + 2 * optimizer_s(LEARNER, zero_stage=1))


def test_generation_over_data_parallel_groups_takes_as_long_as_that_of_the_largest() -> None:
    two = RooflineCosts(generator=replace(GENERATOR, data=2), learner=LEARNER, completion_tokens=1000)
    assert two.decode_s(7, 300) == decode_step_s(GENERATOR, 4, 300)


def test_on_devices_of_their_own_the_slower_role_bounds_the_step_of_a_simulated_run() -> None:
    costs = RooflineCosts(generator=GENERATOR, learner=LEARNER, completion_tokens=1000, actors=16)
    found = simulate(replace(LOAD, actors=16), costs, steps=12)
    assert found.bound_by == "learner"
    assert found.seconds_per_step == pytest.approx(costs.training_s(64, 200, 512_000, 1) + costs.copy_s)
    fewer = simulate(LOAD, costs, steps=12)
    assert fewer.bound_by == "actors" and fewer.seconds_per_step > found.seconds_per_step
