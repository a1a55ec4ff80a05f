"""Settings that change nothing in a run, for what they are about is not in it. Each is a remark: two runs that differ in one of
them are the same run twice."""

from __future__ import annotations

from collections.abc import Iterator

from async_rlhf.learner.config import FunctionSection
from async_rlhf.learner.registry import declared, loss_spec, shipped
from async_rlhf.run.config import Config
from async_rlhf.run.tables import flat


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
        "data.images": (bool(config.environment.all or config.data.spool), "what comes from environments, agents or a spool"),
        "learner.zero_stage": (learner.backend == "deepspeed", "learner.backend = 'deepspeed'"),
        "learner.lora": (learner.lora.rank > 0, "adapters (learner.lora.rank)"),
        "learner.critic": (learner.critic.kind != "none", "a critic (learner.critic.kind)"),
        "learner.reference_dtype": (bool(config.held_reference), "a reference that the learner holds"),
        "advantage.max_refills": (config.advantage.constant_groups == "refill", "advantage.constant_groups = 'refill'"),
    }
    yield from ((setting, about) for setting, (is_used, about) in parts.items() if not is_used)
    yield from config.engine.unused()
    yield from _unused_in_loss(config)
    yield from _unused_in_advantages(config)


def _unused_in_loss(config: Config) -> Iterator[tuple[str, str]]:
    loss = config.loss
    if not (loss_spec(loss.kind).corrects == "weights and masks" or "is_cap" in loss.arguments or loss.kl_coef > 0):
        yield "loss.is_cap", "losses that weigh or truncate the ratio to the policy that sampled"
    if loss.kl_coef == 0:
        yield from ((f"loss.{name}", "a divergence from the reference (loss.kl_coef)") for name in ("kl_estimator", "kl_in"))
    yield from ((key, about) for key, about in _of_others(loss) if key != "loss.is_cap")


def _unused_in_advantages(config: Config) -> Iterator[tuple[str, str]]:
    advantage = config.advantage
    if loss_spec(config.loss.kind).learns_from in ("pair", "best"):
        names = ("kind", "level", "normalise", "gamma", "lam", *advantage.parameters)
        yield from ((f"advantage.{name}", "losses that take advantages") for name in names)
        return
    yield from _of_others(advantage)
    if not advantage.needs_critic:
        yield "advantage.normalise", "advantages from a critic"


def _of_others(section: FunctionSection) -> Iterator[tuple[str, str]]:
    """Settings of a section that functions of other kinds take."""
    takers: dict[str, list[str]] = {}
    for kind in shipped(section.decorator):
        for name in declared(section.decorator, kind).parameters.keys() & type(section).model_fields:
            takers.setdefault(name, []).append(repr(kind))
    for name in takers.keys() - section.arguments:
        yield f"{section.decorator}.{name}", f"{section.decorator}.kind = {' or '.join(takers[name])}"
