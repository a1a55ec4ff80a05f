"""From our configuration to vLLM's: engine arguments, environment, and what the installed vLLM can do. Starts nothing.

vLLM's interfaces move from release to release: what generation needs is refused by name before an engine is started; what it
can do without is named in the log.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from async_rlhf.actors.config import EngineConfig
from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.sampling import Sampling

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


TESTED = "0.32.0"


@dataclass(frozen=True)
class Capabilities:
    """names_versions: the engine reports which weights sampled a token; else a completion counts as its oldest weights'.

    flat_logprobs: log-probabilities come as flat lists, which spares an object per token.
    partials: it reports what a request has written every so many tokens; else rewards have no incremental scoring.
    sampling: which fields of `Sampling` it has, by the same names; a request that sets another is refused.
    """

    names_versions: bool
    flat_logprobs: bool
    partials: bool = False
    sampling: frozenset[str] = frozenset(Sampling.model_fields)

    @property
    def lacking(self) -> tuple[str, ...]:
        """What this vLLM does without, in words."""
        said = {
            "version labels (AsyncLLM.update_weight_version): tokens around an update count as the older version's": self.names_versions,  # noqa: E501
            "flat log-probabilities (SamplingParams.flat_logprobs): a little slower": self.flat_logprobs,
            "outputs in between (SamplingParams.stream_interval): rewards have no incremental scoring": self.partials,
        }
        unknown = [f"SamplingParams.{name}" for name in Sampling.model_fields if name not in self.sampling]
        return (*(text for text, has in said.items() if not has), *unknown)


def probe(async_llm: type, engine_arguments: type, sampling_params: type, version: str) -> Capabilities:
    """What these classes of vLLM offer. Raises ConfigError that names all that is needed and missing."""
    needed = {
        "AsyncLLM.pause_generation(mode, clear_cache)": _takes(async_llm, "pause_generation", {"mode", "clear_cache"}),
        "AsyncLLM.resume_generation": _takes(async_llm, "resume_generation", set()),
        "AsyncLLM.collective_rpc(method, args)": _takes(async_llm, "collective_rpc", {"method", "args"}),
        **{f"AsyncEngineArgs.{name}": name in _fields(engine_arguments) for name in _ARGUMENTS},
        **{f"SamplingParams.{name}": name in _fields(sampling_params) for name in _SAMPLING},
    }
    missing = [name for name, has in needed.items() if not has]
    if missing:
        raise ConfigError(
            f"engine.kind = 'vllm': vLLM {version} lacks {', '.join(missing)}; install vllm {TESTED}, or use 'torch'"
        )
    return Capabilities(
        names_versions=hasattr(async_llm, "update_weight_version"),
        flat_logprobs="flat_logprobs" in _fields(sampling_params),
        partials="stream_interval" in _fields(sampling_params),
        sampling=frozenset(Sampling.model_fields.keys() & _fields(sampling_params)),
    )


_ARGUMENTS = ("worker_extension_cls", "logprobs_mode", "max_logprobs", "kv_cache_memory_bytes", "enable_prefix_caching")
_SAMPLING = ("temperature", "seed", "top_k", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "output_kind")


def _takes(owner: type, method: str, names: set[str]) -> bool:
    function: Any = getattr(owner, method, None)
    return function is not None and names <= set(inspect.signature(function).parameters)


def _fields(kind: type) -> set[str]:
    """Field names of a dataclass, or of a struct that lists them."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set(getattr(kind, "__struct_fields__", ()))
