"""A run that was recorded: its batches, the weights each of them was trained from, and the corrections to ask about them.

Reads; writes and starts nothing. A batch of step t was trained on with the weights of checkpoint t, which is in the run
directory where `checkpoint.keep_every` kept it; the batch is in the journal where `queue.keep_rollouts` did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.buffers.composition import Statistics
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.buffers.record import Group, staleness
from async_rlhf.experiments.statistics import MIN_SEEDS
from async_rlhf.learner.checkpoint.store import complete, step_of, verified
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.registry import loss_spec
from async_rlhf.run.config import Config
from async_rlhf.run.loading import differences, read_toml, section
from async_rlhf.run.run_dir import RunDir

SHIPPED = Path(__file__).resolve().parent / "corrections.toml"
# What is optimised, not how it is corrected: the same in the reference and in every correction.
_OBJECTIVE = ("kl_coef", "kl_estimator", "kl_in", "entropy_coef", "mask_truncated")


@dataclass(frozen=True)
class Moment:
    """The learner just before step `step`: its checkpoint, and the batch that it then trained on."""

    step: int
    checkpoint: Path
    groups: tuple[Group, ...]
    statistics: Statistics
    """The normalisation of rewards, as it was when this batch was trained on."""

    @property
    def staleness(self) -> tuple[float, int]:
        """Mean and largest over the tokens, in learner steps."""
        ages = [(staleness(version, self.step), count) for group in self.groups for version, count in group.sampled_spans()]
        return sum(age * count for age, count in ages) / sum(count for _, count in ages), max(age for age, _ in ages)


def recorded(directory: Path, steps: Sequence[int]) -> tuple[RunDir, Config, list[Moment]]:
    """The run, its configuration and the moments at these steps, ascending; without steps, at all there are.

    Raises ConfigError where there is no run, one that still lives, no kept checkpoint or batch, or none of a step that is asked
    for, and for what this experiment cannot ask about; DamagedError for files that are not as they were written.
    """
    run = RunDir.existing(directory)
    if run.is_alive():
        raise ConfigError(
            f"{str(directory)!r} is still being trained: wait for its end, or stop it (async-rlhf stop {directory})"
        )
    config = run.config()
    if config.advantage.needs_critic:
        raise ConfigError(
            f"advantage.kind = {config.advantage.kind!r} needs a critic, whose gradient is none of the policy's; this "
            "experiment is for estimators without one, group_relative or leave_one_out"
        )
    checkpoints = {step_of(path): path for path in complete(run.path / "checkpoints")}
    if not checkpoints:
        raise ConfigError(f"{str(directory)!r} has no checkpoint; a run with checkpoint.keep_every = 10 keeps every tenth")
    if not any((run.path / "queue").glob("[0-9]*.log")):
        raise ConfigError(f"{str(directory)!r} has no archive of batches; a run with queue.keep_rollouts = true keeps one")
    batches = {batch.step: batch.groups for batch in read_batches(run.path / "queue") if batch.step in checkpoints}
    for step in (*steps, *([] if batches else [max(checkpoints)])):
        if step not in batches:
            missing = "no batch that was trained on from it" if step in checkpoints else "no checkpoint of it"
            nearest = min(batches, key=lambda other: abs(other - step), default="none")
            there = ", ".join(map(str, sorted(batches))) or "none"
            raise ConfigError(
                f"--step {step}: {str(directory)!r} has {missing} (checkpoint.keep_every and queue.keep_rollouts decide what "
                f"is kept); the nearest with both is {nearest}. Steps with both: {there}"
            )
    wanted = sorted(set(steps) or set(batches))
    return run, config, [_moment(config, step, checkpoints[step], batches[step]) for step in wanted]


def several(directories: Sequence[Path], steps: Sequence[int]) -> list[tuple[RunDir, Config, list[Moment]]]:
    """Runs as `recorded` gives them, at the steps that all of them have. Raises ConfigError as `recorded` does, for two runs,
    which have no interval, and for runs that differ in more than their seed or do not differ in it."""
    if 1 < len(directories) < MIN_SEEDS:
        raise ConfigError(f"{len(directories)} runs have no interval over seeds; give one, or at least {MIN_SEEDS}")
    found = [recorded(directory, steps) for directory in directories]
    check_seeds([config for _, config, _ in found])
    common = set.intersection(*({moment.step for moment in moments} for *_, moments in found))
    if not common:
        raise ConfigError(
            "there is no step at which every run has a checkpoint and a batch; give the runs the same checkpoint.keep_every"
        )
    return [(run, config, [moment for moment in moments if moment.step in common]) for run, config, moments in found]


def check_seeds(configs: Sequence[Config]) -> None:
    """Raises ConfigError for runs that differ in more than their seed, or do not differ in it."""
    first, *others = configs
    for config in others:
        like = config.model_copy(update={"name": first.name, "output_dir": first.output_dir, "seed": first.seed})
        if other := differences(first, like):
            raise ConfigError(f"{config.name!r} differs from {first.name!r} in more than its seed: {'; '.join(other)}")
    if len({config.seed for config in configs}) < len(configs):
        raise ConfigError(f"the runs have the seeds {', '.join(str(config.seed) for config in configs)}; one run a seed")


def corrections(path: Path, own: LossConfig) -> dict[str, LossConfig]:
    """The losses of a file, by name, in its order. own: the run's, which says what is optimised. Raises ConfigError."""
    content = read_toml(path, "corrections", f"the shipped ones are in {SHIPPED.name} of this experiment")
    if len(content) < 2:
        raise ConfigError(f"{str(path)!r} names {len(content)} corrections: at least 2 are needed, the first is compared with")
    return {name: _correction(path, name, table, own) for name, table in content.items()}


def plain(loss: LossConfig) -> LossConfig:
    """The on-policy policy gradient that this correction estimates: no weight, no mask, and its own reduction.

    At ratio 1 all losses of tokens have the gradient of A log p, so one stands for all of them; those of whole completions
    differ in what a completion's length counts, so each is its own, without what corrects it.
    """
    kept = {name: getattr(loss, name) for name in (*_OBJECTIVE, "reduction")}
    is_own = loss_spec(loss.kind).level == "sequence"
    own = {"kind": loss.kind, **loss.parameters} if is_own else {"kind": "decoupled_ppo"}
    return LossConfig(**kept, **own, is_cap=None, allow_uncorrected=True)


def _moment(config: Config, step: int, checkpoint: Path, groups: tuple[Group, ...]) -> Moment:
    statistics = Statistics(verified(checkpoint).get("rewards"))
    statistics.observe(config.rewards.composition, (rollout.scores for group in groups for rollout in group.rollouts))
    return Moment(step, checkpoint, groups, statistics)


def _correction(path: Path, name: str, table: Any, own: LossConfig) -> LossConfig:
    where = f"{path.name}, [{name}]"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is no table; write the keys of [loss] under it")
    for key in table:
        if key in _OBJECTIVE:
            raise ConfigError(f"{where}: {key} is what is optimised, and the run's own; leave it out")
    try:
        loss: LossConfig = section("loss", {key: getattr(own, key) for key in (*_OBJECTIVE, "reduction")} | {**table})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    spec = loss_spec(loss.kind)
    if spec.learns_from != "all" or spec.level == "pair":
        raise ConfigError(f"{where}: loss {loss.kind!r} does not estimate the policy gradient of all completions; leave it out")
    return loss
