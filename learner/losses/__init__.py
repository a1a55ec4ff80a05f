"""The table of losses: a new one is a file, a line here, a test and a preset."""

from learner.losses.base import Loss, LossInputs, LossOutputs
from learner.losses.ppo_clip import ppo_clip

LOSSES: dict[str, Loss] = {"ppo_clip": ppo_clip}

__all__ = ["LOSSES", "Loss", "LossInputs", "LossOutputs"]
