"""How far a run goes: what ends it by its budget, how the guard moves the target staleness, and which limits end it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rlhf.learner.config import GuardConfig
from async_rlhf.learner.loop.budget import Budget, Spent
from async_rlhf.learner.loop.metrics import StepClock
from async_rlhf.learner.loop.safeguards import PATIENCE, RECOVERY, StalenessController, beyond
from tests.learner.lives import Killed, Life, Live, ScriptedHub, make_batches

# Of `make_batches`: two groups of three completions with 3, 1 and 4 tokens.
TOKENS = 16

AMOUNT = st.integers(1, 40)
BUDGETS = st.builds(Budget, AMOUNT, st.none() | AMOUNT, st.none() | AMOUNT.map(float))
SPENT = st.builds(Spent, st.integers(0, 50), st.integers(0, 50), st.floats(0, 50))


@given(BUDGETS, BUDGETS, SPENT, SPENT)
def test_what_has_ended_stays_so_and_only_a_budget_that_exceeds_it_lets_a_run_go_on(
    one: Budget, other: Budget, spent: Spent, more: Spent
) -> None:
    later = Spent(spent.steps + more.steps, spent.tokens + more.tokens, spent.seconds + more.seconds)
    assert one.ended(later) or not one.ended(spent)
    assert other.exceeds(one) or not (one.ended(spent) and not other.ended(spent))
    assert not one.exceeds(one)


@given(BUDGETS, st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_at_an_even_pace_the_last_step_is_known_from_the_first_on(budget: Budget, now: int, tokens: int, seconds: int) -> None:
    at = [Spent(step, step * tokens, float(step * seconds)) for step in range(1, 100)]
    last = next(spent.steps for spent in at if budget.ended(spent))
    assert budget.num_steps(at[now - 1]) == max(now, last)


def test_the_reason_names_the_limit_and_a_line_of_metrics_is_counted() -> None:
    line = {"step": 3, "num_tokens": 40, "num_tokens_total": 100, "step_time": 2.0, "step_time_total": 9.5}
    assert Spent.until(line) == Spent(3, 100, 9.5) and Spent.before(line) == Spent(2, 60, 7.5)
    assert Spent.until({"step": 3, "num_tokens_total": None, "step_time_total": "?"}) == Spent(3)
    assert Budget(3, 100).ended(Spent(3, 100)) == "all steps done"
    assert Budget(9, 100).ended(Spent(3, 100)) == "max_trained_tokens = 100 reached"
    assert Budget(9, 101, 9.5).ended(Spent.until(line)) == "max_seconds = 9.5 reached"
    assert Budget(9, 101, 9.6).ended(Spent.until(line)) == "" == Budget(9).ended(Spent.until(line))


class EndedHub(ScriptedHub):
    """A hub that can be told that the learner has enough."""

    directory: Path

    def finish(self, step: int) -> None:
        self._called("finish", step)
        assert step == self.step
        assert (self.directory / "checkpoints" / f"step_{step:06d}").is_dir(), "no actor is left to make a lost step anew"


@pytest.fixture
def limited(tmp_path: Path, live: Live) -> Live:
    """`limited(faults, name="life", **budget)`: its hub offers eight batches."""

    def make(faults: dict[tuple[str, int], str] | None = None, *, name: str = "life", **budget: Any) -> Life:
        hub = EndedHub(make_batches(8), faults)
        hub.directory = tmp_path / name
        return live(hub=hub, name=name, max_steps=budget.pop("max_steps", 8), save_every=5, **budget)

    return make


def totals(life: Life) -> list[int]:
    return [record["num_tokens_total"] for record in life.metrics()]


def test_the_step_that_reaches_the_tokens_is_the_last_saved_and_committed(limited: Live) -> None:
    one = limited(max_trained_tokens=2 * TOKENS + 1)
    assert one.trainer.run() == "max_trained_tokens = 33 reached"
    assert totals(one) == [TOKENS, 2 * TOKENS, 3 * TOKENS] and one.saved() == [3]
    assert [call for call in one.hub.calls if call[0] in ("publish", "finish", "commit")] == [
        ("publish", 0), ("publish", 1), ("publish", 2), ("finish", 3), ("commit", 3),
    ]  # fmt: skip
    other = limited(name="other", max_steps=3)
    other.hub.batches = other.hub.batches[:3]
    assert other.trainer.run() == "finished" and other.weights == one.weights


@pytest.mark.parametrize("fault", [("trained", 1), ("finish", 0), ("commit", 0)], ids=str)
def test_killed_at_its_end_it_ends_at_the_same_step_again(limited: Live, fault: tuple[str, int]) -> None:
    with pytest.raises(Killed):
        limited({fault: "kill"}, max_trained_tokens=2 * TOKENS).trainer.run()
    second = limited(max_trained_tokens=2 * TOKENS)
    assert second.trainer.run() == "max_trained_tokens = 32 reached"
    assert totals(second) == [TOKENS, 2 * TOKENS] and second.hub.calls[-2:] == [("finish", 2), ("commit", 2)]


def test_a_hub_that_was_restarted_at_the_end_is_told_again(limited: Live) -> None:
    life = limited({("finish", 0): "forget"}, max_trained_tokens=TOKENS).ran()
    assert [call for call in life.hub.calls if call[0] in ("register", "finish")] == [
        ("register", 0), ("finish", 1), ("register", 1), ("finish", 1),
    ]  # fmt: skip


def test_seconds_are_those_of_the_steps_over_all_starts(limited: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = StepClock.measure
    monkeypatch.setattr(StepClock, "measure", lambda *given: measure(*given) | {"step_time": 0.5})
    assert limited(max_seconds=1.0).trainer.run() == "max_seconds = 1 reached"
    second = limited(max_seconds=2.0).ran()
    assert [record["step_time_total"] for record in second.metrics()] == [0.5, 1.0, 1.5, 2.0]
    assert [step for call, step in second.hub.calls if call == "take"] == [2, 3]


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
