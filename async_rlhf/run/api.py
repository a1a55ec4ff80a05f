"""The Python API: train a model, with rewards given as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.actors.prompts import load_rows
from async_rlhf.actors.rewards import spec_of
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, RewardError
from async_rlhf.buffers.model_directory import check_stop_strings
from async_rlhf.learner.checkpoint.resuming import check_step, go_back, newest
from async_rlhf.learner.model.gguf import model_directory
from async_rlhf.run.caller_rewards import served, split
from async_rlhf.run.child import MAX_DEATHS
from async_rlhf.run.config import Config, load
from async_rlhf.run.daemon import Progress, Supervisor
from async_rlhf.run.display import Display
from async_rlhf.run.model_checks import check_model_files
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import reward_specs, stage_specs


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind. `metrics` has one object a step; `checkpoint` loads with `from_pretrained`."""

    run_dir: Path
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    checkpoint: Path | None
    finished: bool
    """False when the run was drained before its last step; `resume=True` continues it."""


def train(
    config: str | Path,
    *,
    rewards: Sequence[Callable[..., Any]] | None = None,
    loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    from_step: int | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Run the configuration in a TOML file to its end.

    rewards: functions instead of those the file names; one that no other process can import (a lambda, a closure, a bound
    method) is served by threads of this process (`caller_rewards`). loss, advantage: functions of your own, declared with
    `@loss` and `@advantage`, which must be importable. overrides: dotted keys. resume: go on with its run directory, from the
    newest checkpoint or from that of `from_step` steps. Raises ConfigError before any process starts, and what ended the run
    otherwise (see `async_rlhf.launch.exit_codes`).
    """
    changed, own_rewards = dict(overrides or {}), dict[str, Callable[..., Any]]()
    if rewards is not None:
        changed["rewards.functions"], own_rewards = split(rewards)
    for section, own in (("loss", loss), ("advantage", advantage)):
        if own is not None:
            changed[f"{section}.kind"] = _importable(section, own)
    with served(own_rewards, load(config, changed)) as resolved:
        return run(resolved, resume=resume, from_step=from_step, quiet=quiet)


def _importable(section: str, function: Callable[..., Any]) -> str:
    """The name by which the learner's process imports it. Raises ConfigError."""
    try:
        return spec_of(function)
    except RewardError as error:
        raise ConfigError(
            f"{section}: {error}. In a notebook, begin its cell with '%%writefile my_{section}.py' and give "
            f"overrides={{'{section}.kind': 'my_{section}.py:{getattr(function, '__name__', 'name')}'}}"
        ) from error


def start(
    config: Config,
    *,
    resume: bool = False,
    from_step: int | None = None,
    progress: Progress | None = None,
    max_deaths: int = MAX_DEATHS,
) -> tuple[Supervisor, RunDir]:
    """Everything that can be refused is refused here; what comes back holds the run's lock and only has to `run`."""
    preflight(config)
    model = model_directory(config.model)
    if model != config.model:  # converted from a file, in which `preflight` cannot look
        check_model_files(Path(model))
    config = as_rewards_want(config.model_copy(update={"model": model}))
    if from_step is not None and not resume:
        raise ConfigError(f"--from-step {from_step} goes on with a run that exists: give --resume too")
    directory = _reopened(config, from_step) if resume else RunDir.create(config)
    return Supervisor(config, directory, directory.launcher, progress, max_deaths=max_deaths), directory


def _reopened(config: Config, from_step: int | None) -> RunDir:
    """The directory of a run to continue, its checkpoint looked at: the newest by the sizes of its files, for its learner
    digests them; a requested one by its digests, for what came after it is then set aside."""
    directory = RunDir.reopen(config)
    try:
        if from_step is None:
            newest(directory.path, contents=False)
        else:
            check_step(directory.path, from_step)
            go_back(directory.path, from_step)
    except AsyncRLHFError:
        directory.retire()
        raise
    return directory


def run(config: Config, *, resume: bool = False, from_step: int | None = None, quiet: bool = False) -> TrainResult:
    """Run a checked configuration; see `train`."""
    shown: AbstractContextManager[Progress] = nullcontext(Progress()) if quiet else Display()
    with shown as progress:
        supervisor, directory = start(config, resume=resume, from_step=from_step, progress=progress)
        finished = supervisor.run()
    checkpoint = directory.latest / "model"
    return TrainResult(
        run_dir=directory.path,
        metrics=directory.read_metrics(),
        evaluations=directory.read_evaluations(),
        checkpoint=checkpoint.resolve() if checkpoint.exists() else None,
        finished=finished,
    )


def preflight(config: Config) -> int:
    """Look at the data, the rewards and the model's files themselves, without torch; returns the number of training prompts.

    Raises ConfigError.
    """
    if Path(config.model).is_dir():
        check_model_files(Path(config.model))
    rows, _ = load_rows(config.data)
    if not rows:
        raise ConfigError(f"data.source = {config.data.source!r} leaves no training prompt")
    stage_specs(config, set(rows[0].columns))
    config.rewards.composition.check(spec.name for spec in reward_specs(config))
    check_stop_strings(as_rewards_want(config).generation.stop, Path(config.model))
    config.bound(len(rows)).check()
    return len(rows)


def as_rewards_want(config: Config) -> Config:
    """The configuration with what rewards say of themselves (weights, stop strings) written out: a run's record is whole."""
    specs = reward_specs(config)
    weights = {spec.name: spec.weight for spec in specs if spec.weight != 1.0} | config.rewards.weights
    stop = dict.fromkeys((*config.generation.stop, *(text for spec in specs for text in spec.stop_when)))
    rewards = config.rewards.model_copy(update={"weights": weights})
    return config.model_copy(
        update={"rewards": rewards, "generation": config.generation.model_copy(update={"stop": tuple(stop)})}
    )
