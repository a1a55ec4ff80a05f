"""Rules about the settings of the learner: combinations without meaning, and machines that cannot work together. Each refusal
names the setting, the reason, and the nearest choice that works. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from async_rlhf.actors.engine_config import EngineConfig
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.config import AdvantageConfig, LearnerConfig, LossConfig
from async_rlhf.learner.registry import advantage_spec, advantages, loss_spec
from async_rlhf.run.config import Config
from async_rlhf.run.config_keys import check_parameters


def check(config: Config) -> None:
    """Raises ConfigError with all that is found."""
    learner, advantage, loss = config.learner, config.advantage, config.loss
    for section in (advantage, loss):
        check_parameters(section, type(config))
    machine = _shared_rows(learner), _ranks(learner, config.groups_per_batch), _schedule(learner, config.max_steps)
    meaning = _estimator(learner, advantage), _advantages_and_loss(advantage, loss), _groups(config), _corrections(loss)
    if found := [*chain(*machine, _backend(learner, config.engine), *meaning, _asynchrony(config), _guard(config))]:
        raise ConfigError("\n".join(found))


def _estimator(learner: LearnerConfig, advantage: AdvantageConfig) -> Iterator[str]:
    kind, critic = f"advantage.kind = {advantage.kind!r}", learner.critic.kind
    if advantage.needs_critic and critic == "none":
        yield f"{kind} needs a critic's values: set learner.critic.kind = 'head', or advantage.kind = 'group_relative'"
    if not advantage.needs_critic and critic != "none":
        yield f"learner.critic.kind = {critic!r}, and {kind} has no use for values: set learner.critic.kind = 'none'"
    if critic == "none" and (alone := learner.critic.warmup_steps):
        yield f"learner.critic.warmup_steps = {alone} and no critic: set learner.critic.kind, or leave it out"
    changed = learner.critic.model_dump(include={"updates", "freeze_attention"}, exclude_defaults=True)
    if changed and (critic != "model" or learner.backend != "torch"):
        yield (
            f"learner.critic.{min(changed)} is for a critic with a trunk of its own on plain torch: set learner.critic.kind = "
            "'model' and learner.backend = 'torch', or leave it out"
        )
    c_cap, rho_cap = (advantage.parameters.get(name, 1.0) for name in ("c_cap", "rho_cap"))
    if advantage.kind in advantages() and c_cap > rho_cap:
        yield (
            f"advantage.c_cap = {c_cap:g} is above advantage.rho_cap: a trace would be longer than the step it carries; "
            f"highest: {rho_cap:g}"
        )


def _advantages_and_loss(advantage: AdvantageConfig, loss: LossConfig) -> Iterator[str]:
    kind, spec = advantage_spec(advantage.kind), loss_spec(loss.kind)
    if spec.learns_from == "teacher":
        yield from _without_advantages(advantage, loss)
        return
    named, named_loss, turns = f"advantage.kind = {advantage.kind!r}", f"loss.kind = {loss.kind!r}", advantage.level == "turn"
    if turns and kind.level != "group":
        yield f"advantage.level = 'turn' compares turns within a group, {named} does not: set advantage.kind = 'leave_one_out'"
    if turns and advantage.constant_groups != "keep":
        yield "advantage.level = 'turn': turns can differ where rewards are equal; set advantage.constant_groups = 'keep'"
    # REINFORCE++ without discount and divergence has one return for all tokens of a completion
    even = advantage.kind in advantages() and not advantage.needs_critic and advantage.gamma == 1 and not loss.kl_in_reward
    of_tokens = turns or advantage.needs_energy or (kind.level == "tokens" and not even)
    if of_tokens and (spec.level != "token" or spec.learns_from != "all"):
        several = "advantage.level = 'turn'" if turns else named
        yield f"{named_loss} has one advantage for a completion, {several} has several: set loss.kind = 'decoupled_ppo'"
    if advantage.needs_energy and loss.kl_in_reward:
        yield f"loss.kl_in = 'reward' gives each token a reward, and {named} compares completions: set loss.kl_in = 'loss'"
    if advantage.kind == "max_rl" and loss.kl_in_reward:
        yield f"loss.kl_in = 'reward' takes rewards below 0, and {named} divides by their mean: set loss.kl_in = 'loss'"
    if loss.kind == "oapl" and advantage.kind in advantages() and advantage.kind != "oapl":
        yield f"{named_loss} fits log-ratios to r - V, and {named} gives another number: set advantage.kind = 'oapl'"


def _without_advantages(advantage: AdvantageConfig, loss: LossConfig) -> Iterator[str]:
    for name in advantage.model_dump(exclude_defaults=True, exclude={"max_constant_batches"}):
        yield f"advantage.{name} is set, and loss.kind = {loss.kind!r} learns from a teacher and not from rewards: leave it out"
    if loss.off_policy_delta is not None:
        yield f"loss.off_policy_delta masks where an advantage is below 0, and {loss.kind!r} has none; set it to 'none'"
    if loss.kl_in_reward:
        yield f"loss.kl_in = 'reward': rewards do not count in loss.kind = {loss.kind!r}; set loss.kl_in = 'loss'"


def _groups(config: Config) -> Iterator[str]:
    advantage, loss, size, alone = config.advantage, config.loss, config.generation.group_size, "generation.group_size = 1"
    learns_from = loss_spec(loss.kind).learns_from
    if learns_from == "teacher":
        return
    if size == 1 and learns_from != "all":
        yield f"loss.kind = {loss.kind!r} compares completions of one prompt, and {alone}; lowest: 2"
    if size == 1 and advantage_spec(advantage.kind).level in ("group", "group_tokens"):
        yield (
            f"advantage.kind = {advantage.kind!r} compares completions of one prompt: with {alone} every advantage would be 0. "
            "Set generation.group_size = 2 or more, or advantage.kind = 'reinforce_pp'"
        )
    if size == 1 and advantage.constant_groups != "keep":
        yield f"{alone}: a single completion is always equal to itself; set advantage.constant_groups = 'keep'"
    if advantage.constant_groups == "refill" and config.rewards.normalise:  # together with `queue.exact`: with the bound
        yield (
            f"advantage.constant_groups = 'refill' with rewards.normalise = {list(config.rewards.normalise)}: actors find "
            "which groups are constant, and only the learner has the running statistics. Set it to 'drop', or "
            "rewards.normalise = []"
        )


def _corrections(loss: LossConfig) -> Iterator[str]:
    kind, spec = f"loss.kind = {loss.kind!r}", loss_spec(loss.kind)
    of_completions = ("sequence_mask", "off_policy_delta", "divergence_mean", "divergence_max")
    for name, value in ((name, getattr(loss, name)) for name in ("token_mask", "second_moment", *of_completions)):
        if value is not None and spec.corrects == "nothing":
            yield f"loss.{name}: in {kind} it does not matter which policy sampled; set loss.{name} = 'none'"
        if value is not None and spec.level == "sequence" and name in ("token_mask", "second_moment"):
            yield f"loss.{name} masks single tokens, a term of {kind} is a whole completion: set loss.kind = 'decoupled_ppo'"
        if isinstance(value, tuple) and not 0 <= value[0] < 1 < value[1]:
            yield f"loss.{name} = {list(value)} would mask what the policy itself samples: 1 must be inside, as in [0.5, 2.0]"
    if loss.is_level != "token" and spec.corrects != "weights and masks":
        yield f"loss.is_level = {loss.is_level!r}: {kind} has the ratio to behaviour in itself; set loss.is_level = 'token'"
    if loss.is_normalised and (spec.corrects != "weights and masks" or loss.is_cap is None):
        yield f"loss.is_normalised = true: {kind} has no importance weight here; set loss.is_normalised = false"
    if loss.is_normalised and loss.proximal == "interpolate":
        yield "loss.is_normalised = true needs all weights before the first update; set loss.proximal = 'recompute'"
    if spec.level != "token" and loss.reduction != "token":
        yield f"loss.reduction = {loss.reduction!r}: a term of {kind} is no single token; leave loss.reduction at 'token'"
    if loss.kl_in_reward and spec.corrects == "nothing":
        yield f"loss.kl_in = 'reward' changes advantages, and {kind} only ranks completions: set loss.kl_in = 'loss'"


def _asynchrony(config: Config) -> Iterator[str]:
    advantage, loss, engine, generation = config.advantage, config.loss, config.engine, config.generation
    if loss.allow_uncorrected:
        return
    spec, on_purpose = loss_spec(loss.kind), "loss.allow_uncorrected = true to do it on purpose"
    compressed = engine.off_policy
    if config.queue.max_staleness > 0 or compressed:
        asked = compressed or f"queue.max_staleness = {config.queue.max_staleness}"
        if (spec.corrects == "weights and masks" or "is_cap" in loss.arguments) and loss.is_cap is None:
            others = "what another distribution sampled" if compressed else "data of other weights"
            yield (
                f"{asked} without an importance weight trains on {others} as if it were its own. Set loss.is_cap = 2.0, or "
                f"{on_purpose}"
            )
        if not advantage_spec(advantage.kind).off_policy:
            yield (
                f"{asked} with advantage.kind = {advantage.kind!r} fits the critic to the policies that sampled, not to the "
                f"one that learns. Set advantage.kind = 'traced' (the same on fresh data), or {on_purpose}"
            )
    if generation.truncation and spec.takes_ratios and (unrecorded := engine.unrecorded(generation)):
        yield (
            f"generation.{generation.truncation} cuts off what is sampled, and loss.kind = {loss.kind!r} takes ratios, which "
            f"would not be 1 for an unchanged policy: {unrecorded}, or a loss without ratios: loss.kind = 'online_dpo'"
        )


def _guard(config: Config) -> Iterator[str]:
    guard, lowest, highest = config.guard, config.bound(config.data.size).lowest_staleness, config.queue.max_staleness
    target = highest if guard.target is None else guard.target
    if not lowest <= target <= highest:
        yield (
            f"guard.target = {target} is not between {lowest}, the lowest that can run, and the bound, queue.max_staleness = "
            f"{highest}; nearest: {min(max(target, lowest), highest)}"
        )
    if config.queue.exact and (guard.enabled or guard.target is not None):
        yield "queue.exact = true fixes the staleness: set guard.target = 'none', guard.enabled = false, or queue.exact = false"
    if guard.enabled and target <= lowest:
        top = "queue.max_staleness" if guard.target is None else "guard.target"
        yield (
            f"guard.enabled = true has no room below {top} = {target}, which is the lowest that can run. Set {top} = "
            f"{lowest + 1} or more, or guard.enabled = false"
        )


def remarks(config: Config) -> Iterator[str]:
    """Remarks on steps that train little, and on a device that is used at a fraction of its speed."""
    learner, max_steps = config.learner, config.max_steps
    if max_steps is not None and max_steps <= (alone := learner.critic.warmup_steps):
        yield f"learner.critic.warmup_steps = {alone}: in {max_steps} steps (max_steps) only the critic learns."
    elif max_steps is not None and max_steps <= learner.warmup_steps:
        yield f"learner.warmup_steps = {learner.warmup_steps}: all {max_steps} steps (max_steps) are warm-up."
    if learner.device.partition(":")[0] != "cuda" or learner.dtype != "float32":
        return
    yield (
        f"learner.dtype = 'float32' on learner.device = {learner.device!r}: products take several times as long as in "
        "bfloat16, and there is no flash attention. Set learner.dtype = 'bfloat16'; weights and optimizer stay float32."
    )


def _shared_rows(config: LearnerConfig) -> Iterator[str]:
    settings = ("sequence_parallel", "tensor_parallel")
    for setting, size in ((name, int(getattr(config, name))) for name in settings if getattr(config, name) > 1):
        asked, tensor = f"learner.{setting} = {size}", config.tensor_parallel
        if size < config.ranks_per_row:
            yield f"{asked} with learner.tensor_parallel = {tensor}: ranks share positions or layers; set one of them to 1"
        if size != config.ranks:
            yield f"{asked} of learner.ranks = {config.ranks}: all ranks share a row, or none; set it to {config.ranks} or 1"
        if config.backend != "deepspeed":
            yield f"{asked} with learner.backend = 'torch'; set learner.backend = 'deepspeed', or learner.{setting} = 1"
        if config.critic.kind != "none":
            yield f"{asked} with a critic, which ranks do not share; set it to 1, or learner.critic.kind = 'none'"
        if tensor > 1 and config.lora.rank:
            yield f"{asked} with adapters, whose layers are not split; set it to 1, or learner.lora.rank = 0"


def _ranks(config: LearnerConfig, groups_per_batch: int) -> Iterator[str]:
    groups = groups_per_batch // config.updates_per_step
    if groups < config.ranks // config.ranks_per_row:
        yield (
            f"learner.ranks = {config.ranks} cannot share an update of {groups} groups: a group stays on one rank. "
            f"Highest: learner.ranks = {max(1, groups)}, or make learner.batch_size larger."
        )
    kind, named, _ = config.device.partition(":")
    if config.ranks > 1 and named:
        yield f"learner.device = {config.device!r} is one device for {config.ranks} ranks; {kind!r} gives every rank its own."


def _schedule(config: LearnerConfig, max_steps: int | None) -> Iterator[str]:
    if config.schedule != "constant" and max_steps is None:
        yield f"learner.schedule = {config.schedule!r} falls until max_steps: set that, or learner.schedule = 'constant'"


def _backend(config: LearnerConfig, engine: EngineConfig) -> Iterator[str]:
    sharing, file = config.backend == "deepspeed", config.deepspeed_config
    if sharing and config.dtype == "bfloat16" and engine.dtype == "float32" and engine.canary_limit is None:
        yield (
            "learner.backend = 'deepspeed' with learner.dtype = 'bfloat16' computes from weights of 16 bits, and an engine in "
            "float32 differs by more than the canary allows: set engine.dtype = 'bfloat16', or engine.canary_limit"
        )
    if file is not None and not sharing:
        yield "learner.deepspeed_config is for learner.backend = 'deepspeed'; set that, or leave it out"
    if file is not None and not Path(file).is_file():
        yield f"learner.deepspeed_config = {file!r} is no file; name a JSON file, or leave it out"
    if sharing and config.compile:
        yield (
            "learner.compile = true with learner.backend = 'deepspeed', which gathers and frees parameters between layers; "
            "set learner.compile = false, or learner.backend = 'torch'"
        )
    if config.lora.publish == "adapter" and not config.lora.rank:
        yield (
            'learner.lora.publish = "adapter" and learner.lora.rank = 0: there is no adapter. Set learner.lora.rank = 8, '
            "or leave learner.lora.publish out."
        )
