"""A game of four turns: guess a letter from a to p; a wrong guess is answered by the side on which the right one lies."""

from __future__ import annotations

from collections.abc import Generator

from async_rlhf import Score, environment


@environment(max_turns=4)
def guessing(prompt: str, answer: str) -> Generator[str | Score, str, None]:
    guess = yield f"{prompt}\n"
    while guess != answer:
        guess = yield "<\n" if answer < guess else ">\n"
    yield Score(1.0)
