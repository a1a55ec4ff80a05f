"""The stages a rollout goes through, as `async-rlhf check --graph` draws them: a stage hangs below what it waits for."""

from __future__ import annotations

from collections.abc import Sequence

from async_rlhf.actors.config import REFERENCE, EngineConfig, GenerationConfig, ScoringConfig
from async_rlhf.actors.rewards import RewardSpec
from async_rlhf.buffers.stages import GENERATION


def drawing(
    specs: Sequence[RewardSpec],
    scoring: ScoringConfig,
    generation: GenerationConfig,
    engine: EngineConfig,
    *,
    learner_asks: bool = False,
) -> list[str]:
    """Generation, every reward, and the put that waits for all of them: of each what one call is about, where it runs and its
    limits. learner_asks: whether the reference is wanted and left to the learner, which comes after the put."""
    lines = [f"{GENERATION}  [completion; engine {engine.kind} on {engine.device}, {engine.slots} at once]"]
    lines += [f"-> {_reward(spec, scoring, generation.group_size)}" for spec in specs]
    indent = "   " if specs else ""
    lines.append(f"{indent}-> put  [group of {generation.group_size}; actor]")
    return [*lines, f"{indent}   -> {REFERENCE}  [batch; learner]"] if learner_asks else lines


def _reward(spec: RewardSpec, scoring: ScoringConfig, group_size: int) -> str:
    where, at_once = "event loop", spec.max_concurrency or scoring.max_concurrency
    if spec.target == "remote":
        where = f"server {spec.options['address']}"
    elif spec.kind == "sync":
        where = f"{spec.workers} own worker processes" if spec.workers else "shared worker processes"
        workers = spec.workers or scoring.workers
        at_once = min(workers, spec.max_concurrency or workers)
    if scoring.in_process(spec.name):
        where += " of the scorer"
    unit = f"group of {group_size}" if spec.scope == "group" else "completion"
    if spec.batch_size > 1:
        unit = f"up to {spec.batch_size} completions within {spec.batch_wait_s:g} s"
    about = [f"{where}, {at_once} at once", f"{spec.timeout_s or scoring.timeout_s:g} s"]
    limits = ((spec.requests_per_minute, "requests/min"), (spec.tokens_per_minute, "tokens/min"), (spec.retries, "retries"))
    about += [f"{limit} {what}" for limit, what in limits if limit]
    incremental = f"; incremental, every {spec.stream_tokens} tokens" if spec.stream_tokens else ""
    return f"{spec.name}  [{unit}; {', '.join(about)}{incremental}]"
