"""The learner's loop, on one screen: take, estimate advantages, step, publish, commit.

    owns        the backend, the checkpoints, the step count (the only author of a version)
    waits for   the hub: a batch, an acknowledgement, what is left of a publication when the next step is done; every wait has a
                deadline and the hub names what it waits for
    woken by    the hub's answer
    on close    a checkpoint of the last step is durable, and committed unless the run was only drained

The hub may die meanwhile: it then answers `unregistered`, and before it takes again the learner registers at its present
step and publishes its weights. When the learner itself dies, a new one begins at the newest checkpoint and is given the
same batches again. A step is recorded before it is made durable, so the record of a resumed run has no hole. What is
committed is the step of the oldest checkpoint that is kept, so that a run can go on from each of them. What an operator changes
(`changes`) is taken up at the border of two steps, before the next batch is requested.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from async_rlhf.buffers.clients.learner import TakenBatch
from async_rlhf.buffers.composition import Composition, Statistics
from async_rlhf.buffers.record import Group
from async_rlhf.learner.batch.rows import BatchRow, make_rows, split_updates
from async_rlhf.learner.checkpoint.evaluated import is_due, needed
from async_rlhf.learner.checkpoint.resuming import newest
from async_rlhf.learner.checkpoint.store import CheckpointError, Checkpoints
from async_rlhf.learner.checkpoint.writer import CheckpointWriter
from async_rlhf.learner.config import AdvantageConfig, CheckpointConfig, GuardConfig, LearnerConfig, LossConfig
from async_rlhf.learner.loop.budget import Budget
from async_rlhf.learner.loop.changes import LiveChanges
from async_rlhf.learner.loop.metrics import SourceMetrics, StepClock, data_metrics, sample_record
from async_rlhf.learner.loop.recording import Recording, as_line, last_step, spent
from async_rlhf.learner.loop.safeguards import Safeguards, StalenessController
from async_rlhf.learner.loop.source import BatchSource, SourceSession
from async_rlhf.learner.objective.estimation import (
    AdvantageEstimates,
    Rewards,
    estimate_advantages,
    num_masked,
    select_members,
)
from async_rlhf.learner.step.controller import Controller
from async_rlhf.learner.step.report import StepReport
from async_rlhf.learner.step.torch_machine import learning_rate

_log = logging.getLogger(__name__)
# The hub's reason to end batches of a run that will be resumed.
_DRAINED = "drained"


@dataclass(frozen=True)
class TrainerConfig:
    """The loop's part of a run's configuration: the learner's own sections, and single values of the others."""

    learner: LearnerConfig
    loss: LossConfig
    checkpoint: CheckpointConfig
    budget: Budget
    max_staleness: int
    composition: Composition
    max_failed_ratio: float
    """Largest share of failed scores in a batch."""
    sampled_groups: int
    """Groups of every step written to `rollouts.jsonl`."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    lowest_staleness: int = 0
    """The smallest staleness the guard may set as target: below it the run would wait forever."""
    exact: bool = False
    """Whether each group is made by one certain version."""
    evaluate_every: int = 0
    """Steps between two evaluations, each of which has a checkpoint; 0: none."""
    mismatch_limit: float = math.inf
    """Largest mean |log-ratio| of learner and engine over tokens that were sampled from the weights a step begins with."""
    max_log_bytes: int | None = None
    """Size after which `rollouts.jsonl` begins anew."""


class Trainer:
    """See the module docstring. `run` returns the reason why it ended. settings: with these values for dotted keys of the run's
    configuration, which an operator changed.

    Raises StalenessError, NonFiniteError, MismatchError, DivergedError, RewardError, DeadlineError, DamagedError.
    """

    def __init__(
        self,
        source: BatchSource,
        backend: Controller,
        directory: Path,
        settings: Callable[[Mapping[str, Any]], TrainerConfig],
    ) -> None:
        self._backend, self._settings, config = backend, settings, settings({})
        self._config = config
        keep, evaluations = config.checkpoint, directory / "evaluations.jsonl"
        self._checkpoints = Checkpoints(
            directory / "checkpoints", keep.keep_last, keep.keep_every, lambda: needed(evaluations, config.evaluate_every)
        )
        self._writer = CheckpointWriter(self._checkpoints)
        self.step, self._statistics = 0, Statistics()
        if (checkpoint := newest(directory)) is not None:
            path, state = checkpoint
            backend.load(path)
            self.step, self._statistics = state["step"], Statistics(state.get("rewards"))
            _log.info("resumed at step %d from %s", self.step, path)
        self._spent = spent(directory, self.step)
        self._changes, self._values = LiveChanges(directory, self.step, last_step(directory)), dict[str, Any]()
        self._recording = Recording(directory, config.max_log_bytes)
        steps = config.budget.max_steps
        self._session = SourceSession(
            source, backend, self._recording, self.step, self._writer.floor, steps, exact=config.exact
        )
        self._safeguards = Safeguards(config)
        self._staleness = StalenessController(config.guard, config.lowest_staleness, config.max_staleness)
        self._clock, self._sources = StepClock(), SourceMetrics()
        self._paused_s = 0.0

    def run(self) -> str:
        try:
            while not isinstance(batch := self._take(), str):
                self._train(batch)
            self._end(for_good=batch != _DRAINED)
        finally:
            self._recording.close()
        _log.info("ended after %d steps: %s", self.step, batch)
        return batch

    def _take(self) -> TakenBatch | str:
        """The next batch, or why there is none: the hub's reason, or the exceeded limit of the budget."""
        ended = self._config.budget.ended(self._spent)
        if not ended or self._is_at_max_steps:  # a run of `max_steps` is ended by the hub
            self._adapt()
            return self._session.take(self.step, self._staleness.target_staleness, self.try_group)
        if self._session.published < self.step:
            self._session.canary(self.step)
        self._make_durable()  # once the hub has let the actors go, no batches are left to repeat a step
        self._session.finish(self.step)
        return ended

    @property
    def _is_at_max_steps(self) -> bool:
        most = self._config.budget.max_steps
        return most is not None and self.step >= most

    def _adapt(self) -> None:
        """Take over the changed values in force from the next step on. Raises DamagedError."""
        values = self._values if self._is_at_max_steps else self._changes.at(self.step + 1)
        if values == self._values:
            return
        _log.info("from step %d on: %s", self.step + 1, values)
        self._values, self._config = dict(values), self._settings(values)
        self._checkpoints.keep(self._config.checkpoint.keep_last, self._config.checkpoint.keep_every)
        self._safeguards.config = self._config
        self._staleness.follow(self._config.guard)

    def _train(self, batch: TakenBatch) -> None:
        config, step, groups = self._config, self.step, batch.groups
        with _naming(step, groups):
            self._safeguards.certify(groups, step)
            rewards = self._rewards(groups, self._statistics)
            data = data_metrics(groups, rewards, step, config.max_staleness)
            is_new = all(group.number >= self._session.begun for group in groups)
            # The reward that failed on older groups may have been repaired since; they are taken again at each resumption.
            self._safeguards.check_scores(groups, data["rewards/failed_ratio"] if is_new else 0.0)
            masked = num_masked(groups, rewards, config.loss)
            estimates, constant = self._estimate(groups, rewards)
            self._safeguards.count_constant(groups, masked, constant=constant)
            report = self._update(groups, estimates)
            if is_new:
                self._safeguards.check_mismatch(report)
        self._staleness.adjust(report.metrics, step)
        self._session.trained(step, groups)
        self.step = step + 1
        self._spent = replace(self._spent, steps=self.step, tokens=self._spent.tokens + data["num_tokens"])
        if self._is_at_max_steps:
            self._session.canary(self.step)  # no actor adopts the last weights, and they are the run's result
        elif self.step % config.learner.publish_every == 0 and not config.budget.ended(self._spent):
            self._session.publish(self.step)
        counted = {"groups/zero_advantage": estimates.zero_advantage_groups, "completions/masked_truncated": masked}
        counted["staleness/nominal"] = self._session.num_nominal(groups)
        self._record(batch, {**data, **self._sources.measure(groups, rewards), **counted}, report)
        self._sample(groups, estimates.advantages, report)
        self._safeguards.count_diverged({**data, **report.metrics}, self.step)
        if self._is_saved(self.step):
            self._save()
        else:
            self._session.commit(self._writer.floor)

    def try_group(self, group: Group) -> None:
        """Do with this group alone what a step would do with it, and throw it away: the record, advantages, rows, forward and
        backward pass, the norm of the gradient. Raises what the step would raise; nothing changes.

        A gradient that is not finite raises nothing, as in a step, which would be refused. Whether too many scores failed, or
        the tokens are too old, is judged of a whole batch.
        """
        config, groups = self._config, [group]
        with _naming(self.step, groups):
            rewards = self._rewards(groups, copy.deepcopy(self._statistics))
            data_metrics(groups, rewards, self.step, config.max_staleness)
            estimates, _ = self._estimate(groups, rewards)
            as_line(sample_record(group, self.step, estimates.advantages[0], [None] * len(group.rollouts)))
            if updates := self._updates(groups, estimates):
                self._backend.dry_run(updates, self.step)

    def _rewards(self, groups: Sequence[Group], statistics: Statistics) -> list[list[float | None]]:
        """The reward of each member of each group, after `statistics` have seen the scores."""
        rule = self._config.composition
        statistics.observe(rule, (rollout.scores for group in groups for rollout in group.rollouts))
        return [[rule.of(group.columns).reward(rollout.scores, statistics) for rollout in group.rollouts] for group in groups]

    def _estimate(self, groups: Sequence[Group], rewards: Rewards) -> tuple[AdvantageEstimates, bool]:
        """`estimated` with this run's settings."""
        return estimated(groups, rewards, self._backend, self._config.advantage, self._config.loss)

    def _updates(self, groups: Sequence[Group], estimates: AdvantageEstimates) -> list[list[BatchRow]]:
        """Whole groups split into the updates of this step in order, in every pass over the batch."""
        learner = self._config.learner
        rows = make_rows(groups, estimates.advantages, estimates.targets)
        return split_updates(rows, learner.updates_per_step) * learner.epochs

    def _update(self, groups: Sequence[Group], estimates: AdvantageEstimates) -> StepReport:
        if not (updates := self._updates(groups, estimates)):
            return StepReport.of_nothing()
        report = self._backend.step(updates, self.step, self._config.learner.learning_rate)
        self._safeguards.count_refused(groups, report, self.step)
        return report

    def _record(self, batch: TakenBatch, data: Mapping[str, Any], report: StepReport) -> None:
        """One line of metrics."""
        measured = self._clock.measure(batch.groups, data["num_tokens"], batch.telemetry, self._session.waited_s)
        self._spent = replace(self._spent, seconds=self._spent.seconds + measured["step_time"])
        self._recording.step(
            {
                "step": self.step,
                "time": time.time(),
                "version": self._session.published,
                **data,
                **report.metrics,
                "groups": [group.number for group in batch.groups],
                "applied": report.applied,
                "learning_rate": learning_rate(self._config.learner, self.step - 1, self._config.budget.max_steps),
                "staleness/target": self._staleness.target,
                "changes/in_force": self._changes.history.num_in_force(self.step),
                **measured,
                "num_tokens_total": self._spent.tokens,
                "step_time_total": self._spent.seconds,
                "broadcast/seconds": self._session.broadcast_s,
                "checkpoint/pause_seconds": self._paused_s,
                "checkpoint/write_seconds": self._writer.seconds,
                "checkpoint/failed": self._writer.failed,
                "records/lost_lines": self._recording.lost_lines,
            }
        )

    def _sample(self, groups: Sequence[Group], advantages: Rewards, report: StepReport) -> None:
        members = count()
        for group, values in list(zip(groups, advantages, strict=True))[: self._config.sampled_groups]:
            weights = [report.weight_of_member.get(next(members)) for _ in values]
            self._recording.sample(sample_record(group, self.step, values, weights))

    def _is_saved(self, step: int) -> bool:
        config = self._config
        at_interval = is_due(step, config.evaluate_every) or step % config.checkpoint.save_every == 0
        return at_interval or step == config.budget.max_steps

    def _save(self) -> None:
        """Begin a checkpoint of the present step; training goes on while it is written."""
        began = time.monotonic()
        rewards = copy.deepcopy(self._statistics.state)
        state = {"version": self.step, "max_steps": self._config.budget.max_steps, "rewards": rewards}
        self._writer.wait()
        self._session.commit(self._writer.floor)
        write = self._backend.snapshot()

        def record_first(directory: Path) -> None:
            self._recording.sync()  # when power fails, the record of a checkpoint's steps has no hole
            write(directory)

        self._writer.begin(self.step, record_first, state)
        self._paused_s = time.monotonic() - began
        self._session.commit(self._writer.floor)

    def _end(self, *, for_good: bool) -> None:
        """The last step is durable, and committed when the run has ended for good. Raises as `_make_durable`."""
        self._make_durable()
        self._session.commit(self.step if for_good else self._writer.floor)
        self._session.end(self.step)

    def _make_durable(self) -> None:
        """Make a checkpoint of the present step durable. Raises CheckpointError when it cannot be written."""
        writer = self._writer
        writer.wait()
        if self.step > writer.durable:
            self._save()
            writer.wait()
        if self.step > writer.durable:
            raise CheckpointError(f"{writer.reason}; make room, then --resume goes on from step {writer.durable}")


def estimated(
    groups: Sequence[Group], rewards: Rewards, backend: Controller, advantage: AdvantageConfig, loss: LossConfig
) -> tuple[AdvantageEstimates, bool]:
    """Advantages and token targets, and whether nothing can be learned from the batch although there are scores."""
    chosen = select_members(groups, rewards, advantage, loss)
    scored, learned = (any(reward is not None for group in each for reward in group) for each in (rewards, chosen))
    # The KL penalty lowers rewards, and so the baselines made of them: each member of such a baseline is evaluated.
    in_baselines = advantage.needs_energy or (loss.kl_in_reward and not advantage.needs_critic)
    asked = rewards if in_baselines else chosen
    rows = make_rows(groups, asked) if loss.needs_evaluation(advantage) else []
    evaluated = backend.evaluate(rows, energies=advantage.needs_energy) if rows else {}
    return estimate_advantages(groups, rewards, chosen, evaluated, advantage, loss), scored and not learned


@contextmanager
def _naming(step: int, groups: Sequence[Group]) -> Iterator[None]:
    """Name the groups in the traceback of an error within."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"at step {step}, with the groups {[group.number for group in groups]}")
        raise
