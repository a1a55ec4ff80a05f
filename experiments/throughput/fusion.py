"""How much of the scoring time is hidden when every judge sleeps: `python -m async_rlhf.experiments.throughput.fusion`.

A run with a reward that sleeps log-normally (mean 0.25 s), traced. A score's seconds are hidden while some engine decodes or
the learner trains; they are exposed while the run stands still. Beside it, the same run without staleness, and once more
with judges that begin when their whole batch is generated: generate, then score, then train. Then what a reward model that
reads along leaves to do at the end of a completion (`reading_along`).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from async_rlhf.config import override
from async_rlhf.experiments.throughput import reading_along
from async_rlhf.experiments.throughput.judges import BATCH_SIZE
from async_rlhf.experiments.throughput.sides import LOADS, MODEL, our_config, write_prompts
from async_rlhf.inspect.trace import hidden
from async_rlhf.run.api import TrainResult, run
from async_rlhf.run.run_dir import RunDir

GOAL = 0.95
_SLOW = next(load for load in LOADS if load.slow_reward)


@dataclass(frozen=True)
class Fusion:
    """share: of the seconds of all calls, those hidden. samples_per_s: of this run and of those beside it, by what they are."""

    steps: int
    calls: int
    scoring_s: float
    share: float
    goal: float
    exposed_s_per_call: float
    samples_per_s: dict[str, float]


def measure(steps: int, steps_beside: int, directory: Path) -> Fusion:
    """One run of `steps` steps of the slow load, and two of `steps_beside` without staleness. The first step is left out."""
    prompts = write_prompts(directory / "prompts.jsonl")
    overlapped = _run(directory, prompts, "overlapped", {"max_steps": steps, "queue.keep_rollouts": True})
    synchronous = {"max_steps": steps_beside, "queue.max_staleness": 0}
    fused = _run(directory, prompts, "fused", synchronous)
    afterwards = {"rewards.functions": ("async_rlhf.experiments.throughput.judges:similarity_afterwards",)}
    unfused = _run(directory, prompts, "unfused", synchronous | afterwards)
    ((_, hiding),) = hidden(RunDir.existing(overlapped.run_dir)).items()
    calls = steps * BATCH_SIZE
    return Fusion(
        steps=steps,
        calls=calls,
        scoring_s=round(hiding.seconds, 1),
        share=round(hiding.share, 4),
        goal=GOAL,
        exposed_s_per_call=round(hiding.exposed_s / calls, 4),
        samples_per_s={
            f"{_SLOW.max_staleness} steps ahead": _samples_per_s(overlapped),
            "staleness 0": _samples_per_s(fused),
            "staleness 0, scored after generation": _samples_per_s(unfused),
        },
    )


def _run(directory: Path, prompts: Path, name: str, settings: dict[str, Any]) -> TrainResult:
    return run(override(our_config(_SLOW, MODEL, prompts, directory), {"name": name, **settings}), quiet=True)


def _samples_per_s(result: TrainResult) -> float:
    times: list[float] = [record["time"] for record in result.metrics]
    return round(BATCH_SIZE * (len(times) - 1) / (times[-1] - times[0]), 1)


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    steps: Annotated[int, typer.Option(min=2, help="Learner steps.")] = 60,
    steps_beside: Annotated[int, typer.Option(min=2, help="Learner steps of the runs without staleness.")] = 20,
) -> None:
    """The share of scoring time that is hidden, samples/s with and without that, and reading along (five minutes)."""
    with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
        found = measure(steps, steps_beside, Path(directory))
    along = reading_along.measure(completions=6, rounds=1, width=256, layers=8)
    if as_json:
        typer.echo(json.dumps({**asdict(found), "reading_along": asdict(along)}))
        return
    verdict = "reached" if found.share >= found.goal else "missed"
    typer.echo(
        f"{found.calls} calls, {found.scoring_s:.0f} s of scoring: {found.share:.1%} hidden (goal {GOAL:.0%}, {verdict})"
    )
    for name, rate in found.samples_per_s.items():
        typer.echo(f"{name}: {rate:.0f} samples/s")
    typer.echo("\n".join(reading_along.lines(along)))


if __name__ == "__main__":
    typer.run(main)
