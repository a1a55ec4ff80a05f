"""The table of losses: a new one is a file, a line here, a test and a preset."""

from __future__ import annotations

from learner.losses.base import Loss
from learner.losses.ppo_clip import decoupled_ppo, ppo_clip

LOSSES: dict[str, Loss] = {"decoupled_ppo": Loss(decoupled_ppo), "ppo_clip": Loss(ppo_clip)}
