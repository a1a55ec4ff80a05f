"""From our configuration to vLLM's: engine arguments and environment. Starts nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from async_rlhf.actors.config import EngineConfig
from async_rlhf.buffers.errors import ConfigError, did_you_mean

EXTENSION = "async_rlhf.actors.vllm_engine.worker.WeightLoader"
# Names the process that vLLM's processes may not outlive.
ACTOR_PID = "ASYNC_RLHF_ACTOR_PID"

# Keys and values where the configuration names no limit: vLLM would take most of a CPU's memory.
_CPU_KV_BYTES = 1 << 30


def engine_arguments(
    model_dir: str, config: EngineConfig, *, context: int, has_tokenizer: bool, known: Collection[str]
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs; `known` are the names it takes.

    context: longest sequence of the model, 0 where it names none.

    Raises ConfigError for an argument that vLLM does not know or that the configuration sets elsewhere.
    """
    on_cpu, asked = config.device == "cpu", config.vllm.arguments
    tokens_a_step = config.prefill_tokens + config.slots + 1
    ours: dict[str, Any] = {
        "model": model_dir,
        "dtype": config.dtype,
        "tensor_parallel_size": config.vllm.tensor_parallel_size,
        # A place for the canary's probe, so that it does not wait behind what is being generated.
        "max_num_seqs": config.slots + 1,
        "max_num_batched_tokens": tokens_a_step,
        "kv_cache_memory_bytes": config.kv_bytes or (_CPU_KV_BYTES if on_cpu else None),
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
    if on_cpu:
        # On a CPU a request with a seed ends vLLM when its prompt is computed in parts, so each is computed whole.
        whole = max(tokens_a_step, int(asked.get("max_model_len", context)))
        ours |= {"enable_chunked_prefill": False, "max_num_batched_tokens": whole}
    for name in asked:
        if name in ours:
            raise ConfigError(f"engine.vllm.arguments.{name} is set by other settings (engine, model); remove it")
        if name not in known:
            raise ConfigError(f"engine.vllm.arguments.{name}: vLLM has no such argument; {did_you_mean(name, known)}")
    return {**defaults, **asked, **ours}


def environment(config: EngineConfig, enforce_eager: bool, actor_pid: int, given: Mapping[str, str]) -> dict[str, str]:
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
