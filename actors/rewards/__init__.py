"""Rewards, which users write: their form, how they are named, and how another process imports them.

A reward is an ordinary function. The canonical form names what it needs:

    @reward
    def exact(completion: str, answer: str) -> float | None: ...

and gets the fields of the completion (`FIELDS`) and the columns of its prompt's row. TRL's form
`f(prompts, completions, **columns) -> list[float | None]` and those of other systems (`adapters`) work unchanged; `async
def` works for all. A number is a value, None is not applicable, anything raised is failed. Never here: processes and
time-outs (`async_rlhf.actors.scoring`).
"""

from async_rlhf.actors.rewards.adapters import adapted
from async_rlhf.actors.rewards.answer import Answer
from async_rlhf.actors.rewards.loading import (
    BUILTINS,
    RewardSpec,
    absolute,
    check_columns,
    load,
    resolve,
    spec_in_process,
    spec_of,
)
from async_rlhf.actors.rewards.settings import RewardFunction, RewardSettings, Stream, TransientError, reward, settings_of
from async_rlhf.actors.rewards.signature import FIELDS, Signature
from async_rlhf.buffers.score import Score

__all__ = [
    "BUILTINS",
    "FIELDS",
    "Answer",
    "RewardFunction",
    "RewardSettings",
    "RewardSpec",
    "Score",
    "Signature",
    "Stream",
    "TransientError",
    "absolute",
    "adapted",
    "check_columns",
    "load",
    "resolve",
    "reward",
    "settings_of",
    "spec_in_process",
    "spec_of",
]
