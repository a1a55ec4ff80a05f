"""Combinations of settings without meaning, refused before any process starts. No torch.

Each refusal says what was asked, why it cannot mean anything, and the nearest choice that does.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.config import AdvantageConfig, GuardConfig, LearnerConfig, LossConfig
from async_rlhf.learner.kinds import KINDS


@dataclass(frozen=True)
class Circumstances:
    """What the rest of the configuration says about the data.

    truncated: the setting that cuts off sampling, or None. support_recorded: whether the engine then says what was left.
    normalised: the rewards that are measured by the learner's running statistics.
    """

    group_size: int
    max_staleness: int
    lowest_staleness: int
    exact: bool
    truncated: str | None
    support_recorded: bool = True
    normalised: tuple[str, ...] = ()


def check(
    learner: LearnerConfig, advantage: AdvantageConfig, loss: LossConfig, guard: GuardConfig, data: Circumstances
) -> None:
    """Raises ConfigError."""
    _check_critic(learner, advantage, loss)
    _check_groups(advantage, loss, data)
    _check_refill(advantage, data)
    _check_corrections(loss)
    _check_reduction(loss)
    _check_asynchrony(advantage, loss, data)
    _check_sampling_mask(loss, data)
    _check_guard(guard, data)


def _check_critic(learner: LearnerConfig, advantage: AdvantageConfig, loss: LossConfig) -> None:
    kind = KINDS[loss.kind]
    if advantage.needs_critic and learner.critic.kind == "none":
        raise ConfigError(
            f"advantage.kind = {advantage.kind!r} needs a critic's values, and learner.critic.kind is 'none'. "
            "Set learner.critic.kind = 'head', or advantage.kind = 'group_relative'."
        )
    if not advantage.needs_critic and learner.critic.kind != "none":
        raise ConfigError(
            f"learner.critic.kind = {learner.critic.kind!r}, but advantage.kind = {advantage.kind!r} has no use for values. "
            "Set advantage.kind = 'gae', or learner.critic.kind = 'none'."
        )
    if advantage.needs_critic and (kind.level != "token" or kind.corrects == "nothing"):
        raise ConfigError(
            f"loss.kind = {loss.kind!r} has one advantage for a completion, advantage.kind = {advantage.kind!r} one for each "
            "token. Set loss.kind = 'decoupled_ppo', or advantage.kind = 'leave_one_out'."
        )
    if advantage.c_cap > advantage.rho_cap:
        raise ConfigError(
            f"advantage.c_cap = {advantage.c_cap:g} is above advantage.rho_cap = {advantage.rho_cap:g}: a trace would be "
            f"longer than the step it carries. Highest: {advantage.rho_cap:g}."
        )


def _check_groups(advantage: AdvantageConfig, loss: LossConfig, data: Circumstances) -> None:
    if data.group_size > 1:
        return
    if KINDS[loss.kind].learns_from != "all":
        raise ConfigError(
            f"loss.kind = {loss.kind!r} compares completions of one prompt, and generation.group_size is 1. "
            "Lowest: generation.group_size = 2."
        )
    if advantage.kind in {"group_relative", "leave_one_out"}:
        raise ConfigError(
            f"advantage.kind = {advantage.kind!r} compares completions of one prompt, and generation.group_size is 1, so every "
            "advantage would be 0. Set generation.group_size = 2 or more, or advantage.kind = 'reinforce_pp'."
        )
    if advantage.constant_groups != "keep":
        raise ConfigError(
            f"advantage.constant_groups = {advantage.constant_groups!r} with generation.group_size = 1 leaves nothing: a "
            "single completion is always equal to itself. Set advantage.constant_groups = 'keep'."
        )


def _check_refill(advantage: AdvantageConfig, data: Circumstances) -> None:
    """That it is not together with `queue.exact` is the bound's to say."""
    if advantage.constant_groups == "refill" and data.normalised:
        raise ConfigError(
            f"advantage.constant_groups = 'refill' with rewards.normalise = {list(data.normalised)}: actors say which groups "
            "are constant, and only the learner has the running statistics. Set advantage.constant_groups = 'drop', or "
            "rewards.normalise = []."
        )


def _check_corrections(loss: LossConfig) -> None:
    kind = KINDS[loss.kind]
    masks = {
        "token_mask": loss.token_mask,
        "sequence_mask": loss.sequence_mask,
        "second_moment": loss.second_moment,
        "off_policy_delta": loss.off_policy_delta,
    }
    asked = [name for name, value in masks.items() if value is not None]
    if kind.corrects == "nothing" and asked:
        raise ConfigError(
            f"loss.{asked[0]} has nothing to correct: in loss.kind = {loss.kind!r} it does not matter which policy sampled. "
            f"Set loss.{asked[0]} = 'none'."
        )
    for name in ("token_mask", "second_moment"):
        if kind.level == "sequence" and name in asked:
            raise ConfigError(
                f"loss.{name} masks single tokens, and a term of loss.kind = {loss.kind!r} is a whole completion. "
                "Set loss.sequence_mask, or loss.kind = 'decoupled_ppo'."
            )
    if loss.is_level == "sequence" and kind.corrects != "weights and masks":
        raise ConfigError(
            f"loss.is_level = 'sequence' is about a weight that loss.kind = {loss.kind!r} does not take: it has the "
            "ratio to the behaviour policy in itself. Set loss.is_level = 'token', or loss.kind = 'decoupled_ppo'."
        )
    for name in ("token_mask", "sequence_mask"):
        interval = masks[name]
        if isinstance(interval, tuple) and not 0 <= interval[0] < 1 < interval[1]:
            raise ConfigError(
                f"loss.{name} = {list(interval)} must have 1 inside, with 0 or more below and more than 1 above: it would mask "
                "what the policy itself samples. For example [0.5, 2.0]."
            )


def _check_reduction(loss: LossConfig) -> None:
    kind = KINDS[loss.kind]
    if kind.level != "token" and loss.reduction != "token":
        raise ConfigError(
            f"loss.reduction = {loss.reduction!r} is about losses of tokens, and a term of loss.kind = {loss.kind!r} is a "
            f"whole {'completion' if kind.level == 'sequence' else 'pair'}. Leave loss.reduction at 'token'."
        )
    if loss.reduction == "fixed" and loss.fixed_length is None:
        raise ConfigError("loss.reduction = 'fixed' needs loss.fixed_length; as a rule generation.max_completion_length.")
    if loss.kl_coef > 0 and loss.kl_in == "reward" and kind.corrects == "nothing":
        raise ConfigError(
            f"loss.kl_in = 'reward' changes advantages, and loss.kind = {loss.kind!r} only ranks completions. "
            "Set loss.kl_in = 'loss'."
        )


def _check_asynchrony(advantage: AdvantageConfig, loss: LossConfig, data: Circumstances) -> None:
    if data.max_staleness == 0 or loss.allow_uncorrected:
        return
    weighed = KINDS[loss.kind].corrects == "weights and masks" or loss.kind == "truncated_is"
    if weighed and loss.is_cap is None:
        raise ConfigError(
            f"queue.max_staleness = {data.max_staleness} without an importance weight trains on data of other "
            "weights as if it were its own. Set loss.is_cap = 2.0, or loss.allow_uncorrected = true to do it on purpose."
        )
    if advantage.kind == "gae":
        raise ConfigError(
            f"queue.max_staleness = {data.max_staleness} with advantage.kind = 'gae' fits the critic to the policies that "
            "sampled, not to the one that learns. Set advantage.kind = 'traced' (the same on fresh data), or "
            "loss.allow_uncorrected = true to do it on purpose."
        )


def _check_sampling_mask(loss: LossConfig, data: Circumstances) -> None:
    if data.truncated is None or data.support_recorded or not KINDS[loss.kind].takes_ratios or loss.allow_uncorrected:
        return
    raise ConfigError(
        f"{data.truncated} cuts off what is sampled, and vLLM does not say what is left unless top_k is set too: "
        f"loss.kind = {loss.kind!r} takes ratios, which would not be 1 for an unchanged policy. Set generation.top_k as well "
        "(64 is rarely felt beside top_p), engine.kind = 'torch', on a GPU engine.vllm.arguments.return_sampling_mask = true, "
        "or a loss without ratios: loss.kind = 'online_dpo' or 'best_of_n'."
    )


def _check_guard(guard: GuardConfig, data: Circumstances) -> None:
    if not guard.enabled:
        return
    if data.exact:
        raise ConfigError(
            "guard.enabled = true moves the staleness aimed at, and queue.exact = true fixes it. Set one of them to false."
        )
    if data.max_staleness <= data.lowest_staleness:
        raise ConfigError(
            f"guard.enabled = true has no room below queue.max_staleness = {data.max_staleness}, which is the lowest that "
            f"can run. Set queue.max_staleness = {data.lowest_staleness + 1} or more, or guard.enabled = false."
        )
