"""From a plan to the sections of a configuration that carry it out, checked as `async-rlhf check` checks a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.placement.evaluation import Plan
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.launch.placement import Host, place
from async_rlhf.run.checks.memory import check_memory
from async_rlhf.run.config import validated
from async_rlhf.run.config_checks import check
from async_rlhf.run.hosts.placement import wanted

Settings = Mapping[str, Mapping[str, Any]]


def settings_of(plan: Plan, roles: Roles, queued_groups: int = 0) -> dict[str, dict[str, Any]]:
    """Sections of a configuration by name, for `train`. Raises ConfigError for what `check` would refuse."""
    if not plan.candidate.here:
        raise ConfigError(f"{plan.candidate.strategy.name} is modelled; this system does not place its roles so")
    if roles.device.is_cpu:
        raise ConfigError(
            "settings are written for accelerators; on a processor make a run of `quick` and use async-rlhf plan --from-run RUN"
        )
    generate, train = plan.layout("generate"), plan.layout("train")
    cluster = roles.spec.cluster
    colocated = plan.candidate.set_of("train") is plan.candidate.set_of("generate")
    memory_bytes = int(roles.device.memory_bytes)
    found: dict[str, dict[str, Any]] = {
        "generation": roles.settings.model_dump(exclude_unset=True, exclude_none=True),
        "engine": {
            "kind": "vllm",
            "device": "cuda",
            "dtype": "bfloat16",
            "slots": plan.slots,
            "vllm": {"tensor_parallel_size": generate.tensor},
        },
        "actors": {"count": generate.data, "queued_groups": queued_groups},
        "queue": {"max_staleness": int(plan.candidate.max_staleness)},
        "learner": roles.learner_settings(train),
        "loss": roles.spec.loss.model_dump(exclude_defaults=True),
        "placement": {
            "hosts": [
                {"name": f"node{number}" if number else "", "devices": cluster.devices_per_node, "device_memory": memory_bytes}
                for number in range(cluster.nodes)
            ]
        },
    }
    if colocated:
        [filled] = plan.filled
        own = filled.choices["generate"]
        share = (own.kept_bytes + own.working_bytes) / roles.device.memory_bytes
        found["placement"] |= {"colocate": True, "actor_share": math.ceil(100 * share + 1) / 100}
    if "train_critic" in roles.models:
        # Older data would fit the critic of `gae` to the policies that sampled them.
        found["advantage"] = {"kind": "gae" if plan.candidate.max_staleness <= 1 else "traced"}
    if (turns := roles.spec.environment.turns) > 1:
        found["environment"] = {"function": "ENVIRONMENT.py:play", "max_turns": turns}
    found |= _scoring(plan, roles)
    found = {name: section for name, section in found.items() if section}
    _check(found, roles)
    return found


def _scoring(plan: Plan, roles: Roles) -> dict[str, dict[str, Any]]:
    """Models that are not trained, with devices of their own: stages in the scorer process of each host."""
    seats = [role for group in plan.candidate.sets if group.name == "scorers" for role in group.roles]
    found: dict[str, dict[str, Any]] = {}
    stages = {}
    if "reference" in seats:
        stages["reference"] = {"placement": "process"}
        found["scoring"] = {"reference": {"device": "cuda", "dtype": "bfloat16"}}
    if "reward" in seats:
        stages["reward_model"] = {"placement": "process"}
        path = roles.spec.models.reward
        options = {"path": path if isinstance(path, str) else "REWARD_MODEL", "device": "cuda", "dtype": "bfloat16"}
        found["rewards"] = {"functions": ["reward_model"], "options": {"reward_model": options}}
    if stages:
        found["scoring"] = {**found.get("scoring", {}), "stages": stages}
    return found


def _check(settings: Settings, roles: Roles) -> None:
    config = validated({**settings, "name": "plan", "model": "MODEL", "data": {"source": "DATA"}})
    check(config, has_model=False)
    inventory = tuple(Host(**host.model_dump()) for host in config.placement.hosts)
    check_memory(config, inventory, place(wanted(config), inventory), roles.shape)


def as_toml(settings: Settings) -> str:
    """Sections in the order they are given; tables within a section are written inline."""
    lines = []
    for name, section in settings.items():
        lines += [f"[{name}]", *(f"{key} = {_written(value)}" for key, value in section.items()), ""]
    return "\n".join(lines)


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a basic string of TOML has the escapes of JSON
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_written(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    return f"{value}"
