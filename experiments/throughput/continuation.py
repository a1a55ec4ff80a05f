"""First token of a turn behind a long row: its keys and values held since the turn before, beside computing them again.

One sequence of three turns in an engine of its own: a prompt, a turn, a long observation, a turn, a short observation; then the
time from the submission of the third turn to its first token. Random weights: the arithmetic is that of trained ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.throughput.engine import ThreadsOption
from async_rlhf.experiments.throughput.harness import Bench, Row, alternate, timed

GOAL = 0.15
PROMPT_TOKENS, TURN_TOKENS, OBSERVATION_TOKENS = 64, 16, 64


def continuation(
    bench: Bench,
    prefix: Annotated[int, typer.Option(min=256, help="Tokens before the third turn.")] = 2000,
    width: Annotated[int, typer.Option(min=64, help="Width of the model.")] = 576,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 6,
    batch_invariant: Annotated[bool, typer.Option(help="What is behind the prompt attends one token at a time.")] = False,
    threads: ThreadsOption = 1,
) -> Iterator[Row]:
    """Milliseconds to the first token of a third turn, held beside computed again."""
    prefix, width, layers = bench.size((prefix, width, layers), (256, 64, 2))
    torch.set_num_threads(threads)
    model = random_llama(width, layers, prefix + 64)
    parameters = model.num_parameters() / 1e6
    engine = TorchEngine(model, slots=8, batch_invariant=batch_invariant)  # without end tokens
    sides = {name: partial(_first_token_s, engine, prefix, hold) for name, hold in (("held", True), ("again", False))}
    found = alternate(sides, bench.num_turns(3))
    milliseconds = {name: [1000 * each for each in values] for name, values in found.items()}
    yield Row.of(f"third turn behind {prefix} tokens, {parameters:.0f} M", milliseconds, "ms", at_most=GOAL)


def random_llama(width: int, layers: int, length: int, vocabulary: int = 8192) -> LlamaForCausalLM:
    """Of random weights; length: of the longest row."""
    torch.manual_seed(0)
    heads = width // 64
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 3 or 1, max_position_embeddings=length,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _first_token_s(engine: TorchEngine, prefix: int, hold: bool) -> float:
    long = prefix - PROMPT_TOKENS - 2 * TURN_TOKENS - OBSERVATION_TOKENS
    request = Request(RolloutKey(0, 0, 0), _ids(PROMPT_TOKENS), TURN_TOKENS, Sampling(), seed=0, hold=hold)
    for observation in (long, OBSERVATION_TOKENS):
        completion = _completed(engine, request)
        request = replace(request, context=(*request.context, *completion.token_ids.tolist(), *_ids(observation)))
    assert len(request.prefix_ids) == prefix
    return timed(lambda: _completed(engine, replace(request, max_new_tokens=1, hold=False)))()


def _completed(engine: TorchEngine, request: Request) -> Completion:
    engine.submit([request])
    while True:
        for completion in engine.step():
            return completion


def _ids(count: int) -> tuple[int, ...]:
    return tuple(1 + number % 1000 for number in range(count))
