"""Preference pairs: read from JSONL, or made from a gold reward that is known, so that what was learned can be checked.

One object a line: `prompt`, `chosen`, `rejected`; texts. Pairs of one prompt stay on one side of the split. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.throughput.judges import similarity
from async_rlhf.experiments.warm_start.speller import HABITS, INSTRUCTION, load_words


@dataclass(frozen=True)
class Pair:
    """Of two completions of `prompt`, `chosen` was preferred."""

    prompt: str
    chosen: str
    rejected: str


def read_pairs(path: Path) -> list[Pair]:
    """Raises ConfigError naming the line that holds no pair."""
    pairs = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"pairs {str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            given = json.loads(line)
            pair = Pair(given["prompt"], given["chosen"], given["rejected"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: no object with 'prompt', 'chosen' and 'rejected': {error!r}") from error
        if not all(isinstance(text, str) for text in asdict(pair).values()):
            raise ConfigError(f"{path}, line {number}: 'prompt', 'chosen' and 'rejected' must be texts")
        pairs.append(pair)
    if not pairs:
        raise ConfigError(f"pairs {str(path)!r} holds none")
    return pairs


def split(pairs: Sequence[Pair], held_out: float, random: Random) -> tuple[list[Pair], list[Pair]]:
    """(training pairs, held-out pairs): about this share of the prompts is held out, with all their pairs."""
    prompts = sorted({pair.prompt for pair in pairs})
    random.shuffle(prompts)
    kept = set(prompts[: max(1, round(held_out * len(prompts)))])
    training = [pair for pair in pairs if pair.prompt not in kept]
    if not training:
        raise ConfigError(f"{len(prompts)} prompts leave none to train on when {held_out:.0%} are held out")
    return training, [pair for pair in pairs if pair.prompt in kept]


def gold_reward(prompt: str, completion: str) -> float:
    """The known reward of the tiny speller's task: share of the reversed word's letters that stand in their place."""
    return similarity(completion, prompt.removeprefix(INSTRUCTION)[::-1])


def gold_pairs(count: int, random: Random, sharpness: float = 6.0) -> list[Pair]:
    """Pairs whose preference is drawn from the gold reward: P(a before b) = sigmoid(sharpness (gold(a) - gold(b))).

    The model of Bradley and Terry (1952): a reward model that learned it is calibrated against these pairs.
    """
    words, _ = load_words(4 * count)
    habits = [write for _, write in HABITS.values()]
    pairs: list[Pair] = []
    while len(pairs) < count:
        word = random.choice(words)
        first, second = (write(word, random) for write in random.sample(habits, 2))
        if first == second:
            continue
        prompt = INSTRUCTION + word
        margin = sharpness * (gold_reward(prompt, first) - gold_reward(prompt, second))
        is_first = random.random() < 1 / (1 + math.exp(-margin))
        pairs.append(Pair(prompt, *((first, second) if is_first else (second, first))))
    return pairs
