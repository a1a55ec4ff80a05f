"""How long one replica takes to generate completions of given lengths, by continuous batching.

Rows wait in the order of `lengths`. One begins as soon as a slot is free and the cache has room for its prompt and the longest
completion that a row may have, so that none is ever put off again. With as many slots as rows it is a static batch. Time goes
from one row's end to the next: in between the same rows are alive, each of them one token longer with every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from async_rlhf.buffers.errors import ConfigError


def generation_ends_s(
    lengths: Sequence[int],
    *,
    prompt_tokens: int,
    slots: int,
    room_tokens: int,
    longest: int,
    step_s: Callable[[int, float], float],
    prefill_s: Callable[[int], float],
) -> list[float]:
    """When each row ends. lengths: tokens of each completion, 1 to `longest`. room_tokens: of the whole key-value cache.

    step_s(alive, context): a decode step, context the mean over the alive rows of prompt and completion, its token among them;
    taken at the middle of each stretch of steps with the same rows, which is exact where it is linear in the context.
    prefill_s(rows): of that many prompts that begin together; the alive rows wait for it. Raises ConfigError where no row fits.
    """
    if slots < 1 or prompt_tokens < 0:
        raise ConfigError(f"slots = {slots} (1 or more), prompt_tokens = {prompt_tokens} (0 or more)")
    if wrong := [length for length in lengths if not 1 <= length <= longest]:
        raise ConfigError(f"a completion of {wrong[0]} tokens: 1 to longest = {longest}")
    if room_tokens < prompt_tokens + longest:
        raise ConfigError(
            f"the cache has room for {room_tokens} tokens, a row may need {prompt_tokens + longest}: nearest longest is "
            f"{max(room_tokens - prompt_tokens, 0)}"
        )
    places = min(slots, room_tokens // (prompt_tokens + longest))
    alive: list[tuple[int, int]] = []  # (the step behind which it ends, row)
    ends = [0.0] * len(lengths)
    now, step, waiting, begun_at = 0.0, 0, 0, 0  # begun_at: the sum of the steps at which the alive rows began
    while alive or waiting < len(lengths):
        begun = min(places - len(alive), len(lengths) - waiting)
        if begun:
            now += prefill_s(begun)
        for row in range(waiting, waiting + begun):
            heappush(alive, (step + lengths[row], row))
        waiting, begun_at = waiting + begun, begun_at + begun * step
        rows, stretch = len(alive), alive[0][0] - step
        now += stretch * step_s(rows, prompt_tokens + step - begun_at / rows + (stretch + 1) / 2)
        step += stretch
        while alive and alive[0][0] == step:
            row = heappop(alive)[1]
            begun_at -= step - lengths[row]
            ends[row] = now
    return ends
