"""What each loss is, apart from its formula: enough to refuse what makes no sense before torch is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True)
class LossSpec:
    """One line of the table."""

    level: Literal["token", "sequence", "pair"] = "token"
    """What one term of the loss belongs to: a token, a whole completion, or two completions of a group."""
    corrects: Literal["weights and masks", "masks", "nothing"] = "weights and masks"
    """What it multiplies its terms by. A loss with the ratio to the behaviour policy in itself takes masks only."""
    learns_from: Literal["all", "pair", "best"] = "all"
    """Members of a group that it is given."""

    @property
    def takes_ratios(self) -> bool:
        """Whether it compares the policy with the one that sampled, and so with what that one really sampled from."""
        return self.corrects != "nothing"


LOSS_SPECS: dict[str, LossSpec] = {
    "decoupled_ppo": LossSpec(),
    "ppo_clip": LossSpec(corrects="masks"),
    "cispo": LossSpec(),
    "gspo": LossSpec(level="sequence"),
    "topr": LossSpec(corrects="masks"),
    "truncated_is": LossSpec(corrects="masks"),
    "proximal_rloo": LossSpec(level="sequence", corrects="masks"),
    "online_dpo": LossSpec(level="pair", corrects="nothing", learns_from="pair"),
    "best_of_n": LossSpec(corrects="nothing", learns_from="best"),
}

_LOSSES = "async_rlhf.learner.objective.losses"
_PLACES = {
    "decoupled_ppo": "clipped",
    "ppo_clip": "clipped",
    "cispo": "reinforce",
    "gspo": "clipped",
    "topr": "reinforce",
    "truncated_is": "reinforce",
    "proximal_rloo": "clipped",
    "online_dpo": "preference",
    "best_of_n": "preference",
}


def load_loss(kind: str) -> Callable[..., Any]:
    """The function; imports torch."""
    function: Callable[..., Any] = getattr(import_module(f"{_LOSSES}.{_PLACES[kind]}"), kind)
    return function
