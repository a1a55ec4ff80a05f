"""From a model directory to a running vLLM. Opens files, sets the environment of vLLM's processes, starts them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import OnUpdate
from async_rlhf.actors.torch_engine.loading import find_stop_ids, find_tokenizer
from async_rlhf.actors.torch_engine.weights import Base
from async_rlhf.actors.vllm_engine.arguments import engine_arguments, environment
from async_rlhf.actors.vllm_engine.engine import VLLMEngine
from async_rlhf.buffers.attention import max_length as longest_text
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.model_directory import LOADING, from_pretrained

# Of the extra. vLLM's interfaces move from release to release.
RELEASE = "0.32."


def load_engine(model_dir: str, config: EngineConfig, *, on_update: OnUpdate = "keep", version: int = -1) -> VLLMEngine:
    """An engine that serves the weights of `model_dir`, stamped `version`.

    Changes the environment of this process, which vLLM's processes inherit.
    Raises ImportError without vLLM, ConfigError when it or the configuration cannot be used, EngineError when it does not
    start.
    """
    model = _skeleton(model_dir, config.dtype)
    tokenizer = find_tokenizer(model_dir)
    enforce_eager = bool(config.vllm.arguments.get("enforce_eager", config.device == "cpu"))
    os.environ.update(environment(config, enforce_eager, os.getpid(), os.environ))
    # Only now: vLLM reads the environment when it is imported.
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if not vllm.__version__.startswith(RELEASE):
        raise ConfigError(
            f"engine.kind = 'vllm': vLLM {vllm.__version__} is installed, {RELEASE}* is needed; install the extra of that "
            "name, or use 'torch'"
        )
    if current_platform.device_type != config.device:
        raise ConfigError(
            f"engine.device = {config.device!r}, but the installed vLLM is built for {current_platform.device_type!r}; "
            "set engine.device to that, and choose among several GPUs with CUDA_VISIBLE_DEVICES"
        )
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    context = longest_text(model.config.get_text_config().to_dict()) or 0
    arguments = engine_arguments(model_dir, config, context=context, has_tokenizer=tokenizer is not None, known=known)
    return VLLMEngine(
        lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)),
        model,
        slots=config.slots,
        stop_ids=sorted(find_stop_ids(model, tokenizer)),
        has_tokenizer=tokenizer is not None,
        base=Base(Path(model_dir)),
        on_update=on_update,
        version=version,
    )


def _skeleton(model_dir: str, dtype: str) -> PreTrainedModel:
    """The model without its numbers: names, shapes and dtypes of its parameters, and its configurations."""
    if not (Path(model_dir) / "config.json").is_file():
        raise ConfigError(f"model {model_dir!r} is no model directory: it has no config.json; give a local directory")
    try:
        config = from_pretrained(AutoConfig, Path(model_dir))
        with LOADING, torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {model_dir!r} is no causal language model: {error}") from error
    if (Path(model_dir) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    return model
