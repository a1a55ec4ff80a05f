"""Mathematical equality, by math-verify."""

from __future__ import annotations

import logging

from math_verify import parse, verify

from async_rlhf.actors.rewards.settings import reward

# math-verify reads a text as LaTeX only with one of these; else it sees plain numbers.
_MARKS = ("$", "\\boxed", "\\(", "\\[")
# What stands before the result in the solutions of GSM8K.
_RESULT = "####"


@reward
def math_verify(completion: str, answer: str | int | float) -> float:
    """1.0 when the completion's final expression equals the answer, else 0.0. Raises for an answer that cannot be read.

    Of a solution as in GSM8K the answer is what stands after `####`.

    math-verify's own time-outs are off: they need SIGALRM in the main thread, and the scoring pool has its own.
    """
    # It warns that the caller must then limit the time, as the scoring pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if not isinstance(answer, str | int | float):
        raise TypeError(f"answer is {answer!r:.60}; text or a number can be compared")
    answer = str(answer).rpartition(_RESULT)[2].strip()
    marked = answer if any(mark in answer for mark in _MARKS) else f"${answer}$"
    gold = parse(marked, parsing_timeout=None)
    if not gold:
        raise ValueError(f"column 'answer' holds no mathematical expression: {answer!r:.80}")
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))
