"""Makes the tiny speller that ships with the project: a supervised warm start, from nothing, in minutes on two cores.

    python -m async_rlhf.experiments.warm_start.make_model [--out DIR] [--width N]

Seeded: the same machine and library versions give the same weights. Called by hand; nothing imports it but tests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from transformers import DynamicCache

from async_rlhf.buffers.attention import cache_argument
from async_rlhf.experiments.warm_start.speller import (
    INSTRUCTION,
    WIDTH,
    Demonstration,
    demonstrate,
    load_words,
    make_model,
    make_tokenizer,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

IGNORED = -100


@dataclass(frozen=True)
class WarmStart:
    """Everything that decides the weights."""

    seed: int = 0
    words: int = 20_000
    """Words drawn from the task for demonstrations."""
    random_share: float = 0.5
    """Share of demonstrations about random letters."""
    batch: int = 128
    """Demonstrations per update."""
    updates: int = 3_000
    learning_rate: float = 2e-3
    """Highest learning rate; rises over the first `warmup` updates, then falls to zero along a cosine."""
    warmup: int = 100
    weight_decay: float = 0.01
    threads: int = 2


def completion_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: Sequence[Demonstration]
) -> torch.Tensor:
    """Mean cross-entropy over the completion tokens of a batch, the end token included.

    All prompts begin with the same instruction, so it is computed once and its keys and values are shared by the batch:
    the same loss and gradient as with whole sequences, at a quarter of the work.
    """
    prefix = torch.tensor([tokenizer(INSTRUCTION)["input_ids"]])
    cache, argument = DynamicCache(config=model.config), cache_argument(model)
    model(prefix, use_cache=True, **{argument: cache})
    cache.batch_repeat_interleave(len(batch))
    end = tokenizer.eos_token_id
    tails = [(tokenizer(d.word)["input_ids"], [*tokenizer(d.completion)["input_ids"], end]) for d in batch]
    longest = max(len(word) + len(completion) for word, completion in tails)
    # Padding stands on the right, where causal attention never looks at it.
    ids = torch.full((len(batch), longest), tokenizer.pad_token_id)
    labels = torch.full((len(batch), longest), IGNORED)
    for row, (word, completion) in enumerate(tails):
        ids[row, : len(word) + len(completion)] = torch.tensor(word + completion)
        labels[row, len(word) : len(word) + len(completion)] = torch.tensor(completion)
    logits = model(ids[:, :-1], use_cache=True, **{argument: cache}).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def descend(
    model: PreTrainedModel,
    config: WarmStart,
    loss_of: Callable[[int], torch.Tensor],
    betas: tuple[float, float] = (0.9, 0.98),
) -> Iterator[tuple[int, float]]:
    """Train in place by AdamW, and after each update give the number of those that are done and its loss.

    loss_of: of an update, counted from 0. The learning rate rises over the first `warmup` updates and falls along a cosine.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=betas, weight_decay=config.weight_decay)
    model.train()
    for update in range(config.updates):
        rising, falling = min(1.0, (update + 1) / config.warmup), 0.5 * (1 + math.cos(math.pi * update / config.updates))
        optimizer.param_groups[0]["lr"] = config.learning_rate * rising * falling
        loss = loss_of(update)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield update + 1, loss.item()
    model.eval()


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, words: Sequence[str], *, sample: bool) -> float:
    """Share of words spelled backward, case ignored as the task does; greedy, or sampled at temperature 1."""
    batch = tokenizer([INSTRUCTION + word for word in words], padding=True, return_tensors="pt")
    # generate() would keep the 50 likeliest tokens only; all of them belong to the policy.
    how = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    ids = model.generate(**batch, max_new_tokens=12, pad_token_id=tokenizer.pad_token_id, **how)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right: int = sum(text.lower() == word[::-1].lower() for text, word in zip(texts, words, strict=True))
    return right / len(words)


def main(
    out: Annotated[Path, typer.Option(help="Directory the model is written to.")] = Path("configs/models/tiny-speller"),
    width: Annotated[int, typer.Option(help="Of the hidden states; a multiple of 8.", min=8)] = WIDTH,
) -> None:
    """Make the tiny speller and write it as a transformers model directory."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = WarmStart()
    torch.set_num_threads(config.threads)
    words, held_out = load_words(config.words)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, config.seed, width)
    typer.echo(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(words):,} words")
    started, random = time.monotonic(), Random(config.seed)

    def loss_of(_: int) -> torch.Tensor:
        return completion_loss(model, tokenizer, demonstrate(words, held_out, config.batch, config.random_share, random))

    for done, loss in descend(model, config, loss_of):
        if done % 100 == 0 or done == config.updates:
            greedy, sampled = (accuracy(model, tokenizer, held_out, sample=sample) for sample in (False, True))
            typer.echo(
                f"{done:>6}/{config.updates} updates  {time.monotonic() - started:5.0f} s  "
                f"loss {loss:.3f}  held out: greedy {greedy:.3f}  sampled {sampled:.3f}"
            )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
