"""The guard's decision: patience on the way down, hysteresis on the way up, never outside its limits, always with a reason."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.learner.config import GuardConfig
from async_rlhf.learner.loop.safeguards import StalenessTarget, adjusted

GOOD = {"is/ess": 0.99, "is/second_moment": 0.001, "clip_ratio/region_mean": 0.0, "is/masked_ratio": 0.0}
BETWEEN = {**GOOD, "is/ess": 0.55}  # above the limit of 0.5, but not by the margin
OLD = {**GOOD, "is/ess": 0.3}
CONFIG = GuardConfig(enabled=True, patience=3, recovery=4)


def after(
    metrics: list[dict[str, float | None]], start: int = 4, lowest: int = 1, highest: int = 4
) -> tuple[StalenessTarget, list[str]]:
    aim, reasons = StalenessTarget(start), []
    for each in metrics:
        aim, reason = adjusted(aim, each, CONFIG, lowest, highest)
        reasons += [] if reason is None else [reason]
    return aim, reasons


def test_bad_steps_in_a_row_lower_the_aim_by_one_and_say_why() -> None:
    aim, reasons = after([OLD] * 3)
    assert aim == StalenessTarget(3) and reasons == ["3 steps in a row: is/ess 0.3 below 0.5"]
    assert after([OLD] * 2)[0].staleness == 4


def test_every_signal_counts() -> None:
    for name, value in {"is/second_moment": 0.2, "clip_ratio/region_mean": 0.4, "is/masked_ratio": 0.4}.items():
        assert after([{**GOOD, name: value}] * 3)[0].staleness == 3
    assert after([{**GOOD, "clip_ratio/region_mean": 0.2, "is/masked_ratio": 0.2}] * 3)[0].staleness == 3


def test_a_good_step_between_starts_the_patience_anew() -> None:
    assert after([OLD, OLD, GOOD, OLD, OLD])[0].staleness == 4


def test_only_what_is_better_by_a_margin_raises_the_aim_again() -> None:
    assert after([GOOD] * 4, start=2)[0].staleness == 3
    assert after([BETWEEN] * 40, start=2)[0] == StalenessTarget(2)
    assert after([GOOD, GOOD, GOOD, BETWEEN, GOOD], start=2)[0].staleness == 2


def test_a_step_of_which_nothing_is_known_changes_nothing() -> None:
    assert after([OLD, OLD, dict.fromkeys(GOOD), OLD])[0].staleness == 3


@given(st.lists(st.sampled_from([GOOD, BETWEEN, OLD, dict.fromkeys(GOOD)]), max_size=60), st.integers(1, 4))
def test_the_aim_never_leaves_its_limits_and_moves_by_one(metrics: list[dict[str, float | None]], lowest: int) -> None:
    aim = StalenessTarget(4)
    for each in metrics:
        next_aim, reason = adjusted(aim, each, CONFIG, lowest, 4)
        assert lowest <= next_aim.staleness <= 4
        assert abs(next_aim.staleness - aim.staleness) == (0 if reason is None else 1)
        aim = next_aim
