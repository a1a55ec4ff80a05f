"""The critic: the expected return from each token on, from the states before it, and the loss it is fitted with.

`head` reads the policy's own last states; `model` has a trunk of its own. Its last layer begins at zero, so that the first
advantages are those of no critic.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from async_rlhf.learner.config import CriticConfig


class Critic(nn.Module):
    """Values float32 [N] of the N tokens that are predicted at positions `source_N` of the flattened rows."""

    def __init__(self, width: int, trunk: nn.Module | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.value = nn.Linear(width, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, hidden_ND: Tensor, inputs: Mapping[str, Any], source_N: Tensor) -> Tensor:
        """`hidden_ND` are the policy's states, `inputs` what its trunk was given."""
        if self.trunk is not None:
            hidden_ND = self.trunk(**inputs).last_hidden_state.flatten(0, 1)[source_N]
        with torch.autocast(hidden_ND.device.type, enabled=False):
            values: Tensor = self.value(hidden_ND.float()).squeeze(-1)
        return values


def make_critic(config: CriticConfig, trunk: nn.Module, width: int) -> Critic | None:
    """The critic asked for beside a policy with this trunk, or None."""
    if config.kind == "none":
        return None
    own = copy.deepcopy(trunk) if config.kind == "model" else None
    return Critic(width, own).to(next(trunk.parameters()).device)


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, clip: float | None) -> Tensor:
    """[N]: max((V - R)^2, (V' - R)^2) / 2, with V' the value held within `clip` of the one at the start of the step.

    PPO's clipped value loss (detail 9 of Huang et al. 2022, "The 37 implementation details of proximal policy optimization").
    None: (V - R)^2 / 2. `value_N` carries the gradient. Per token, to be summed and divided like a token loss.
    """
    plain_N = (value_N - return_N).square()
    if clip is None:
        return plain_N / 2
    held_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
    return plain_N.maximum((held_N - return_N).square()) / 2
