"""Plans: what is found fits, runs and is no slower than what it is compared with; what cannot be planned is refused."""

from __future__ import annotations

import json
import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.commands import app
from async_rlhf.experiments.planning.model.calibration import Calibration, save
from async_rlhf.experiments.planning.model.costs import Costs
from async_rlhf.experiments.planning.model.devices import device
from async_rlhf.experiments.planning.placement import report
from async_rlhf.experiments.planning.placement.evaluation import Plan
from async_rlhf.experiments.planning.placement.on_virtual_time import best_queued_groups, lines, simulate_plan
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.experiments.planning.placement.search import Found, search
from async_rlhf.experiments.planning.placement.settings import as_toml, settings_of
from async_rlhf.experiments.planning.placement.spec import read
from async_rlhf.experiments.planning.placement.strategies import STRATEGIES, Problem
from async_rlhf.experiments.planning.simulation.workload import ActorJoined, ActorLost
from async_rlhf.run.config import load
from tests.conftest import REPOSITORY, toml
from tests.planning.specs import LLAMA_1B, spec, spec_values

TINY = REPOSITORY / "configs" / "models" / "tiny-speller"
SHIPPED = REPOSITORY / "configs" / "plans" / "qwen3-8b.toml"
DOCUMENT = (REPOSITORY / "docs" / "planning.md").read_text()
REST = pytest.mark.rest
BOUNDED = {"strategies": ["bounded"]}


@cache
def shipped() -> Found:
    return search(read(SHIPPED))


@cache
def with_everything() -> Found:
    """A critic, a reward model, a reference: all roles."""
    models = {"critic": LLAMA_1B, "reward": LLAMA_1B}
    return search(spec(models=models, loss={"kl_coef": 0.05}, cluster={"devices_per_node": 6}))


def best(found: Found) -> Plan:
    assert found.best is not None
    return found.best


FOUND = (shipped, with_everything)


def test_fewer_devices_that_are_as_fast_are_named_beside_the_plan() -> None:
    """The weight channel sets the pace of 64 devices, which half of them keep."""
    found = search(spec(cluster={"nodes": 8}, search=BOUNDED, efficiency={"weights_bytes_per_s": 1e7}))
    assert found.cheaper is not None and found.cheaper.devices < 32
    assert found.cheaper.step.seconds <= 1.02 * best(found).step.seconds
    assert f"on {found.cheaper.devices} of the devices" in "\n".join(report.lines(found))


def test_a_rank_trains_on_whole_groups() -> None:
    """Of 64 groups on 40 ranks some have two: as long as 64 on 32 ranks, but for what ranks say to each other."""
    roles = Roles.of(spec(cluster={"nodes": 8}, batch={"groups": 64, "group_size": 8}))
    few, many = (min(each.seconds for each in roles.training("train", count, "here")) for count in (32, 40))
    assert many >= 0.97 * few


def test_a_plan_for_other_machines_needs_no_package_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert best(search(spec(search=BOUNDED))).layout("train").devices > 1


@pytest.mark.parametrize("found", FOUND)
def test_every_plan_fits_and_gives_each_device_once(found: Any) -> None:
    found = found()
    plans = [plan for plan in [*found.by_strategy.values(), *found.by_bound.values(), found.best] if plan is not None]
    assert len(plans) > 6
    for plan in plans:
        assert sum(group.devices for group in plan.candidate.sets) <= found.roles.spec.cluster.size
        assert {role for group in plan.candidate.sets for role in group.roles} == set(found.roles.models)
        for filled in plan.filled:
            assert 0 < filled.bytes_per_device <= found.roles.room_bytes
            for role, choice in filled.choices.items():
                seat = next(seat for seat in filled.set.seats if seat.role == role)
                layout = choice.layout
                assert layout.tensor * layout.pipeline * layout.data == seat.devices


def test_where_all_roles_are_asked_for_all_strategies_have_a_plan_and_one_bound_by_nothing_is_no_slower_than_a_step_ahead() -> (
    None
):
    found = with_everything().by_strategy
    assert [name for name, plan in found.items() if plan is None] == []
    assert found["fully_async"].step.seconds <= found["one_step"].step.seconds  # type: ignore[union-attr]


@pytest.mark.parametrize("found", FOUND)
def test_more_staleness_is_faster_on_the_front_and_no_strategy_beats_it(found: Any) -> None:
    found = found()
    seconds = [found.by_bound[bound].step.seconds for bound in sorted(found.by_bound)]
    assert seconds == sorted(seconds, reverse=True)
    for plan in found.by_strategy.values():
        if plan is not None and not math.isinf(plan.candidate.max_staleness):
            better = [each for bound, each in found.by_bound.items() if bound <= plan.candidate.max_staleness]
            assert min(each.step.seconds for each in better) <= plan.step.seconds * (1 + 1e-9)


def test_the_settings_of_a_plan_are_a_configuration_that_loads() -> None:
    found = shipped()
    assert best(found).candidate.here
    sections = tomllib.loads(as_toml(found.settings))
    config = load({**sections, "name": "planned", "model": str(TINY), "data": {"source": "spell_backward"}})
    assert config.queue.max_staleness == best(found).candidate.max_staleness
    assert config.learner.ranks + config.actors.count * config.engine.vllm.tensor_parallel_size == 16  # type: ignore[operator]


def test_what_this_system_does_not_place_has_no_settings() -> None:
    found = with_everything()
    modelled = found.by_strategy["interleaving"]
    assert modelled is not None
    with pytest.raises(ConfigError, match="interleaving is modelled"):
        settings_of(modelled, found.roles)


def test_a_verifier_that_is_slow_bounds_the_step() -> None:
    found = search(spec(reward={"seconds": 60.0, "concurrency": 16}, search=BOUNDED))
    assert found.fastest.step.bound_by.name == "judges"
    assert found.fastest.step.seconds == pytest.approx(256 * 60 / 16)


def test_this_systems_weights_go_through_its_own_channel_and_bound_a_step_that_is_shorter() -> None:
    fast, slow = (
        search(spec(efficiency={"weights_bytes_per_s": rate}, search=BOUNDED | {"max_staleness": [4]})) for rate in (1e9, 1e7)
    )
    weights = fast.roles.policy.weight_bytes
    sent = best(fast).times["publish"]
    assert sent.span_s - sent.busy_s == pytest.approx(weights / 1e9)
    assert best(slow).step.bound_by.name == "weight channel"
    assert best(slow).step.seconds == pytest.approx(weights / 1e7)
    simulated = simulate_plan(best(slow), slow.roles, steps=12)
    assert simulated.seconds_per_step == pytest.approx(weights / 1e7, rel=0.05)


def test_an_environment_lengthens_the_way_around_and_what_it_says_is_read() -> None:
    plain, slow, wordy = (
        search(spec(environment=environment, search={"strategies": ["flattening", "bounded"], "max_staleness": [0]}))
        for environment in ({}, {"turns": 3, "seconds": 10.0}, {"turns": 3, "observation_tokens": 500})
    )
    alone_s = plain.here_by_bound[0].step.seconds
    for found in (slow, wordy):
        assert found.here_by_bound[0].step.seconds > alone_s
        assert found.settings["environment"]["max_turns"] == 3
        assert found.settings["generation"]["max_episode_length"] == found.roles.spec.row_tokens - 256
    assert slow.here_by_bound[0].step.seconds == pytest.approx(alone_s + 20.0)
    assert "environment" not in plain.settings
    simulated = simulate_plan(best(slow), slow.roles, steps=12, queued_groups=slow.queued_groups)
    assert simulated.seconds_per_step == pytest.approx(best(slow).step.seconds, rel=0.25)
    assert "episodes of 3 turns, whose environment takes 10 s" in "\n".join(report.lines(slow))


def test_a_synchronous_loop_on_devices_apart_is_run_here_too() -> None:
    found = search(spec(search=BOUNDED | {"max_staleness": [0]}))
    assert found.best is not None and found.settings["queue"] == {"max_staleness": 0}


def test_twice_the_devices_are_never_slower_and_cost_no_less() -> None:
    one, two = (search(spec(cluster={"nodes": nodes}, search=BOUNDED)).fastest for nodes in (1, 2))
    assert two.step.seconds <= one.step.seconds
    assert two.device_seconds_per_million >= one.device_seconds_per_million * 0.99


def test_longer_tails_gain_more_from_staleness() -> None:
    gains = []
    for spread in (0.0, 1.0):
        by_bound = search(spec(lengths={"spread": spread}, search=BOUNDED)).by_bound
        gains.append(by_bound[min(by_bound)].step.seconds / by_bound[max(by_bound)].step.seconds)
    assert gains[0] < gains[1]


def test_a_static_batch_is_as_long_as_its_longest_row_on_any_number_of_devices() -> None:
    roles = Roles.of(spec())
    spans = [roles.generation(count, 1, 40e9, 0)[0][0].span_s for count in (1, 2, 4, 8)]
    assert spans == sorted(spans, reverse=True)
    # Decoding reads the weights whatever the rows: eight times the devices are far from eight times as fast.
    assert spans[0] / spans[-1] < 4


def test_splits_of_the_cluster_use_all_of_it() -> None:
    problem = Problem(("generate", "train", "reference"), 24, 8, (0, 1))
    assert all(sum(split) == 24 for parts in (1, 2, 3) for split in problem.splits(parts))
    assert (8, 16) in list(problem.splits(2)) and (1, 23) in list(problem.splits(2))


def test_text_and_json_say_the_plan_what_bounds_it_and_why_others_lose() -> None:
    found = shipped()
    text = "\n".join(report.lines(found))
    assert "Best that runs here: bounded" in text and "bound by actors" in text
    assert all(name in text for name in STRATEGIES)
    said = json.loads(json.dumps(report.as_json(found), allow_nan=False))
    assert said["best"]["runs_here"] and said["best"]["samples_per_s"] == pytest.approx(512 / said["best"]["seconds"])


def test_the_command_writes_settings_and_a_picture(tmp_path: Path) -> None:
    asked, settings, picture = (tmp_path / name for name in ("spec.toml", "plan.toml", "plan.png"))
    sections = spec_values(search=BOUNDED | {"max_staleness": [0]}).items()
    asked.write_text("".join(f"{name} = {toml(section)}\n" for name, section in sections))
    result = CliRunner().invoke(app, ["plan", str(asked), "--settings", str(settings), "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    assert "[queue]" in settings.read_text() and picture.read_bytes().startswith(b"\x89PNG")
    assert "MI300X" in CliRunner().invoke(app, ["plan", "--devices"]).output


def test_the_document_shows_what_the_command_says_and_all_strategies() -> None:
    said = "\n".join(report.lines(shipped())).split("\n\n# For train")[0]
    assert said in DOCUMENT
    assert all(f"| `{each.name}` | {each.source} | {each.summary} |" in DOCUMENT for each in STRATEGIES.values())


@pytest.mark.parametrize("bound", [0, pytest.param(2, marks=REST), 4, pytest.param(8, marks=REST)])
def test_on_virtual_time_a_plan_takes_about_what_its_circuits_say(bound: int) -> None:
    found = shipped()
    plan = found.here_by_bound[bound]
    queued = best_queued_groups(plan, found.roles)
    simulated = simulate_plan(plan, found.roles, steps=30, queued_groups=queued)
    assert simulated.seconds_per_step == pytest.approx(plan.step.seconds, rel=0.1)
    assert max(simulated.staleness) <= bound
    assert "".join(lines(plan, simulated)).count("by its circuits") == 1


def test_an_actor_that_is_lost_costs_time_and_one_that_joins_gives_it_back() -> None:
    found = shipped()
    whole, lost, back = (
        simulate_plan(best(found), found.roles, steps=20, queued_groups=found.queued_groups, events=events).total_s
        for events in ([], [ActorLost(100.0, "actor-0")], [ActorLost(100.0, "actor-0"), ActorJoined(200.0, "actor-new")])
    )
    assert whole < back < lost


def test_a_machine_that_was_measured_is_a_device(tmp_path: Path) -> None:
    here = device("A100-80GB").model_copy(update={"memory_bytes_per_s": 1e12})
    fit = {"decode": (0.0, 0.0, 0.0), "prefill": (0.0, 0.0, 0.0), "training": (0.0, 0.0, 0.0)}
    costs = Costs.model_validate({**fit, "copy_s": 0.0, "travel_s": 0.0, "adopt_s": 0.0})
    words = dict.fromkeys(("measured", "machine", "model", "dtype"), "")
    measured = Calibration(**words, engine_device="cuda", threads=1, seconds=1, device=here, costs=costs, fits={})
    save(measured, tmp_path / "here.json")
    roles = Roles.of(spec(cluster={"device": "own", "calibration": str(tmp_path / "here.json")}))
    assert roles.device == here
