"""Settings of the learner's machine that cannot work together, refused before any process starts. No torch.

Each refusal says what was asked, the limit, and the nearest choice that works.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.config import LearnerConfig


def check_machine(config: LearnerConfig, groups_per_batch: int, max_steps: int) -> None:
    """`groups_per_batch`: prompts of one step; `max_steps`: steps of the run. Raises ConfigError."""
    _check_ranks(config, groups_per_batch)
    _check_schedule(config, max_steps)
    _check_deepspeed(config)
    if config.lora.publish == "adapter" and not config.lora.rank:
        raise ConfigError(
            'learner.lora.publish = "adapter" and learner.lora.rank = 0: there is no adapter. Set learner.lora.rank = 8, '
            "or leave learner.lora.publish out."
        )
    if config.lora.rank:
        _check_installed("peft", "learner.lora.rank", config.lora.rank, "lora", "0")


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


def _check_schedule(config: LearnerConfig, max_steps: int) -> None:
    if config.schedule != "constant" and config.schedule_steps is None:
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
    _check_installed("deepspeed", "learner.backend", config.backend, "deepspeed", "'torch'")
    if config.deepspeed_config is not None and not Path(config.deepspeed_config).is_file():
        raise ConfigError(
            f"learner.deepspeed_config = {config.deepspeed_config!r} is no file; name a JSON file, or leave it out"
        )


def _check_installed(package: str, key: str, value: object, extra: str, other: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{key} = {value!r} needs the package {package}: pip install 'async-rlhf[{extra}]'. Without it: {other}"
        )
