"""One rank's model and optimizer: what differs between plain torch and DeepSpeed. A step (`update`) drives it.

Where `collective` is True all methods are called on all ranks at once; else those of a step and `load` are, and the rest on
rank 0 only. Batches come on the machine's device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.protocol.wire import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.model.files import load_model
from async_rlhf.learner.model.policy import Policy
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
        self._publish_dtype: torch.dtype = getattr(torch, settings.publish_dtype)
        self.device = find_device(self.config.device, ranks.rank)
        self._reference: Policy | None = None

    def _load_reference(self) -> None:
        if self.settings.with_reference:
            model = load_model(self.settings.model_dir, self.device).requires_grad_(False)
            self._reference = Policy(model, self.config)
            self._reference.packs = self.policy.packs

    def reference(self, batch: MicroBatch) -> Tensor | None:
        """[N]: log-probabilities under the frozen reference, or None without one."""
        return None if self._reference is None else self._reference(batch)[0]

    @abstractmethod
    def predict(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """([N], [N], [N] or None): log-probability, entropy and value of each token, with gradients where they are on."""

    @abstractmethod
    def begin(self) -> None:
        """Forget the gradient."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add this rank's gradient; after the `last` of an update it is summed over the ranks."""

    @abstractmethod
    def apply(self, step: int, finite: bool) -> tuple[float, bool]:
        """Norm of the gradient before clipping, and whether the update was made: not when `finite` is False or the norm is
        not; weights and optimizer are then as they were."""

    @abstractmethod
    def tensors(self) -> Mapping[str, RawTensor]:
        """See `Backend.tensors`."""

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
    if settings.learner.backend == "deepspeed":
        from async_rlhf.learner.step.deepspeed_machine import DeepSpeedMachine as kind
    else:
        from async_rlhf.learner.step.torch_machine import TorchMachine as kind
    return kind(settings, ranks)


def find_device(name: str, rank: int = 0) -> torch.device:
    """The device of this rank: `cuda` is one per rank. Raises ConfigError when it cannot be used."""
    try:
        device = torch.device(f"cuda:{rank}" if name == "cuda" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"learner.device = {name!r} cannot be used: {error}; use 'cpu'") from error
    return device


def probe(policy: Policy, device: torch.device, ids: Sequence[int]) -> Canary:
    """The beginning of a text, or without one any tokens, with the log-probabilities under the present weights."""
    text = np.array(ids[:_PROBE_TOKENS], np.int64)
    if len(text) < 2:
        text = np.random.default_rng(0).integers(policy.vocabulary, size=_PROBE_TOKENS // 4)
    return Canary(ids=text.tolist(), logprobs=policy.probe(torch.from_numpy(text).to(device)).tolist())


def raw(tensor: torch.Tensor) -> RawTensor:
    """Its row-major bytes: a view where it lies in CPU memory already."""
    data = tensor.cpu().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
