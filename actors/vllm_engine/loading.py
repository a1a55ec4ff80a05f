"""From a model directory and our configuration to a running vLLM: arguments, the environment of its processes, its start."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from async_rlhf.actors.engine import OnUpdate
from async_rlhf.actors.served_model.files import find_stop_ids, find_tokenizer, read_model
from async_rlhf.actors.served_model.reading import check_behind_images
from async_rlhf.actors.served_model.weights import Base
from async_rlhf.actors.vllm_engine.engine import VLLMEngine
from async_rlhf.actors.vllm_engine.settings import CPU_KV_BYTES, VLLMEngineConfig
from async_rlhf.actors.vllm_engine.weights import ACTOR_PID, EXTENSION
from async_rlhf.buffers.attention import max_length as longest_text
from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.tower import ImageTower
from async_rlhf.buffers.model_directory import LOADING, from_pretrained, language_model, load_whole, reads_images

# Of the extra. vLLM's interfaces move from release to release; before 0.32 a completion has no `weight_versions`.
RELEASES = ("0.32.", "0.33.")
# Behind images, in nats: rounding of other kernels makes a hundredth of it, a wrong place or array some times as much.
_MAX_DIFFERENCE = {"float32": 5e-3, "bfloat16": 0.1, "float16": 0.05}


def load_engine(
    model_dir: str,
    config: VLLMEngineConfig,
    *,
    on_update: OnUpdate = "keep",
    version: int = -1,
    images: ImageProcessor | None = None,
) -> VLLMEngine:
    """An engine that serves the weights of `model_dir`, stamped `version`. images: prepares those of prompts.

    Changes the environment of this process, which vLLM's processes inherit.
    Raises ImportError without vLLM, ConfigError when it or the configuration cannot be used, EngineError when it does not
    start.
    """
    model = _skeleton(model_dir, config.dtype)
    if images is not None and (obstacle := config.images_obstacle(str(model.config.model_type))):
        raise ConfigError(f"model {model_dir!r} is to read images, with {obstacle}")
    tokenizer = find_tokenizer(model_dir)
    enforce_eager = bool(config.arguments.get("enforce_eager", config.device == "cpu"))
    os.environ.update(environment(config, enforce_eager, os.getpid(), os.environ))
    # Only now: vLLM reads the environment when it is imported.
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if not vllm.__version__.startswith(RELEASES):
        raise ConfigError(
            f"engine.kind = 'vllm': vLLM {vllm.__version__} is installed, {'* or '.join(RELEASES)}* is needed "
            "(before 0.32 it does not say which weights sampled which token); install the extra of that name, or use 'torch'"
        )
    if current_platform.device_type != config.device:
        raise ConfigError(
            f"engine.device = {config.device!r}, but the installed vLLM is built for {current_platform.device_type!r}; "
            "set engine.device to that, and choose among several GPUs with CUDA_VISIBLE_DEVICES"
        )
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    context = longest_text(model.config.get_text_config().to_dict()) or 0
    arguments = engine_arguments(model_dir, config, context=context, has_tokenizer=tokenizer is not None, known=known)
    engine = VLLMEngine(
        lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)),
        model,
        slots=config.slots,
        stop_ids=sorted(find_stop_ids(model, tokenizer)),
        has_tokenizer=tokenizer is not None,
        base=Base(Path(model_dir)),
        on_update=on_update,
        version=version,
        images=images,
    )
    if images is not None:
        _check_reading(engine, Path(model_dir), config, images)
    return engine


def _check_reading(engine: VLLMEngine, directory: Path, config: VLLMEngineConfig, images: ImageProcessor) -> None:
    """Raises ConfigError, and closes it, where it does not read images as plain passes on the CPU do."""
    try:
        model = load_whole(language_model(directory), directory, dtype=getattr(torch, config.dtype)).eval()
        refused = partial(_refused, model.config.model_type)
        check_behind_images(engine, ImageTower(model, images.another()), _MAX_DIFFERENCE[config.dtype], refused)
    except BaseException:  # an interrupt too: vLLM's processes must not outlive a start that was given up
        engine.close()
        raise


def _refused(kind: str, what: str) -> ConfigError:
    return ConfigError(f"model type {kind!r} cannot be served with images by vLLM: {what}. Set engine.kind = 'torch'")


def _skeleton(model_dir: str, dtype: str) -> PreTrainedModel:
    """The model without its numbers: names, shapes and dtypes of its parameters, and its configurations."""

    def made(directory: Path) -> PreTrainedModel:
        config = from_pretrained(AutoConfig, directory)
        with LOADING, torch.device("meta"):
            return language_model(directory).from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)

    model = read_model(model_dir, made)
    if (Path(model_dir) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    return model


def engine_arguments(
    model_dir: str, config: VLLMEngineConfig, *, context: int, has_tokenizer: bool, known: Collection[str]
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs; `known` are the names it takes.

    context: longest sequence of the model, 0 where it names none.

    Raises ConfigError for an argument that vLLM does not know or that the configuration sets elsewhere.
    """
    on_cpu, asked = config.device == "cpu", config.arguments
    tokens_a_step = config.prefill_tokens + config.slots + 1
    ours: dict[str, Any] = {
        "model": model_dir,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel_size,
        # A place for the canary's probe, so that it does not wait behind what is being generated.
        "max_num_seqs": config.slots + 1,
        "max_num_batched_tokens": tokens_a_step,
        "kv_cache_memory_bytes": config.kv_bytes or (CPU_KV_BYTES if on_cpu else None),
        # Of the distribution really sampled from: after temperature and truncation.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": not has_tokenizer,
        "trust_remote_code": False,
    }
    defaults: dict[str, Any] = {
        "max_model_len": -1,  # as long as fits
        "max_logprobs": -1,
        "enable_prefix_caching": True,
        # On a CPU compilation takes longer than most runs gain by it.
        "enforce_eager": on_cpu,
        "disable_log_stats": True,
    }
    if reads_images(Path(model_dir)):
        # What is given has been prepared once, and is normalised; images have names, so nothing is hashed.
        ours |= {"mm_processor_cache_gb": 0, "mm_device_do_normalize": False}
        defaults |= {"mm_hasher_algorithm": "sha256", "limit_mm_per_prompt": {"video": 0}}
    if on_cpu:
        # On a CPU a request with a seed ends vLLM when its prompt is computed in parts, so each is computed whole.
        whole = max(tokens_a_step, int(asked.get("max_model_len", context)))
        ours |= {"enable_chunked_prefill": False, "max_num_batched_tokens": whole}
    for name in asked:
        if name in ours:
            raise ConfigError(f"engine.arguments.{name} is set by other settings (engine, model); remove it")
        if name not in known:
            raise ConfigError(f"engine.arguments.{name}: vLLM has no such argument; {did_you_mean(name, known)}")
    return {**defaults, **asked, **ours}


def environment(config: VLLMEngineConfig, enforce_eager: bool, actor_pid: int, given: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before vLLM is imported; what the user has `given` stays, but for the number of threads."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Several actors share the machine: binding each one's threads to the first core would stack them on it.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if config.device == "cpu" and enforce_eager:
        defaults["TORCH_COMPILE_DISABLE"] = "1"  # parts of the sampler compile even so, for 20 s and with a C++ compiler
    kept = {name: value for name, value in defaults.items() if name not in given}
    return {**kept, "OMP_NUM_THREADS": str(config.threads), ACTOR_PID: str(actor_pid)}
