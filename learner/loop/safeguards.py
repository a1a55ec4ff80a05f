"""What protects a run from its own data: the bound on staleness, failed scores, batches with nothing to learn, steps that are
not finite, engines that sample from another policy, a policy beyond the limits that are set for it; and the adaptive guard,
which lowers the target staleness while data look too old.

The hard bound never moves and never depends on the guard; its target only sets how much of the bound is used. Several signals,
because an effective sample size near 1 alone certifies nothing. Down after `patience` bad steps in a row, up after `recovery`
good ones; good is better than the limit by `margin`, so that between the two the target stays where it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from async_rlhf.buffers.errors import DivergedError, MismatchError, NonFiniteError, RewardError, StalenessError
from async_rlhf.buffers.record import Group
from async_rlhf.learner.config import GuardConfig
from async_rlhf.learner.loop.metrics import staleness_histogram
from async_rlhf.learner.loop.settings import TrainerConfig
from async_rlhf.learner.step.report import StepReport

# Beside `guard.min_ess`: the corrections still work on what is so far off, but most of a batch teaches nothing.
_MAX_SECOND_MOMENT, _MAX_CLIP_RATIO = 0.1, 0.3
_MAX_NONFINITE_STEPS = 3  # refused in a row: one may be a batch's, three are the model's

_log = logging.getLogger(__name__)
# Too few scores are no measure of a ratio; a batch of the smallest sensible size already passes this.
_MIN_SCORES = 8
# Of fewer tokens a mean is noise.
_MIN_TOKENS = 64


class Safeguards:
    """Ends a run that would go on in vain. Counts what may happen a few times in a row."""

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self._constant_in_a_row = self._unscored_in_a_row = self._refused_in_a_row = self._diverged_in_a_row = 0

    def certify(self, groups: Sequence[Group], step: int) -> None:
        """The last net, right before the gradient: no token over the bound. Raises StalenessError."""
        limit = self.config.max_staleness
        ages = staleness_histogram(groups, step)
        if max(ages, default=0) > limit:
            numbers = [g.number for g in groups if max(staleness_histogram([g], step)) > limit]
            raise StalenessError(
                f"step {step} was given tokens of staleness {max(ages)}, the bound is {limit} "
                f"(groups {numbers}); nothing was trained on them. This is a defect of the queue: please report it."
            )

    def check_scores(self, groups: Sequence[Group], failed_ratio: float) -> None:
        """Raises RewardError when too many scores failed."""
        scores = [(g.number, name, score) for g in groups for r in g.rollouts for name, score in r.scores.items()]
        if failed_ratio > self.config.max_failed_ratio and len(scores) >= _MIN_SCORES:
            failed = [each for each in scores if each[2].failure is not None]
            number, name, score = failed[0]
            raise RewardError(
                f"{len(failed)} of {len(scores)} scores failed ({failed_ratio:.0%}); rewards.max_failed_ratio is "
                f"{self.config.max_failed_ratio:.0%}. First: reward {name!r} of group {number}: {score.failure}. "
                "The full traceback is in the run directory: logs/actor-*.log, or logs/scorer.log for a stage that runs there."
            )

    def count_unscored(self, groups: Sequence[Group]) -> None:
        """Raises RewardError after too many batches in a row in which every reward returned None for every completion. Failed
        scores have a limit of their own."""
        scores = [(name, score) for group in groups for r in group.rollouts for name, score in r.scores.items()]
        if not scores:
            return
        unscored = all(score.state == "not_applicable" for _, score in scores)
        self._unscored_in_a_row = self._unscored_in_a_row + 1 if unscored else 0
        most, max_steps = self.config.advantage.max_constant_batches, self.config.budget.max_steps
        if self._unscored_in_a_row >= (most if max_steps is None else min(most, max_steps)):  # a short run ends badly too
            raise RewardError(
                f"{self._unscored_in_a_row} batches in a row had no score: {', '.join(sorted({name for name, _ in scores}))} "
                "returned None ('not applicable') for every completion, so there is nothing to learn from. Is a `return` "
                "missing? `async-rlhf try reward` shows what a reward gives."
            )

    def count_constant(self, groups: Sequence[Group], masked: int, *, constant: bool) -> None:
        """Raises RewardError after too many batches in a row in which no completion is better than another, of those that were
        not masked because they were cut."""
        self._constant_in_a_row = self._constant_in_a_row + 1 if constant else 0
        if self._constant_in_a_row >= self.config.advantage.max_constant_batches:
            rollouts = sum(len(group.rollouts) for group in groups)
            cut = f"; {masked} of its {rollouts} completions were cut and masked (loss.mask_truncated)" if masked else ""
            way_out = "raise generation.max_completion_length (of episodes max_episode_length), or " if masked else ""
            raise RewardError(
                f"{self._constant_in_a_row} batches in a row had no group in which one completion is better than another, so "
                f"there is nothing to learn from; the last had the groups {[group.number for group in groups]}{cut}. "
                f"{way_out}Look at the rewards in rollouts.jsonl: the prompts are all too easy or all too hard, or the reward "
                "is constant."
            )

    def count_refused(self, groups: Sequence[Group], report: StepReport, step: int) -> None:
        """Raises NonFiniteError after too many refused steps in a row."""
        self._refused_in_a_row = 0 if report.applied else self._refused_in_a_row + 1
        if not report.applied:
            _log.error("step %d refused: its gradient is not finite; groups %s", step, [g.number for g in groups])
        if self._refused_in_a_row >= _MAX_NONFINITE_STEPS:
            raise NonFiniteError(
                f"{self._refused_in_a_row} steps in a row had a gradient that is not finite, the last with groups "
                f"{[group.number for group in groups]}. Lower learner.learning_rate, or look at rollouts.jsonl."
            )

    def check_mismatch(self, report: StepReport) -> None:
        """Engine and learner must be one policy under one set of weights. Raises MismatchError."""
        mismatch, limit = report.metrics["mismatch/abs_log_ratio"], self.config.mismatch_limit
        if report.applied and (report.metrics["mismatch/tokens"] or 0) >= _MIN_TOKENS and not mismatch <= limit:
            raise MismatchError(
                f"log-probabilities of learner and engine differ by {mismatch:.3g} nats on average over tokens sampled from "
                f"the same weights; the limit is {limit:g}. One of them computes this model wrong, or another "
                "one. Compare with engine.kind = 'torch' and float32 on both sides, or raise engine.mismatch_limit to go on"
            )

    def count_diverged(self, metrics: Mapping[str, Any], step: int) -> None:
        """Raises DivergedError after too many steps in a row beyond one of the guard's limits."""
        found, guard = beyond(metrics, self.config.guard), self.config.guard
        self._diverged_in_a_row = self._diverged_in_a_row + 1 if found else 0
        if self._diverged_in_a_row >= guard.max_diverged_steps:
            raise DivergedError(
                f"the policy was beyond a limit for {self._diverged_in_a_row} steps in a row (guard.max_diverged_steps); "
                f"step {step} had {', '.join(found)}. Change values or the limit with async-rlhf set, and go back with "
                "--resume --from-step"
            )


def beyond(metrics: Mapping[str, Any], guard: GuardConfig) -> list[str]:
    """The limits of the guard that a step with these metrics is beyond. What a step does not measure is within."""
    divergence = "kl/reference" if metrics.get("kl/reference") is not None else "kl/behaviour"
    # each as (metric, limit, its setting, sign): with sign +1 a value above the limit is beyond it, with -1 one below
    limits = [
        (divergence, guard.max_kl, "max_kl", 1),
        ("entropy", guard.min_entropy, "min_entropy", -1),
        ("reward", guard.min_reward, "min_reward", -1),
    ]
    return [
        f"{name} {value:.4g} {'above' if sign > 0 else 'below'} guard.{setting} = {limit:g}"
        for name, limit, setting, sign in limits
        if limit is not None and (value := metrics.get(name)) is not None and not sign * (value - limit) <= 0
    ]


def _judge(metrics: Mapping[str, Any], config: GuardConfig) -> tuple[list[str], bool, bool]:
    """What is over its limit, whether anything is known, whether all that is known is better than its limit by the margin."""
    clipped = [metrics.get(name) for name in ("clip_ratio/region_mean", "is/masked_ratio")]
    known_clips = [value for value in clipped if value is not None]
    # each as (what, value, limit, sign): with sign +1 a value above the limit is bad, with -1 one below
    signals = [
        ("is/ess", metrics.get("is/ess"), config.min_ess, -1),
        ("is/second_moment", metrics.get("is/second_moment"), _MAX_SECOND_MOMENT, 1),
        ("clipped or masked", sum(known_clips) if known_clips else None, _MAX_CLIP_RATIO, 1),
    ]
    known = [(name, value, limit, sign) for name, value, limit, sign in signals if value is not None]
    bad = [
        f"{name} {value:.3g} {'above' if sign > 0 else 'below'} {limit:g}"
        for name, value, limit, sign in known
        if sign * (value - limit) > 0
    ]
    clearly_good = all(sign * (value - limit) <= -config.margin * limit for _, value, limit, sign in known)
    return bad, bool(known), clearly_good


class StalenessController:
    """The target staleness of the next take, moved by what each step measured. lowest: at which the run still goes on. bound:
    the hard one."""

    def __init__(self, config: GuardConfig, lowest: int, bound: int) -> None:
        self.config, self.lowest, self.bound = config, lowest, bound
        self._aim_at(self.highest)

    def _aim_at(self, staleness: int) -> None:
        self.target, self._bad, self._good = staleness, 0, 0

    @property
    def highest(self) -> int:
        return self.bound if self.config.target is None else self.config.target

    @property
    def target_staleness(self) -> int | None:
        """What the hub is given: None where nothing aims below the bound."""
        return self.target if self.config.enabled or self.config.target is not None else None

    def follow(self, config: GuardConfig) -> None:
        """Other settings, from the next take on; another `guard.target` is aimed at at once."""
        before, self.config = self.highest, config
        if self.highest != before:
            self._aim_at(self.highest)

    def adjust(self, metrics: Mapping[str, Any], step: int) -> None:
        """After a step with these metrics. One that is missing or None does not count; a step of which nothing is known changes
        nothing."""
        bad, known, clearly_good = _judge(metrics, self.config)
        if not (self.config.enabled and known):
            return
        before, reason = self.target, ""
        self._bad, self._good = (self._bad + 1, 0) if bad else (0, self._good + 1 if clearly_good else 0)
        if self._bad >= self.config.patience and self.target > self.lowest:
            self._aim_at(self.target - 1)
            reason = f"{self.config.patience} steps in a row: {', '.join(bad)}"
        elif self._good >= self.config.recovery and self.target < self.highest:
            self._aim_at(self.target + 1)
            reason = f"{self.config.recovery} steps in a row well within all limits"
        if reason:
            _log.info("step %d: aiming at staleness %d instead of %d: %s", step, self.target, before, reason)
