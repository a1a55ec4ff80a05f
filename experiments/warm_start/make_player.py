"""Makes the tiny player that ships with the project: a supervised warm start on episodes, in minutes on two cores.

    python -m async_rlhf.experiments.warm_start.make_player [--out DIR]

Seeded: the same machine and library versions give the same weights. Called by hand; nothing imports it but tests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from async_rlhf.experiments.warm_start.episodes import CALLS, CALLS_AT_THE_END, Episode, demonstrate
from async_rlhf.experiments.warm_start.make_model import IGNORED, WarmStart, train
from async_rlhf.experiments.warm_start.speller import make_model, make_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


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
    model = make_model(tokenizer, config.seed)
    started = time.monotonic()

    def loss_of(update: int, random: Random) -> torch.Tensor:
        calls = CALLS if update < _SKILL * config.updates else CALLS_AT_THE_END
        return turn_loss(model, tokenizer, demonstrate(config.batch, calls, random))

    def report(done: int, loss: float) -> None:
        if not done % 100:
            typer.echo(f"{done:>6}/{config.updates} updates  {time.monotonic() - started:5.0f} s  loss {loss:.3f}")

    train(model, config, loss_of, report)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
