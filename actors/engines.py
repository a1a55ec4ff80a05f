"""From `engine.kind` to an engine. Imports that engine and no other: each brings its own heavy library."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Engine, OnUpdate
from async_rlhf.buffers.errors import ConfigError

if TYPE_CHECKING:
    from typing import Protocol

    class _Module(Protocol):
        def load_engine(
            self, model_dir: str, config: EngineConfig, *, on_update: OnUpdate = ..., version: int = ...
        ) -> Engine: ...


MODULES = {"torch": "async_rlhf.actors.torch_engine.loading", "vllm": "async_rlhf.actors.vllm_engine.loading"}


def load_engine(model_dir: str, config: EngineConfig, *, on_update: OnUpdate = "keep", version: int = -1) -> Engine:
    """The engine of this kind, serving the weights of `model_dir` stamped `version`.

    Raises ConfigError when its library is not installed, or the engine refuses the model or the configuration.
    """
    try:
        module = cast("_Module", import_module(MODULES[config.kind]))
    except ImportError as error:
        raise ConfigError(
            f"engine.kind = {config.kind!r} cannot be used: {error}; install the extra of that name, or use 'torch'"
        ) from error
    return module.load_engine(model_dir, config, on_update=on_update, version=version)
