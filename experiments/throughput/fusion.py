"""How much of the scoring time is hidden when every judge sleeps?

A run with a reward that sleeps log-normally (mean 0.25 s), traced. A score's seconds are hidden while some engine decodes or
the learner trains; they are exposed while the run stands still. Beside it, the same run without staleness, and once more
with judges that begin when their whole batch is generated: generate, then score, then train.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from async_rlhf.api import TrainResult, run
from async_rlhf.experiments.throughput.harness import Bench, Row
from async_rlhf.experiments.throughput.judges import BATCH_SIZE
from async_rlhf.experiments.throughput.sides import LOADS, MODEL, our_config, write_prompts
from async_rlhf.inspect.trace import overlap
from async_rlhf.run.config import override
from async_rlhf.run.run_dir import RunDir

GOAL = 0.95
_SLOW = next(load for load in LOADS if load.slow_reward)


def fusion(
    bench: Bench,
    max_staleness: Annotated[int, typer.Option(min=1, help="Steps that generation may run ahead.")] = _SLOW.max_staleness,
    steps: Annotated[int | None, typer.Option(min=2, help="Learner steps; else 60.")] = None,
    steps_beside: Annotated[
        int | None, typer.Option(min=2, help="Learner steps of the runs without staleness; else 20.")
    ] = None,
) -> Iterator[Row]:
    """The share of scoring time that is hidden, and samples/s with and without staleness. The first step is left out."""
    many, few = steps or bench.size(60, 12), steps_beside or bench.size(20, 2)
    with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as name:
        directory = Path(name)
        prompts = write_prompts(directory / "prompts.jsonl")
        ahead = {"max_steps": many, "queue.max_staleness": max_staleness, "queue.keep_rollouts": True}
        overlapped = _run(directory, prompts, "overlapped", ahead)
        ((_, judge),) = overlap(RunDir.existing(overlapped.run_dir)).items()
        sides, calls = {"hidden": [judge.seconds * judge.share], "scoring": [judge.seconds]}, many * BATCH_SIZE
        further = {"samples_per_s": _samples_per_s(overlapped), "calls": calls, "exposed_s_per_call": judge.exposed_s / calls}
        yield Row.of(f"up to {max_staleness} steps ahead", sides, "s", at_least=GOAL, figures=further)
        synchronous = {"max_steps": few, "queue.max_staleness": 0}
        fused = _run(directory, prompts, "fused", synchronous)
        afterwards = {"rewards.functions": ("async_rlhf.experiments.throughput.judges:similarity_afterwards",)}
        unfused = _run(directory, prompts, "unfused", synchronous | afterwards)
    rates = {"scored while siblings decode": [_samples_per_s(fused)], "scored after generation": [_samples_per_s(unfused)]}
    yield Row.of("staleness 0", rates, "samples/s")


def _run(directory: Path, prompts: Path, name: str, settings: dict[str, Any]) -> TrainResult:
    return run(override(our_config(_SLOW, MODEL, prompts, directory), {"name": name, **settings}), quiet=True)


def _samples_per_s(result: TrainResult) -> float:
    times: list[float] = [record["time"] for record in result.metrics]
    return round(BATCH_SIZE * (len(times) - 1) / (times[-1] - times[0]), 1)
