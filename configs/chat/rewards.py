"""The rewards of the chat run: a friendly answer of a sentence or two that comes to an end.

The judge of friendliness is vaderSentiment, a dictionary with rules: it needs no model and no network, and what it can be
fooled with is known (a heap of happy words). The length reward and the pull to the reference stand against that.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from async_rlhf.actors.rewards import reward

if TYPE_CHECKING:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

FEWEST, MOST = 5, 30
"""Words of an answer that is neither cut short nor rambling."""


@reward
def friendly(completion: str) -> float:
    """Compound sentiment of the whole answer, from -1 to 1."""
    return float(_judge().polarity_scores(completion)["compound"])


@reward
def concise(completion: str) -> float:
    """0 between `FEWEST` and `MOST` words that end a sentence; down to -1 for anything shorter, longer or unfinished."""
    words = len(completion.split())
    too_short = max(0.0, (FEWEST - words) / FEWEST)
    too_long = min(1.0, max(0.0, (words - MOST) / MOST))
    unfinished = 0.0 if completion.rstrip().endswith((".", "!", "?", '"')) else 0.5
    return 0.0 - min(1.0, too_short + too_long + unfinished)


@functools.cache
def _judge() -> SentimentIntensityAnalyzer:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
