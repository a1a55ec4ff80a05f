"""The configurations that are measured, and which of them constants may be fitted on: written down before any is run.

All train the shipped `tiny-speller` with a learning rate of nothing, so that lengths stay what they are, on batches of 64
completions. Six of them are APP's comparison: three strategies times two loads. The other six vary staleness, actors, rewards
and lengths without a strategy. Of each kind, three are for fitting and three are held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from async_rlhf.launch.cpu_sets import Strategy

Use = Literal["fit", "held out"]

GROUP_SIZE, BATCH_SIZE = 8, 64
_REWARDS = "async_rlhf.experiments.planning.measured.rewards"

EVERYWHERE: Mapping[str, Any] = {
    "max_steps": 1_000_000,
    "data.size": 512,
    "data.held_out": 8,
    "generation.group_size": GROUP_SIZE,
    "engine.slots": 128,
    "actors.queued_groups": 0,  # what an engine holds it decodes: no time of a completion is a wait for a slot
    "learner.batch_size": BATCH_SIZE,
    "learner.learning_rate": 1e-9,
    "checkpoint.save_every": 1_000_000,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "sampled_groups": BATCH_SIZE // GROUP_SIZE,  # all: their lengths and times are read
}

_WORDS = {"generation.max_completion_length": 12, "generation.temperature": 1.0}
_TAILS = {"generation.max_completion_length": 128, "generation.temperature": 4.0}  # seldom certain enough to end


def _judged(rounds: int) -> dict[str, Any]:
    """By a stand-in for a frozen model: so many rounds of work on one core, a completion."""
    return {"rewards.functions": [f"{_REWARDS}:work"], "rewards.options": {"work": {"rounds": rounds}}}


LOADS: Mapping[str, Mapping[str, Any]] = {
    "words": {**_WORDS, **_judged(100)},
    "long tails": {**_TAILS, **_judged(100)},
    "heavy scoring": {**_WORDS, **_judged(10_000)},
    "slow rewards": {
        **_WORDS,
        "rewards.functions": [f"{_REWARDS}:wait"],
        "rewards.options": {"wait": {"seconds": 0.5}},
    },
    "long tails, slow rewards": {
        **_TAILS,
        "rewards.functions": [f"{_REWARDS}:wait"],
        "rewards.options": {"wait": {"seconds": 0.5}},
    },
}


@dataclass(frozen=True)
class Cell:
    """One configuration. strategy: None leaves processes where the system puts them."""

    name: str
    use: Use
    load: str
    strategy: Strategy | None = None
    max_staleness: int = 1
    actors: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """What it sets of a configuration, by dotted name."""
        placed: dict[str, Any] = {}
        if self.strategy is not None:
            placed = {"placement.strategy": self.strategy, "scoring.placement": "process"}
        return {
            **EVERYWHERE,
            **LOADS[self.load],
            **placed,
            "queue.max_staleness": self.max_staleness,
            "actors.count": self.actors,
        }


CELLS: tuple[Cell, ...] = (
    Cell("tails-flattening", "fit", "long tails", "flattening"),
    Cell("tails-interleaving", "held out", "long tails", "interleaving"),
    Cell("tails-separation", "fit", "long tails", "separation"),
    Cell("scoring-flattening", "held out", "heavy scoring", "flattening"),
    Cell("scoring-interleaving", "fit", "heavy scoring", "interleaving"),
    Cell("scoring-separation", "held out", "heavy scoring", "separation"),
    Cell("words-0", "fit", "words", max_staleness=0),
    Cell("tails-1", "held out", "long tails", max_staleness=1),
    Cell("slow-1", "fit", "slow rewards", max_staleness=1),
    Cell("slow-2-two-actors", "held out", "slow rewards", max_staleness=2, actors=2),
    Cell("words-4-three-actors", "fit", "words", max_staleness=4, actors=3),
    Cell("tails-slow-8", "held out", "long tails, slow rewards", max_staleness=8),
)


def cell(name: str) -> Cell:
    """Raises KeyError."""
    return {each.name: each for each in CELLS}[name]
