"""What the installed vLLM can do. Its interfaces move from release to release; nothing here is taken for granted.

What generation cannot do without is refused by name before an engine is started; what it can do without is named in the
log and done the careful way.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

from async_rlhf.buffers.errors import ConfigError

TESTED = "0.32.0"


@dataclass(frozen=True)
class Capabilities:
    """names_versions: the engine says which weights sampled a token; else a completion counts as its oldest weights'.

    flat_logprobs: log-probabilities come as flat lists, which spares an object per token.
    partials: it reports what a request has written every so many tokens; else rewards have no incremental scoring.
    """

    names_versions: bool
    flat_logprobs: bool
    partials: bool = False

    @property
    def lacking(self) -> tuple[str, ...]:
        """What this vLLM does without, in words."""
        said = {
            "version labels (AsyncLLM.update_weight_version): tokens around an update count as the older version's": self.names_versions,  # noqa: E501
            "flat log-probabilities (SamplingParams.flat_logprobs): a little slower": self.flat_logprobs,
            "outputs in between (SamplingParams.stream_interval): rewards have no incremental scoring": self.partials,
        }
        return tuple(text for text, has in said.items() if not has)


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
    )


_ARGUMENTS = ("worker_extension_cls", "logprobs_mode", "max_logprobs", "kv_cache_memory_bytes", "enable_prefix_caching")
_SAMPLING = ("seed", "top_k", "top_p", "min_p", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "output_kind")


def _takes(owner: type, method: str, names: set[str]) -> bool:
    function: Any = getattr(owner, method, None)
    return function is not None and names <= set(inspect.signature(function).parameters)


def _fields(kind: type) -> set[str]:
    """Field names of a dataclass, or of a struct that lists them."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set(getattr(kind, "__struct_fields__", ()))
