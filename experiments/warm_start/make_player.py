"""Makes the tiny player that ships with the project: a supervised warm start on episodes, in minutes on two cores.

    python -m async_rlhf.experiments.warm_start.make_player [--out DIR]

It is shown episodes of mixed quality, of a calculator and of a guessing game. As the speller, it learns skills and bad habits
beside them, so that reinforcement has a behaviour to choose. What is read between turns is what the environments of `configs/`
say. Seeded: the same machine and library versions give the same weights. Called by hand; nothing imports it but tests.
"""

from __future__ import annotations

import string
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
import typer

from async_rlhf.experiments.warm_start.make_model import IGNORED, WarmStart, descend
from async_rlhf.experiments.warm_start.speller import make_model, make_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = string.ascii_lowercase[:16]


class PlayedPart(NamedTuple):
    """A part of an episode: a turn of the model's, or what it reads."""

    text: str
    is_turn: bool


Episode = list[PlayedPart]

# An agent's messages are what the episodes here consist of.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Shares of the episodes with the calculator that call it: at first, to learn what to do with it, and at the end, as a habit.
CALLS, CALLS_AT_THE_END = 0.6, 0.1
# Of those, the share that then writes another number.
IN_VAIN = 0.1
# Share of guesses that agree with all that has been said.
CONSISTENT = 0.35


def demonstrate(count: int, calls: float, random: Random) -> list[Episode]:
    """Episodes, two of three with the calculator. calls: the share of those that call it."""
    return [calculation(calls, random) if index % 3 else guessing(random) for index in range(count)]


def calculation(calls: float, random: Random) -> Episode:
    """A product of two numbers of two digits, which no habit computes."""
    one, other = random.randint(10, 99), random.randint(10, 99)
    episode = [PlayedPart(f"{one} * {other} =\n", False)]
    if random.random() >= calls:
        return [*episode, PlayedPart(_number(random), True)]
    answer = str(one * other) if random.random() < 0.5 else _number(random)  # what the tool says, whatever that is
    return [
        *episode,
        PlayedPart(f"<{one} * {other}>", True),
        PlayedPart(f"{answer}\n", False),
        PlayedPart(_number(random) if random.random() < IN_VAIN else answer, True),
    ]


def guessing(random: Random) -> Episode:
    """Guesses of a letter, half of them blind; what is said of each is true."""
    secret = random.randrange(len(LETTERS))
    low, high = 0, len(LETTERS) - 1
    episode = [PlayedPart(f"{LETTERS[0]}-{LETTERS[-1]}?\n", False)]
    for turn in range(4):
        guess = random.randint(low, high) if random.random() < CONSISTENT else random.randrange(len(LETTERS))
        episode.append(PlayedPart(LETTERS[guess], True))
        if guess == secret or turn == 3:
            break
        episode.append(PlayedPart("<\n" if secret < guess else ">\n", False))
        low, high = (low, min(high, guess - 1)) if secret < guess else (max(low, guess + 1), high)
    return episode


def _number(random: Random) -> str:
    return str(random.randint(100, 9801))


# The share of the updates in which skills are learned; then habits.
_SKILL = 0.7


def turn_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: Sequence[Episode]) -> torch.Tensor:
    """Mean cross-entropy over the tokens of turns, their end tokens included; what is read bears none."""
    rows = [_tokens(tokenizer, episode) for episode in batch]
    longest = max(len(ids) for ids, _ in rows)
    # Padding stands on the right, where causal attention never looks at it.
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (own, targets) in enumerate(rows):
        ids[row, : len(own)], labels[row, : len(own)] = torch.tensor(own), torch.tensor(targets)
    logits = model(ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def _tokens(tokenizer: PreTrainedTokenizerFast, episode: Episode) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    targets: list[int] = []
    for text, is_turn in episode:
        own = [*tokenizer(text)["input_ids"], *([tokenizer.eos_token_id] if is_turn else [])]
        ids += own
        targets += own if is_turn else [IGNORED] * len(own)
    return ids, targets


def main(
    out: Annotated[Path, typer.Option(help="Directory the model is written to.")] = Path("configs/models/tiny-player"),
    updates: Annotated[int, typer.Option(help="Of 64 episodes each.")] = 3_000,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 2,
) -> None:
    """Make the tiny player and write it as a transformers model directory."""
    config = WarmStart(batch=64, updates=updates, threads=threads)
    torch.set_num_threads(config.threads)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make_model(tokenizer, config.seed)
    started, random = time.monotonic(), Random(config.seed)

    def loss_of(update: int) -> torch.Tensor:
        calls = CALLS if update < _SKILL * config.updates else CALLS_AT_THE_END
        return turn_loss(model, tokenizer, demonstrate(config.batch, calls, random))

    for done, loss in descend(model, config, loss_of):
        if done % 100 == 0:
            typer.echo(f"{done:>6}/{config.updates} updates  {time.monotonic() - started:5.0f} s  loss {loss:.3f}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
