"""How much of the scoring time is hidden when every judge sleeps: `python -m experiments.throughput.fusion`.

A run with a reward that sleeps log-normally (mean 0.25 s), traced. A score's seconds are hidden while some engine decodes or
the learner trains; they are exposed while the run stands still. Beside it: what waiting for the slowest judge of every
batch would have cost, the way a loop does that scores after generation. Then what a reward model that reads along leaves to do
at the end of a completion (`reading_along`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.api import run
from async_rlhf.config import override
from async_rlhf.run_dir import RunDir
from async_rlhf.trace import TracedRollout, hidden, read_rollouts
from buffers.stages import GENERATION
from experiments.throughput import reading_along
from experiments.throughput.sides import LOADS, MODEL, our_config, write_prompts

GOAL = 0.95
_SLOW = next(load for load in LOADS if load.slow_reward)


@dataclass(frozen=True)
class Fusion:
    """share: of the seconds of all calls, those hidden. unfused: what waiting for the slowest call of every batch costs."""

    steps: int
    calls: int
    scoring_s: float
    share: float
    goal: float
    unfused_s_per_step: float
    exposed_s_per_call: float
    seconds_per_step: float


def measure(steps: int, directory: Path) -> Fusion:
    """One run of `steps` steps of the slow load; the first steps, in which processes start, are in it."""
    config = our_config(_SLOW, MODEL, write_prompts(directory / "prompts.jsonl"), directory)
    config = override(config, {"max_steps": steps, "queue.keep_rollouts": True})
    result = run(config, quiet=True)
    traced = RunDir.existing(result.run_dir)
    ((_, hiding),) = hidden(traced).items()
    rollouts = list(read_rollouts(traced))
    times = [record["time"] for record in result.metrics]
    return Fusion(
        steps=steps,
        calls=len(rollouts),
        scoring_s=round(hiding.seconds, 1),
        share=round(hiding.share, 4),
        goal=GOAL,
        unfused_s_per_step=round(_slowest(rollouts, steps), 3),
        exposed_s_per_call=round(hiding.exposed_s / len(rollouts), 4),
        seconds_per_step=round((times[-1] - times[0]) / (len(times) - 1), 3),
    )


def _slowest(rollouts: Iterable[TracedRollout], steps: int) -> float:
    """The mean over the steps of the longest call of each."""
    longest: dict[int, float] = {}
    for rollout in rollouts:
        took = max(time.seconds for name, time in rollout.stages.items() if name != GENERATION)
        longest[rollout.step] = max(longest.get(rollout.step, 0.0), took)
    return sum(longest.values()) / steps


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    steps: Annotated[int, typer.Option(min=2, help="Learner steps.")] = 60,
) -> None:
    """The share of scoring time that is hidden, and what reading along hides (about three minutes)."""
    with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
        found = measure(steps, Path(directory))
    along = reading_along.measure(completions=6, rounds=1, width=256, layers=8)
    if as_json:
        typer.echo(json.dumps({**asdict(found), "reading_along": asdict(along)}))
        return
    verdict = "reached" if found.share >= found.goal else "missed"
    typer.echo(
        f"{found.calls} calls, {found.scoring_s:.0f} s of scoring: {found.share:.1%} hidden (goal {GOAL:.0%}, {verdict})"
    )
    typer.echo(
        f"a step takes {found.seconds_per_step:.2f} s; waiting for the slowest judge of every batch would add "
        f"{found.unfused_s_per_step:.2f} s to each"
    )
    typer.echo("\n".join(reading_along.lines(along)))


if __name__ == "__main__":
    typer.run(main)
