"""The shape of an answer: a regular expression that must be found."""

from __future__ import annotations

import re

from async_rlhf.actors.rewards.settings import reward


@reward
def regex(completion: str, pattern: str, whole: bool = False) -> float:
    """1.0 when `pattern` is found in the completion (with `whole`, when it matches all of it), else 0.0.

    A dot matches line ends too. A format is a pattern: "<think>.*</think>\\s*<answer>.*</answer>" with whole = true.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return float((compiled.fullmatch if whole else compiled.search)(completion.strip()) is not None)
