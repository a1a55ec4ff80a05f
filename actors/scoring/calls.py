"""One call of one reward: what is sent to a worker, and how the worker gets ready for it. Plain data both ways."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from actors.rewards import Answer, RewardSpec, Signature, failed, load

# Longest time a worker may take to import its rewards, models they load at import included.
START_LIMIT_S = 300.0
# Workers that end before they are ready will not do better the next time.
MAX_FAILED_STARTS = 3


class Call(NamedTuple):
    """`fields` holds what the reward can use: fields of the completion and columns of its prompt's row."""

    id: int
    spec: RewardSpec
    fields: Mapping[str, Any]


# Hands an answer to the pool, from any thread.
Answered = Callable[[int, Answer], None]


class Ready(NamedTuple):
    """A loaded reward and how to call it."""

    function: Callable[..., Any]
    signature: Signature


@functools.cache
def ready(spec: RewardSpec) -> Ready | Answer:
    """Load a reward once per process; a reward that cannot be loaded answers every call with the reason."""
    try:
        function = load(spec)
        return Ready(function, Signature.of(function))
    except BaseException as error:  # noqa: BLE001  loading runs the user's module; its failure must not end the worker
        return failed(error)


def timed_out(timeout_s: float) -> Answer:
    return Answer(None, f"timed out after {timeout_s:g} s (rewards.timeout_s)", seconds=timeout_s)
