"""Settings of the machine that turns prompts into tokens: the keys that every engine has, and what a run asks of it. No torch.

An engine is a folder beside this file. Its settings are a subclass of `EngineConfig` with keys of its own, which answers for
them; `ENGINES` names it, and nothing outside the folder asks which engine it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from async_rlhf.buffers.config import KindSection
from async_rlhf.buffers.errors import did_you_mean
from async_rlhf.buffers.files import written
from async_rlhf.buffers.model_directory import TYPE_BYTES, ModelShape
from async_rlhf.buffers.sampling import Sampling

if TYPE_CHECKING:
    from async_rlhf.actors.engine import Engine, OnUpdate

ENGINES = {
    "torch": "async_rlhf.actors.torch_engine.settings:TorchEngineConfig",
    "vllm": "async_rlhf.actors.vllm_engine.settings:VLLMEngineConfig",
}
"""By `engine.kind`: the class of its settings."""
_CACHES = ("keys and values", "held between turns")


@dataclass(frozen=True)
class Demand:
    """An engine's memory demand."""

    shape: ModelShape
    longest: int
    """Largest number of tokens of a row."""
    holds: bool
    """Whether rows are kept between turns of episodes."""
    reading: int = 0
    """Bytes for images: of what is kept of them, and of a pass over a prompt's."""


class EngineConfig(KindSection):
    """The machine that turns prompts into tokens. Beside these keys each engine has keys of its own."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Packages; the extra that brings them has the name of the kind."""
    kind: str = "torch"
    """Which of the engines below."""
    slots: int = Field(default=128, ge=1, le=65536)
    """Sequences decoded together."""
    device: str = "cpu"
    """Torch device of the engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and activations; log-probabilities are float32 always."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of one actor's engine."""
    prefill_tokens: int = Field(default=2048, ge=1)
    """Prompt tokens (and recomputed prefixes) computed in one step beside the decoding."""
    kv_bytes: int | None = Field(default=None, ge=1)
    """Most bytes of keys and values. `"none"`: the default of each engine, below."""
    canary_limit: float | None = Field(default=None, gt=0)
    """Largest difference, in nats a token, of learner and engine on the probe; above it the actor does not generate. `"none"`:
    0.001 in float32, 0.5 in 16 bits."""
    mismatch_limit: float | None = Field(default=None, gt=0)
    """Largest mean |log-ratio| of learner and engine over tokens sampled from the weights a step begins with; above it the run
    ends. `"none"`: 0.01 in float32, else 0.1; no limit where the engine samples from another distribution."""

    @classmethod
    def kinds(cls) -> Collection[str]:
        return ENGINES

    @classmethod
    def of_kind(cls, kind: str) -> type[EngineConfig]:
        module, _, name = ENGINES[kind].partition(":")
        found: type[EngineConfig] = getattr(import_module(module), name)
        return found

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Any:
        if cls is not EngineConfig or not isinstance(values, dict):
            return handler(values)
        kind = values.get("kind", cls.model_fields["kind"].default)
        if not isinstance(kind, str) or kind not in ENGINES:
            return handler({"kind": kind})  # which is refused
        return cls.of_kind(kind).model_validate(values)

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in ENGINES:
            raise ValueError(f"there is no such engine; {did_you_mean(kind, ENGINES)}")
        return kind

    @abstractmethod
    def start(self, model_dir: str, *, on_update: OnUpdate, version: int) -> Engine:
        """The engine, serving the weights of `model_dir` stamped `version`. Raises ImportError without its packages,
        ConfigError where it refuses the model or these settings."""

    # Consequences of other settings of the run

    def served(self, *, asks_for_bits: bool, share: float | None) -> EngineConfig:
        """With what other settings decide. asks_for_bits: completions are to have the same bits in any batch, where it can.
        share: of a device's memory, where the device is not its own."""
        return self

    @property
    def plain(self) -> EngineConfig:
        """As evaluations have it: it samples from the model's own distribution, and records no more than is needed for that."""
        return self

    @property
    def canary_tolerance(self) -> float:
        """The limit in force."""
        return self.canary_limit or (1e-3 if self.dtype == "float32" else 0.5)

    # Its abilities, and their obstacles

    @property
    def bits_obstacle(self) -> str:
        """The setting for which its completions have other bits in another batch, and what it would have to be; empty where
        they have the same."""
        return f"engine.kind = {self.kind!r}; only 'torch' can"

    @property
    def off_policy(self) -> str:
        """The setting with which it samples from another distribution than the model's; empty where there is none."""
        return ""

    @property
    def records_routing(self) -> bool:
        """Whether completions carry the experts that computed them."""
        return False

    def images_obstacle(self, model_type: str) -> str:
        """The setting with which it reads no images for a model, and what it would have to be; empty where it reads some:
        `start` and `compared` then take what prepares them, by the name `images`."""
        return f"engine.kind = {self.kind!r}; only 'torch' and 'vllm' read images"

    def unrecorded(self, sampling: Sampling) -> str:
        """Why it does not report what truncation leaves to sample from, and which setting helps; empty where it does."""
        return ""

    def refusals(self, longest: int) -> Iterator[str]:
        """A message for each setting that cannot be had beside the others. longest: tokens of a row at most."""
        yield from ()

    def model_refusals(self, text: Mapping[str, Any]) -> Iterator[str]:
        """The same for a model. text: of its config.json, what is about text."""
        yield from ()

    def unused(self) -> Iterator[tuple[str, str]]:
        """Settings that change nothing beside the others, and what they are about."""
        yield from ()

    def compared(self, model_dir: str) -> str:
        """Loads it and holds it to plain passes, where it can do that alone; what came of it. Raises ConfigError."""
        return f"{self.kind} is held to the learner while the run goes on (engine.mismatch_limit)"

    # Devices and memory

    @property
    def num_devices(self) -> int:
        """Devices (on a CPU: processes) one engine is spread over."""
        return 1

    def device_share(self, allowed: float) -> float:
        """The share of a device's memory that it takes of an allowed one. Raises ConfigError where it is set to take more."""
        return allowed

    def token_bytes(self, shape: ModelShape) -> int:
        """Keys and values of one token, on each device."""
        return 2 * shape.layers * shape.key_heads * TYPE_BYTES[self.dtype] // self.num_devices

    def memory(self, demand: Demand, room: int | None) -> dict[str, int]:
        """Bytes on each of its devices, by what they hold. room: those that there are, for an engine that takes all it may."""
        size, shape = TYPE_BYTES[self.dtype], demand.shape
        working = size * self.prefill_tokens * (8 * shape.width + 3 * shape.mlp) + 3 * 4 * self.slots * shape.vocabulary
        return {
            "weights": size * shape.parameters // self.num_devices,
            "keys and values": self.kv_bytes or self.slots * demand.longest * self.token_bytes(shape),
            "activations": working,
        } | ({"images": demand.reading} if demand.reading else {})

    def nearest(self, demand: Demand, left: int, size: int) -> str:
        """Advice for a fit. left: bytes of a device for the engine itself; size: of the whole device."""
        parts = self.memory(demand, left)
        caches = [name for name in _CACHES if name in parts]
        rest = sum(parts.values()) - sum(parts[name] for name in caches)
        if (room := (left - rest) // len(caches)) > 0:
            return f"nearest that fits: engine.kv_bytes = {room}"
        other = "use engine.dtype = 'bfloat16', vLLM over several devices, or a smaller model"
        return f"without keys and values it takes {written(rest)}: {other}"
