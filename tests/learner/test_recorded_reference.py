"""Log-probabilities under the reference that came with the rollouts: the step is the one that computes them itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import ADVANTAGES, make_group, weights

from async_rlhf.buffers.errors import RecordError
from async_rlhf.buffers.record import Group
from async_rlhf.learner.batch.rows import make_rows, split_updates
from async_rlhf.learner.config import AdvantageConfig, LearnerConfig, LossConfig
from async_rlhf.learner.objective.estimation import estimate_advantages
from async_rlhf.learner.step.controller import Controller, make_backend

GROUPS = [make_group(n, [3, 1, 6], temperature=0.8) for n in range(4)]


def backend(path: Path, loss: LossConfig, *, recorded: bool = True) -> Controller:
    config = LearnerConfig(learning_rate=1e-2, micro_batch_tokens=40)
    return make_backend(path, config, loss, reference_recorded=recorded)


def recorded(path: Path, loss: LossConfig, less: float = 0.0) -> list[Group]:
    """The same groups with what the frozen model says of each token."""
    seen = backend(path, loss, recorded=False).evaluate(make_rows(GROUPS, ADVANTAGES, 512)).values()
    said = iter([each.logp_reference - np.float32(less) for each in seen if each.logp_reference is not None])
    return [replace(g, rollouts=tuple(replace(r, reference=next(said)) for r in g.rollouts)) for g in GROUPS]


@pytest.mark.parametrize(
    "loss", [{"kl_coef": 0.3}, {"kl_coef": 0.3, "kl_in": "reward"}, {"kind": "online_dpo"}], ids=["loss", "reward", "pairs"]
)
def test_a_step_from_recorded_values_is_the_step_that_computes_them(model_dir: Path, loss: dict[str, Any]) -> None:
    config, plain = LossConfig(**loss), AdvantageConfig()
    told: list[tuple[dict[str, bytes], Any]] = []
    for groups in (GROUPS, recorded(model_dir, config)):
        trained = backend(model_dir, config, recorded=groups is not GROUPS)
        for step in range(2):  # in the second the policy is another than the reference
            seen = trained.evaluate(make_rows(groups, ADVANTAGES, 512)) if config.needs_evaluation(plain) else {}
            found = estimate_advantages(groups, ADVANTAGES, ADVANTAGES, seen, plain, config)
            report = trained.step(split_updates(make_rows(groups, found.advantages, 512, found.targets), 2), step)
        told.append((weights(trained), report.metrics))
    assert told[0] == told[1]


def test_what_was_recorded_is_used_no_second_model_is_held_and_one_without_is_no_guess(model_dir: Path) -> None:
    loss = LossConfig(kl_coef=0.3)
    groups = recorded(model_dir, loss)
    one, other = backend(model_dir, loss), backend(model_dir, loss)
    assert one.machine._reference is None
    lower = other.step([make_rows(recorded(model_dir, loss, 1.0), ADVANTAGES, 512)], 0).metrics["kl/reference"]
    assert lower == pytest.approx(one.step([make_rows(groups, ADVANTAGES, 512)], 0).metrics["kl/reference"] + 1, abs=1e-4)
    lacking = replace(groups[2].rollouts[0], reference=None)
    groups[2] = replace(groups[2], rollouts=(lacking, *groups[2].rollouts[1:]))
    with pytest.raises(RecordError, match=r'group 2 carries no log-probabilities.*placement = "learner"'):
        one.step([make_rows(groups, ADVANTAGES, 512)], 1)
    without = [[None if (g, m) == (2, 0) else value for m, value in enumerate(row)] for g, row in enumerate(ADVANTAGES)]
    assert one.step([make_rows(groups, without, 512)], 1).applied, "one that failed is left out, the others are trained on"
