"""The learner's loop, on one screen: take, estimate_advantages, step, publish, commit.

    owns        the backend, the checkpoints, the step count (the only author of a version)
    waits for   the hub: a batch, or an acknowledgement; every wait has a deadline and the hub says for whom it waits
    woken by    the hub's answer
    on close    a checkpoint of the last step is durable, and committed unless the run was only drained

The hub may die meanwhile: it then answers `unregistered`, and before it takes again the learner registers at its present
step and publishes its weights. When the learner itself dies, a new one begins at the newest checkpoint and is given the
same batches again. A step is recorded before it is made durable, so the record of a resumed run has no hole. What is
committed is the step of the oldest checkpoint that is kept, so that a run can go on from each of them.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_rlhf.buffers.clients.connection import HubRestartedError
from async_rlhf.buffers.clients.learner import SuspectGroup, TakenBatch
from async_rlhf.buffers.composition import Composition, Statistics
from async_rlhf.buffers.errors import MismatchError, NonFiniteError, RewardError, StalenessError
from async_rlhf.buffers.record import Group
from async_rlhf.learner.batch.rows import Row, make_rows, split_updates
from async_rlhf.learner.checkpoint.resuming import newest
from async_rlhf.learner.checkpoint.store import CheckpointError, Checkpoints
from async_rlhf.learner.checkpoint.writer import CheckpointWriter, Writer
from async_rlhf.learner.config import AdvantageConfig, CheckpointConfig, GuardConfig, LearnerConfig, LossConfig
from async_rlhf.learner.loop.metrics import data_metrics, sample_record, staleness_histogram
from async_rlhf.learner.loop.recording import Recording, as_line
from async_rlhf.learner.loop.safeguards import Aim, observe
from async_rlhf.learner.loop.source import BatchSource
from async_rlhf.learner.objective.estimation import AdvantageEstimates, estimate_advantages, select_members
from async_rlhf.learner.step.backend import Backend
from async_rlhf.learner.step.report import StepReport

_log = logging.getLogger(__name__)
# Too few scores say nothing about a ratio; a batch of the smallest sensible size already passes this.
_MIN_SCORES = 8
# Of fewer tokens a mean says little.
_MIN_TOKENS = 64
# Why the hub gives no more batches to a run that is to go on another time.
_DRAINED = "drained"


@dataclass(frozen=True)
class TrainerConfig:
    """What the loop needs to know of the whole run."""

    learner: LearnerConfig
    loss: LossConfig
    checkpoint: CheckpointConfig
    max_steps: int
    max_staleness: int
    composition: Composition
    max_failed_ratio: float
    sampled_groups: int
    """Groups of every step written to `rollouts.jsonl`."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    lowest_staleness: int = 0
    """The smallest staleness the guard may aim at: below it the run would wait forever."""
    mismatch_limit: float = math.inf
    """Largest mean |log-ratio| of learner and engine over tokens that were sampled from the weights a step begins with."""


class Trainer:
    """See the module docstring. `run` returns the reason why it ended.

    Raises StalenessError, NonFiniteError, MismatchError, RewardError, DeadlineError.
    """

    def __init__(self, client: BatchSource, backend: Backend, directory: Path, config: TrainerConfig) -> None:
        self._client, self._backend, self._config = client, backend, config
        keep = config.checkpoint
        self._checkpoints = Checkpoints(directory / "checkpoints", keep.keep_last, keep.keep_every)
        self._saver = CheckpointWriter(self._checkpoints, background=keep.background)
        self.step, self._committed = 0, self._saver.floor
        self._statistics = Statistics()
        if (found := newest(directory)) is not None:
            path, state = found
            backend.load(path)
            self.step = state["step"]
            self._statistics = Statistics(state.get("rewards"))
            _log.info("resumed at step %d from %s", self.step, path)
        self._recording = Recording(directory)
        self._registered = False
        self._published = self.step
        self._refused_in_a_row = self._constant_in_a_row = 0
        self._text: Sequence[int] = ()  # the newest that was trained on, by which engines are held to this policy
        self._aim = Aim(config.max_staleness)
        self._broadcast_s = 0.0
        self._waited_s = self._paused_s = 0.0
        self._recorded_at = time.monotonic()
        self._busy: dict[str, float] = {}

    def run(self) -> str:
        try:
            while not isinstance(batch := self._take(), str):
                self._train(batch)
            self._end_saving(for_good=batch != _DRAINED)
        finally:
            self._recording.close()
        _log.info("ended after %d steps: %s", self.step, batch)
        return batch

    def try_group(self, group: Group) -> None:
        """Do with this group alone what a step would do with it, and throw it away: the record, advantages, rows, forward and
        backward pass, the norm of the gradient. Raises what the step would raise; nothing changes.

        A gradient that is not finite raises nothing, as in a step, which would be refused. Whether too many scores failed, or
        the tokens are too old, is the batch's to be judged by.
        """
        config, groups = self._config, [group]
        with _naming(self.step, groups):
            rewards = self._rewards(groups, copy.deepcopy(self._statistics))
            data_metrics(groups, rewards, self.step, config.max_staleness)
            beliefs, _ = self._beliefs(groups, rewards)
            as_line(sample_record(group, self.step, beliefs.advantages[0], [None] * len(group.rollouts)))
            if updates := self._updates(groups, beliefs):
                self._backend.rehearse(updates, self.step)

    def _take(self) -> TakenBatch | str:
        """The next batch, or why there is none. Groups that the hub suspects of having ended learners are tried before."""
        while True:
            try:
                if not self._registered:
                    self._register()
                began = time.monotonic()
                taken = self._client.take(self.step, self._aim.staleness if self._config.guard.enabled else None)
                if isinstance(taken, SuspectGroup):
                    _log.warning("step %d: group %d is tried alone, its batch has ended learners", self.step, taken.number)
                    self.try_group(taken.group())
                    self._client.tried(taken)
                    continue
            except HubRestartedError:
                _log.warning("the hub was restarted: registering again at step %d", self.step)
                self._registered = False
            else:
                self._waited_s = time.monotonic() - began
                return taken

    def _train(self, batch: TakenBatch) -> None:
        config, step = self._config, self.step
        with _naming(step, batch.groups):
            self._certify(batch.groups)
            rewards = self._rewards(batch.groups, self._statistics)
            data = data_metrics(batch.groups, rewards, step, config.max_staleness)
            self._check_rewards(batch.groups, data["rewards/failed_ratio"])
            beliefs = self._believe(batch.groups, rewards)
            report = self._update(batch.groups, beliefs)
            self._check_mismatch(batch.groups, report)
        for group in batch.groups[:1]:
            longest = max(group.rollouts, key=lambda rollout: rollout.num_tokens)
            self._text = [*group.prompt_ids.tolist(), *longest.completion_ids.tolist()]
        self._guard(report)
        self._tell(lambda: self._client.trained(step))
        self.step = step + 1
        self._broadcast_s = 0.0
        if self.step % config.learner.publish_every == 0 and self.step < config.max_steps:
            self._tell(self._publish)
        self._record(batch, {**data, "groups/zero_advantage": beliefs.zero_advantage_groups}, report)
        self._sample(batch.groups, beliefs.advantages, report)
        if self.step % config.checkpoint.save_every == 0 or self.step == config.max_steps:
            self._save()
        else:
            self._commit()

    def _record(self, batch: TakenBatch, data: Mapping[str, Any], report: StepReport) -> None:
        """One line of metrics. `step_time` runs from record to record, so a checkpoint counts into the step after it."""
        now = time.monotonic()
        took, self._recorded_at = now - self._recorded_at, now
        self._recording.step(
            {
                "step": self.step,
                "time": time.time(),
                "version": self._published,
                **data,
                **report.metrics,
                "groups": [group.number for group in batch.groups],
                "applied": report.applied,
                "staleness/aim": self._aim.staleness,
                "step_time": took,
                "tokens_per_second": data["num_tokens"] / took,
                "samples_per_second": sum(len(group.rollouts) for group in batch.groups) / took,
                "idle/learner": self._waited_s / took,
                "idle/actor": self._idle(batch.telemetry),
                "queue/depth": batch.telemetry.get("queue/depth", 0.0),
                "groups/filtered_total": batch.telemetry.get("groups/filtered", 0.0),
                "actors": batch.telemetry.get("actors", 0.0),
                "canary/drift": batch.telemetry.get("canary_drift", 0.0) / max(1.0, batch.telemetry.get("actors", 0.0)),
                "broadcast/seconds": self._broadcast_s,
                "checkpoint/pause_seconds": self._paused_s,
                "checkpoint/write_seconds": self._saver.seconds,
                "checkpoint/failed": self._saver.failed,
                "records/lost_lines": self._recording.lost_lines,
            }
        )

    def _rewards(self, groups: Sequence[Group], statistics: Statistics) -> list[list[float | None]]:
        """Of each member of each group, after `statistics` have seen them."""
        rule = self._config.composition
        statistics.observe(rule, (rollout.scores for group in groups for rollout in group.rollouts))
        return [[rule.reward(rollout.scores, statistics) for rollout in group.rollouts] for group in groups]

    def _believe(self, groups: Sequence[Group], rewards: Sequence[Sequence[float | None]]) -> AdvantageEstimates:
        """Advantages and token targets. Counts batches in which no group had anything to say, and ends on too many."""
        beliefs, nothing = self._beliefs(groups, rewards)
        self._constant_in_a_row = self._constant_in_a_row + 1 if nothing else 0
        if self._constant_in_a_row >= self._config.advantage.max_constant_batches:
            raise RewardError(
                f"{self._constant_in_a_row} batches in a row had no group in which one completion is better than another, so "
                f"there is nothing to learn from; the last had the groups {[group.number for group in groups]}. Look at the "
                "rewards in rollouts.jsonl: the prompts are all too easy or all too hard, or the reward is constant."
            )
        return beliefs

    def _beliefs(self, groups: Sequence[Group], rewards: Sequence[Sequence[float | None]]) -> tuple[AdvantageEstimates, bool]:
        """Advantages and token targets, and whether no group had anything to say."""
        config = self._config
        chosen = select_members(rewards, config.advantage, config.loss)
        scored = any(reward is not None for group in rewards for reward in group)
        nothing = scored and all(reward is None for group in chosen for reward in group)
        rows = make_rows(groups, chosen, self._backend.row_tokens) if config.loss.needs_evaluation(config.advantage) else []
        observed = self._backend.evaluate(rows) if rows else {}
        return estimate_advantages(groups, rewards, chosen, observed, config.advantage, config.loss), nothing

    def _check_mismatch(self, groups: Sequence[Group], report: StepReport) -> None:
        """Engine and learner must be one policy under one set of weights. Raises MismatchError."""
        config, mismatch = self._config, report.metrics["mismatch/abs_log_ratio"]
        fresh = [span for group in groups for span in group.spans() if span.version == self.step]
        comparable = (
            sum(span.num_tokens for span in fresh) >= _MIN_TOKENS
            and all(span.cache_version is None for span in fresh)  # older keys and values are another policy's
            and not (config.loss.proximal == "interpolate" and config.learner.updates_per_step * config.learner.epochs > 1)
            and all(rollout.sampling_mask is not None for group in groups if group.is_truncated for rollout in group.rollouts)
        )
        if report.applied and comparable and mismatch is not None and not mismatch <= config.mismatch_limit:
            raise MismatchError(
                f"log-probabilities of learner and engine differ by {mismatch:.3g} nats on average over tokens sampled from "
                f"the same weights; the limit is {config.mismatch_limit:g}. One of them computes this model wrong, or another "
                "one. Compare with engine.kind = 'torch' and float32 on both sides, or raise engine.mismatch_limit to go on"
            )

    def _guard(self, report: StepReport) -> None:
        """Aim lower or higher for groups begun from the next take on, as this step's data suggest."""
        config = self._config
        if not config.guard.enabled:
            return
        before = self._aim.staleness
        self._aim, reason = observe(self._aim, report.metrics, config.guard, config.lowest_staleness, config.max_staleness)
        if reason is not None:
            _log.info("step %d: aiming at staleness %d instead of %d: %s", self.step, self._aim.staleness, before, reason)

    def _update(self, groups: Sequence[Group], beliefs: AdvantageEstimates) -> StepReport:
        """The optimizer's part."""
        learner, updates = self._config.learner, self._updates(groups, beliefs)
        if not updates:
            return StepReport.of_nothing()
        report = self._backend.step(updates, self.step)
        self._refused_in_a_row = 0 if report.applied else self._refused_in_a_row + 1
        if not report.applied:
            _log.error("step %d refused: its gradient is not finite; groups %s", self.step, [g.number for g in groups])
        if self._refused_in_a_row >= learner.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self._refused_in_a_row} steps in a row had a gradient that is not finite, the last with groups "
                f"{[group.number for group in groups]}. Lower learner.learning_rate, or look at rollouts.jsonl."
            )
        return report

    def _updates(self, groups: Sequence[Group], beliefs: AdvantageEstimates) -> list[list[Row]]:
        """Whole groups dealt to the updates of this step in order, in every pass over the batch."""
        learner = self._config.learner
        rows = make_rows(groups, beliefs.advantages, self._backend.row_tokens, beliefs.targets)
        return split_updates(rows, learner.updates_per_step) * learner.epochs

    def _certify(self, groups: Sequence[Group]) -> None:
        """The last net, right before the gradient: no token over the bound, whatever the queue believed."""
        ages = staleness_histogram(groups, self.step)
        if max(ages, default=0) > self._config.max_staleness:
            numbers = [g.number for g in groups if max(staleness_histogram([g], self.step)) > self._config.max_staleness]
            raise StalenessError(
                f"step {self.step} was given tokens of staleness {max(ages)}, the bound is {self._config.max_staleness} "
                f"(groups {numbers}); nothing was trained on them. This is a defect of the queue: please report it."
            )

    def _check_rewards(self, groups: Sequence[Group], failed_ratio: float) -> None:
        scores = [(g.number, name, score) for g in groups for r in g.rollouts for name, score in r.scores.items()]
        if failed_ratio > self._config.max_failed_ratio and len(scores) >= _MIN_SCORES:
            failed = [each for each in scores if each[2].failure is not None]
            number, name, score = failed[0]
            raise RewardError(
                f"{len(failed)} of {len(scores)} scores failed ({failed_ratio:.0%}); rewards.max_failed_ratio is "
                f"{self._config.max_failed_ratio:.0%}. First: reward {name!r} of group {number}: {score.failure}. "
                "The full traceback is in the actor's log."
            )

    def _sample(self, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], report: StepReport) -> None:
        start = 0
        for group, values in list(zip(groups, advantages, strict=True))[: self._config.sampled_groups]:
            members = range(start, start + len(values))
            start += len(values)
            weights = [report.weight_of_member.get(member) for member in members]
            self._recording.sample(sample_record(group, self.step, values, weights))

    def _publish(self) -> None:
        began = time.monotonic()
        self._client.publish(self.step, self._backend.tensors(), self._backend.canary(self._text))
        self._published = self.step
        self._broadcast_s = time.monotonic() - began

    def _save(self) -> None:
        """Begin a checkpoint of the present step; training goes on while it is written."""
        began = time.monotonic()
        rewards = copy.deepcopy(self._statistics.state)
        state = {"version": self.step, "max_steps": self._config.max_steps, "rewards": rewards}
        self._saver.wait()
        self._commit()
        self._saver.begin(self.step, self._recorded(self._backend.snapshot()), state)
        self._paused_s = time.monotonic() - began
        self._commit()

    def _recorded(self, write: Writer) -> Writer:
        """A checkpoint is durable only after the record of its steps: when power fails, the record has no hole."""

        def both(directory: Path) -> None:
            self._recording.sync()
            write(directory)

        return both

    def _commit(self, step: int | None = None) -> None:
        """Give up what was trained on before `step`: by default before the oldest checkpoint that is kept."""
        step = self._saver.floor if step is None else step
        if step > self._committed:
            self._committed = step
            self._tell(lambda: self._client.commit(step))

    def _end_saving(self, *, for_good: bool) -> None:
        """The last step is durable, and committed when the run has ended for good. Raises CheckpointError when it cannot be
        written."""
        self._saver.wait()
        if self.step > self._saver.durable:
            self._save()
            self._saver.wait()
        if self.step > self._saver.durable:
            raise CheckpointError(f"{self._saver.reason}; make room, then --resume goes on from step {self._saver.durable}")
        self._commit(self.step if for_good else None)
        if not self._registered:  # the hub was restarted just now
            self._client.register(self.step, self._committed)

    def _register(self) -> None:
        """Says where this learner stands, and so everything that `trained` and `commit` would have said."""
        self._client.register(self.step, self._committed)
        self._recording.begin(self.step)  # nothing is cut off before the hub has taken this learner
        if self.step < self._config.max_steps:
            self._publish()
        self._registered = True

    def _tell(self, operation: Callable[[], None]) -> None:
        """Tell the hub something. When it was restarted, the registration that comes before the next take says it too."""
        if not self._registered:
            return
        try:
            operation()
        except HubRestartedError:
            self._registered = False

    def _idle(self, telemetry: Mapping[str, float]) -> float:
        """Share of the actors' time since the last step in which no sequence was being decoded."""
        idle = max(0.0, telemetry.get("idle_s", 0.0) - self._busy.get("idle_s", 0.0))
        busy = max(0.0, telemetry.get("busy_s", 0.0) - self._busy.get("busy_s", 0.0))
        self._busy = dict(telemetry)
        return idle / (idle + busy) if idle + busy > 0 else 0.0


@contextmanager
def _naming(step: int, groups: Sequence[Group]) -> Iterator[None]:
    """What ends the process within says in its traceback which groups it was about."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"at step {step}, with the groups {[group.number for group in groups]}")
        raise
