"""The learning rate over steps, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from async_rlhf.learner.config import CriticConfig, LearnerConfig
from async_rlhf.learner.step.torch_machine import learning_rate

RATES = {
    "constant": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "linear": [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
    "cosine": [0.5, 1.0, 1.0, 0.2 + 0.8 * (1 + 2**-0.5) / 2, 0.6, 0.2 + 0.8 * (1 - 2**-0.5) / 2, 0.2, 0.2],
}


@pytest.mark.parametrize("schedule", RATES)
def test_it_rises_over_the_warm_up_and_falls_to_the_final_one(schedule: str) -> None:
    config = LearnerConfig(
        learning_rate=1.0,
        warmup_steps=2,
        schedule=schedule,  # type: ignore[arg-type]
        schedule_steps=6,
        final_learning_rate=0.2,
    )
    assert [learning_rate(config, step) for step in range(8)] == pytest.approx(RATES[schedule])


def test_the_critics_follows_the_same_curve_from_its_own_peak() -> None:
    config = LearnerConfig(learning_rate=1e-4, schedule="linear", schedule_steps=4, final_learning_rate=1e-5)
    config = config.model_copy(update={"critic": CriticConfig(kind="head", learning_rate=1e-2)})
    for step in range(6):
        assert learning_rate(config, step, 1e-2) == pytest.approx(100 * learning_rate(config, step))
