"""Every placement of a spec, the fastest of each bound that `async-rlhf check` accepts, and its sections of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.experiments.planning.placement.spec import Spec
from async_rlhf.experiments.planning.placement.step import Plan, counts, placements, plan_of
from async_rlhf.launch.placement import Host, place
from async_rlhf.run.checks.memory import check_memory
from async_rlhf.run.config_checks import check
from async_rlhf.run.hosts.placement import wanted
from async_rlhf.run.loading import validated
from async_rlhf.run.tables import in_toml

Settings = Mapping[str, Mapping[str, Any]]
_MOST_REFUSED = 50
# Slower by less than this is as fast: the model of times is no finer.
_AS_FAST = 1.02


@dataclass(frozen=True, kw_only=True)
class Found:
    """by_bound: the fastest plan of each `max_staleness`, of those bounds alone that are faster than all smaller ones.
    settings: of the best; empty where `check` refuses all plans, `refusal` then has the reason for the best. cheaper: a plan
    that is as fast within 2 % on the fewest devices; None where all of them are needed. tried, fitting: placements.
    """

    roles: Roles
    by_bound: Mapping[int, Plan]
    settings: Settings
    refusal: str
    cheaper: Plan | None
    tried: int
    fitting: int

    @property
    def best(self) -> Plan:
        return min(self.by_bound.values(), key=_seconds)


def search(spec: Spec) -> Found:
    """Raises ConfigError where nothing fits."""
    roles = Roles(spec)
    tried = list(placements(roles))
    plans = sorted((plan for each in tried if (plan := plan_of(each, roles)) is not None), key=_seconds)
    if not plans:
        raise ConfigError(f"no placement fits: {_no_fit(roles)}")
    accepted = _front(plans, roles, accepted=True)
    by_bound = accepted or _front(plans, roles, accepted=False)
    best = min(by_bound.values(), key=_seconds)
    settings, refusal = _settings_or_refusal(best, roles)
    return Found(
        roles=roles,
        by_bound=by_bound,
        settings=settings,
        refusal=refusal,
        cheaper=_cheaper(best, spec) if settings else None,
        tried=len(tried),
        fitting=len(plans),
    )


def _front(plans: list[Plan], roles: Roles, *, accepted: bool) -> dict[int, Plan]:
    """plans: the fastest first. accepted: only those that `check` does not refuse."""
    found: dict[int, Plan] = {}
    for bound in sorted({plan.placement.max_staleness for plan in plans}):
        least = min((plan.step.seconds for plan in found.values()), default=math.inf)
        of_bound = [plan for plan in plans if plan.placement.max_staleness == bound and plan.step.seconds < least]
        tried = of_bound[:_MOST_REFUSED]
        plan = next((each for each in tried if not accepted or _settings_or_refusal(each, roles)[0]), None)
        if plan is not None:
            found[bound] = plan
    return found


def _cheaper(best: Plan, spec: Spec) -> Plan | None:
    cluster = spec.cluster
    for count in counts(cluster):
        nodes, per_node = max(1, count // cluster.devices_per_node), min(count, cluster.devices_per_node)
        if nodes * per_node != count:
            continue
        smaller = cluster.model_copy(update={"nodes": nodes, "devices_per_node": per_node})
        roles = Roles(spec.model_copy(update={"cluster": smaller}))
        plans = [plan for each in placements(roles) if (plan := plan_of(each, roles)) is not None]
        as_fast = sorted((plan for plan in plans if plan.step.seconds <= _AS_FAST * best.step.seconds), key=_seconds)
        if plan := next((each for each in as_fast[:_MOST_REFUSED] if _settings_or_refusal(each, roles)[0]), None):
            return plan
    return None


def _seconds(plan: Plan) -> tuple[float, int, int]:
    """The order of plans: of equally fast ones the less stale, then that of fewer pools."""
    return plan.step.seconds, plan.placement.max_staleness, plan.placement.scorers


def _no_fit(roles: Roles) -> str:
    cluster, policy = roles.spec.cluster, roles.policy
    trained, row = 16 * policy.parameters / cluster.size, policy.kv_bytes_per_token * roles.spec.row_tokens
    return (
        f"training takes at least {trained / 1e9:.3g} GB of a device where all {cluster.size} share it, and activations of its "
        f"longest row; generation {policy.weight_bytes / 1e9:.3g} GB for weights and {row / 1e9:.3g} GB for the longest row, "
        f"over the devices of an engine; a device has {roles.device.memory_bytes / 1e9:.3g} GB, "
        f"{roles.spec.search.memory_share:.0%} of it for the plan. Add nodes, take devices with more memory, shorten "
        "lengths.longest, or train a smaller model"
    )


# -- as a configuration --------------------------------------------------------------------------------------------------


def _settings_or_refusal(plan: Plan, roles: Roles) -> tuple[Settings, str]:
    try:
        return settings_of(plan, roles), ""
    except ConfigError as error:
        return {}, str(error)


def settings_of(plan: Plan, roles: Roles) -> dict[str, dict[str, Any]]:
    """Sections of a configuration by name, for `train`. Raises ConfigError for what `check` would refuse."""
    if roles.device.is_cpu:
        raise ConfigError(
            "settings are written for accelerators; on a processor make a run of `quick` and use async-rlhf plan --from-run RUN"
        )
    spec, cluster, engines = roles.spec, roles.spec.cluster, plan.engines
    bound = plan.placement.max_staleness
    sections: dict[str, dict[str, Any]] = {
        "generation": roles.generation_settings.model_dump(exclude_unset=True, exclude_none=True),
        "engine": {
            "kind": "vllm",
            "device": "cuda",
            "dtype": "bfloat16",
            "slots": engines.slots,
            "tensor_parallel_size": engines.layout.tensor,
        },
        "actors": {"count": engines.layout.data, "queued_groups": roles.queued_groups(engines, bound)},
        "queue": {"max_staleness": bound},
        "learner": roles.learner_settings(plan.learner.layout),
        "loss": spec.loss.model_dump(exclude_defaults=True),
        "placement": {"hosts": [_host(number, roles) for number in range(cluster.nodes)]},
        **_scoring(plan, spec),
    }
    if plan.placement.colocated:
        share = engines.bytes_per_device / roles.device.memory_bytes
        sections["placement"] |= {"colocate": True, "actor_share": math.ceil(100 * share + 1) / 100}
    if spec.models.critic:
        # Older data would fit the critic of `gae` to the policies that sampled them.
        sections["advantage"] = {"kind": "gae" if bound <= 1 else "traced"}
    if spec.environment.turns > 1:
        sections["environment"] = {"function": "ENVIRONMENT.py:play", "max_turns": spec.environment.turns}
    sections = {name: section for name, section in sections.items() if section}
    _check(sections, roles)
    return sections


def _host(number: int, roles: Roles) -> dict[str, Any]:
    """The first is the supervisor's own, and has no name."""
    devices, device_memory = roles.spec.cluster.devices_per_node, int(roles.device.memory_bytes)
    return {"name": f"node{number}" if number else "", "devices": devices, "device_memory": device_memory}


def _scoring(plan: Plan, spec: Spec) -> dict[str, dict[str, Any]]:
    """Frozen models with devices of their own: stages in the scorer process of each host."""
    models = () if plan.scorers is None else plan.scorers.seconds
    scoring, found = dict[str, Any](), dict[str, dict[str, Any]]()
    if "reference" in models:
        scoring = {"reference": {"device": "cuda", "dtype": "bfloat16"}, "stages": {"reference": {"placement": "process"}}}
    if "reward" in models:
        path = spec.models.reward if isinstance(spec.models.reward, str) else "REWARD_MODEL"
        options = {"path": path, "device": "cuda", "dtype": "bfloat16"}
        found["rewards"] = {"functions": ["reward_model"], "options": {"reward_model": options}}
        scoring["stages"] = {**scoring.get("stages", {}), "reward_model": {"placement": "process"}}
    return {**found, "scoring": scoring}


def _check(settings: Settings, roles: Roles) -> None:
    config = validated({**settings, "name": "plan", "model": "MODEL", "data": {"source": "DATA"}})
    check(config)
    inventory = tuple(Host(**host.model_dump()) for host in config.placement.hosts)
    check_memory(config, inventory, place(wanted(config), inventory), roles.shape)


def as_toml(settings: Settings) -> str:
    """Sections of a file, in the order they are given."""
    return tomli_w.dumps(in_toml(settings))
