"""Settings of vLLM, and what it answers for them. Imports nothing of vLLM."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from async_rlhf.actors.engine_config import Demand, EngineConfig
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.sampling import Sampling

if TYPE_CHECKING:
    from async_rlhf.actors.engine import OnUpdate
    from async_rlhf.actors.vllm_engine.engine import VLLMEngine
    from async_rlhf.buffers.images.processor import ImageProcessor

CPU_KV_BYTES = 1 << 30
"""Keys and values on a CPU where the configuration names no limit: vLLM would take most of its memory."""
# Families whose images it reads, and whose new weights it takes, as transformers does.
_READS = ("idefics3", "internvl", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "smolvlm")
# Tokens of an image see each other there, for which vLLM has no attention on a CPU; on a GPU it was not held to plain passes.
_READS_NOT = {"gemma3": " (vLLM's attention on a CPU hides tokens of an image from those before them)"}
# What vLLM takes of a GPU when nothing is set (0.32).
_GPU_SHARE = 0.92
_SHARE = "gpu_memory_utilization"


class VLLMEngineConfig(EngineConfig):
    """The real vLLM, in processes of its own; needs the extra of that name. `kv_bytes = "none"` is 1 GiB on a CPU, and vLLM's
    own share of a GPU's memory."""

    needs = ("vllm",)
    kind: Literal["vllm"]
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices (on a CPU: processes) one engine is spread over."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, by its names (`max_model_len = 4096`)."""

    def start(self, model_dir: str, *, on_update: OnUpdate, version: int, images: ImageProcessor | None = None) -> VLLMEngine:
        from async_rlhf.actors.vllm_engine.loading import load_engine

        return load_engine(model_dir, self, on_update=on_update, version=version, images=images)

    def served(self, *, asks_for_bits: bool, share: float | None) -> VLLMEngineConfig:
        if share is None or self.device != "cuda":
            return self
        return self.model_copy(update={"arguments": {_SHARE: share, **self.arguments}})

    def unrecorded(self, sampling: Sampling) -> str:
        if sampling.top_k > 0 or self.arguments.get("return_sampling_mask"):
            return ""
        return (
            "vLLM does not report what is left unless top_k is set too. Set generation.top_k as well (64 is rarely felt beside "
            "top_p), engine.kind = 'torch', on a GPU engine.arguments.return_sampling_mask = true"
        )

    def images_obstacle(self, model_type: str) -> str:
        if model_type in _READS:
            return ""
        why = _READS_NOT.get(model_type, "")
        return f"engine.kind = {self.kind!r}, which reads images for {', '.join(_READS)}, not {model_type}{why}; 'torch' can"

    def compared(self, model_dir: str, images: ImageProcessor | None = None) -> str:
        """Behind images, where the model reads some."""
        if images is None:
            return super().compared(model_dir)
        self.start(model_dir, on_update="keep", version=-1, images=images).close()
        return "behind images sampled log-probabilities are those of plain passes"

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel_size * int(self.arguments.get("pipeline_parallel_size", 1))

    def device_share(self, allowed: float) -> float:
        if self.kv_bytes is not None or self.device == "cpu":
            return allowed
        if (share := float(self.arguments.get(_SHARE, _GPU_SHARE))) > allowed:
            raise ConfigError(
                f"engine.arguments.{_SHARE} = {share:g} is more than placement.actor_share = {allowed:g}; leave it out, and it "
                "is that"
            )
        return share

    def memory(self, demand: Demand, room: int | None) -> dict[str, int]:
        parts = super().memory(demand, room)
        if self.kv_bytes is not None:
            return parts
        rest = CPU_KV_BYTES if self.device == "cpu" else (room or 0) - parts["weights"]
        cache = max(demand.longest * self.token_bytes(demand.shape), rest)
        return {"weights": parts["weights"], "keys and values": cache}

    def nearest(self, demand: Demand, left: int, size: int) -> str:
        limit = min(left, int(self.device_share(1.0) * size))
        for devices in range(self.tensor_parallel_size, 9):
            changed = self.model_copy(update={"tensor_parallel_size": devices})
            if sum(changed.memory(demand, limit).values()) <= limit and demand.shape.heads % devices == 0:
                if devices > self.tensor_parallel_size:
                    return f"nearest that fits: engine.tensor_parallel_size = {devices}"
                return f"nearest that fits: engine.arguments.{_SHARE} = {math.floor(100 * left / size) / 100:g}"
        return "use a smaller model, or larger devices"
