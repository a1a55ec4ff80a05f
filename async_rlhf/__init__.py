"""async-rlhf: asynchronous off-policy RLHF.

    from async_rlhf import reward, train

The names below are loaded when they are first used; importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.rewards import Score, Stream, TransientError, reward

if TYPE_CHECKING:
    from async_rlhf.api import TrainResult, train
    from async_rlhf.reward_trial import Trial, try_rewards

__all__ = ["Score", "Stream", "TrainResult", "TransientError", "Trial", "reward", "train", "try_rewards"]


def __getattr__(name: str) -> Any:
    if name in ("train", "TrainResult"):
        from async_rlhf import api

        return getattr(api, name)
    if name in ("try_rewards", "Trial"):
        from async_rlhf import reward_trial

        return getattr(reward_trial, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
