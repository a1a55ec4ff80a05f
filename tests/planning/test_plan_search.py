"""Plans: what is found fits, runs and is no slower than what it is compared with; what cannot be planned is refused."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from async_rlhf.cli.commands import app
from async_rlhf.experiments.planning import command
from async_rlhf.experiments.planning.model.stages import Layout
from async_rlhf.experiments.planning.placement.roles import Engines, Roles
from async_rlhf.experiments.planning.placement.search import Found, search
from async_rlhf.experiments.planning.placement.spec import read
from async_rlhf.experiments.planning.placement.step import placements, plan_of
from tests.conftest import REPOSITORY, toml
from tests.planning.specs import LLAMA_1B, spec, spec_values

SHIPPED = REPOSITORY / "configs" / "plans" / "qwen3-8b.toml"
DOCUMENT = (REPOSITORY / "docs" / "planning.md").read_text()


@cache
def shipped() -> Found:
    return search(read(SHIPPED))


@cache
def with_everything() -> Found:
    """A critic, a reward model, a reference: all models."""
    return search(spec(models={"critic": True, "reward": LLAMA_1B}, loss={"kl_coef": 0.05}, cluster={"devices_per_node": 6}))


@cache
def with_a_reference() -> Found:
    return search(spec(loss={"kl_coef": 0.05}))


FOUND = (shipped, with_everything, with_a_reference)


def printed(found: Found) -> str:
    return "\n".join(command.plan_lines(found))


def test_fewer_devices_that_are_as_fast_are_named_beside_the_plan() -> None:
    """The weight channel sets the pace of 64 devices, which half of them keep."""
    found = search(spec(cluster={"nodes": 8}, efficiency={"weights_bytes_per_s": 1e7}))
    assert found.cheaper is not None and found.cheaper.devices < 32
    assert found.cheaper.step.seconds <= 1.02 * found.best.step.seconds
    assert f"on {found.cheaper.devices} of the devices" in printed(found)


def test_a_rank_trains_on_whole_groups() -> None:
    """Of 64 groups on 40 ranks some have two: as long as 64 on 32 ranks, but for what ranks exchange."""
    roles = Roles(spec(cluster={"nodes": 8}, batch={"groups": 64, "group_size": 8}))
    assert roles.learners(40, False)[0].total_s >= 0.97 * roles.learners(32, False)[0].total_s


def test_a_plan_for_other_machines_needs_no_package_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert search(spec()).best.learner.layout.devices > 1


@pytest.mark.parametrize("find", FOUND)
def test_every_plan_fits_and_gives_each_device_once(find: Callable[[], Found]) -> None:
    roles = find().roles
    plans = [plan for each in placements(roles) if (plan := plan_of(each, roles)) is not None]
    assert len(plans) > 6
    for plan in plans:
        place, scorers, size = plan.placement, plan.scorers, roles.spec.cluster.size
        devices = place.actors if place.colocated else place.actors + place.learner + place.scorers
        assert devices <= size and (plan.engines.layout.devices, plan.learner.layout.devices) == (place.actors, place.learner)
        held = [plan.engines.bytes_per_device, plan.learner.bytes_per_device]
        assert all(0 < each <= roles.room_bytes for each in ([sum(held)] if place.colocated else held))
        assert scorers is None or scorers.bytes_per_device <= roles.room_bytes
        passes = [*plan.learner.seconds, *(scorers.seconds if scorers else ())]
        wanted = {"train"} | ({"reference"} if roles.spec.loss.needs_reference else set())
        wanted |= ({"critic", "values"} if roles.spec.models.critic else set()) | ({"reward"} if roles.reward else set())
        assert sorted(passes) == sorted(wanted)


@pytest.mark.parametrize("find", FOUND)
def test_more_staleness_is_faster_on_the_front_and_no_plan_beats_it(find: Callable[[], Found]) -> None:
    found = find()
    seconds = [found.by_bound[bound].step.seconds for bound in sorted(found.by_bound)]
    assert seconds == sorted(seconds, reverse=True) and found.best.step.seconds == seconds[-1]
    assert found.settings["queue"]["max_staleness"] == found.best.placement.max_staleness
    assert found.settings["actors"]["count"] == found.best.engines.layout.data


def test_frozen_models_have_devices_of_their_own_or_the_reference_is_the_learners() -> None:
    scorers, alone = with_everything(), with_a_reference()
    assert scorers.best.scorers is not None and set(scorers.best.scorers.seconds) == {"reference", "reward"}
    assert set(scorers.settings["scoring"]["stages"]) == {"reference", "reward_model"}
    assert "scorers: 1 devices" in printed(scorers) and "a reference, a critic, reward model of 1" in printed(scorers)
    held, free = (alone.roles.learners(4, holds)[0] for holds in (True, False))
    weights = alone.roles.policy.weight_bytes
    assert held.bytes_per_device - free.bytes_per_device in (weights, weights // 4)
    assert held.seconds["train"] == free.seconds["train"] and held.seconds["reference"] > 0


@pytest.mark.parametrize(
    ("slow", "lane", "seconds"),
    [
        ({"reward": {"seconds": 60.0, "concurrency": 16}}, "judges", 256 * 60 / 16),
        ({"efficiency": {"weights_bytes_per_s": 1e7}}, "weight channel", Roles(spec()).policy.weight_bytes / 1e7),
    ],
)
def test_a_slow_verifier_or_channel_of_weights_bounds_the_step(slow: dict[str, Any], lane: str, seconds: float) -> None:
    step = search(spec(**slow, search={"max_staleness": [4]})).best.step
    assert step.bound_by.name == lane and step.seconds == pytest.approx(seconds)


def test_an_environment_lengthens_the_way_around_and_its_observations_are_read() -> None:
    plain, slow, wordy = (
        search(spec(environment=environment, search={"max_staleness": [0]}))
        for environment in ({}, {"turns": 3, "seconds": 10.0}, {"turns": 3, "observation_tokens": 500})
    )
    alone_s = plain.best.step.seconds
    for found in (slow, wordy):
        assert found.best.step.seconds > alone_s
        assert found.settings["environment"]["max_turns"] == 3
        assert found.settings["generation"]["max_episode_length"] == found.roles.spec.row_tokens - 256
    assert slow.best.step.seconds == pytest.approx(alone_s + 20.0)
    assert "environment" not in plain.settings
    assert "episodes of 3 turns, whose environment takes 10 s" in printed(slow)


def test_twice_the_devices_are_never_slower_and_longer_tails_gain_more_from_staleness() -> None:
    even, tails, twice = (
        search(spec(lengths={"spread": spread}, cluster={"nodes": nodes})) for spread, nodes in ((0.0, 1), (1.0, 1), (1.0, 2))
    )
    assert twice.best.step.seconds <= tails.best.step.seconds
    assert twice.best.device_seconds_per_million >= tails.best.device_seconds_per_million * 0.99
    gains = [found.by_bound[0].step.seconds / found.best.step.seconds for found in (even, tails)]
    assert gains[0] < gains[1]


def test_a_static_batch_is_as_long_as_its_longest_row_on_any_number_of_devices() -> None:
    spans = [Roles(spec())._generation_alone_s(Layout(data=count), 256) for count in (1, 2, 4, 8)]
    # Decoding reads the weights whatever the rows: eight times the devices are far from eight times as fast.
    assert spans == sorted(spans, reverse=True) and spans[0] / spans[-1] < 4


def alive_share(lengths: tuple[int, ...], group_size: int, slots: int, groups: int) -> float:
    """Of the slots of an actor that always holds so many groups, in the mean over many steps."""
    draw, open_groups, waiting, running, alive = random.Random(0), list[int](), list[tuple[int, int]](), list[list[int]](), []
    for step in range(12_000):
        while sum(map(bool, open_groups)) < groups:
            waiting += [(len(open_groups), draw.choice(lengths)) for _ in range(group_size)]
            open_groups.append(group_size)
        while waiting and len(running) < slots:
            running.append(list(waiting.pop(0)))
        if step >= 2_000:
            alive.append(len(running))
        for row in running:
            row[1] -= 1
            open_groups[row[0]] -= not row[1]
        running = [row for row in running if row[1]]
    return statistics.fmean(alive) / slots


@pytest.mark.parametrize("spread", [0.4, 1.0])
def test_with_the_groups_that_are_queued_slots_stay_full_and_without_them_they_do_not(spread: float) -> None:
    roles = Roles(spec(lengths={"mean": 100, "longest": 1000, "spread": spread}, batch={"groups": 64, "group_size": 4}))
    engines = Engines(layout=Layout(), slots=32, busy_s=1.0, span_s=1.0, bytes_per_device=1.0)
    queued = roles.queued_groups(engines, 8)
    assert alive_share(roles.lengths, 4, 32, 8 + queued) > 0.93
    assert alive_share(roles.lengths, 4, 32, 8) < 0.8
    assert alive_share(roles.lengths, 4, 32, 8 + queued // 2) < alive_share(roles.lengths, 4, 32, 8 + queued)


@given(st.integers(1, 256), st.integers(0, 8), st.integers(1, 8))
def test_no_more_groups_are_queued_than_the_bound_lets_begin(slots: int, ahead: int, replicas: int) -> None:
    roles, even = Roles(spec()), Roles(spec(lengths={"spread": 0.0}))
    engines = Engines(layout=Layout(data=replicas), slots=slots, busy_s=1.0, span_s=1.0, bytes_per_device=1.0)
    queued = roles.queued_groups(engines, ahead)
    assert 0 <= queued <= max(0, -(-(ahead + 1) * 32 // replicas) - -(-slots // 8))
    assert even.queued_groups(engines, ahead) <= 1  # rows of a group end together, but for what is rounded


def test_the_command_writes_settings(tmp_path: Path) -> None:
    question, settings = tmp_path / "spec.toml", tmp_path / "plan.toml"
    sections = spec_values(search={"max_staleness": [0]}).items()
    question.write_text("".join(f"{name} = {toml(section)}\n" for name, section in sections))
    result = CliRunner().invoke(app, ["plan", str(question), "--settings", str(settings)])
    assert result.exit_code == 0, result.output
    assert "[queue]" in settings.read_text()
    assert "MI300X" in CliRunner().invoke(app, ["plan", "--devices"]).output


def test_a_plan_for_processors_has_no_settings() -> None:
    found = search(spec(cluster={"device": "CPU"}))
    assert not found.settings and "No settings for train: settings are written for accelerators" in printed(found)


def test_the_document_shows_what_the_command_prints() -> None:
    assert printed(shipped()).split("\n\n# For train")[0] in DOCUMENT
    written = json.loads(json.dumps(command.plan_as_json(shipped()), allow_nan=False))["best"]
    assert written["samples_per_s"] == pytest.approx(512 / written["seconds"])
