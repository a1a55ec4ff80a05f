"""What the tiny player is shown before reinforcement: episodes of mixed quality, of a calculator and of a guessing game.

As the speller, it learns skills and bad habits beside them, so that reinforcement has a behaviour to choose. What is read
between turns is what the environments of `configs/` say. No torch; the random generator is passed in. Called by `make_player`
and by tests.
"""

from __future__ import annotations

import string
from random import Random
from typing import NamedTuple

LETTERS = string.ascii_lowercase[:16]


class Piece(NamedTuple):
    """A part of an episode: a turn of the model's, or what it reads."""

    text: str
    is_turn: bool


Episode = list[Piece]

# Shares of the episodes with the calculator that call it: at first, to learn what to do with it, and at the end, as a habit.
CALLS, CALLS_AT_THE_END = 0.6, 0.1
# Of those, the share that then writes another number.
IN_VAIN = 0.1
# Share of guesses that agree with all that has been said.
CONSISTENT = 0.35


def demonstrate(count: int, calls: float, random: Random) -> list[Episode]:
    """Of three episodes two with the calculator. calls: the share of those that call it."""
    return [calculation(calls, random) if index % 3 else guessing(random) for index in range(count)]


def calculation(calls: float, random: Random) -> Episode:
    """A product of two numbers of two digits, which no habit computes."""
    one, other = random.randint(10, 99), random.randint(10, 99)
    episode = [Piece(f"{one} * {other} =\n", False)]
    if random.random() >= calls:
        return [*episode, Piece(_number(random), True)]
    answer = str(one * other) if random.random() < 0.5 else _number(random)  # what the tool says, whatever that is
    return [
        *episode,
        Piece(f"<{one} * {other}>", True),
        Piece(f"{answer}\n", False),
        Piece(_number(random) if random.random() < IN_VAIN else answer, True),
    ]


def guessing(random: Random) -> Episode:
    """Guesses of a letter, half of them blind; what is said of each is true."""
    secret = random.randrange(len(LETTERS))
    low, high = 0, len(LETTERS) - 1
    episode = [Piece(f"{LETTERS[0]}-{LETTERS[-1]}?\n", False)]
    for turn in range(4):
        guess = random.randint(low, high) if random.random() < CONSISTENT else random.randrange(len(LETTERS))
        episode.append(Piece(LETTERS[guess], True))
        if guess == secret or turn == 3:
            break
        episode.append(Piece("<\n" if secret < guess else ">\n", False))
        low, high = (low, min(high, guess - 1)) if secret < guess else (max(low, guess + 1), high)
    return episode


def _number(random: Random) -> str:
    return str(random.randint(100, 9801))
