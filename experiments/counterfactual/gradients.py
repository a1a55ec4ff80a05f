"""Gradients at the weights of a checkpoint, by the learner's own step and without an update, in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from async_rlhf.buffers.composition import Statistics
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.record import Group
from async_rlhf.experiments.counterfactual.measures import Array
from async_rlhf.learner.batch.packing import count
from async_rlhf.learner.batch.rows import BatchRow, by_group, make_rows
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.loop.trainer import estimated
from async_rlhf.learner.model.gguf import model_directory
from async_rlhf.learner.objective.estimation import Rewards
from async_rlhf.learner.objective.objective import denominator
from async_rlhf.learner.step.controller import Controller
from async_rlhf.learner.step.ranks import Ranks
from async_rlhf.learner.step.torch_machine import Machine
from async_rlhf.run.config import Config

# What holds the whole gradient in one process, however many the run had.
_ALONE = {"ranks": 1, "sequence_parallel": 1, "tensor_parallel": 1, "backend": "torch", "compile": False}


class Gradients:
    """A learner of this configuration that holds the weights of a checkpoint and never moves them.

    loss: any that optimises what the run does; it decides whether the frozen reference is loaded. Raises ConfigError,
    CheckpointError.
    """

    def __init__(self, config: Config, checkpoint: Path, step: int, loss: LossConfig) -> None:
        self._config, self._step = config, step
        model = Path(model_directory(config.model))
        held = config.model_copy(update={"loss": loss}).held_reference
        reference = model if held == config.model else Path(held) if held else None
        self._machine = Machine(model, config.learner.model_copy(update=_ALONE), Ranks(), reference=reference)
        self._machine.load(checkpoint)
        policy = self._machine.policy
        self.num_parameters = sum(p.numel() for p in policy.parameters() if p.requires_grad)

    def sums(
        self,
        groups: Sequence[Group],
        rewards: Rewards,
        loss: LossConfig,
        groups_a_part: int,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> tuple[npt.NDArray[np.float32], Array]:
        """The gradient of `loss` on these groups as one update would be made from them all: the first of a step, in which the
        proximal policy is the present one. Cut, in order, into parts of so many groups (the last may have fewer): float32
        [K, P] of each part its gradient before the division, float64 [K] what it is divided by.

        Advantages, and masks that look at the whole batch, are made from all groups before the cut. progress: groups that are
        done, and of how many. Raises NonFiniteError.
        """
        longest = self._config.generation.longest_completion
        backend = Controller(self._machine, loss, longest)
        estimates, _ = estimated(groups, rewards, backend, self._config.advantage, loss)
        rows = make_rows(groups, estimates.advantages, estimates.targets)
        of_group = {rows_of_group[0].group.number: rows_of_group for rows_of_group in by_group(rows)}
        num_parts = -(-len(groups) // groups_a_part)
        sums_KP, counts_K = np.zeros((num_parts, self.num_parameters), np.float32), np.zeros(num_parts)
        waiting = iter(groups)
        for part in range(num_parts):
            rows_of_part: list[BatchRow] = [
                row for group in islice(waiting, groups_a_part) for row in of_group.get(group.number, [])
            ]
            if rows_of_part:  # else no completion of these groups is learned from
                counts_K[part] = denominator(loss, count(rows_of_part), longest)
                sums_KP[part] = backend.gradient(rows_of_part, self._step).cpu().numpy() * counts_K[part]
            progress(min(len(groups), (part + 1) * groups_a_part), len(groups))
        if not counts_K.any():
            raise ConfigError(f"step {self._step}: no completion of {len(groups)} groups is learned from; choose another step")
        return sums_KP, counts_K


def rewards_of(config: Config, groups: Sequence[Group], statistics: Statistics) -> list[list[float | None]]:
    """The reward of each member of each group, by the run's composition; None where one failed. statistics are not moved."""
    rule = config.rewards.composition
    return [[rule.of(group.columns).reward(rollout.scores, statistics) for rollout in group.rollouts] for group in groups]
