"""Inside vLLM's worker processes: takes weights out of shared memory, and ends with the actor. Loaded by vLLM by name."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from async_rlhf.actors.served_model.weights import A, B, Base, adapted_parameters, with_adapter
from async_rlhf.actors.vllm_engine.weights import ACTOR_PID, IndexedWeights

if TYPE_CHECKING:
    import torch

_TOWER = re.compile(r"\bvision_tower\.(?!vision_model\.)")


class WeightLoader:
    """Mixed into vLLM's worker class (`worker_extension_cls`); `model_runner` is the worker's."""

    model_runner: Any

    def receive_weights(self, path: str) -> None:
        """Take every tensor of an index (`weights`), named as in a checkpoint, into the running model in place.

        Adapters are completed from the model directory; a tower that an index leaves out stays.
        """
        # It warns of each layer that gets no weights; which may be left out was checked.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        directory, model = Path(self.model_runner.vllm_config.model_config.model), self.model_runner.get_model()
        self.model_runner.reload_weights(weights_iterator=_named(model, _tensors(path, directory)))
        _pack_tied(model)


def _named(model: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Where a tower is SigLIP's, vLLM's names have one level more than those of transformers, as published files have."""
    has_level = hasattr(getattr(model, "vision_tower", None), "vision_model")
    for name, tensor in tensors:
        yield _TOWER.sub("vision_tower.vision_model.", name) if has_level else name, tensor


def _pack_tied(model: Any) -> None:
    """On a CPU vLLM multiplies by packed copies of weights, and a layer gets a new one when a set names it: not an output layer
    with the weights of the embeddings."""
    packed = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    times = Counter(id(layer.weight) for layer in packed)
    for layer in packed:
        if times[id(layer.weight)] > 1:
            layer.quant_method.process_weights_after_loading(layer)


def _tensors(path: str, directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    weights = IndexedWeights(path)
    adapted = adapted_parameters(weights)
    if not adapted:
        yield from weights.items()
        return
    base = Base(directory)
    for name in base.names:
        tensor = base.tensor(name)
        yield name, with_adapter(tensor, weights[name + A], weights[name + B]) if name in adapted else tensor


def end_with(actor_pid: int) -> None:
    """Kill this process and vLLM's core, its parent, when the actor is gone.

    vLLM's core does not notice by itself that the process it serves was killed.
    """
    core = os.getppid()

    def wait() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(actor_pid).wait()
        if core not in (actor_pid, 1) and os.getppid() == core:
            os.kill(core, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="end-with-actor", daemon=True).start()


# vLLM imports this module early in each worker, long before it can be called: nothing is left to an actor that was killed
# while its engine started.
if (_actor := os.environ.get(ACTOR_PID)) and int(_actor) != os.getpid():
    end_with(int(_actor))
