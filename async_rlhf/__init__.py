"""async-rlhf: asynchronous off-policy RLHF.

    from async_rlhf import reward, train

The names below are loaded when they are first used; importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rlhf.actors.environments import Feedback, environment
    from async_rlhf.actors.environments.tool_calls import tool_calls
    from async_rlhf.actors.rewards import Score, Stream, TransientError, reward
    from async_rlhf.api import Run, TrainResult, start, train
    from async_rlhf.inspect.trials import TrialReport, try_rewards
    from async_rlhf.learner.registry import advantage, loss
    from async_rlhf.run.config import Config

    __version__: str

__all__ = [
    "Config",
    "Feedback",
    "Run",
    "Score",
    "Stream",
    "TrainResult",
    "TransientError",
    "TrialReport",
    "__version__",
    "advantage",
    "environment",
    "loss",
    "reward",
    "start",
    "tool_calls",
    "train",
    "try_rewards",
]


_HOMES = {
    **dict.fromkeys(("Feedback", "environment"), "async_rlhf.actors.environments"),
    "tool_calls": "async_rlhf.actors.environments.tool_calls",
    **dict.fromkeys(("Score", "Stream", "TransientError", "reward"), "async_rlhf.actors.rewards"),
    **dict.fromkeys(("Run", "TrainResult", "start", "train"), "async_rlhf.api"),
    "Config": "async_rlhf.run.config",
    **dict.fromkeys(("advantage", "loss"), "async_rlhf.learner.registry"),
    **dict.fromkeys(("TrialReport", "try_rewards"), "async_rlhf.inspect.trials"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("async-rlhf")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
