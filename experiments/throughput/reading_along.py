"""From a completion's last token to its score: a reward model that reads along beside one that begins at the end.

    python -m async_rlhf.experiments.throughput.reading_along

One torch engine decodes completions of 512 tokens, one begun every 64 steps, so that they end one after the other while
others are being decoded; a reward model as large as the policy scores them in its worker process. Rounds with and without
reading along take turns in one run. Random weights: the arithmetic is that of trained ones. `fusion` reports it too.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from async_rlhf.experiments.throughput.sides import MODEL

GOAL = 0.3
PROMPT = "Spell the word backward: "
LENGTH, APART, EVERY = 512, 64, 32
# Longer than a round takes on a busy machine.
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Along:
    """Medians over the completions, in seconds from the last token to the score. prefetched: mean share of tokens.

    difference: largest between the two scores of one completion. tokens_per_s: of the engine.
    """

    parameters: int
    completions: int
    at_the_end_s: float
    along_s: float
    ratio: float
    goal: float
    prefetched: float
    difference: float
    tokens_per_s_at_the_end: float
    tokens_per_s_along: float


@dataclass(frozen=True)
class _Round:
    exposed_s: list[float]
    scores: list[float]
    prefetched: list[float]
    tokens_per_s: float


def measure(completions: int, rounds: int, width: int, layers: int) -> Along:
    """So many completions in each round of either kind."""
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
    requests = [Request(RolloutKey(n, 0, 0), tuple(tokenizer(PROMPT)["input_ids"]), LENGTH, 1.0, n) for n in range(completions)]
    found: dict[int, list[_Round]] = {0: [], EVERY: []}
    with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
        judge = LlamaForSequenceClassification(config)
        judge.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        for every in [0, EVERY] * rounds:
            found[every].append(_round(engine, _pool(Path(directory), every), requests, decode, every))
    plain, along = found[0], found[EVERY]
    medians = [statistics.median(s for each in side for s in each.exposed_s) for side in (plain, along)]
    pairs = [(a, b) for one, two in zip(plain, along, strict=True) for a, b in zip(one.scores, two.scores, strict=True)]
    return Along(
        parameters=sum(parameter.numel() for parameter in judge.parameters()),
        completions=completions * rounds,
        at_the_end_s=round(medians[0], 4),
        along_s=round(medians[1], 4),
        ratio=round(medians[1] / medians[0], 3),
        goal=GOAL,
        prefetched=round(statistics.mean(share for each in along for share in each.prefetched), 3),
        difference=max(abs(a - b) for a, b in pairs),
        tokens_per_s_at_the_end=round(statistics.mean(each.tokens_per_s for each in plain), 1),
        tokens_per_s_along=round(statistics.mean(each.tokens_per_s for each in along), 1),
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


def lines(found: Along) -> list[str]:
    """What a person reads."""
    verdict = "reached" if found.ratio <= found.goal else "missed"
    return [
        f"{found.completions} completions of {LENGTH} tokens, policy and reward model of {found.parameters / 1e6:.1f} M: "
        f"from last token to score {found.at_the_end_s * 1e3:.0f} ms at the end, {found.along_s * 1e3:.0f} ms reading along",
        f"ratio {found.ratio:.2f} (goal {found.goal:g}, {verdict}); {found.prefetched:.1%} of the tokens were read before the "
        f"end; scores differ by {found.difference:.1e} at most; decoding {found.tokens_per_s_at_the_end:.0f} and "
        f"{found.tokens_per_s_along:.0f} tokens/s",
    ]


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    completions: Annotated[int, typer.Option(min=1, help="Completions in a round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of either kind.")] = 2,
    width: Annotated[int, typer.Option(min=64, help="Width of both models.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of both models.")] = 8,
) -> None:
    """Seconds from the last token to the score, with and without reading along (about two minutes)."""
    found = measure(completions, rounds, width, layers)
    typer.echo(json.dumps(asdict(found)) if as_json else "\n".join(lines(found)))


if __name__ == "__main__":
    typer.run(main)
