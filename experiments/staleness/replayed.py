"""`python -m async_rlhf.experiments.staleness.replayed RUN_DIR... [--corrections FILE] [--jobs N] [--out DIR]`.

Each correction learns from the very batches of a recorded run, the same tokens, log-probabilities and rewards in the same
order, so that arms differ by the loss alone. The data do not react to what an arm has learned: where its policy goes elsewhere,
its batches stay those of the recorded policy. What an arm has learned is what it scores on held-out prompts, beside the loss
of the recorded runs, or the first of the file where that is not among them.

A replay lies beside its run, as RUN-CORRECTION; one that is there and whole is not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.cli.app import errors, say
from async_rlhf.experiments.counterfactual.recorded import SHIPPED, check_seeds, corrections, ended
from async_rlhf.experiments.page import comparison, number, table, write_csv
from async_rlhf.experiments.statistics import MIN_SEEDS, adjusted, estimate, paired
from async_rlhf.learner.config import LossConfig
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Arm:
    """What one correction learned from the batches of one recorded run.

    held_out_reward, held_out_tokens: means over the held-out prompts, greedy. kl_behaviour (nats a token), ess (share of
    tokens): means over the last quarter of the steps.
    """

    correction: str
    seed: int
    held_out_reward: float
    held_out_tokens: float
    kl_behaviour: float
    ess: float


@app.command()
def main(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Runs that have ended, with kept batches; they differ in their seed."),
    ],
    chosen: Annotated[
        Path, typer.Option("--corrections", help="TOML file of losses, as corrections.toml of the counterfactual experiment.")
    ] = SHIPPED,
    jobs: Annotated[int, typer.Option(min=1, help="Replays at once.")] = 1,
    out: Annotated[Path, typer.Option(help="Directory for results.csv and report.md, made.")] = Path("runs/replayed"),
) -> None:
    """What does each correction learn from the same batches?"""
    with errors():
        runs = [recorded(each) for each in run_dirs]
        check_seeds([config for _, config in runs])
        losses = [corrections(chosen, config.loss) for _, config in runs]
        work = [(*each, name, loss) for each, named in zip(runs, losses, strict=True) for name, loss in named.items()]
        base = next((name for name, loss in losses[0].items() if loss == runs[0][1].loss), next(iter(losses[0])))
        with ThreadPoolExecutor(jobs) as threads:
            arms = [*threads.map(lambda each: arm(*each), work)]
        out.mkdir(parents=True, exist_ok=True)
        write_csv([{key: f"{value:.6g}" if isinstance(value, float) else value for key, value in asdict(each).items()}
                   for each in arms], out / "results.csv")  # fmt: skip
        (out / "report.md").write_text(report(arms, base))
        typer.echo(str(out / "report.md"))


def recorded(directory: Path) -> tuple[RunDir, Config]:
    """A run that can be replayed. Raises ConfigError for one that lives or keeps no batches."""
    run, config = ended(directory)
    if not config.queue.keep_rollouts:
        raise ConfigError(f"{str(run.path)!r} kept no batches; a run with queue.keep_rollouts = true keeps them")
    return run, config


def arm(run: RunDir, config: Config, name: str, loss: LossConfig) -> Arm:
    """Replay the run with this loss, unless that is done, and evaluate what came out.

    Raises AsyncRLHFError where a command of it fails, ConfigError for a replay that was cut short.
    """
    replay = RunDir(run.path.with_name(f"{run.path.name}-{name}"))
    if not replay.exists:
        _command("rollouts", "replay", str(run.path), "--name", replay.path.name, *_overrides(config.loss, loss))
    metrics = replay.read_metrics()
    if len(metrics) != len(run.read_metrics()):
        raise ConfigError(f"{str(replay.path)!r} was cut short after step {len(metrics)}; remove it, and it is made again")
    model, settings = replay.path / "checkpoints" / "latest" / "model", run.path / "config.toml"
    held_out = json.loads(_command("evaluate", str(model), str(settings), "--json"))
    last = metrics[-max(1, len(metrics) // 4) :]
    kl, ess = (sum(record[key] for record in last) / len(last) for key in ("kl/behaviour", "is/ess"))
    say(f"{replay.path.name}: held-out reward {held_out['mean_reward']:.3f}")
    return Arm(name, config.seed, held_out["mean_reward"], held_out["mean_length"], kl, ess)


def _overrides(own: LossConfig, loss: LossConfig) -> list[str]:
    """Settings that make the run's loss this one."""
    changed = {key: getattr(loss, key) for key in type(loss).model_fields if getattr(loss, key) != getattr(own, key)}
    return [word for key, value in changed.items() for word in ("--set", f"loss.{key}={_written(value)}")]


def _written(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _command(*words: str) -> str:
    """What a command of this project prints."""
    done = subprocess.run(
        [sys.executable, "-m", "async_rlhf", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AsyncRLHFError(f"`async-rlhf {' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def report(arms: Sequence[Arm], base: str) -> str:
    """Markdown: a row a correction, its held-out reward beside that of `base` with the same seed, p by Holm."""
    by_name: dict[str, list[Arm]] = {}
    for each in arms:
        by_name.setdefault(each.correction, []).append(each)
    rewards = {name: [each.held_out_reward for each in found] for name, found in by_name.items()}
    against = adjusted({name: paired(rewards[name], rewards[base]) for name in by_name if name != base})
    rows = [
        ["correction", "held-out reward", f"minus {base}", "p (Holm)", "tokens", "KL from behaviour", "ESS"],
        *(
            [
                name,
                number(estimate(rewards[name])),
                *comparison(against.get(name)),
                number(estimate(each.held_out_tokens for each in found)),
                number(estimate(each.kl_behaviour for each in found)),
                number(estimate(each.ess for each in found)),
            ]
            for name, found in by_name.items()
        ),
    ]
    seeds = len(rewards[base])
    few = "" if seeds >= MIN_SEEDS else f" With fewer than {MIN_SEEDS} the brackets hold the range of the seeds, no interval."
    return (
        f"# Corrections that learn from the same recorded batches\n\n{table(rows)}\n\n"
        f"{seeds} recorded runs, one a seed; 95 % intervals over seeds, differences within a seed.{few} KL and ESS: means over "
        "the last quarter of the steps.\n"
    )


if __name__ == "__main__":
    app()
