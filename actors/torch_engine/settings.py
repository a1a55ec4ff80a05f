"""Settings of the built-in engine, and what it answers for them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from async_rlhf.actors.engine_config import Demand, EngineConfig
from async_rlhf.buffers.attention import attention, unknown
from async_rlhf.buffers.config import Section
from async_rlhf.buffers.routing import SIGMOID, SOFTMAX, not_recorded

if TYPE_CHECKING:
    from async_rlhf.actors.engine import OnUpdate
    from async_rlhf.actors.torch_engine.engine import TorchEngine
    from async_rlhf.buffers.images.processor import ImageProcessor


class KVConfig(Section):
    """The keys and values of a row that stay; prompts count too. A chunk ends with a token whose text ends with one of `ends`,
    or when it has `chunk` tokens."""

    policy: Literal["full", "window", "chunk_sink"] = "full"
    """`full`: all stay; `window`: the first tokens and a recent window; `chunk_sink`: these and a token for each evicted chunk.
    Where not all stay sampling is off-policy, also at staleness 0."""
    sinks: int = Field(default=4, ge=0)
    """First tokens that stay."""
    window: int = Field(default=256, ge=1)
    """Newest tokens, each attending to itself and the `window - 1` before it."""
    representatives: int = Field(default=64, ge=1)
    """`chunk_sink`: most tokens that stand for chunks, as the first of each; the newest of what lies before the window."""
    chunk: int = Field(default=16, ge=2)
    """`chunk_sink`: longest chunk in tokens."""
    ends: tuple[str, ...] = (".", ",", "?", "!", ";", ":", "\n")
    """`chunk_sink`: what ends a chunk; `[]`: nothing but its length."""

    @field_validator("ends")
    @classmethod
    def _not_empty(cls, ends: tuple[str, ...]) -> tuple[str, ...]:
        if not all(ends):
            raise ValueError("a text that ends chunks is empty: every token would end one; [] is none")
        return ends

    @property
    def budget(self) -> int | None:
        """The most tokens whose keys and values stay; None: all."""
        if self.policy == "full":
            return None
        return self.sinks + self.window + (self.representatives if self.policy == "chunk_sink" else 0)


class TorchEngineConfig(EngineConfig):
    """The built-in engine, in the process of its actor. `kv_bytes` counts on a CPU each sequence's own tokens, elsewhere as
    many as the longest has; beyond it the newest sequences wait and are computed again. `"none"`: what `slots` sequences need.
    Held turns of episodes take as much again at most."""

    kind: Literal["torch"] = "torch"
    kv: KVConfig = KVConfig()
    cuda_graphs: bool = False
    """On a CUDA device: record the decode pass once per shape and replay it (not together with `kv_bytes`)."""
    batch_invariant: bool | None = None
    """A completion's bits do not depend on what else the engine does (`docs/generation.md`). `"none"`: true with `queue.exact`
    or `queue.max_staleness = 0` where the engine can (plain Llama, a CPU with one thread)."""
    replay_routing: bool = False
    """Of a model with experts: record which experts computed each position, and take the same in the learner's passes; see
    `docs/learner.md`."""

    def start(self, model_dir: str, *, on_update: OnUpdate, version: int, images: ImageProcessor | None = None) -> TorchEngine:
        from async_rlhf.actors.torch_engine.loading import load_engine

        return load_engine(model_dir, self, on_update=on_update, version=version, images=images)

    def served(self, *, asks_for_bits: bool, share: float | None) -> TorchEngineConfig:
        """With `batch_invariant` decided as far as it can be without the model."""
        if self.batch_invariant is None and (not asks_for_bits or self.cannot_be_invariant):
            return self.model_copy(update={"batch_invariant": False})
        return self

    @property
    def plain(self) -> TorchEngineConfig:
        return self.model_copy(update={"kv": KVConfig(), "replay_routing": False})

    @property
    def bits_obstacle(self) -> str:
        return "engine.batch_invariant = false" if self.batch_invariant is False else self.cannot_be_invariant

    @property
    def cannot_be_invariant(self) -> str:
        """The setting with which nothing is batch invariant and what it would have to be; empty where there is none."""
        if self.device != "cpu" or self.cuda_graphs:
            return f"engine.device = {self.device!r} and engine.cuda_graphs = {str(self.cuda_graphs).lower()}; only 'cpu' can"
        if self.dtype == "float16":
            return f"engine.dtype = {self.dtype!r}; only 'float32' and 'bfloat16' can"
        if self.off_policy:
            return f"{self.off_policy}; only 'full' can"
        return f"engine.threads = {self.threads}; only 1 can" if self.threads != 1 else ""

    @property
    def off_policy(self) -> str:
        return "" if self.kv.budget is None else f"engine.kv.policy = {self.kv.policy!r}"

    @property
    def records_routing(self) -> bool:
        return self.replay_routing

    def images_obstacle(self, model_type: str) -> str:
        if self.cuda_graphs:
            return "engine.cuda_graphs = true; set it to false"
        return f"{self.off_policy}; set engine.kv.policy = 'full'" if self.off_policy else ""

    def refusals(self, longest: int) -> Iterator[str]:
        if self.batch_invariant and (obstacle := self.cannot_be_invariant):
            yield f'engine.batch_invariant = true with {obstacle}. Set that, or engine.batch_invariant = "none".'
        if not self.off_policy:
            return
        if self.cuda_graphs:
            yield (
                f"{self.off_policy} with engine.cuda_graphs = true: which columns are read is decided anew for each token. "
                "Set engine.cuda_graphs = false"
            )
        if self.replay_routing:
            yield (
                f"engine.replay_routing = true with {self.off_policy}: experts stand beside keys and values, and those are "
                "evicted. Set engine.kv.policy = 'full', or engine.replay_routing = false"
            )
        if (kept := self.kv.sinks + self.kv.window) >= longest:
            yield (
                f"{self.off_policy} with engine.kv.sinks + engine.kv.window = {kept} never evicts a token: prompt and "
                f"completion have {longest} at most. Highest: engine.kv.window = {max(1, longest - self.kv.sinks - 1)}; or set "
                "engine.kv.policy = 'full'"
            )

    def model_refusals(self, text: Mapping[str, Any]) -> Iterator[str]:
        kind = str(text.get("model_type"))
        if (reaches := attention(text)) is None:
            yield unknown(kind)
        else:
            yield from self.window_refusals(reaches.window, kind)
        if self.batch_invariant and kind != "llama":
            yield f'engine.batch_invariant = true with model type {kind!r}; only plain Llama can. Set it to "none".'
        if self.replay_routing and kind not in SOFTMAX | SIGMOID:
            yield not_recorded(kind)

    def window_refusals(self, window: int | None, model_type: str) -> Iterator[str]:
        """window: how far the layers of the model attend that attend least far, None where all see everything before."""
        if self.off_policy and window is not None:
            yield (
                f"{self.off_policy}: layers of model type {model_type!r} attend to {window} tokens only, and the policy is for "
                "layers that attend to everything before. Set engine.kv.policy = 'full'"
            )

    def unused(self) -> Iterator[tuple[str, str]]:
        if not self.off_policy:
            yield "engine.kv", "engine.kv.policy = 'window' and 'chunk_sink'"

    def compared(self, model_dir: str, images: ImageProcessor | None = None) -> str:
        from async_rlhf.actors.torch_engine.loading import load_engine

        bits = ", the same bits alone and in a batch" if load_engine(model_dir, self, images=images).is_batch_invariant else ""
        return f"sampled log-probabilities are those of plain passes{bits}"

    def memory(self, demand: Demand, room: int | None) -> dict[str, int]:
        """Between turns keys and values of as many tokens are held as its rows have room for."""
        kept = self.kv.budget
        parts = super().memory(demand if kept is None else replace(demand, longest=kept + 1), room)
        return parts | ({"held between turns": parts["keys and values"]} if demand.holds else {})
