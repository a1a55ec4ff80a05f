"""The guard: patience on the way down, hysteresis on the way up, never outside its limits, always with a reason; and the limits
to divergence."""

from __future__ import annotations

import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rlhf.learner.config import GuardConfig
from async_rlhf.learner.loop.safeguards import PATIENCE, RECOVERY, StalenessController, beyond

GOOD = {"is/ess": 0.99, "is/second_moment": 0.001, "clip_ratio/region_mean": 0.0, "is/masked_ratio": 0.0}
BETWEEN = {**GOOD, "is/ess": 0.55}  # above the limit of 0.5, but not by the margin
OLD = {**GOOD, "is/ess": 0.3}
UNKNOWN: dict[str, float | None] = dict.fromkeys(GOOD)
CONFIG = GuardConfig(enabled=True)
LOWERED = [OLD] * 6  # to 2, of 4

MOVES = {
    "bad steps in a row lower it by one": ([OLD] * 3, 3),
    "fewer do not": ([OLD] * 2, 4),
    "the second moment counts": ([{**GOOD, "is/second_moment": 0.2}] * 3, 3),
    "clipped tokens count": ([{**GOOD, "clip_ratio/region_mean": 0.4}] * 3, 3),
    "masked tokens count": ([{**GOOD, "is/masked_ratio": 0.4}] * 3, 3),
    "both together count": ([{**GOOD, "clip_ratio/region_mean": 0.2, "is/masked_ratio": 0.2}] * 3, 3),
    "a good step between starts the patience anew": ([OLD, OLD, GOOD, OLD, OLD], 4),
    "a step of which nothing is known changes nothing": ([OLD, OLD, UNKNOWN, OLD], 3),
    "good steps in a row raise it again": ([*LOWERED, *[GOOD] * 10], 3),
    "what is good by less than the margin does not": ([*LOWERED, *[BETWEEN] * 40], 2),
    "nor does it count among good steps": ([*LOWERED, *[GOOD] * 9, BETWEEN, GOOD], 2),
}


@pytest.mark.parametrize(("metrics", "target"), MOVES.values(), ids=MOVES)
def test_the_target_moves(metrics: list[dict[str, float | None]], target: int) -> None:
    controller = StalenessController(CONFIG, lowest=1, bound=4)
    for step, each in enumerate(metrics):
        controller.adjust(each, step)
    assert controller.target == target


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([GOOD, BETWEEN, OLD, UNKNOWN]), max_size=60), st.integers(1, 4))
def test_it_never_leaves_its_limits_moves_by_one_and_with_a_reason(
    caplog: pytest.LogCaptureFixture, metrics: list[dict[str, float | None]], lowest: int
) -> None:
    caplog.set_level(logging.INFO)
    controller = StalenessController(CONFIG, lowest, bound=4)
    for step, each in enumerate(metrics):
        caplog.clear()
        before = controller.target
        controller.adjust(each, step)
        assert lowest <= controller.target <= 4
        assert abs(controller.target - before) == len(caplog.messages)


def test_it_goes_up_to_its_setting_and_begins_at_a_new_one() -> None:
    def made(*metrics: dict[str, float | None]) -> int | None:
        for step, each in enumerate(metrics):
            controller.adjust(each, step)
        return controller.target_staleness

    guard = GuardConfig(enabled=True, target=2)
    controller = StalenessController(guard, lowest=0, bound=4)
    assert made(*[OLD] * PATIENCE) == 1 and made(*[GOOD] * 4 * RECOVERY) == 2
    controller.follow(guard.model_copy(update={"target": 3}))
    assert made() == 3 and made(*[OLD] * PATIENCE) == 2
    controller.follow(guard.model_copy(update={"target": 3, "max_kl": 0.3}))
    assert made() == 2, "what the guard has done stays, where its setting does"


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({"kl/behaviour": 0.4, "entropy": 0.1, "reward": -1.0}, []),
        ({"kl/behaviour": 0.9, "kl/reference": 0.4, "entropy": None}, []),  # what is not measured is within
        ({"kl/behaviour": 0.9}, ["kl/behaviour 0.9 above guard.max_kl = 0.5"]),
        ({"entropy": 0.05}, ["entropy 0.05 below guard.min_entropy = 0.1"]),
        ({"reward": -2.0}, ["reward -2 below guard.min_reward = -1"]),
        ({"kl/reference": float("nan")}, ["kl/reference nan above guard.max_kl = 0.5"]),
    ],
)
def test_each_limit_is_about_its_metric(metrics: dict[str, float | None], found: list[str]) -> None:
    assert beyond(metrics, GuardConfig(max_kl=0.5, min_entropy=0.1, min_reward=-1.0)) == found
