"""What the learner's loop takes of the whole run: the learner's own sections, and single values of the others. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from async_rlhf.buffers.composition import Composition
from async_rlhf.learner.config import AdvantageConfig, CheckpointConfig, GuardConfig, LearnerConfig, LossConfig
from async_rlhf.learner.loop.budget import Budget


@dataclass(frozen=True)
class TrainerConfig:
    """See the module docstring."""

    learner: LearnerConfig
    loss: LossConfig
    checkpoint: CheckpointConfig
    budget: Budget
    max_staleness: int
    composition: Composition
    max_failed_ratio: float
    """Of the scores of a batch."""
    sampled_groups: int
    """Groups of every step written to `rollouts.jsonl`."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    lowest_staleness: int = 0
    """The smallest staleness the guard may set as target: below it the run would wait forever."""
    exact: bool = False
    """Whether each group is made by one certain version."""
    evaluate_every: int = 0
    """Steps between two evaluations, each of which has a checkpoint; 0: none."""
    mismatch_limit: float = math.inf
    """Largest mean |log-ratio| of learner and engine over tokens that were sampled from the weights a step begins with."""
    max_log_bytes: int | None = None
    """After which `rollouts.jsonl` begins anew."""
