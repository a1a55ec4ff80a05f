"""Log-probabilities under the reference that came with the rollouts: the step is the one that computes them itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import make_group, weights

from async_rlhf.buffers.errors import RecordError
from async_rlhf.buffers.record import Group
from async_rlhf.learner.batch.rows import make_rows, split_updates
from async_rlhf.learner.config import AdvantageConfig, LearnerConfig, LossConfig
from async_rlhf.learner.objective.estimation import estimate_advantages
from async_rlhf.learner.step.controller import Controller, make_backend

GROUPS = [make_group(n, [3, 1, 6], temperature=0.8) for n in range(4)]
ADVANTAGES = [[1.0, -1.5, 0.5]] * 4


def backend(path: Path, loss: LossConfig, *, recorded: bool) -> Controller:
    config = LearnerConfig(learning_rate=1e-2, micro_batch_tokens=40)
    return make_backend(path, config, loss, reference_recorded=recorded)


def recorded(path: Path, loss: LossConfig) -> list[Group]:
    """The same groups with what the frozen model says of each token."""
    seen = iter(backend(path, loss, recorded=False).evaluate(make_rows(GROUPS, ADVANTAGES, 512)).items())
    return [
        replace(group, rollouts=tuple(replace(r, reference=next(seen)[1].logp_reference) for r in group.rollouts))
        for group in GROUPS
    ]


@pytest.mark.parametrize(
    "loss", [{"kl_coef": 0.3}, {"kl_coef": 0.3, "kl_in": "reward"}, {"kind": "online_dpo"}], ids=["loss", "reward", "pairs"]
)
def test_a_step_from_recorded_values_is_the_step_that_computes_them(model_dir: Path, loss: dict[str, Any]) -> None:
    config = LossConfig(**loss)
    told: list[tuple[dict[str, bytes], Any]] = []
    for groups, is_recorded in ((GROUPS, False), (recorded(model_dir, config), True)):
        trained = backend(model_dir, config, recorded=is_recorded)
        rows = make_rows(groups, ADVANTAGES, 512)
        for step in range(2):  # in the second the policy is another than the reference
            seen = trained.evaluate(rows) if config.needs_evaluation(AdvantageConfig()) else {}
            beliefs = estimate_advantages(groups, ADVANTAGES, ADVANTAGES, seen, AdvantageConfig(), config)
            report = trained.step(split_updates(make_rows(groups, beliefs.advantages, 512, beliefs.targets), 2), step)
        told.append((weights(trained), report.metrics))
    assert told[0] == told[1]


def test_what_was_recorded_is_used_and_no_second_model_is_held(model_dir: Path) -> None:
    loss = LossConfig(kl_coef=0.3)
    groups = recorded(model_dir, loss)
    lower = [
        replace(g, rollouts=tuple(replace(r, reference=r.reference - np.float32(1)) for r in g.rollouts))  # type: ignore[operator]
        for g in groups
    ]
    one, other = (backend(model_dir, loss, recorded=True) for _ in range(2))
    assert one.machine._reference is None
    reports = [b.step([make_rows(g, ADVANTAGES, 512)], 0).metrics for b, g in ((one, groups), (other, lower))]
    assert reports[1]["kl/reference"] == pytest.approx(reports[0]["kl/reference"] + 1, abs=1e-4)


def test_a_rollout_without_them_is_no_guess(model_dir: Path) -> None:
    loss = LossConfig(kl_coef=0.3)
    groups = recorded(model_dir, loss)
    first = groups[2].rollouts
    groups[2] = replace(groups[2], rollouts=(replace(first[0], reference=None), *first[1:]))
    rows = make_rows(groups, ADVANTAGES, 512)
    with pytest.raises(RecordError, match=r'group 2 carries no log-probabilities.*placement = "learner"'):
        backend(model_dir, loss, recorded=True).step([rows], 0)
    without = [[None if g == 2 and m == 0 else value for m, value in enumerate(row)] for g, row in enumerate(ADVANTAGES)]
    report = backend(model_dir, loss, recorded=True).step([make_rows(groups, without, 512)], 0)
    assert report.applied, "one that failed is left out, and the others are trained on"
