"""Plans: what is found fits, runs and is no slower than what it is compared with; what cannot be planned is refused."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_rlhf.cli.commands import app
from async_rlhf.experiments.planning.placement import report
from async_rlhf.experiments.planning.placement.evaluation import Plan
from async_rlhf.experiments.planning.placement.on_virtual_time import best_queued_groups, lines, simulate_plan
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.experiments.planning.placement.search import Found, search
from async_rlhf.experiments.planning.placement.spec import read
from async_rlhf.experiments.planning.placement.strategies import STRATEGIES
from tests.conftest import REPOSITORY, toml
from tests.planning.specs import LLAMA_1B, spec, spec_values

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
    """Of 64 groups on 40 ranks some have two: as long as 64 on 32 ranks, but for what ranks exchange."""
    roles = Roles(spec(cluster={"nodes": 8}, batch={"groups": 64, "group_size": 8}))
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


@pytest.mark.parametrize("found", FOUND)
def test_more_staleness_is_faster_on_the_front_and_no_strategy_beats_it(found: Any) -> None:
    found = found()
    seconds = [found.by_bound[bound].step.seconds for bound in sorted(found.by_bound)]
    assert seconds == sorted(seconds, reverse=True)
    for plan in found.by_strategy.values():
        if plan is not None and not math.isinf(plan.candidate.max_staleness):
            better = [each for bound, each in found.by_bound.items() if bound <= plan.candidate.max_staleness]
            assert min(each.step.seconds for each in better) <= plan.step.seconds * (1 + 1e-9)


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


def test_an_environment_lengthens_the_way_around_and_its_observations_are_read() -> None:
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


def test_twice_the_devices_are_never_slower_and_longer_tails_gain_more_from_staleness() -> None:
    even, tails, twice = (
        search(spec(lengths={"spread": spread}, cluster={"nodes": nodes}, search=BOUNDED))
        for spread, nodes in ((0.0, 1), (1.0, 1), (1.0, 2))
    )
    assert twice.fastest.step.seconds <= tails.fastest.step.seconds
    assert twice.fastest.device_seconds_per_million >= tails.fastest.device_seconds_per_million * 0.99
    gains = [found.by_bound[0].step.seconds / found.fastest.step.seconds for found in (even, tails)]
    assert gains[0] < gains[1]


def test_a_static_batch_is_as_long_as_its_longest_row_on_any_number_of_devices() -> None:
    roles = Roles(spec())
    spans = [roles.generation(count, 1, 40e9, 0)[0][0].span_s for count in (1, 2, 4, 8)]
    assert spans == sorted(spans, reverse=True)
    # Decoding reads the weights whatever the rows: eight times the devices are far from eight times as fast.
    assert spans[0] / spans[-1] < 4


def test_the_command_writes_settings(tmp_path: Path) -> None:
    question, settings = tmp_path / "spec.toml", tmp_path / "plan.toml"
    sections = spec_values(search=BOUNDED | {"max_staleness": [0]}).items()
    question.write_text("".join(f"{name} = {toml(section)}\n" for name, section in sections))
    result = CliRunner().invoke(app, ["plan", str(question), "--settings", str(settings)])
    assert result.exit_code == 0, result.output
    assert "[queue]" in settings.read_text()
    assert "MI300X" in CliRunner().invoke(app, ["plan", "--devices"]).output


def test_the_document_shows_what_the_command_prints_and_all_strategies() -> None:
    printed = "\n".join(report.lines(shipped())).split("\n\n# For train")[0]
    assert printed in DOCUMENT
    written = json.loads(json.dumps(report.as_json(shipped()), allow_nan=False))["best"]
    assert written["runs_here"] and written["samples_per_s"] == pytest.approx(512 / written["seconds"])
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
