"""async-rlhf: asynchronous off-policy RLHF.

    from async_rlhf import reward, train

The names below are loaded when they are first used; importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rlhf.actors.rewards import Score, Stream, TransientError, reward
    from async_rlhf.inspect.trials import Trial, try_rewards
    from async_rlhf.learner.registry import advantage, loss
    from async_rlhf.run.api import TrainResult, train

__all__ = ["Score", "Stream", "TrainResult", "TransientError", "Trial", "advantage", "loss", "reward", "train", "try_rewards"]


_HOMES = {
    **dict.fromkeys(("Score", "Stream", "TransientError", "reward"), "async_rlhf.actors.rewards"),
    **dict.fromkeys(("TrainResult", "train"), "async_rlhf.run.api"),
    **dict.fromkeys(("advantage", "loss"), "async_rlhf.learner.registry"),
    **dict.fromkeys(("Trial", "try_rewards"), "async_rlhf.inspect.trials"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
