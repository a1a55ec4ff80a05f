"""Combinations of settings without meaning are refused with the reason and the nearest valid choice, which is then accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.check import RunContext, check
from async_rlhf.learner.config import AdvantageConfig, GuardConfig, LearnerConfig, LossConfig

DATA = {"group_size": 4, "max_staleness": 2, "lowest_staleness": 0, "exact": False, "truncated": None}


def checked(settings: dict[str, Any]) -> None:
    """Sections by their dotted keys; `data.` stands for what the rest of the configuration says."""
    sections: dict[str, dict[str, Any]] = {"learner": {}, "advantage": {}, "loss": {}, "guard": {}, "data": dict(DATA)}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    check(
        LearnerConfig(**sections["learner"]),
        AdvantageConfig(**sections["advantage"]),
        LossConfig(**sections["loss"]),
        GuardConfig(**sections["guard"]),
        RunContext(**sections["data"]),
    )


# what is asked, what the refusal says, and what makes it right as the refusal says
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "an estimator without its critic": (
        {"advantage.kind": "traced"},
        "'traced' needs a critic's values.*learner.critic.kind = 'head'",
        {"learner.critic": {"kind": "head"}},
    ),
    "a critic nobody asks": (
        {"learner.critic": {"kind": "model"}},
        "has no use for values.*learner.critic.kind = 'none'",
        {"learner.critic": {"kind": "none"}},
    ),
    "token advantages in a loss of completions": (
        {"advantage.kind": "v_trace", "learner.critic": {"kind": "head"}, "loss.kind": "gspo"},
        "one advantage for a completion.*loss.kind = 'decoupled_ppo'",
        {"loss.kind": "decoupled_ppo"},
    ),
    "returns to go in a loss of completions": (
        {"advantage.kind": "reinforce_pp", "advantage.gamma": 0.9, "loss.kind": "gspo"},
        "'reinforce_pp' one for each token.*loss.kind = 'decoupled_ppo'",
        {"loss.kind": "decoupled_ppo"},
    ),
    "turns without a group": (
        {"advantage.level": "turn", "advantage.kind": "reinforce_pp"},
        "compared within a group.*advantage.kind = 'leave_one_out'",
        {"advantage.kind": "leave_one_out"},
    ),
    "turns in a loss of completions": (
        {"advantage.level": "turn", "loss.kind": "gspo"},
        "one advantage for a completion.*loss.kind = 'decoupled_ppo'",
        {"loss.kind": "decoupled_ppo"},
    ),
    "turns where groups are dropped by their rewards": (
        {"advantage.level": "turn", "advantage.constant_groups": "drop"},
        "turns can differ.*'keep'",
        {"advantage.constant_groups": "keep"},
    ),
    "cut completions out of a baseline that is a critic": (
        {"advantage.kind": "v_trace", "learner.critic": {"kind": "head"}, "loss.mask_truncated": "loss and baseline"},
        "with advantage.kind = 'v_trace' no baseline is made from rewards.*'loss'",
        {"loss.mask_truncated": "loss"},
    ),
    "cut completions out of a baseline that only ranks": (
        {"loss.kind": "best_of_n", "loss.mask_truncated": "loss and baseline"},
        "with loss.kind = 'best_of_n' no baseline.*'loss'",
        {"loss.mask_truncated": "loss"},
    ),
    "a trace longer than its step": (
        {"advantage.c_cap": 2.0},
        "c_cap = 2 is above .*rho_cap = 1.*Highest: 1",
        {"advantage.c_cap": 1.0},
    ),
    "pairs of one": ({"loss.kind": "online_dpo", "data.group_size": 1}, "group_size is 1. Lowest.*= 2", {"data.group_size": 2}),
    "a group of one": (
        {"data.group_size": 1},
        "every advantage would be 0.*advantage.kind = 'reinforce_pp'",
        {"advantage.kind": "reinforce_pp"},
    ),
    "dropping groups of one": (
        {"data.group_size": 1, "advantage.kind": "reinforce_pp", "advantage.constant_groups": "drop"},
        "leaves nothing.*'keep'",
        {"advantage.constant_groups": "keep"},
    ),
    "refill by running statistics": (
        {"advantage.constant_groups": "refill", "data.normalised": ("judge",)},
        r"rewards.normalise = \['judge'\].*'drop', or rewards.normalise = \[\]",
        {"advantage.constant_groups": "drop"},
    ),
    "a correction with nothing to correct": (
        {"loss.kind": "best_of_n", "loss.sequence_mask": (0.9, 1.1)},
        "does not matter which policy sampled.*loss.sequence_mask = 'none'",
        {"loss.sequence_mask": None},
    ),
    "a token mask on whole completions": (
        {"loss.kind": "gspo", "loss.token_mask": (0.5, 2.0)},
        "masks single tokens.*loss.kind = 'decoupled_ppo'",
        {"loss.kind": "decoupled_ppo"},
    ),
    "a second weight": (
        {"loss.kind": "ppo_clip", "loss.is_level": "sequence"},
        "has the ratio to the behaviour policy in itself.*is_level = 'token'",
        {"loss.is_level": "token"},
    ),
    "a mask that takes what is on-policy": (
        {"loss.token_mask": (1.1, 2.0)},
        r"token_mask = \[1.1, 2.0\] must have 1 inside.*\[0.5, 2.0\]",
        {"loss.token_mask": (0.5, 2.0)},
    ),
    "a reduction over tokens of a loss of pairs": (
        {"loss.kind": "online_dpo", "loss.reduction": "sequence"},
        "is a whole pair.*at 'token'",
        {"loss.reduction": "token"},
    ),
    "a fixed length that is not given": (
        {"loss.reduction": "fixed"},
        "needs loss.fixed_length",
        {"loss.fixed_length": 16},
    ),
    "a divergence in rewards that only rank": (
        {"loss.kind": "online_dpo", "loss.kl_coef": 0.1, "loss.kl_in": "reward"},
        "only ranks.*'loss'",
        {"loss.kl_in": "loss"},
    ),
    "uncorrected asynchrony": (
        {"loss.is_cap": None},
        "max_staleness = 2 without an importance weight.*loss.is_cap = 2.0",
        {"loss.is_cap": 2.0},
    ),
    "uncorrected REINFORCE": (
        {"loss.kind": "truncated_is", "loss.is_cap": None},
        "without an importance weight.*allow_uncorrected = true",
        {"loss.allow_uncorrected": True},
    ),
    "a critic fitted to old policies": (
        {"advantage.kind": "gae", "learner.critic": {"kind": "head"}},
        "fits the critic to the policies that sampled.*advantage.kind = 'traced'",
        {"advantage.kind": "traced"},
    ),
    "ratios over an unknown part of the vocabulary": (
        {"data.truncated": "generation.top_p = 0.9", "data.support_recorded": False},
        "top_p = 0.9 cuts off.*would not be 1.*Set generation.top_k",
        {"data.support_recorded": True},
    ),
    "the same, and a loss without ratios": (
        {"data.truncated": "generation.min_p = 0.1", "data.support_recorded": False},
        "min_p = 0.1 cuts off.*loss.kind = 'online_dpo'",
        {"loss.kind": "online_dpo"},
    ),
    "a guard of what is fixed": (
        {"guard.enabled": True, "data.exact": True},
        "exact = true fixes it",
        {"data.exact": False},
    ),
    "a target beside an exact one": (
        {"guard.target": 1, "data.exact": True},
        r"guard\.target = 1 aims at a staleness, and queue\.exact = true fixes it\. Set guard\.target = 'none'",
        {"guard.target": None},
    ),
    "a target beyond the bound": (
        {"guard.target": 9},
        r"guard\.target = 9 is not between .* queue\.max_staleness = 2, the bound; nearest: 2",
        {"guard.target": 2},
    ),
    "a guard without room below its target": (
        {"guard.enabled": True, "guard.target": 0},
        r"no room below guard\.target = 0, .* Set guard\.target = 1 or more, or guard\.enabled = false",
        {"guard.target": 1},
    ),
    "a guard without room": (
        {"guard.enabled": True, "data.lowest_staleness": 2},
        "no room below queue.max_staleness = 2.*= 3 or more",
        {"data.max_staleness": 3},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_has_no_meaning_is_refused_and_what_the_refusal_proposes_is_accepted(case: str) -> None:
    asked, message, remedy = CASES[case]
    with pytest.raises(ConfigError) as refusal:
        checked(asked)
    assert re.search(message, str(refusal.value)), refusal.value
    checked({**asked, **remedy})


def test_the_defaults_are_accepted() -> None:
    checked({})


@pytest.mark.parametrize("kind", ["ppo_clip", "topr", "proximal_rloo", "online_dpo", "best_of_n"])
def test_a_loss_that_needs_no_weight_may_be_stale_without_one(kind: str) -> None:
    checked({"loss.kind": kind, "loss.is_cap": None})
