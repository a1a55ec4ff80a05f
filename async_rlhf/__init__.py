"""async-rlhf: asynchronous off-policy RLHF.

    from async_rlhf import reward, train

The names below are loaded when they are first used; importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.rewards import reward

if TYPE_CHECKING:
    from async_rlhf.api import TrainResult, train

__all__ = ["TrainResult", "reward", "train"]


def __getattr__(name: str) -> Any:
    if name in ("train", "TrainResult"):
        from async_rlhf import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
