"""The stages a rollout goes through, as data: what comes after what, where it runs, how many at once. Nothing runs here.

Made from the rewards of a run and the settings of its sections; drawn by `async-rlhf check --graph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_rlhf.actors.config import REFERENCE, EngineConfig, GenerationConfig, ScoringConfig
from async_rlhf.actors.rewards import RewardSpec
from async_rlhf.buffers.stages import GENERATION

PUT = "put"


@dataclass(frozen=True)
class Stage:
    """One stage. after: names of the stages it waits for. unit: what one call of it is about.

    where: the kind of process it runs in. concurrency: calls at once of one actor (or of the scorer), None for no limit.
    limits: further ones, in words. timeout_s: of one call, None for none. stream_tokens: incremental scoring each time a
    completion has grown by so many tokens; 0: it begins when generation has ended.
    """

    name: str
    after: tuple[str, ...]
    unit: str
    where: str
    concurrency: int | None
    timeout_s: float | None = None
    limits: tuple[str, ...] = ()
    stream_tokens: int = 0


def stages(
    specs: Sequence[RewardSpec],
    scoring: ScoringConfig,
    generation: GenerationConfig,
    engine: EngineConfig,
    *,
    learner_asks: bool = False,
) -> tuple[Stage, ...]:
    """Generation, every reward, and the put that waits for all of them; in an order in which none comes before its own.

    learner_asks: whether the reference is wanted and left to the learner, which comes after the put.
    """
    first = Stage(GENERATION, (), "completion", f"engine {engine.kind} on {engine.device}", engine.slots)
    judges = [_reward(spec, scoring, generation.group_size) for spec in specs]
    last = Stage(PUT, tuple(judge.name for judge in judges), f"group of {generation.group_size}", "actor", None)
    reference = Stage(REFERENCE, (PUT,), "batch", "learner", None)
    return (first, *judges, last, reference) if learner_asks else (first, *judges, last)


def drawing(graph: Sequence[Stage]) -> list[str]:
    """The graph as lines of text: a stage hangs below the last one that it waits for."""
    lines: list[str] = []
    for stage in graph:
        depth = _depth(stage, {each.name: each for each in graph})
        arrow = "   " * (depth - 1) + "-> " if depth else ""
        at_once = "" if stage.concurrency is None else f", {stage.concurrency} at once"
        timeout = "" if stage.timeout_s is None else f", {stage.timeout_s:g} s"
        limits = "".join(f", {limit}" for limit in stage.limits)
        incremental = f"; incremental, every {stage.stream_tokens} tokens" if stage.stream_tokens else ""
        lines.append(f"{arrow}{stage.name}  [{stage.unit}; {stage.where}{at_once}{timeout}{limits}{incremental}]")
    return lines


def _reward(spec: RewardSpec, scoring: ScoringConfig, group_size: int) -> Stage:
    if spec.kind == "async":
        where, concurrency = "event loop", spec.max_concurrency or scoring.max_concurrency
    else:
        own = f"{spec.workers} own" if spec.workers else "shared"
        workers = spec.workers or scoring.workers
        where, concurrency = f"{own} worker processes", min(workers, spec.max_concurrency or workers)
    if scoring.in_process(spec.name):
        where += " of the scorer"
    limits = [
        f"{limit} {what}/min"
        for limit, what in ((spec.requests_per_minute, "requests"), (spec.tokens_per_minute, "tokens"))
        if limit is not None
    ]
    if spec.retries:
        limits.append(f"{spec.retries} retries")
    unit = f"group of {group_size}" if spec.scope == "group" else "completion"
    if spec.batch_size > 1:
        unit = f"up to {spec.batch_size} completions within {spec.batch_wait_s:g} s"
    timeout_s = spec.timeout_s or scoring.timeout_s
    return Stage(spec.name, (GENERATION,), unit, where, concurrency, timeout_s, tuple(limits), spec.stream_tokens)


def _depth(stage: Stage, by_name: dict[str, Stage]) -> int:
    return max((1 + _depth(by_name[name], by_name) for name in stage.after), default=0)
