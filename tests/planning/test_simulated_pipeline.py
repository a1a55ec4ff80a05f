"""A run on virtual time with the real admission, held against closed forms and against what the queue promises."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.stages import generation_ends_s
from async_rlhf.experiments.planning.simulation.actor import SimulatedActor
from async_rlhf.experiments.planning.simulation.run import Simulation, simulate
from async_rlhf.experiments.planning.simulation.virtual_time import Clock
from async_rlhf.experiments.planning.simulation.workload import Costs, Workload

COSTS = Costs(
    decode=(2e-3, 1e-4, 1e-6), prefill=(1e-3, 5e-4, 1e-5), training=(0.05, 0.01, 1e-5), copy_s=0.01, travel_s=0.03,
    adopt_s=0.004,
)  # fmt: skip
EVEN = Workload(
    groups_per_batch=4, group_size=2, lengths=(20,), prompt_tokens=6, max_staleness=0, slots=8, reward_s=(0.06,), judges=None
)
TRAINED_S = 0.05 + 0.01 + 1e-5 * (4 * 6 + 8 * 20)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    groups, window, every = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    exact = draw(st.booleans()) and window == every == 1
    return Workload(
        groups_per_batch=groups,
        group_size=draw(st.integers(1, 4)),
        lengths=draw(st.lists(st.integers(1, 60), min_size=1, max_size=5)),
        prompt_tokens=draw(st.integers(0, 20)),
        max_staleness=every - 1 - (1 - window) // groups + draw(st.integers(0, 4)),
        exact=exact,
        window=window,
        publish_every=every,
        updates_per_step=draw(st.integers(1, 3)),
        actors=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 12)),
        queued_groups=draw(st.integers(0, 4)),
        reward_s=draw(st.lists(st.sampled_from([0.0, 0.01, 0.2, 1.0]), min_size=1, max_size=3)),
        judges=draw(st.sampled_from([None, 1, 3])),
        shared_judges=draw(st.booleans()),
        on_update=draw(st.sampled_from(["keep", "interrupt", "finish"])),
        turns=draw(st.integers(1, 3)),
        environment_s=draw(st.sampled_from([(0.0,), (0.05, 0.5)])),
        observation_tokens=draw(st.integers(0, 9)),
    )


class LooksAtAll(Simulation):
    """At all actors whatever happens. looks: at idle ones, of any."""

    looks = 0

    def _pump(self, changed: SimulatedActor | None = None) -> None:
        self._announced = self._awaited = None
        super()._pump(changed)

    def waits_for(self, actor: SimulatedActor) -> str:
        self.looks += 1
        return super().waits_for(actor)


class Looks(LooksAtAll):
    _pump = Simulation._pump


@settings(max_examples=60, deadline=None)
@given(workloads())
def test_the_ledger_closes_no_token_is_too_old_and_a_run_that_looks_at_all_actors_is_the_same(workload: Workload) -> None:
    found = simulate(workload, COSTS, steps=6, warm_up=0)
    assert found.ledger.closes and found.ledger.trained == 6 * workload.groups_per_batch
    assert max(found.staleness) <= workload.max_staleness
    assert sum(found.staleness.values()) == found.ledger.tokens_trained
    assert found.samples_per_s == pytest.approx(6 * workload.samples / found.total_s)
    for time in found.roles.values():
        assert sum(time.shares.values()) == pytest.approx(1)
    assert LooksAtAll(workload, COSTS, 6, 0).run() == found


def test_an_actor_that_reports_costs_no_look_at_hundreds_of_others() -> None:
    workload = replace(EVEN, actors=300, groups_per_batch=50, max_staleness=2)
    few, all_ = Looks(workload, COSTS, 3, 0), LooksAtAll(workload, COSTS, 3, 0)
    assert few.run() == all_.run() and few.looks < all_.looks / 20


def test_without_staleness_a_step_generates_scores_trains_and_publishes_one_after_the_other() -> None:
    generated_s = 1e-3 + 4 * (5e-4 + 6e-5) + 20 * (2e-3 + 8 * (1e-4 + 1e-6 * (6 + 10.5)))
    found = simulate(EVEN, COSTS, steps=8)
    assert found.seconds_per_step == pytest.approx(generated_s + 0.06 + TRAINED_S + 0.01 + 0.03 + 0.004)
    assert set(found.staleness) == {0} and found.bound_by == "max_staleness"


def test_generation_is_that_of_the_closed_model_of_continuous_batching() -> None:
    costs = replace(COSTS, prefill=(0.0, 0.0, 0.0))
    alone = generation_ends_s([20] * 8, prompt_tokens=6, slots=3, step_s=costs.decode_s, prefill_s=lambda rows: 0.0)
    found = simulate(replace(EVEN, slots=3, reward_s=(0.0,)), costs, steps=8)
    assert found.seconds_per_step == pytest.approx(max(alone) + TRAINED_S + 0.01 + 0.03 + 0.004)


def test_with_much_staleness_the_slowest_role_never_waits() -> None:
    load = replace(EVEN, max_staleness=8)
    found = simulate(load, replace(COSTS, training=(1.0, 0.0, 0.0)), steps=30)
    assert found.seconds_per_step == pytest.approx(1.0 + 0.01)
    assert found.roles["learner"].idle == 0 and found.bound_by == "learner"
    assert found.roles["actor-0"].waits_for == "weights"
    assert set(found.staleness) == {8} and found.queue_depth_max == 8 * 4
    found = simulate(load, replace(COSTS, decode=(0.05, 0.0, 0.0)), steps=30)
    prefill_s, adopt_s = 1e-3 + 4 * (5e-4 + 6e-5), 0.004
    assert found.seconds_per_step == pytest.approx(20 * 0.05 + prefill_s + adopt_s)
    assert found.roles["actor-0"].idle == 0 and found.bound_by == "actors"
    assert found.roles["learner"].waits_for == "batch"
    found = simulate(replace(load, reward_s=(0.5,), judges=1), COSTS, steps=30)
    assert found.seconds_per_step == pytest.approx(8 * 0.5) and found.bound_by == "scoring"


@pytest.mark.parametrize("decode_s", [1e-3, 5e-3, 2e-2])
@pytest.mark.parametrize("train_s", [0.02, 0.5])
@pytest.mark.parametrize(("slots", "reward_s"), [(4, (0.0,)), (16, (0.0, 0.5))])
def test_more_staleness_makes_no_run_longer(decode_s: float, train_s: float, slots: int, reward_s: tuple[float, ...]) -> None:
    """But for a hundredth: what begins earlier shares decode steps, and so the end, of what the learner waits for."""
    costs = replace(COSTS, decode=(decode_s, 1e-4, 1e-6), training=(train_s, 0.0, 0.0))
    load = replace(EVEN, lengths=(5, 20, 80), slots=slots, reward_s=reward_s)
    times = [simulate(replace(load, max_staleness=bound), costs, steps=40).total_s for bound in (0, 1, 2, 4)]
    assert all(later <= earlier * 1.01 for earlier, later in pairwise(times))
    assert times[-1] < times[0]


def test_in_exact_mode_every_group_is_made_by_the_one_version_that_its_number_names() -> None:
    found = simulate(replace(EVEN, max_staleness=2, exact=True, actors=2, slots=3, lengths=(5, 40)), COSTS, steps=12)
    assert set(found.staleness) == {2}


def test_what_becomes_of_running_rows_when_weights_come_costs_their_prefixes_or_idle_slots() -> None:
    costs = Costs(decode=(0.01, 0.0, 0.0), prefill=(0.0, 0.0, 1e-4), training=(0.3, 0.0, 0.0))
    load = replace(EVEN, max_staleness=6, lengths=(30, 70), slots=4, reward_s=(0.0,))
    keep = simulate(load, costs, steps=40)
    interrupt = simulate(replace(load, on_update="interrupt"), costs, steps=40)
    finish = simulate(replace(load, on_update="finish"), costs, steps=40)
    assert keep.bound_by == interrupt.bound_by == finish.bound_by == "actors"
    again_s = interrupt.seconds_per_step - keep.seconds_per_step
    assert 4 * 6 * 1e-4 < again_s < 4 * 76 * 1e-4  # the prefixes of four rows, a step
    assert finish.seconds_per_step > keep.seconds_per_step * 1.1
    assert interrupt.roles["actor-0"].shares["adopt"] == pytest.approx(again_s / interrupt.seconds_per_step, rel=0.1)


def test_turns_wait_for_their_environment_and_the_slots_serve_others_meanwhile() -> None:
    costs = Costs(decode=(0.01, 0.0, 0.0), training=(0.001, 0.0, 0.0))
    games = replace(EVEN, turns=3, environment_s=(1.0,), reward_s=(0.0,))
    assert simulate(games, costs, steps=4).seconds_per_step == pytest.approx(3 * 0.2 + 2 * 1.0 + 0.001)
    busy = simulate(replace(games, max_staleness=12, queued_groups=40), costs, steps=120)
    assert busy.seconds_per_step == pytest.approx(3 * 0.2, rel=0.05)


def test_a_run_that_would_hang_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"publish_every = 3.*Lowest that can run: queue.max_staleness = 2"):
        replace(EVEN, publish_every=3)
    with pytest.raises(ConfigError, match=r"stands still after .* at step 0 of 4: none of its 0 actors"):
        simulate(replace(EVEN, actors=0), COSTS, steps=4)


def test_a_shortened_task_ends_earlier_and_those_of_one_time_in_their_order() -> None:
    clock, ended = Clock(), list[tuple[str, float]]()

    def end(name: str) -> None:
        ended.append((name, clock.now))

    long = clock.begin(8.0, lambda: end("shortened"))
    clock.begin(3.0, lambda: clock.shorten(long, clock.left(long) - 1))
    clock.begin(7.0, lambda: end("as early"))
    while clock.turn():
        pass
    assert ended == [("as early", 7.0), ("shortened", 7.0)]
