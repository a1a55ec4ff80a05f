"""What a model that knows its task makes of it with a part of its cache, through the engine: reward, and how far it is off.

Prompts are the held-out ones of a run's configuration. Each is completed greedily, for reward and accuracy, and sampled once,
for the divergence of the engine's distribution from the model's own (`mismatch/kl` of a run).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.prompts import encode
from async_rlhf.actors.rewards.builtins.gym import reasoning_gym
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.buffers.model_directory import from_pretrained
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.kv_policy.arms import ARMS, FULL, settings
from async_rlhf.experiments.kv_policy.rows import Row
from async_rlhf.run.config import Config

ENDS = (" ", ":", ")", "\n")
"""What ends a chunk of this task: its model has a token for each character."""
_INTERVAL = 6  # characters of a word of the instruction, with its space
_BLOCK = 20  # prompts of a row of the results


def task_rows(config: Config, model_dir: Path, budgets: Sequence[int]) -> Iterator[Row]:
    """Of each block of prompts, arm and budget the mean."""
    tokenizer = from_pretrained(AutoTokenizer, model_dir)
    entries = load_rows(config.data)[1]
    prompts = [
        tuple(encode(row, tokenizer, config.data.row_template, config.generation.max_prompt_length)[1]) for row in entries
    ]
    full = _engine(model_dir, FULL, 0)
    for budget, arm in [(0, FULL), *((budget, arm) for budget in budgets for arm in ARMS)]:
        engine = _engine(model_dir, arm, budget)
        greedy = _completions(engine, prompts, config, 0.0)
        sampled = _completions(engine, prompts, config, 1.0)
        found = []
        for row, prompt, likeliest, drawn in zip(entries, prompts, greedy, sampled, strict=True):
            text = tokenizer.decode(likeliest.token_ids, skip_special_tokens=True)
            reward = reasoning_gym(text, row.columns["entry"])
            own = full.probe([*prompt, *drawn.token_ids.tolist()])[len(prompt) - 1 :]
            found.append((reward, float(reward >= 1), float((drawn.logprobs - own).mean())))
        for block in range(0, len(found), _BLOCK):
            for name, value in zip(("reward", "accuracy", "kl"), np.mean(found[block : block + _BLOCK], axis=0), strict=True):
                yield Row("task", arm, budget, block // _BLOCK, name, float(value))


def _engine(model_dir: Path, arm: str, budget: int) -> TorchEngine:
    asked = {"slots": 64, "batch_invariant": False, **settings(arm, budget, ENDS, _INTERVAL)}
    return load_engine(str(model_dir), EngineConfig.model_validate(asked), version=0)


def _completions(
    engine: TorchEngine, prompts: Sequence[tuple[int, ...]], config: Config, temperature: float
) -> list[Completion]:
    """In the order of the prompts."""
    longest = config.generation.max_completion_length
    sampling = Sampling(temperature=temperature)
    engine.submit(
        [Request(RolloutKey(number, 0, 0), prompt, longest, sampling, number) for number, prompt in enumerate(prompts)]
    )
    done: list[Completion] = []
    while engine.num_unfinished:
        done += engine.step()
    return sorted(done, key=lambda completion: np.int64(completion.key.group))
