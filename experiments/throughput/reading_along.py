"""From a completion's last token to its score: a reward model that reads along beside one that begins at the end.

One torch engine decodes completions of 512 tokens, one begun every 64 steps, so that they end one after the other while
others are being decoded; a reward model as large as the policy scores them in its worker process. Rounds with and without
reading along take turns in one run. Random weights: the arithmetic is that of trained ones.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.rewards import resolve
from async_rlhf.actors.scoring.pool import ScoringPool
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.errors import DeadlineError
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.throughput.harness import Bench, Row, alternate
from async_rlhf.experiments.throughput.sides import MODEL

GOAL = 0.3
PROMPT = "Spell the word backward: "
LENGTH, APART, EVERY = 512, 64, 32
# Longer than a round takes on a busy machine.
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class _Round:
    exposed_s: list[float]
    scores: list[float]
    prefetched: list[float]
    tokens_per_s: float


def reading_along(
    bench: Bench,
    completions: Annotated[int, typer.Option(min=1, help="Completions in a turn.")] = 8,
    width: Annotated[int, typer.Option(min=64, help="Width of both models.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of both models.")] = 8,
) -> Iterator[Row]:
    """Milliseconds from the last token to the score, reading along beside reading at the end."""
    completions, layers = bench.size((completions, layers), (2, 2))
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, max_position_embeddings=2048,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_num_threads(1)
    engine = TorchEngine(LlamaForCausalLM(config), slots=16, version=0)  # without end tokens
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    requests = [
        Request(RolloutKey(n, 0, 0), tuple(tokenizer(PROMPT)["input_ids"]), LENGTH, Sampling(), n) for n in range(completions)
    ]
    with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as name:
        directory, judge = Path(name), LlamaForSequenceClassification(config)
        judge.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        sides = {
            side: partial(lambda every: _round(engine, _pool(directory, every), requests, decode, every), every)
            for side, every in (("along", EVERY), ("at the end", 0))
        }
        found = alternate(sides, bench.num_turns(2), warm_up=0)
    yield _row(found, sum(parameter.numel() for parameter in judge.parameters()))


def _row(found: dict[str, list[_Round]], parameters: int) -> Row:
    exposed = {name: [1000 * s for each in turns for s in each.exposed_s] for name, turns in found.items()}
    along, plain = found["along"], found["at the end"]
    pairs = [(a, b) for one, two in zip(plain, along, strict=True) for a, b in zip(one.scores, two.scores, strict=True)]
    return Row.of(
        f"completions of {LENGTH} tokens, models of {parameters / 1e6:.1f} M",
        exposed,
        "ms",
        at_most=GOAL,
        turns=len(along),
        figures={
            "prefetched": statistics.mean(share for each in along for share in each.prefetched),
            "largest_difference": max(abs(a - b) for a, b in pairs),
            "along_tok_per_s": statistics.mean(each.tokens_per_s for each in along),
            "at_the_end_tok_per_s": statistics.mean(each.tokens_per_s for each in plain),
        },
    )


def _pool(directory: Path, every: int) -> ScoringPool[RolloutKey]:
    options = {"reward_model": {"path": str(directory)}}
    settings = {"reward_model": {"stream_tokens": every, "batch_wait_s": 0.0}}
    pool = ScoringPool[RolloutKey](resolve(["reward_model"], directory, {"answer"}, options, settings), ScoringConfig())
    for number in range(4):  # the worker is ready, its model is warm
        key = RolloutKey(-1 - number, 0, 0)
        pool.submit(key, {"prompt": PROMPT, "completion": "x" * LENGTH})
        _await(pool, key)
    return pool


def _await(pool: ScoringPool[RolloutKey], key: RolloutKey) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not any(done.key == key for done in pool.poll()):
        if time.monotonic() > deadline:
            raise DeadlineError(f"waited {_PATIENCE_S:.0f} s for a first score")
        time.sleep(0.005)


def _round(
    engine: TorchEngine, pool: ScoringPool[RolloutKey], requests: Sequence[Request], decode: partial[str], every: int
) -> _Round:
    """Every request once, as the actor's loop does it."""
    asked = [Request(**{**vars(request), "partial_every": every}) for request in requests]
    ended: dict[RolloutKey, float] = {}
    exposed: dict[RolloutKey, float] = {}
    scores: dict[RolloutKey, float] = {}
    prefetched: dict[RolloutKey, float] = {}
    shown: dict[RolloutKey, int] = {}
    began, decoded_s, step = time.monotonic(), 0.0, 0
    while len(exposed) < len(asked):
        if time.monotonic() - began > _PATIENCE_S:
            raise DeadlineError(f"waited {_PATIENCE_S:.0f} s for {len(asked) - len(exposed)} scores")
        if step % APART == 0 and step // APART < len(asked):
            engine.submit([asked[step // APART]])
        step += 1
        for completion in engine.step():
            ended[completion.key], decoded_s = time.time(), time.monotonic() - began
            pool.submit(completion.key, {"prompt": PROMPT, "completion": decode(completion.token_ids.tolist())})
        for part in engine.partials(shown) if every else ():
            shown[part.key] = len(part.token_ids)
            pool.show(part.key, {"prompt": PROMPT, "completion": decode(part.token_ids.tolist())})
        for done in pool.poll():
            score = done.scores["reward_model"]
            assert score.value is not None, score.failure
            # When the judge had it, not when this loop looked: a step of the engine may lie between.
            exposed[done.key] = done.stages["reward_model"].ended - ended[done.key]
            scores[done.key], prefetched[done.key] = score.value, score.metrics.get("prefetched", 0.0)
        if not engine.num_unfinished:
            time.sleep(0.001)
    pool.close()
    keys = [request.key for request in asked]
    in_order = [[values[key] for key in keys] for values in (exposed, scores, prefetched)]
    return _Round(in_order[0], in_order[1], in_order[2], len(asked) * LENGTH / decoded_s)
