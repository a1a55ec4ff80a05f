"""Checks that protect a run from its own data: the bound on staleness, failed scores, batches with nothing to learn, steps
that are not finite, engines that sample from another policy, a policy beyond its limits; and the adaptive guard, which
lowers the target staleness while data look too old.

The hard bound never moves and never depends on the guard; its target only sets how much of the bound is used. Several signals,
because an effective sample size near 1 alone certifies nothing. Down after `PATIENCE` bad steps in a row, up after `RECOVERY`
good ones; good is better than the limit by `_MARGIN`, so that between the two the target stays where it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from async_rlhf.buffers.errors import DivergedError, MismatchError, NonFiniteError, RewardError, StalenessError
from async_rlhf.buffers.record import Group
from async_rlhf.learner.config import GuardConfig
from async_rlhf.learner.loop.metrics import staleness_histogram
from async_rlhf.learner.registry import loss_spec
from async_rlhf.learner.step.report import StepReport

if TYPE_CHECKING:
    from async_rlhf.learner.loop.trainer import TrainerConfig

# The corrections still work beyond it, but most of a batch teaches nothing.
MIN_ESS, _MAX_SECOND_MOMENT, _MAX_CLIP_RATIO = 0.5, 0.1, 0.3
# One bad step is noise; and a target that was lowered for a reason is raised with more care.
PATIENCE, RECOVERY, _MARGIN = 3, 10, 0.2
# Refused, or beyond a limit, in a row: one may be a batch's, three are the model's.
_MAX_BAD_STEPS = 3
# A ratio needs this many scores to be measured; the smallest sensible batch has them.
_MIN_SCORES = 8
# Of fewer tokens a mean is noise.
_MIN_TOKENS = 64

_log = logging.getLogger(__name__)


class Safeguards:
    """Ends a run that would go on in vain. Counts events that may happen a few times in a row."""

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self._in_a_row: dict[str, int] = {}

    def _count(self, what: str, happened: bool) -> int:
        """Count an event; returns how many times in a row it has happened."""
        self._in_a_row[what] = self._in_a_row.get(what, 0) + 1 if happened else 0
        return self._in_a_row[what]

    def certify(self, groups: Sequence[Group], step: int) -> None:
        """The last net, right before the gradient: no token over the bound. Raises StalenessError."""
        limit = self.config.max_staleness
        oldest = {group.number: max(staleness_histogram([group], step)) for group in groups}
        if max(oldest.values(), default=0) > limit:
            raise StalenessError(
                f"step {step} was given tokens of staleness {max(oldest.values())}, the bound is {limit} "
                f"(groups {[number for number, age in oldest.items() if age > limit]}); nothing was trained on them. This is a "
                "defect of the queue: please report it."
            )

    def check_scores(self, groups: Sequence[Group], failed_ratio: float) -> None:
        """Raises RewardError when too many scores failed, and after too many batches in a row in which every reward returned
        None for every completion."""
        scores = [(g.number, name, score) for g in groups for r in g.rollouts for name, score in r.scores.items()]
        failed = [each for each in scores if each[2].failure is not None]
        if failed_ratio > self.config.max_failed_ratio and len(scores) >= _MIN_SCORES:
            number, name, score = failed[0]
            raise RewardError(
                f"{len(failed)} of {len(scores)} scores failed ({failed_ratio:.0%}); rewards.max_failed_ratio is "
                f"{self.config.max_failed_ratio:.0%}. First: reward {name!r} of group {number}: {score.failure}. "
                "The full traceback is in the run directory: logs/actor-*.log, or logs/scorer.log for a stage that runs there."
            )
        if not scores or loss_spec(self.config.loss.kind).learns_from == "teacher":
            return
        unscored = self._count("unscored", all(score.state == "not_applicable" for *_, score in scores))
        most, max_steps = self.config.advantage.max_constant_batches, self.config.budget.max_steps
        if unscored >= (most if max_steps is None else min(most, max_steps)):  # a short run ends badly too
            raise RewardError(
                f"{unscored} batches in a row had no score: {', '.join(sorted({name for _, name, _ in scores}))} returned None "
                "for every completion. Is a `return` missing? `async-rlhf try reward` shows what a reward gives."
            )

    def count_constant(self, groups: Sequence[Group], masked: int, *, constant: bool) -> None:
        """Raises RewardError after too many batches in a row in which no completion is better than another, of those that were
        not masked because they were cut."""
        if (batches := self._count("constant", constant)) >= self.config.advantage.max_constant_batches:
            rollouts = sum(len(group.rollouts) for group in groups)
            cut = f"; {masked} of its {rollouts} completions were cut and masked (loss.mask_truncated)" if masked else ""
            way_out = "raise generation.max_completion_length (of episodes max_episode_length), or " if masked else ""
            raise RewardError(
                f"{batches} batches in a row had no group in which one completion is better than another, so there is nothing "
                f"to learn from; the last had the groups {[group.number for group in groups]}{cut}. {way_out}Look at the "
                "rewards in rollouts.jsonl: the prompts are all too easy or all too hard, or the reward is constant."
            )

    def count_refused(self, groups: Sequence[Group], report: StepReport, step: int) -> None:
        """Raises NonFiniteError after too many refused steps in a row."""
        numbers = [group.number for group in groups]
        if not report.applied:
            _log.error("step %d refused: its gradient is not finite; groups %s", step, numbers)
        if (steps := self._count("refused", not report.applied)) >= _MAX_BAD_STEPS:
            raise NonFiniteError(
                f"{steps} steps in a row had a gradient that is not finite, the last with groups {numbers}. Lower "
                "learner.learning_rate, or look at rollouts.jsonl."
            )

    def check_mismatch(self, report: StepReport) -> None:
        """Engine and learner must be one policy under one set of weights. Raises MismatchError."""
        mismatch, limit = report.metrics["mismatch/abs_log_ratio"], self.config.mismatch_limit
        if report.applied and (report.metrics["mismatch/tokens"] or 0) >= _MIN_TOKENS and not mismatch <= limit:
            raise MismatchError(
                f"log-probabilities of learner and engine differ by {mismatch:.3g} nats on average over tokens sampled from "
                f"the same weights; the limit is {limit:g}. One of them computes wrongly, or computes another model. "
                "Compare with engine.kind = 'torch' and float32 on both sides, or raise engine.mismatch_limit to go on"
            )

    def count_diverged(self, metrics: Mapping[str, Any], step: int) -> None:
        """Raises DivergedError after too many steps in a row beyond one of the guard's limits."""
        exceeded = beyond(metrics, self.config.guard)
        if (steps := self._count("diverged", bool(exceeded))) >= _MAX_BAD_STEPS:
            raise DivergedError(
                f"the policy was beyond a limit for {steps} steps in a row; step {step} had {', '.join(exceeded)}. "
                "Change values or the limit with async-rlhf set, and go back with --resume --from-step"
            )


class _Limit(NamedTuple):
    name: str
    value: float
    limit: float
    sign: int
    """With +1 a value above the limit is beyond it, with -1 one below."""
    setting: str = ""
    """The setting that the message names."""

    def excess(self) -> float:
        return self.sign * (self.value - self.limit)

    def text(self) -> str:
        return f"{self.name} {self.value:.4g} {'above' if self.sign > 0 else 'below'} {self.setting}{self.limit:g}"


def beyond(metrics: Mapping[str, Any], guard: GuardConfig) -> list[str]:
    """The limits of the guard that these metrics of a step exceed. Missing metrics exceed none."""
    divergence = "kl/reference" if metrics.get("kl/reference") is not None else "kl/behaviour"
    limits = [
        _Limit(name, metrics[name], limit, sign, f"guard.{setting} = ")
        for name, setting, sign in ((divergence, "max_kl", 1), ("entropy", "min_entropy", -1), ("reward", "min_reward", -1))
        if (limit := getattr(guard, setting)) is not None and metrics.get(name) is not None
    ]
    return [each.text() for each in limits if not each.excess() <= 0]


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
        """The target for the hub; None where nothing aims below the bound."""
        return self.target if self.config.enabled or self.config.target is not None else None

    def follow(self, config: GuardConfig) -> None:
        """Other settings, from the next take on; another `guard.target` is aimed at at once."""
        before, self.config = self.highest, config
        if self.highest != before:
            self._aim_at(self.highest)

    def adjust(self, metrics: Mapping[str, Any], step: int) -> None:
        """Move the target after a step with these metrics. Missing metrics and None do not count; a step without any changes
        nothing."""
        clips = [metrics.get(name) for name in ("clip_ratio/region_mean", "is/masked_ratio")]
        measured = {
            "is/ess": (metrics.get("is/ess"), MIN_ESS, -1),
            "is/second_moment": (metrics.get("is/second_moment"), _MAX_SECOND_MOMENT, 1),
            "clipped or masked": (None if clips == [None, None] else sum(clip or 0.0 for clip in clips), _MAX_CLIP_RATIO, 1),
        }
        known = [_Limit(name, value, limit, sign) for name, (value, limit, sign) in measured.items() if value is not None]
        if not (self.config.enabled and known):
            return
        bad = [each.text() for each in known if not each.excess() <= 0]
        clearly_good = all(each.excess() <= -_MARGIN * each.limit for each in known)
        before, reason = self.target, ""
        self._bad, self._good = (self._bad + 1, 0) if bad else (0, self._good + 1 if clearly_good else 0)
        if self._bad >= PATIENCE and self.target > self.lowest:
            self._aim_at(self.target - 1)
            reason = f"{PATIENCE} steps in a row: {', '.join(bad)}"
        elif self._good >= RECOVERY and self.target < self.highest:
            self._aim_at(self.target + 1)
            reason = f"{RECOVERY} steps in a row well within all limits"
        if reason:
            _log.info("step %d: aiming at staleness %d instead of %d: %s", step, self.target, before, reason)
