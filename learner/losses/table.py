"""The table of losses: a new one is a file, a line here and in `learner/kinds.py`, a test and a preset."""

from __future__ import annotations

from async_rlhf.learner.losses.base import LossFunction
from async_rlhf.learner.losses.best_of_n import best_of_n
from async_rlhf.learner.losses.cispo import cispo
from async_rlhf.learner.losses.online_dpo import online_dpo
from async_rlhf.learner.losses.ppo_clip import decoupled_ppo, ppo_clip
from async_rlhf.learner.losses.sequence_clip import gspo, proximal_rloo
from async_rlhf.learner.losses.topr import topr
from async_rlhf.learner.losses.truncated_is import truncated_is

LOSSES: dict[str, LossFunction] = {
    "decoupled_ppo": decoupled_ppo,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "topr": topr,
    "truncated_is": truncated_is,
    "proximal_rloo": proximal_rloo,
    "online_dpo": online_dpo,
    "best_of_n": best_of_n,
}
