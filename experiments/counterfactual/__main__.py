"""`python -m async_rlhf.experiments.counterfactual RUN_DIR... [--step N] [--completions N] [--corrections FILE] [--out D]`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import psutil
import typer
from transformers.utils import logging as transformers_logging

from async_rlhf.buffers.errors import ConfigError, RewardError
from async_rlhf.buffers.files import written
from async_rlhf.cli.app import errors, say
from async_rlhf.experiments.counterfactual.fresh import fresh_groups
from async_rlhf.experiments.counterfactual.gradients import Gradients, rewards_of
from async_rlhf.experiments.counterfactual.measures import FreshGradients, Measures
from async_rlhf.experiments.counterfactual.page import (
    ENOUGH,
    FRESH,
    EstimateRow,
    over_seeds,
    render,
    rows_of,
    shortfall,
    write_rows,
)
from async_rlhf.experiments.counterfactual.recorded import SHIPPED, Moment, corrections, plain, several
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective.estimation import Rewards
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir

app = typer.Typer(add_completion=False)
_LINE_EVERY_S = 15.0
Report = Callable[[str, int, int], None]


@app.command()
def main(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...",
            help="Run that has ended, with kept checkpoints and batches; or three and more that differ in their seed.",
        ),
    ],
    step: Annotated[
        list[int] | None,
        typer.Option(min=1, help="A step with a checkpoint; again for another. Without, all that every run has."),
    ] = None,
    completions: Annotated[
        int, typer.Option(min=1, help="Fresh completions at each step, rounded up to whole batches of the run.")
    ] = ENOUGH,
    chosen: Annotated[
        Path, typer.Option("--corrections", help="TOML file of losses, as corrections.toml of this experiment.")
    ] = SHIPPED,
    out: Annotated[Path | None, typer.Option(help="Directory, made; counterfactual/ of the first run without.")] = None,
) -> None:
    """How far is each correction's gradient on a stale batch from the gradient that the same weights have on fresh data?

    Leaves results.csv and report.md.
    """
    with errors():
        runs = several(run_dirs, step or [])
        config = runs[0][1]
        losses = corrections(chosen, config.loss)
        num_batches = batches_for(config, completions)
        if warning := shortfall(num_batches * config.learner.batch_size):
            say(f"warning: {warning}", err=True)
        transformers_logging.disable_progress_bar()
        directory = out or runs[0][0].path / "counterfactual"
        directory.mkdir(parents=True, exist_ok=True)
        rows, show = list[EstimateRow](), _shown()
        for run, config, moments in runs:
            for moment in moments:
                rows += compare(run, config, moment, losses, num_batches, show)
                write_rows(rows, directory / "results.csv")  # a long night that is cut short leaves its whole steps
        (directory / "report.md").write_text(render(over_seeds(rows)))
        typer.echo(str(directory / "report.md"))


def _shown() -> Report:
    """How far the work is: a line when something begins, and every 15 seconds."""
    last_what, last = "", float("-inf")

    def show(what: str, done: int, of: int) -> None:
        nonlocal last_what, last
        if what != last_what or time.monotonic() - last >= _LINE_EVERY_S:
            last_what, last = what, time.monotonic()
            say(f"{what}: {done}/{of}", err=True)

    return show


def batches_for(config: Config, completions: int) -> int:
    """Batches of the run's size that hold at least so many completions. Raises ConfigError for fewer than four: each half of
    the reference is of two or more."""
    found, size = -(-completions // config.learner.batch_size), config.learner.batch_size
    if found < 4:
        raise ConfigError(
            f"--completions {completions}: fewer than 4 batches of {size} (learner.batch_size); at least {4 * size} are "
            f"needed, {max(ENOUGH, 4 * size)} are advised"
        )
    return found


def compare(
    run: RunDir, config: Config, moment: Moment, losses: Mapping[str, LossConfig], num_batches: int, report: Report
) -> list[EstimateRow]:
    """A row for a fresh batch and for each correction, at one step. The first correction is what the others are compared with.

    report: what is being done, how much of it, and of how much. Raises RewardError when too many fresh scores failed, and
    ConfigError where there is nothing to learn from, or no room.
    """
    where, count = f"{run.path.name}, step {moment.step}", num_batches * config.groups_per_batch
    gradients = Gradients(config, moment.checkpoint, moment.step, plain(config.loss))
    check_memory(gradients.num_parameters, num_batches, psutil.virtual_memory().available)
    groups = fresh_groups(run, config, moment.checkpoint, moment.step, count, partial(report, f"{where}: fresh completions"))
    rewards, of_stale = (rewards_of(config, each, moment.statistics) for each in (groups, moment.groups))
    _check_scores(config, where, rewards)
    rows: dict[str, EstimateRow] = {}
    for on_policy, names in _by_reference(losses):
        progress = partial(report, f"{where}: reference of {names[0]}{' and others' if len(names) > 1 else ''}")
        reference = FreshGradients(*gradients.sums(groups, rewards, on_policy, config.groups_per_batch, progress))
        if not reference.total_P.any():
            raise ConfigError(f"{where}: rewards of each fresh group are equal, so the gradient is 0; choose an earlier step")
        measured = dict[str, Measures]()
        for name in names:
            progress = partial(report, f"{where}: {name}")
            (sum_P,), (divisor,) = gradients.sums(moment.groups, of_stale, losses[name], len(moment.groups), progress)
            measured[name] = reference.measure(sum_P.astype(np.float64) / divisor)
        made = rows_of(config.seed, moment, count * config.generation.group_size, reference, measured)
        rows |= {row.estimate: row for row in made if row.estimate not in rows}  # fresh batches of the first reference
    return [rows[name] for name in (FRESH, *losses)]


def check_memory(num_parameters: int, num_batches: int, available: int) -> None:
    """Raises ConfigError where the gradients of all batches have no room beside each other. available: bytes."""
    needed = 4 * num_parameters * num_batches
    if needed > available:
        raise ConfigError(
            f"{num_batches} gradients of {num_parameters:,} parameters need {written(needed)} at once, {written(available)} "
            "are free; ask about a run of a smaller model, or one that trains adapters (learner.lora)"
        )


def _by_reference(losses: Mapping[str, LossConfig]) -> list[tuple[LossConfig, list[str]]]:
    """Those whose on-policy gradient is the same have one reference."""
    found: dict[str, tuple[LossConfig, list[str]]] = {}
    for name, loss in losses.items():
        found.setdefault(plain(loss).model_dump_json(), (plain(loss), []))[1].append(name)
    return list(found.values())


def _check_scores(config: Config, where: str, rewards: Rewards) -> None:
    failed = fmean(reward is None for group in rewards for reward in group)
    if failed > config.rewards.max_failed_ratio:
        raise RewardError(
            f"{where}: {failed:.0%} of the scores of fresh completions failed, {config.rewards.max_failed_ratio:.0%} are "
            "allowed (rewards.max_failed_ratio)"
        )


if __name__ == "__main__":
    app()
