"""The learner's loop, on one screen: take, believe, step, publish, commit.

    owns        the backend, the checkpoints, the step count (the only author of a version)
    waits for   the hub: a batch, or an acknowledgement; every wait has a deadline and the hub says for whom it waits
    woken by    the hub's answer
    on close    a checkpoint of the last step is durable and committed

The hub may die meanwhile: it then answers `unregistered`, and before it takes again the learner registers at its present
step and publishes its weights. When the learner itself dies, a new one begins at the newest checkpoint and is given the
same batches again. A step is recorded before it is made durable, so the record of a resumed run has no hole.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buffers.clients.connection import HubRestartedError
from buffers.clients.learner import TakenBatch
from buffers.composition import Composition, Statistics
from buffers.errors import NonFiniteError, RewardError, StalenessError
from buffers.record import Group
from learner import guard
from learner.backend import Backend, StepReport
from learner.batch import deal, make_rows
from learner.beliefs import Beliefs, believe, choose
from learner.checkpoint import CheckpointError, Checkpoints
from learner.config import AdvantageConfig, CheckpointConfig, GuardConfig, LearnerConfig, LossConfig
from learner.feed import Feed
from learner.records import StepFile, data_metrics, sample_record, staleness_histogram
from learner.saving import Saver

_log = logging.getLogger(__name__)
# Too few scores say nothing about a ratio; a batch of the smallest sensible size already passes this.
_MIN_SCORES = 8


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


class Trainer:
    """See the module docstring. `run` returns the reason why it ended.

    Raises StalenessError, NonFiniteError, RewardError, DeadlineError.
    """

    def __init__(self, client: Feed, backend: Backend, directory: Path, config: TrainerConfig) -> None:
        self._client, self._backend, self._config = client, backend, config
        keep = config.checkpoint
        self._checkpoints = Checkpoints(directory / "checkpoints", keep.keep_last, keep.keep_every)
        self._saver = Saver(self._checkpoints, background=keep.background)
        self.step = self._committed = 0
        self._statistics = Statistics()
        if (found := self._checkpoints.latest()) is not None:
            path, state = found
            backend.load(path)
            self.step = self._committed = state["step"]
            self._statistics = Statistics(state.get("rewards"))
            _log.info("resumed at step %d from %s", self.step, path)
        self._metrics = StepFile(directory / "metrics.jsonl", self.step)
        self._samples = StepFile(directory / "rollouts.jsonl", self.step)
        self._registered = False
        self._published = self.step
        self._refused_in_a_row = self._constant_in_a_row = 0
        self._aim = guard.Aim(config.max_staleness)
        self._broadcast_s = 0.0
        self._waited_s = self._paused_s = 0.0
        self._recorded_at = time.monotonic()
        self._busy: dict[str, float] = {}

    def run(self) -> str:
        try:
            while not isinstance(batch := self._take(), str):
                self._train(batch)
            self._end_saving()
        finally:
            self._metrics.close()
            self._samples.close()
        _log.info("ended after %d steps: %s", self.step, batch)
        return batch

    def _take(self) -> TakenBatch | str:
        while True:
            try:
                if not self._registered:
                    self._register()
                began = time.monotonic()
                batch = self._client.take(self.step, self._aim.staleness if self._config.guard.enabled else None)
            except HubRestartedError:
                _log.warning("the hub was restarted: registering again at step %d", self.step)
                self._registered = False
            else:
                self._waited_s = time.monotonic() - began
                return batch

    def _train(self, batch: TakenBatch) -> None:
        config, step = self._config, self.step
        self._certify(batch.groups)
        self._statistics.observe(config.composition, (r.scores for group in batch.groups for r in group.rollouts))
        rewards = [[config.composition.reward(r.scores, self._statistics) for r in group.rollouts] for group in batch.groups]
        data = data_metrics(batch.groups, rewards, step, config.max_staleness)
        self._check_rewards(batch.groups, data["rewards/failed_ratio"])
        beliefs = self._believe(batch.groups, rewards)
        advantages = beliefs.advantages
        report = self._update(batch.groups, beliefs)
        self._guard(report)
        self._tell(lambda: self._client.trained(step))
        self.step = step + 1
        self._broadcast_s = 0.0
        if self.step % config.learner.publish_every == 0 and self.step < config.max_steps:
            self._tell(self._publish)
        self._record(batch, {**data, "groups/silent": beliefs.silent_groups}, report)
        self._sample(batch.groups, advantages, report)
        if self.step % config.checkpoint.save_every == 0 or self.step == config.max_steps:
            self._save()
        else:
            self._commit()

    def _record(self, batch: TakenBatch, data: Mapping[str, Any], report: StepReport) -> None:
        """One line of metrics. `step_time` runs from record to record, so a checkpoint counts into the step after it."""
        now = time.monotonic()
        took, self._recorded_at = now - self._recorded_at, now
        self._metrics.write(
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
            }
        )

    def _believe(self, groups: Sequence[Group], rewards: Sequence[Sequence[float | None]]) -> Beliefs:
        """Advantages and token targets. Counts batches in which no group had anything to say, and ends on too many."""
        config, learner = self._config, self._config.learner
        chosen = choose(rewards, config.advantage, config.loss)
        scored = any(reward is not None for group in rewards for reward in group)
        nothing = scored and all(reward is None for group in chosen for reward in group)
        self._constant_in_a_row = self._constant_in_a_row + 1 if nothing else 0
        if self._constant_in_a_row >= config.advantage.max_constant_batches:
            raise RewardError(
                f"{self._constant_in_a_row} batches in a row had no group in which one completion is better than another, so "
                "there is nothing to learn from. Look at the rewards in rollouts.jsonl: the prompts are all too easy or all "
                "too hard, or the reward is constant."
            )
        rows = make_rows(groups, chosen, learner.row_tokens) if config.loss.needs_observation(config.advantage) else []
        observed = self._backend.observe(rows) if rows else {}
        return believe(groups, rewards, chosen, observed, config.advantage, config.loss)

    def _guard(self, report: StepReport) -> None:
        """Aim lower or higher for groups begun from the next take on, as this step's data suggest."""
        config = self._config
        if not config.guard.enabled:
            return
        before = self._aim.staleness
        self._aim, reason = guard.observe(
            self._aim, report.metrics, config.guard, config.lowest_staleness, config.max_staleness
        )
        if reason is not None:
            _log.info("step %d: aiming at staleness %d instead of %d: %s", self.step, self._aim.staleness, before, reason)

    def _update(self, groups: Sequence[Group], beliefs: Beliefs) -> StepReport:
        """The optimizer's part: whole groups dealt to the updates of this step in order."""
        learner = self._config.learner
        rows = make_rows(groups, beliefs.advantages, learner.row_tokens, beliefs.targets)
        updates = deal(rows, learner.updates_per_step)
        if not updates:
            return StepReport.of_nothing()
        report = self._backend.step(updates * learner.epochs, self.step)
        self._refused_in_a_row = 0 if report.applied else self._refused_in_a_row + 1
        if not report.applied:
            _log.error("step %d refused: its gradient is not finite; groups %s", self.step, [g.number for g in groups])
        if self._refused_in_a_row >= learner.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self._refused_in_a_row} steps in a row had a gradient that is not finite, the last with groups "
                f"{[group.number for group in groups]}. Lower learner.learning_rate, or look at rollouts.jsonl."
            )
        return report

    def _certify(self, groups: Sequence[Group]) -> None:
        """The last net, right before the gradient: no token over the bound, whatever the queue believed."""
        ages = staleness_histogram(groups, self.step)
        if max(ages) > self._config.max_staleness:
            numbers = [g.number for g in groups if max(staleness_histogram([g], self.step)) > self._config.max_staleness]
            raise StalenessError(
                f"step {self.step} was given tokens of staleness {max(ages)}, the bound is {self._config.max_staleness} "
                f"(groups {numbers}); nothing was trained on them. This is a defect of the queue: please report it."
            )

    def _check_rewards(self, groups: Sequence[Group], failed_ratio: float) -> None:
        scores = [(name, score) for group in groups for r in group.rollouts for name, score in r.scores.items()]
        if failed_ratio > self._config.max_failed_ratio and len(scores) >= _MIN_SCORES:
            failed = [(name, score.failure) for name, score in scores if score.failure is not None]
            raise RewardError(
                f"{len(failed)} of {len(scores)} scores failed ({failed_ratio:.0%}); rewards.max_failed_ratio is "
                f"{self._config.max_failed_ratio:.0%}. First: reward {failed[0][0]!r}: {failed[0][1]}. "
                "The full traceback is in the actor's log."
            )

    def _sample(self, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], report: StepReport) -> None:
        start = 0
        for group, values in list(zip(groups, advantages, strict=True))[: self._config.sampled_groups]:
            members = range(start, start + len(values))
            start += len(values)
            weights = [report.weight_of_member.get(member) for member in members]
            self._samples.write(sample_record(group, self.step, values, weights))

    def _publish(self) -> None:
        began = time.monotonic()
        self._client.publish(self.step, self._backend.tensors(), self._backend.canary())
        self._published = self.step
        self._broadcast_s = time.monotonic() - began

    def _save(self) -> None:
        """Begin a checkpoint of the present step; training goes on while it is written."""
        began = time.monotonic()
        rewards = copy.deepcopy(self._statistics.state)
        state = {"version": self.step, "max_steps": self._config.max_steps, "rewards": rewards}
        self._saver.wait()
        self._commit()
        self._saver.begin(self.step, self._backend.freeze(), state)
        self._paused_s = time.monotonic() - began
        self._commit()

    def _commit(self) -> None:
        """Tell the hub of a checkpoint that has become durable since."""
        durable = self._saver.durable
        if durable is not None and durable > self._committed:
            self._committed = durable
            self._tell(lambda: self._client.commit(durable))

    def _end_saving(self) -> None:
        """The last step is durable and committed. Raises CheckpointError when it cannot be written."""
        self._saver.wait()
        self._commit()
        if self.step > self._committed:
            self._save()
            self._saver.wait()
            self._commit()
        if self.step > self._committed:
            raise CheckpointError(f"{self._saver.reason}; make room, then --resume goes on from step {self._committed}")

    def _register(self) -> None:
        """Says where this learner stands, and so everything that `trained` and `commit` would have said."""
        self._client.register(self.step, self._committed)
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
