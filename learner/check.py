"""Combinations of settings without meaning, and settings of the machine that cannot work together. No torch.

Both are refused before any process starts. Each refusal names the setting, the reason, and the nearest choice that works.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.config import AdvantageConfig, GuardConfig, LearnerConfig, LossConfig
from async_rlhf.learner.registry import advantage_settings, advantage_spec, advantages, loss_spec


@dataclass(frozen=True)
class RunContext:
    """The rest of the configuration, as far as it is about the data.

    truncated: the setting that cuts off sampling, or None. support_recorded: whether the engine then records what was left.
    normalised: the rewards that are measured by the learner's running statistics. compressed: the setting with which an engine
    samples from another distribution than the model's, or None.
    """

    group_size: int
    max_staleness: int
    lowest_staleness: int
    exact: bool
    truncated: str | None
    support_recorded: bool = True
    normalised: tuple[str, ...] = ()
    compressed: str | None = None


def check(learner: LearnerConfig, advantage: AdvantageConfig, loss: LossConfig, guard: GuardConfig, data: RunContext) -> None:
    """Raises ConfigError."""
    _check_estimator(advantage)
    _check_critic(learner, advantage)
    _check_token_advantages(advantage, loss)
    _check_mask_truncated(advantage, loss)
    _check_groups(advantage, loss, data)
    _check_refill(advantage, data)
    _check_corrections(loss)
    _check_reduction(loss)
    _check_asynchrony(advantage, loss, data)
    _check_sampling_mask(loss, data)
    _check_guard(guard, data)


def _check_estimator(advantage: AdvantageConfig) -> None:
    known = sorted(set(AdvantageConfig.model_fields) - {"kind"})
    if unknown := [name for name in advantage_settings(advantage.kind) if name not in known]:
        raise ConfigError(
            f"advantage.kind = {advantage.kind!r} asks for {unknown[0]!r} by keyword, which is no setting of [advantage]: "
            f"{', '.join(known)}. Write a number of your own as a constant of the file."
        )


def _check_critic(learner: LearnerConfig, advantage: AdvantageConfig) -> None:
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
    if advantage.c_cap > advantage.rho_cap:
        raise ConfigError(
            f"advantage.c_cap = {advantage.c_cap:g} is above advantage.rho_cap = {advantage.rho_cap:g}: a trace would be "
            f"longer than the step it carries. Highest: {advantage.rho_cap:g}."
        )


def _check_token_advantages(advantage: AdvantageConfig, loss: LossConfig) -> None:
    kind = loss_spec(loss.kind)
    if advantage.level == "turn":
        _check_turns(advantage, loss)
    of_tokens = advantage.needs_critic or advantage_spec(advantage.kind).level == "token_rewards"
    # REINFORCE++ without discount and divergence has one return for all tokens of a completion
    even = advantage.kind in advantages() and not advantage.needs_critic and advantage.gamma == 1 and not loss.kl_in_reward
    if of_tokens and not even and (kind.level != "token" or kind.corrects == "nothing"):
        raise ConfigError(
            f"loss.kind = {loss.kind!r} has one advantage for a completion, advantage.kind = {advantage.kind!r} one for each "
            "token. Set loss.kind = 'decoupled_ppo', or advantage.kind = 'leave_one_out'."
        )


def _check_turns(advantage: AdvantageConfig, loss: LossConfig) -> None:
    if advantage_spec(advantage.kind).level != "group":
        raise ConfigError(
            f"advantage.level = 'turn' with advantage.kind = {advantage.kind!r}: turns are compared within a group. "
            "Set advantage.kind = 'leave_one_out', or advantage.level = 'completion'."
        )
    if advantage.constant_groups != "keep":
        raise ConfigError(
            f"advantage.level = 'turn' with advantage.constant_groups = {advantage.constant_groups!r}: turns can differ where "
            "rewards are equal. Set advantage.constant_groups = 'keep'."
        )
    if loss_spec(loss.kind).level != "token" or loss_spec(loss.kind).learns_from != "all":
        raise ConfigError(
            f"advantage.level = 'turn' with loss.kind = {loss.kind!r}, which has one advantage for a completion. "
            "Set loss.kind = 'decoupled_ppo', or advantage.level = 'completion'."
        )


def _check_mask_truncated(advantage: AdvantageConfig, loss: LossConfig) -> None:
    if loss.mask_truncated != "loss and baseline":
        return
    if advantage.needs_critic or loss_spec(loss.kind).learns_from != "all":
        of = f"advantage.kind = {advantage.kind!r}" if advantage.needs_critic else f"loss.kind = {loss.kind!r}"
        raise ConfigError(
            f"loss.mask_truncated = 'loss and baseline', and with {of} no baseline is made from rewards. "
            "Set loss.mask_truncated = 'loss'."
        )


def _check_groups(advantage: AdvantageConfig, loss: LossConfig, data: RunContext) -> None:
    if data.group_size > 1:
        return
    if loss_spec(loss.kind).learns_from != "all":
        raise ConfigError(
            f"loss.kind = {loss.kind!r} compares completions of one prompt, and generation.group_size is 1. "
            "Lowest: generation.group_size = 2."
        )
    if advantage_spec(advantage.kind).level == "group":
        raise ConfigError(
            f"advantage.kind = {advantage.kind!r} compares completions of one prompt, and generation.group_size is 1, so every "
            "advantage would be 0. Set generation.group_size = 2 or more, or advantage.kind = 'reinforce_pp'."
        )
    if advantage.constant_groups != "keep":
        raise ConfigError(
            f"advantage.constant_groups = {advantage.constant_groups!r} with generation.group_size = 1 leaves nothing: a "
            "single completion is always equal to itself. Set advantage.constant_groups = 'keep'."
        )


def _check_refill(advantage: AdvantageConfig, data: RunContext) -> None:
    """That it is not together with `queue.exact` is checked with the bound."""
    if advantage.constant_groups == "refill" and data.normalised:
        raise ConfigError(
            f"advantage.constant_groups = 'refill' with rewards.normalise = {list(data.normalised)}: actors find which groups "
            "are constant, and only the learner has the running statistics. Set advantage.constant_groups = 'drop', or "
            "rewards.normalise = []."
        )


def _check_corrections(loss: LossConfig) -> None:
    kind = loss_spec(loss.kind)
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
    kind = loss_spec(loss.kind)
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


def _check_asynchrony(advantage: AdvantageConfig, loss: LossConfig, data: RunContext) -> None:
    if (data.max_staleness == 0 and data.compressed is None) or loss.allow_uncorrected:
        return
    asked = data.compressed or f"queue.max_staleness = {data.max_staleness}"
    others = "what another distribution sampled" if data.compressed else "data of other weights"
    weighed = loss_spec(loss.kind).corrects == "weights and masks" or loss_spec(loss.kind).truncates
    if weighed and loss.is_cap is None:
        raise ConfigError(
            f"{asked} without an importance weight trains on {others} as if it were its own. Set loss.is_cap = 2.0, or "
            "loss.allow_uncorrected = true to do it on purpose."
        )
    if not advantage_spec(advantage.kind).off_policy:
        raise ConfigError(
            f"{asked} with advantage.kind = {advantage.kind!r} fits the critic to the policies "
            "that sampled, not to the one that learns. Set advantage.kind = 'traced' (the same on fresh data), or "
            "loss.allow_uncorrected = true to do it on purpose."
        )


def _check_sampling_mask(loss: LossConfig, data: RunContext) -> None:
    if data.truncated is None or data.support_recorded or not loss_spec(loss.kind).takes_ratios or loss.allow_uncorrected:
        return
    raise ConfigError(
        f"{data.truncated} cuts off what is sampled, and vLLM does not report what is left unless top_k is set too: "
        f"loss.kind = {loss.kind!r} takes ratios, which would not be 1 for an unchanged policy. Set generation.top_k as well "
        "(64 is rarely felt beside top_p), engine.kind = 'torch', on a GPU engine.vllm.arguments.return_sampling_mask = true, "
        "or a loss without ratios: loss.kind = 'online_dpo' or 'best_of_n'."
    )


def _check_guard(guard: GuardConfig, data: RunContext) -> None:
    if guard.target is not None and not data.lowest_staleness <= guard.target <= data.max_staleness:
        raise ConfigError(
            f"guard.target = {guard.target} is not between {data.lowest_staleness}, the lowest that can run, and "
            f"queue.max_staleness = {data.max_staleness}, the bound; nearest: "
            f"{min(max(guard.target, data.lowest_staleness), data.max_staleness)}"
        )
    if guard.target is not None and data.exact:
        raise ConfigError(
            f"guard.target = {guard.target} aims at a staleness, and queue.exact = true fixes it. Set guard.target = 'none', "
            "or queue.exact = false."
        )
    if not guard.enabled:
        return
    if data.exact:
        raise ConfigError(
            "guard.enabled = true moves the target staleness, and queue.exact = true fixes it. Set one of them to false."
        )
    if guard.target == data.lowest_staleness:
        raise ConfigError(
            f"guard.enabled = true has no room below guard.target = {guard.target}, which is the lowest that can run. Set "
            f"guard.target = {data.lowest_staleness + 1} or more, or guard.enabled = false."
        )
    if data.max_staleness <= data.lowest_staleness:
        raise ConfigError(
            f"guard.enabled = true has no room below queue.max_staleness = {data.max_staleness}, which is the lowest that "
            f"can run. Set queue.max_staleness = {data.lowest_staleness + 1} or more, or guard.enabled = false."
        )


def check_machine(config: LearnerConfig, groups_per_batch: int, max_steps: int | None) -> None:
    """`groups_per_batch`: prompts of one step; `max_steps`: steps of the run, None for one without end. Raises ConfigError."""
    _check_ranks(config, groups_per_batch)
    _check_schedule(config, max_steps)
    _check_deepspeed(config)
    if config.lora.publish == "adapter" and not config.lora.rank:
        raise ConfigError(
            'learner.lora.publish = "adapter" and learner.lora.rank = 0: there is no adapter. Set learner.lora.rank = 8, '
            "or leave learner.lora.publish out."
        )


def remarks(config: LearnerConfig) -> tuple[str, ...]:
    """What stops nothing and a person should know."""
    if config.device.partition(":")[0] != "cuda" or config.dtype != "float32":
        return ()
    return (
        f"learner.dtype = 'float32' on learner.device = {config.device!r}: products take several times as long as in bfloat16, "
        "and there is no flash attention. Set learner.dtype = 'bfloat16'; weights and optimizer stay float32.",
    )


def check_division(config: LearnerConfig, size_of: Callable[[str], int | None]) -> None:
    """What ranks share must divide by them. `size_of`: a number in the model's configuration, None where it has no such.

    Raises ConfigError.
    """
    heads = ("num_attention_heads", "num_key_value_heads")
    shared = {"sequence_parallel": heads, "tensor_parallel": (*heads, "intermediate_size")}
    for setting, names in shared.items():
        ranks = int(getattr(config, setting))
        sizes = {name: size for name in names if (size := size_of(name)) is not None}
        if ranks > 1 and math.gcd(*sizes.values()) % ranks:
            most = math.gcd(*sizes.values())
            model = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            choice = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
            raise ConfigError(f"learner.{setting} = {ranks} does not divide all of the model's {model}; choose {choice}")


def _check_ranks(config: LearnerConfig, groups_per_batch: int) -> None:
    if config.ranks_per_row > 1:
        _check_shared_rows(config)
    groups = groups_per_batch // config.updates_per_step
    if groups < config.ranks // config.ranks_per_row:
        raise ConfigError(
            f"learner.ranks = {config.ranks} cannot share an update of {groups} groups: a group stays on one rank. "
            f"Highest: learner.ranks = {max(1, groups)}, or make learner.batch_size larger."
        )
    if config.ranks > 1 and ":" in config.device:
        raise ConfigError(
            f"learner.device = {config.device!r} is one device for {config.ranks} ranks; "
            f"{config.device.partition(':')[0]!r} gives every rank its own."
        )


def _check_shared_rows(config: LearnerConfig) -> None:
    settings = ("sequence_parallel", "tensor_parallel")
    (setting, size), *more = ((name, int(getattr(config, name))) for name in settings if getattr(config, name) > 1)
    asked = f"learner.{setting} = {size}"
    if more:
        raise ConfigError(
            f"{asked} with learner.{more[0][0]} = {more[0][1]}: ranks share positions or layers; set one of them to 1"
        )
    if size != config.ranks:
        raise ConfigError(
            f"{asked} of learner.ranks = {config.ranks}: all ranks share a row, or none; set it to {config.ranks} or 1"
        )
    if config.backend != "deepspeed":
        raise ConfigError(
            f"{asked} with learner.backend = 'torch'; set learner.backend = 'deepspeed', or learner.{setting} = 1"
        )
    if config.critic.kind != "none":
        raise ConfigError(f"{asked} with a critic, which ranks do not share; set it to 1, or learner.critic.kind = 'none'")
    if config.tensor_parallel > 1 and config.lora.rank:
        raise ConfigError(f"{asked} with adapters, whose layers are not split; set it to 1, or learner.lora.rank = 0")


def _check_schedule(config: LearnerConfig, max_steps: int | None) -> None:
    if config.schedule != "constant" and config.schedule_steps is None:
        if max_steps is None:
            raise ConfigError(
                f"learner.schedule = {config.schedule!r} needs an end, and a run without max_steps has none; set "
                "learner.schedule_steps, after which the learning rate stays, or learner.schedule = 'constant'"
            )
        raise ConfigError(
            f"learner.schedule = {config.schedule!r} needs learner.schedule_steps; over the whole run: {max_steps}"
        )
    if config.schedule_steps is not None and config.schedule_steps <= config.warmup_steps:
        raise ConfigError(
            f"learner.schedule_steps = {config.schedule_steps} ends within the warm-up of {config.warmup_steps} steps; "
            f"lowest: {config.warmup_steps + 1}"
        )
    if config.final_learning_rate > config.learning_rate:
        raise ConfigError(
            f"learner.final_learning_rate = {config.final_learning_rate:g} is above learner.learning_rate; "
            f"highest: {config.learning_rate:g}"
        )


def _check_deepspeed(config: LearnerConfig) -> None:
    if config.backend == "torch":
        if config.deepspeed_config is not None:
            raise ConfigError("learner.deepspeed_config is for learner.backend = 'deepspeed'; set that, or leave it out")
        return
    if config.compile:
        raise ConfigError(
            "learner.compile = true with learner.backend = 'deepspeed', which gathers and frees parameters between layers; "
            "set learner.compile = false, or learner.backend = 'torch'"
        )
    if config.deepspeed_config is not None and not Path(config.deepspeed_config).is_file():
        raise ConfigError(
            f"learner.deepspeed_config = {config.deepspeed_config!r} is no file; name a JSON file, or leave it out"
        )
