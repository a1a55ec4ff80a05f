"""Settings that change nothing in a run, for what they are about is not in it. Each is a remark: two runs that differ in one of
them are the same run twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from async_rlhf.learner.registry import advantage_settings, advantages, loss_spec, losses
from async_rlhf.run.config import Config, flat

_CLIPPING = ("ppo_clip", "decoupled_ppo", "gspo", "proximal_rloo")
# What of [loss] the formulas of shipped losses read.
_OF_LOSSES: Mapping[str, tuple[str, ...]] = {
    "clip_low": _CLIPPING,
    "clip_high": (*_CLIPPING, "cispo"),
    "dual_clip": _CLIPPING,
    "dpo_beta": ("online_dpo",),
    "oapl_beta": ("oapl",),
    "dppo_tv_delta": ("dppo_tv",),
    "dppo_kl_delta": ("dppo_kl",),
    "ipo_epsilon": ("ipo",),
    "sapo_tau": ("sapo",),
    "vespo_k": ("vespo",),
    "vespo_lambda": ("vespo",),
    "sao_band": ("sao",),
    "teacher_cap": ("forward_kl",),
    "teacher_top_k": ("reverse_kl_top_k",),
}


def without_effect(config: Config) -> Iterator[str]:
    """A remark for each setting that is not its default, and changes nothing."""
    unused = dict(_unused(config))
    for key in dict(flat(config.model_dump(exclude_defaults=True))):
        about = next((what for setting, what in unused.items() if f"{key}.".startswith(f"{setting}.")), None)
        if about is not None:
            yield f"{key} changes nothing in this run: it is about {about}."


def _unused(config: Config) -> Iterator[tuple[str, str]]:
    """Settings and sections, and what they are about."""
    learner = config.learner
    parts = {
        "environment": (bool(config.environment.all), "environments (environment.function)"),
        "engine.kv": (config.engine.kv_budget is not None, "engine.kv_policy = 'window' and 'chunk_sink'"),
        "engine.vllm": (config.engine.kind == "vllm", "engine.kind = 'vllm'"),
        "learner.zero_stage": (learner.backend == "deepspeed", "learner.backend = 'deepspeed'"),
        "learner.lora": (learner.lora.rank > 0, "adapters (learner.lora.rank)"),
        "learner.critic": (learner.critic.kind != "none", "a critic (learner.critic.kind)"),
        "learner.schedule_steps": (learner.schedule != "constant", "learner.schedule = 'linear' and 'cosine'"),
        "learner.reference_dtype": (bool(config.held_reference), "a reference that the learner holds"),
        "advantage.max_refills": (config.advantage.constant_groups == "refill", "advantage.constant_groups = 'refill'"),
    }
    yield from ((setting, about) for setting, (is_used, about) in parts.items() if not is_used)
    yield from _unused_in_loss(config)
    yield from _unused_in_advantages(config)


def _unused_in_loss(config: Config) -> Iterator[tuple[str, str]]:
    loss, spec = config.loss, loss_spec(config.loss.kind)
    has_weight = spec.corrects == "weights and masks" and loss.is_cap is not None
    has_sequence_weight = has_weight and "sequence" in (spec.level, loss.is_level)
    has_divergence_mask = loss.divergence_mean is not None or loss.divergence_max is not None
    parts = {
        "fixed_length": (loss.reduction == "fixed", "loss.reduction = 'fixed'"),
        "kl_estimator": (loss.kl_coef > 0, "a divergence from the reference (loss.kl_coef)"),
        "kl_in": (loss.kl_coef > 0, "a divergence from the reference (loss.kl_coef)"),
        "is_cap": (
            spec.corrects == "weights and masks" or spec.truncates or loss.kl_coef > 0,
            "losses that weigh or truncate the ratio to the policy that sampled",
        ),
        "sequence_ratio": (
            (spec.corrects != "nothing" and loss.sequence_mask is not None) or has_sequence_weight,
            "loss.sequence_mask, and weights of completions (loss.is_level)",
        ),
        "divergence_estimator": (
            spec.corrects != "nothing" and has_divergence_mask,
            "loss.divergence_mean and loss.divergence_max",
        ),
    }
    yield from ((f"loss.{name}", about) for name, (is_used, about) in parts.items() if not is_used)
    if loss.kind in losses():
        others = ((name, kinds) for name, kinds in _OF_LOSSES.items() if loss.kind not in kinds)
        yield from ((f"loss.{name}", f"loss.kind = {' or '.join(map(repr, kinds))}") for name, kinds in others)


def _unused_in_advantages(config: Config) -> Iterator[tuple[str, str]]:
    advantage, of = config.advantage, {kind: advantage_settings(kind) for kind in advantages()}
    settings = {name for names in of.values() for name in names}
    if loss_spec(config.loss.kind).learns_from in ("pair", "best"):
        names = ("kind", "level", "normalise", *settings)
        yield from ((f"advantage.{name}", "losses that take advantages") for name in names)
        return
    for name in settings - {*advantage_settings(advantage.kind)}:
        kinds = " or ".join(repr(kind) for kind, names in of.items() if name in names)
        yield f"advantage.{name}", f"advantage.kind = {kinds}"
    if not advantage.needs_critic:
        yield "advantage.normalise", "advantages from a critic"
