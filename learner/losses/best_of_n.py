"""Best-of-n supervised: imitate the best completion of each group."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.losses.base import LossInputs


def best_of_n(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[N]: - log p_current, of the only completion that the trainer leaves in each group (arXiv 2410.18252, section 4.1).

    Who wrote it does not enter: nothing to correct.
    """
    return -inputs.logp_current_N, {}
