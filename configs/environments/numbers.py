"""A game for a chat model: guess a number; a wrong guess is answered by whether the right one is higher or lower.

A hit scores 1; without one, half the share of the turns that named a number which agrees with all that was said before.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from async_rlhf import Score, environment


@environment(max_turns=8)
def guess(prompt: str, answer: int, turns: int = 4, highest: int = 20) -> Generator[str | Score, str, None]:
    """turns: guesses in a game, after which it ends. highest: of the numbers; the lowest is 1."""
    low, high, sound, says = 0, highest + 1, 0, prompt
    for _ in range(turns):
        found = re.search(r"\d+", (yield says))
        if found is None:
            says = "That was no number. Say one."
            continue
        number = int(found[0])
        if number == answer:
            yield Score(1.0)
        sound += low < number < high
        low, high = (max(low, number), high) if number < answer else (low, min(high, number))
        says = "Higher." if number < answer else "Lower."
    yield Score(0.5 * sound / turns)
