"""The answer, word for word."""

from __future__ import annotations

import json
import re

from async_rlhf.actors.rewards.settings import reward
from async_rlhf.buffers.score import Score


@reward
def exact(completion: str, answer: str | int | float | bool) -> float:
    """1.0 when the completion is the answer, surrounding white space aside; else 0.0.

    A number or a truth value is compared as JSON writes it: 4, 0.5, true. Raises TypeError for an answer of another kind.
    """
    if not isinstance(answer, str | int | float):
        raise TypeError(f"answer is {answer!r:.60}; text, a number, true or false can be compared")
    return float(completion.strip() == (answer if isinstance(answer, str) else json.dumps(answer)).strip())


@reward
def regex(completion: str, pattern: str, whole: bool = False) -> float:
    """1.0 when `pattern` is found in the completion (with `whole`, when it matches all of it), else 0.0.

    A dot matches line ends too. A format is a pattern: "<think>.*</think>\\s*<answer>.*</answer>" with whole = true.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return float((compiled.fullmatch if whole else compiled.search)(completion.strip()) is not None)


@reward
def length(completion_ids: list[int], target: int, tolerance: int) -> Score:
    """1.0 at `target` tokens, falling evenly to 0.0 at `tolerance` tokens more or less. Metric: `length`."""
    if tolerance < 1:
        raise ValueError(f"tolerance = {tolerance}; at least 1 token is needed")
    num_tokens = len(completion_ids)
    return Score(max(0.0, 1.0 - abs(num_tokens - target) / tolerance), metrics={"length": num_tokens})


@reward
def overlong(completion_ids: list[int], max_length: int, buffer: int) -> float:
    """The soft over-long penalty: 0 up to `max_length - buffer` tokens, then falling evenly to -1 at `max_length` and beyond.

    Source: DAPO (Yu et al. 2025, arXiv 2503.14476), equation 13.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer = {buffer}; between 1 and max_length = {max_length} is needed")
    over = len(completion_ids) - (max_length - buffer)
    return -min(1.0, max(0.0, over / buffer))
