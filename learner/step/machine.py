"""One rank's model and optimizer: what differs between plain torch and DeepSpeed. A step (`update`) drives it.

Where `collective` is True all methods are called on all ranks at once; else those of a step and `load` are, and the rest on
rank 0 only. Batches come on the machine's device.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from async_rlhf.buffers.errors import ConfigError, NonFiniteError
from async_rlhf.buffers.protocol.manifest import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.model import lora
from async_rlhf.learner.model.files import load_model, saved_weights
from async_rlhf.learner.model.policy import Policy
from async_rlhf.learner.parallel.devices import take_device
from async_rlhf.learner.parallel.ranks import Ranks

# Enough that a wrong tensor anywhere shows, few enough to cost nothing beside a step.
_PROBE_TOKENS = 128


@dataclass(frozen=True)
class MachineSettings:
    """publish_dtype: what the engines serve. with_reference: a frozen reference is held here."""

    model_dir: Path
    learner: LearnerConfig
    publish_dtype: str = "float32"
    with_reference: bool = False


class Machine(ABC):
    """`policy` learns. Raises ConfigError when `model_dir` holds no causal language model or the device is not there."""

    collective = False
    policy: Policy

    def __init__(self, settings: MachineSettings, ranks: Ranks) -> None:
        self.config, self.settings, self._ranks = settings.learner, settings, ranks
        torch.set_num_threads(self.config.threads)
        self.publish_dtype: torch.dtype = getattr(torch, settings.publish_dtype)
        self.device = take_device(self.config.device, ranks.rank)
        self._reference: Callable[[MicroBatch], Any] | None = None
        self._leaving: dict[str, Tensor] = {}

    def _load_reference(self, device: torch.device) -> Policy:
        """The model that training began with, frozen."""
        kind = self.config.reference_dtype
        model = load_model(self.settings.model_dir, device, getattr(torch, kind)).requires_grad_(False)
        computed = self.config.dtype if kind == "float32" else kind
        reference = Policy(model, self.config.model_copy(update={"dtype": computed}))
        reference.packs = self.policy.packs
        return reference

    def _saved(self, directory: Path, own: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint has, by part: `model` (its adapters, where those learn), `optimizer`, `critic`. On the CPU of every
        rank; rank 0 reads it, for the others may be on hosts that have no such file. own: the names and shapes of what learns.

        Raises CheckpointError.
        """

        def read() -> dict[str, Tensor]:
            learned = lora.read_adapter(directory / "adapter", own) if self.config.lora.rank else saved_weights(directory, own)
            parts = {"model": learned, "optimizer": load_file(directory / "optimizer.safetensors")}
            if self.policy.critic is not None:
                parts["critic"] = load_file(directory / "critic.safetensors")
            return {f"{part} {name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

        found: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "critic": {}}
        for key, tensor in self._ranks.shared(read).items():
            part, _, name = key.partition(" ")
            found[part][name] = tensor
        return found

    def reference(self, batch: MicroBatch) -> Tensor | None:
        """[N]: log-probabilities under the frozen reference, or None without one."""
        return None if self._reference is None else self._reference(batch)[0]

    def learn_at(self, rate: float) -> None:
        """From the next update on `learner.learning_rate` is this."""
        if rate != self.config.learning_rate:
            self.config = self.config.model_copy(update={"learning_rate": rate})

    @abstractmethod
    def predict(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """([N], [N], [N] or None): log-probability, entropy and value of each token, with gradients where they are on."""

    @abstractmethod
    def begin(self) -> None:
        """Forget the gradient."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add this rank's gradient; after the `last` of an update it is summed over the ranks."""

    def gradient(self) -> Tensor:
        """float32 [P], a copy: what `backward` has summed, of every parameter that learns, one after the other; 0 for one that
        the loss does not reach. Raises ConfigError where ranks hold only parts of it."""
        raise ConfigError(f"learner.backend = {self.config.backend!r} gives no whole gradient; 'torch' does")

    @abstractmethod
    def apply(self, step: int, finite: bool) -> tuple[float, bool]:
        """Norm of the gradient before clipping, and whether the update was made: not when `finite` is False or the norm is
        not; weights and optimizer are then as they were."""

    @abstractmethod
    def tensors(self) -> Mapping[str, RawTensor]:
        """See `Backend.tensors`."""

    def _copies(self, named: Mapping[str, Tensor]) -> dict[str, RawTensor]:
        """In the type that is published, in host memory that is used again: fresh memory costs more than the copy. It is pinned
        for a copy that a CUDA device makes by itself."""
        for name, tensor in named.items():
            if name not in self._leaving:
                self._leaving[name] = torch.empty(tensor.shape, dtype=self.publish_dtype, pin_memory=tensor.is_cuda)
            converted = tensor.detach().to(self.publish_dtype) if tensor.is_cuda else tensor.detach()  # half the bytes
            self._leaving[name].copy_(converted, non_blocking=tensor.is_cuda)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return {name: raw(self._leaving[name]) for name in named}

    @abstractmethod
    def canary(self, ids: Sequence[int] = ()) -> Canary:
        """See `Backend.canary`."""

    @abstractmethod
    def snapshot(self) -> Callable[[Path], None]:
        """See `Backend.snapshot`."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """See `Backend.load`."""


def make_machine(settings: MachineSettings, ranks: Ranks) -> Machine:
    """The machine of `learner.backend`."""
    kind: type[Machine]
    # Else DeepSpeed takes the best that is there when it is imported; transformers imports it too, to save a model.
    os.environ["DS_ACCELERATOR"] = settings.learner.device.partition(":")[0]
    if settings.learner.backend == "deepspeed":
        from async_rlhf.learner.step.deepspeed_machine import DeepSpeedMachine as kind
    else:
        from async_rlhf.learner.step.torch_machine import TorchMachine as kind
    return kind(settings, ranks)


def probe(policy: Policy, device: torch.device, ids: Sequence[int], dtype: torch.dtype) -> Canary:
    """The beginning of a text, or without one any tokens, with the log-probabilities under the present weights in the dtype
    that engines serve. Raises NonFiniteError when they are no numbers.
    """
    text = np.array(ids[:_PROBE_TOKENS], np.int64)
    if len(text) < 2:
        text = np.random.default_rng(0).integers(policy.vocabulary, size=_PROBE_TOKENS // 4)
    with _rounded(policy.model, dtype):
        logprobs = policy.probe(torch.from_numpy(text).to(device))
    if not torch.isfinite(logprobs).all():
        raise NonFiniteError("the model's log-probabilities are not finite")
    return Canary(ids=text.tolist(), logprobs=logprobs.tolist())


@contextmanager
def _rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within, each module computes with its own parameters as they are in `dtype`; copied for one module at a time.

    Rounding swallows small updates (steps of 1e-6 move few bfloat16 numbers), and all of them point one way: so an engine that
    serves the rounded weights, as it should, lags behind the others by whole nats.
    """
    own: dict[nn.Module, dict[str, nn.Parameter | None]] = {}

    def put(module: nn.Module, _: object) -> None:
        own[module] = dict(module._parameters)
        for name, held in own[module].items():
            if held is not None:
                module._parameters[name] = nn.Parameter(held.to(dtype).to(held.dtype), requires_grad=False)

    def take_back(module: nn.Module, *_: object) -> None:
        module._parameters.update(own.pop(module))

    hooks = []
    if dtype != torch.float32:
        for module in model.modules():
            if any(each is not None and each.dtype != dtype for each in module._parameters.values()):
                hooks.append(module.register_forward_pre_hook(put))
                hooks.append(module.register_forward_hook(take_back, prepend=True, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def raw(tensor: torch.Tensor) -> RawTensor:
    """Its row-major bytes: a view where it lies in CPU memory already."""
    data = tensor.cpu().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
