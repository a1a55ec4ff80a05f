"""DeepSpeed's configuration: made from the learner's settings, with the user's JSON file laid over it. Holds nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.config import LearnerConfig

# Gradients reduced at once. DeepSpeed's own 500 million hold a GB on every rank, whatever the size of the model.
_REDUCE_ELEMENTS = 50_000_000
# What the rest of the configuration decides.
_OURS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "torch_autocast",
    "tensor_parallel",
    "sequence_parallel_size",
)


def deepspeed_settings(config: LearnerConfig) -> dict[str, Any]:
    """DeepSpeed's configuration: ours, with the user's file laid over it. Raises ConfigError."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # sizes are decided in tokens, where rows are cut
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": _REDUCE_ELEMENTS,
        },
    }
    if config.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    return settings if config.deepspeed_config is None else _laid_over(settings, config.deepspeed_config)


def _laid_over(settings: dict[str, Any], path: str) -> dict[str, Any]:
    try:
        own = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"learner.deepspeed_config = {path!r} cannot be read: {error}") from error
    if not isinstance(own, dict):
        raise ConfigError(f"learner.deepspeed_config = {path!r} must hold one JSON object")
    if taken := [key for key in _OURS if key in own]:
        raise ConfigError(
            f"learner.deepspeed_config = {path!r} sets {', '.join(taken)}, which this run's own settings decide; leave it out"
        )
    stage = own.get("zero_optimization", {}).get("stage", settings["zero_optimization"]["stage"])
    if stage != settings["zero_optimization"]["stage"]:
        raise ConfigError(f"learner.deepspeed_config = {path!r} asks for ZeRO stage {stage}; set learner.zero_stage = {stage}")
    merged = {**settings, **own}
    merged["zero_optimization"] = {**settings["zero_optimization"], **own.get("zero_optimization", {})}
    return merged
