"""How long one replica takes to generate completions of given lengths, by continuous batching: step after step, row after row.

Rows wait in the order of `lengths`. One begins as soon as a slot is free and the cache has room for its prompt and the longest
completion that a row may have, so that none is ever put off again. With as many slots as rows it is a static batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from async_rlhf.buffers.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Generated:
    """ends_s: of each row, in the order of their lengths. busy_share: of the slots, in the mean over decode steps."""

    total_s: float
    ends_s: tuple[float, ...]
    steps: int
    busy_share: float


def generate(
    lengths: Sequence[int],
    *,
    prompt_tokens: int,
    slots: int,
    room_tokens: int,
    longest: int,
    step_s: Callable[[int, float], float],
    prefill_s: Callable[[int], float],
) -> Generated:
    """lengths: tokens of each completion, 1 to `longest`. room_tokens: of the whole key-value cache.

    step_s(alive, context): a decode step, context the mean over the alive rows of prompt and completion, its token among them.
    prefill_s(rows): of that many prompts that begin together; the alive rows wait for it. Raises ConfigError where no row fits.
    """
    _check(lengths, prompt_tokens, slots, room_tokens, longest)
    places = min(slots, room_tokens // (prompt_tokens + longest))
    waiting = deque(range(len(lengths)))
    produced: dict[int, int] = {}
    ends = [0.0] * len(lengths)
    now, steps, row_steps = 0.0, 0, 0
    while waiting or produced:
        begun = min(places - len(produced), len(waiting))
        if begun:
            now += prefill_s(begun)
            produced.update({waiting.popleft(): 0 for _ in range(begun)})
        alive = len(produced)
        now += step_s(alive, prompt_tokens + 1 + sum(produced.values()) / alive)
        steps, row_steps = steps + 1, row_steps + alive
        for row in list(produced):
            produced[row] += 1
            if produced[row] == lengths[row]:
                del produced[row]
                ends[row] = now
    busy = row_steps / (steps * slots) if steps else 0.0
    return Generated(total_s=now, ends_s=tuple(ends), steps=steps, busy_share=busy)


def _check(lengths: Sequence[int], prompt_tokens: int, slots: int, room_tokens: int, longest: int) -> None:
    if slots < 1 or prompt_tokens < 0:
        raise ConfigError(f"slots = {slots} (1 or more), prompt_tokens = {prompt_tokens} (0 or more)")
    wrong = next((length for length in lengths if not 1 <= length <= longest), None)
    if wrong is not None:
        raise ConfigError(f"a completion of {wrong} tokens: 1 to longest = {longest}")
    if room_tokens < prompt_tokens + longest:
        raise ConfigError(
            f"the cache has room for {room_tokens} tokens, a row may need {prompt_tokens + longest}: nearest longest is "
            f"{max(room_tokens - prompt_tokens, 0)}"
        )
