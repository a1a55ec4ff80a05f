"""The keys of a configuration: all there are, and what to say of one that is not, or of a value that does not fit.

Called by the configuration's loading for its messages, and by `cli.reference` for the list of all keys.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from async_rlhf.buffers.config import KindSection
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.config import FunctionSection
from async_rlhf.run.tables import lay, nested

_log = logging.getLogger(__name__)
NAME = "NAME"
"""Stands in a key where the user chooses the name (`scoring.stages.NAME.timeout_s`)."""

# By our key: what TRL, verl, OpenRLHF and AReaL call it. Only names that no key of ours has.
ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "model": ("model_name_or_path", "model_name", "pretrain", "actor_model_name_or_path"),
    "max_steps": ("total_training_steps", "num_steps", "steps"),
    "max_seconds": ("max_time", "max_train_time"),
    "name": ("run_name", "experiment_name", "trial_name"),
    "data.source": ("dataset", "dataset_name", "train_dataset", "train_files", "prompt_data"),
    "data.epochs": ("num_train_epochs", "total_epochs", "num_episodes", "total_train_epochs"),
    "data.columns": ("input_key", "prompt_key"),
    "data.template": ("input_template",),
    "data.chat_template_kwargs": ("apply_chat_template_kwargs",),
    "generation.group_size": ("n", "num_generations", "n_samples_per_prompt", "n_samples", "rollout_n"),
    "generation.max_prompt_length": ("prompt_max_len", "max_prompt_len"),
    "generation.max_completion_length": (
        "max_new_tokens", "max_tokens", "response_length", "max_response_length", "generate_max_len",
    ),
    "generation.stop": ("stop_strings", "stop_sequences", "stop_token"),
    "engine.kind": ("use_vllm", "rollout_backend", "inference_backend"),
    "engine.slots": ("max_num_seqs", "max_concurrent_rollouts"),
    "rewards.functions": ("reward_funcs", "reward_fn", "reward_function", "remote_rm_url", "reward_model"),
    "rewards.weights": ("reward_weights",),
    "actors.count": ("num_actors", "num_workers", "vllm_num_engines", "num_engines"),
    "queue.max_staleness": ("staleness", "staleness_threshold", "max_head_offpolicyness", "max_lag", "max_async_level"),
    "learner.learning_rate": ("lr", "actor_learning_rate"),
    "learner.batch_size": ("per_device_train_batch_size", "train_batch_size", "rollout_batch_size", "global_batch_size"),
    "learner.micro_batch_tokens": (
        "gradient_accumulation_steps", "micro_train_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu",
    ),
    "learner.updates_per_step": ("ppo_mini_batch_size", "num_mini_batches", "num_minibatches"),
    "learner.epochs": ("num_iterations", "ppo_epochs", "num_ppo_epochs", "max_epochs"),
    "learner.max_grad_norm": ("grad_clip", "gradient_clipping", "max_norm", "clip_grad"),
    "learner.schedule": ("lr_scheduler_type", "lr_scheduler"),
    "learner.warmup_steps": ("lr_warmup_steps", "warmup_ratio", "lr_warmup_ratio", "num_warmup_steps"),
    "learner.dtype": ("bf16", "fp16", "param_dtype", "torch_dtype"),
    "learner.critic.learning_rate": ("critic_learning_rate", "critic_lr"),
    "learner.lora.rank": ("lora_r", "lora_rank"),
    "learner.lora.alpha": ("lora_alpha",),
    "learner.lora.targets": ("target_modules", "lora_target_modules"),
    "advantage.kind": ("adv_estimator", "advantage_estimator"),
    "advantage.scale_by_std": ("scale_rewards", "norm_adv_by_std_in_grpo"),
    "advantage.lam": ("lambd", "gae_lambda"),
    "advantage.constant_groups": ("dynamic_sampling", "dynamic_filtering", "filter_groups"),
    "loss.kind": ("loss_type", "policy_loss", "loss_mode"),
    "loss.kl_coef": ("beta", "kl_beta", "kl_loss_coef", "init_kl_coef"),
    "loss.kl_estimator": ("kl_loss_type",),
    "loss.clip_low": ("epsilon", "cliprange", "clip_ratio", "clip_ratio_low", "eps_clip", "eps_clip_low"),
    "loss.clip_high": ("epsilon_high", "clip_ratio_high", "eps_clip_high"),
    "loss.dual_clip": ("clip_ratio_c",),
    "loss.entropy_coef": ("entropy_coeff", "entropy_loss_coef"),
    "loss.is_cap": ("vllm_importance_sampling_cap", "rollout_is_threshold", "behav_imp_weight_cap"),
    "loss.reduction": ("loss_agg_mode",),
    "checkpoint.save_every": ("save_steps", "save_freq", "save_interval"),
    "evaluation.every": ("eval_steps", "eval_freq", "eval_interval", "test_freq"),
    "tracking.kind": ("report_to", "logger", "loggers", "use_wandb", "use_tensorboard"),
    "checkpoint.keep_last": ("save_total_limit", "max_ckpt_num", "max_actor_ckpt_to_keep"),
}  # fmt: skip
_OURS = {theirs: ours for ours, names in ELSEWHERE.items() for theirs in names}
# Keys of earlier versions, and what they are now.
_MOVED = {
    "engine.kv_policy": "engine.kv.policy",
    "engine.vllm.tensor_parallel_size": "engine.tensor_parallel_size",
    "engine.vllm.arguments": "engine.arguments",
}
# By our key: what others call a kind, and the settings that are it here. Only names that are none of ours.
KINDS: Mapping[str, Mapping[str, str]] = {
    "advantage.kind": {
        "grpo": 'advantage.kind = "group_relative"',
        "group_norm": 'advantage.kind = "group_relative"',
        "dr_grpo": 'advantage.kind = "group_relative", advantage.scale_by_std = false',
        "dapo": 'advantage.kind = "group_relative", advantage.constant_groups = "refill"',
        "rloo": 'advantage.kind = "leave_one_out"',
        "maxrl": 'advantage.kind = "max_rl"',
        "reinforce_plus_plus": 'advantage.kind = "reinforce_pp"',
        "ppo": 'advantage.kind = "gae"',
    },
    "loss.kind": {
        "grpo": 'loss.kind = "decoupled_ppo", loss.reduction = "sequence", advantage.kind = "group_relative"',
        "dr_grpo": 'loss.kind = "decoupled_ppo", loss.reduction = "fixed", advantage.scale_by_std = false',
        "dapo": 'loss.kind = "decoupled_ppo", loss.reduction = "token", advantage.constant_groups = "refill"',
        "rloo": 'loss.kind = "truncated_is", advantage.kind = "leave_one_out"',
        "reinforce": 'loss.kind = "truncated_is"',
        "ppo": 'loss.kind = "decoupled_ppo", or loss.kind = "ppo_clip", which clips around the policy that sampled',
        "dppo": 'loss.kind = "dppo_tv" or loss.kind = "dppo_kl"',
        "dpo": 'loss.kind = "online_dpo"',
    },
}
_MASK = str(SecretStr("any"))
# A setting that names an environment variable is none.
LIKE_A_SECRET = re.compile(r"^(?!.*_env$).*(api_?key|_key$|_pat$|token$|secret|passw|credential|authorization)", re.IGNORECASE)
_ASKS = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
# A key of the same section is offered when it is a little like the one that was given, one from elsewhere when it is much so.
_LIKE, _MUCH_LIKE = 0.7, 0.88


@dataclass(frozen=True)
class Setting:
    """One key, dotted, and its field."""

    key: str
    field: FieldInfo


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Every key below a section, in the order of the fields; sections themselves are none."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if get_origin(inner) is dict:
            inner = get_args(inner)[-1]
        elif get_origin(inner) is tuple:  # a list of tables
            inner = get_args(inner)[0]
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from settings(inner, f"{prefix}{name}.{NAME}." if inner is not field.annotation else f"{prefix}{name}.")
        else:
            yield Setting(f"{prefix}{name}", field)


def kind_sections(config: type[BaseModel]) -> dict[str, type[KindSection]]:
    """By name, the sections whose keys depend on their kind."""
    found = {name: field.annotation for name, field in config.model_fields.items()}
    return {name: each for name, each in found.items() if isinstance(each, type) and issubclass(each, KindSection)}


def own_settings(section: type[KindSection], kind: str, prefix: str = "") -> list[Setting]:
    """The keys of a kind beside the fields of its section. Raises ConfigError for a kind that has none."""
    found = settings(section.of_kind(kind))
    return [Setting(f"{prefix}{own.key}", own.field) for own in found if own.key.split(".")[0] not in section.model_fields]


def all_settings(config: type[BaseModel]) -> Iterator[Setting]:
    """Every key there is, those of each kind too."""
    yield from settings(config)
    for name, section in kind_sections(config).items():
        for kind in section.kinds():
            yield from own_settings(section, kind, f"{name}.")


@cache
def secret_keys(section: type[BaseModel]) -> frozenset[str]:
    """The settings whose values are shown nowhere."""
    return frozenset(setting.key for setting in all_settings(section) if _is_secret(setting.field.annotation))


def masked(key: str, value: Any, config: type[BaseModel]) -> Any:
    """The value of a dotted key as it may be shown."""
    return _MASK if any(f"{secret}.".startswith(f"{key}.") for secret in secret_keys(config)) else value


def without_secrets(values: Any) -> Any:
    """A dump without declared secrets, for other users: asterisks also replace texts under names of secrets where there is no
    schema (options of a reward, arguments of vLLM), and credentials in a URL (`http://NAME:KEY@host`)."""
    if isinstance(values, str):
        return _ASKS.sub(_MASK, values)
    if isinstance(values, dict):
        return {
            key: _MASK if isinstance(value, str) and value and LIKE_A_SECRET.search(key) else without_secrets(value)
            for key, value in values.items()
        }
    return [without_secrets(each) for each in values] if isinstance(values, list) else values


def _is_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(map(_is_secret, get_args(annotation)))


def known(values: dict[str, Any], config: type[BaseModel]) -> dict[str, Any]:
    """The values of a run that an earlier version may have begun: keys that moved stand where they are now, those that are none
    any more are left out and logged, for constants have taken their places."""
    for old, new in _MOVED.items():
        *tables, key = old.split(".")
        table: Any = values
        for name in tables:
            table = table.get(name) if isinstance(table, dict) else None
        if isinstance(table, dict) and key in table:
            lay(values, nested(new, table.pop(key)))
    try:
        config.model_validate(values)
    except ValidationError as error:
        gone = [problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"]
        for place in gone:
            section: Any = values
            for part in place[:-1]:
                section = section[part]
            del section[place[-1]]
        if gone:
            _log.warning("settings that are none any more: %s", ", ".join(".".join(map(str, place)) for place in gone))
    return values


def check_parameters(section: FunctionSection, config: type[BaseModel]) -> None:
    """Raises ConfigError for parameters that the function of a section does not take."""
    try:
        _ = section.arguments
    except ValidationError as error:
        name = section.decorator
        problems = ({**problem, "loc": (name, *problem["loc"])} for problem in error.errors())
        raise ConfigError(
            "; ".join(explain(problem, config, {name: {"kind": section.kind}}) for problem in problems)
        ) from error


def explain(problem: Mapping[str, Any], config: type[BaseModel], values: Mapping[str, Any] = MappingProxyType({})) -> str:
    """One problem that pydantic found in the values of a configuration: where, the value, the limit or the nearest valid
    choice."""
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where!r}{_unknown([str(part) for part in problem['loc']], problem['input'], config, values)}"
    if problem["type"] == "missing":
        return f"key {where!r} is missing and has no default"
    message = problem["msg"].removeprefix("Value error, ")
    if where in KINDS and (here := KINDS[where].get(str(problem["input"]).lower())) is not None:
        message = f"no kind has this name; here that is {here}"
    hidden = isinstance(problem["input"], dict) or where.startswith(tuple(secret_keys(config)))
    return f"{where}: {message}" if hidden else f"{where} = {problem['input']!r}: {message}"


def _unknown(given: Sequence[str], value: Any, config: type[BaseModel], values: Mapping[str, Any]) -> str:
    """The message for an unknown key: in a section with kinds, with the keys of this kind."""
    name, word = given[0], given[-1]
    section = kind_sections(config).get(name)
    if section is None or name not in values:
        return f": {nearest(given, value, config)}"
    if now := [new for old, new in _MOVED.items() if f"{old}.".startswith(f"{'.'.join(given)}.")]:
        return f": it has become {' and '.join(now)}"
    kind = values[name].get("kind", section.model_fields["kind"].default)
    kind_keys = [setting.key for setting in own_settings(section, kind)]
    near = nearest(given, value, config, [f"{name}.{key}" for key in kind_keys])
    if len(given) > 2:
        return f": {near}"
    names = sorted({key.partition(".")[0] for key in kind_keys})
    tables = {other: {entry.key.partition(".")[0] for entry in own_settings(section, other)} for other in section.kinds()}
    others = [repr(other) for other, keys in tables.items() if word in keys]
    has = f"has the key{'s' if names[1:] else ''} {', '.join(names)}" if names else "has no keys of its own"
    tail = near if not others or word in _OURS else f"it is one of {' or '.join(others)}"
    shown = "" if isinstance(value, dict) else f" = {value!r}"
    return f"{shown}: {name}.kind = {kind!r} {has}; {tail}"


def nearest(given: Sequence[str], value: Any, config: type[BaseModel], own: Sequence[str] = ()) -> str:
    """The tail of a message about an unknown key: the one that was meant, or all of its section.

    value: what it was set to; of a table that is like no section of ours, the first key in it is looked at. own: keys of its
    section's kind.
    """
    *sections, word = given
    known = [key.split(".") for key in (*(setting.key for setting in settings(config)), *own)]
    fixed = [key for key in known if NAME not in key]
    beside = {key[len(sections)] for key in known if len(key) > len(sections) and _within(sections, key)}
    matches = (
        ([_OURS[word]] if word in _OURS else [])
        or [".".join(key) for key in fixed if key[-1] == word]
        or [".".join([*sections, name]) for name in difflib.get_close_matches(word, beside, n=1, cutoff=_LIKE)]
    )
    if not matches and not sections and isinstance(value, dict) and value:
        return nearest([next(iter(value))], next(iter(value.values())), config, own)
    if not matches and (near := difflib.get_close_matches(word, {key[-1] for key in fixed}, n=1, cutoff=_MUCH_LIKE)):
        matches = [".".join(key) for key in fixed if key[-1] == near[0]]
    if not matches:
        return f"choose one of: {', '.join(sorted(beside))}"
    return f"did you mean {' or '.join(map(repr, matches))}?"


def _within(sections: Sequence[str], key: Sequence[str]) -> bool:
    return all(part in (own, NAME) for own, part in zip(sections, key, strict=False))
