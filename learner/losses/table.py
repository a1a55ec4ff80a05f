"""The table of losses: a new one is a file, a line here, a test and a preset."""

from __future__ import annotations

from learner.losses.base import Loss
from learner.losses.best_of_n import best_of_n
from learner.losses.cispo import cispo
from learner.losses.online_dpo import online_dpo
from learner.losses.ppo_clip import decoupled_ppo, ppo_clip
from learner.losses.sequence_clip import gspo, proximal_rloo
from learner.losses.topr import topr
from learner.losses.truncated_is import truncated_is

LOSSES: dict[str, Loss] = {
    "decoupled_ppo": Loss(decoupled_ppo),
    "ppo_clip": Loss(ppo_clip, corrects="masks"),
    "cispo": Loss(cispo),
    "gspo": Loss(gspo, level="sequence"),
    "topr": Loss(topr, corrects="masks"),
    "truncated_is": Loss(truncated_is, corrects="masks"),
    "proximal_rloo": Loss(proximal_rloo, level="sequence", corrects="masks"),
    "online_dpo": Loss(online_dpo, level="pair", corrects="nothing", learns_from="pair"),
    "best_of_n": Loss(best_of_n, corrects="nothing", learns_from="best"),
}
