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
def length(completion_ids: list[int], target: int, tolerance: int, sampled: list[bool] | None = None) -> Score:
    """1.0 at `target` sampled tokens, falling evenly to 0.0 at `tolerance` tokens more or less. Metric: `length`."""
    if tolerance < 1:
        raise ValueError(f"tolerance = {tolerance}; at least 1 token is needed")
    num_tokens = _num_sampled(completion_ids, sampled)
    return Score(max(0.0, 1.0 - abs(num_tokens - target) / tolerance), metrics={"length": num_tokens})


@reward
def overlong(completion_ids: list[int], max_length: int, buffer: int, sampled: list[bool] | None = None) -> float:
    """The soft over-long penalty: 0 up to `max_length - buffer` sampled tokens, then falling evenly to -1 from `max_length` on.

    Source: DAPO (Yu et al. 2025, arXiv 2503.14476), equation 13.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer = {buffer}; between 1 and max_length = {max_length} is needed")
    over = _num_sampled(completion_ids, sampled) - (max_length - buffer)
    return -min(1.0, max(0.0, over / buffer))


def _num_sampled(completion_ids: list[int], sampled: list[bool] | None) -> int:
    """sampled: which of the tokens were, of an episode."""
    return len(completion_ids) if sampled is None else sum(sampled)
