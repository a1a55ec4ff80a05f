"""One rank's model and optimizer in plain torch: every rank holds everything, gradients are summed over the ranks.

`Controller` drives it. `DeepSpeedMachine` is the same with parameters, gradients and optimizer shared out. Where `collective`
is True all methods are called on all ranks at once; else those of a step and `load` are, and the rest on rank 0 only. Batches
come on the machine's device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from async_rlhf.buffers.errors import DeadlineError, NonFiniteError
from async_rlhf.buffers.images.tower import ImageTower, tower_parameters
from async_rlhf.buffers.protocol.message import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.checkpoint.writer import Lent, begin_copy
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.model import lora
from async_rlhf.learner.model.check import check_policy, check_together
from async_rlhf.learner.model.files import load_model, saved_weights, write_model
from async_rlhf.learner.model.policy import Policy, Predicted
from async_rlhf.learner.step.ranks import Ranks, buckets, take_device

# Enough that a wrong tensor anywhere shows, few enough to cost nothing beside a step.
_PROBE_TOKENS = 128
_READ_S = 600.0
# 256 MiB in one file of a checkpoint's optimizer; kept or copied together when weights change during the write.
_FILE_NUMBERS = 2**26
# Devices for which torch has AdamW as one kernel for a list of parameters.
_FUSED = ("cpu", "cuda", "mps", "xpu")
# Of AdamW's running means. The second is shorter than its default of 0.999, as usual for language models: a stale, large
# gradient is forgotten within tens of steps.
_BETAS = (0.9, 0.95)


class Machine:
    """`policy` learns. publish_dtype: what the engines serve. reference: the directory of a frozen reference that is held here,
    the initial model's or a teacher's. max_steps: when the learning rate has fallen, where it does. images: the prompts' store.

    Raises ConfigError when a directory holds no causal language model, when the two read rows in no common way, or the device
    is not there.
    """

    collective = False

    def __init__(
        self,
        model_dir: Path,
        config: LearnerConfig,
        ranks: Ranks,
        publish_dtype: str = "float32",
        reference: Path | None = None,
        max_steps: int | None = None,
        images: Path | None = None,
    ) -> None:
        self.config, self._model_dir, self.ranks, self.max_steps = config, model_dir, ranks, max_steps
        self._images = images
        self.with_reference = reference is not None
        torch.set_num_threads(config.threads)
        self.publish_dtype: torch.dtype = getattr(torch, publish_dtype)
        self.device = take_device(config.device, ranks.rank)
        self._lora = config.lora if config.lora.rank else None
        model = self._load_model()
        # What no set has: an engine began with it.
        self._stays = {} if config.train_vision else tower_parameters(model)
        for parameter in self._stays.values():
            parameter.requires_grad_(False)
        if self._lora is not None:
            lora.add_adapters(model, self._lora)
        self.policy = Policy(
            model, config, with_critic=True, images=ImageTower.of(model, model_dir, images, trains=config.train_vision)
        )
        check_policy(self.policy)
        self._reference: Callable[..., Predicted] | None = self._load_reference(reference) if reference else None
        critic = {} if self.policy.critic is None else dict(self.policy.critic.named_parameters())
        self._optimizer: Any = make_adamw(dict(model.named_parameters()), critic, config, self.device)
        self._readers: list[Callable[[], object]] = []  # of the weights as they are
        self._memory: dict[int, Tensor] = {}
        self._leaving: dict[str, Tensor] = {}
        self._lends = False

    def _load_model(self) -> nn.Module:
        return load_model(self._model_dir, self.device)

    def _load_reference(self, directory: Path, device: torch.device | None = None) -> nn.Module:
        """Frozen."""
        kind = self.config.reference_dtype
        model = load_model(directory, device or self.device, getattr(torch, kind)).requires_grad_(False)
        computed = self.config.dtype if kind == "float32" else kind
        own = self.config.model_copy(update={"dtype": computed})
        reference = Policy(model, own, images=ImageTower.of(model, directory, self._images))
        if directory != self._model_dir:
            check_together(self.policy, reference)
        reference.sharing = self.policy.sharing
        return reference

    # -- the machine of a step ---------------------------------------------------------------------------------------

    def reference(self, batch: MicroBatch, others: int | Tensor = 0) -> Predicted | None:
        """The frozen reference's prediction (see `Policy.forward`); None without a reference."""
        # The reference uses its own experts; only passes of the policy replay the recorded ones.
        return None if self._reference is None else self._reference(replace(batch, experts_PMk=None), others=others)

    def predict(self, batch: MicroBatch, energies: bool = False, others: int = 0) -> Predicted:
        """See `Policy.forward`."""
        return self.policy(batch, energies, others)  # type: ignore[no-any-return]

    def values(self, batch: MicroBatch) -> Tensor:
        """[N]: see `Policy.values`; with gradients where they are on."""
        return self.policy.values(batch)

    def keep_critic(self) -> None:
        """Drop all of the gradient but the critic's: `apply` then leaves the policy and its optimizer state unchanged."""
        for p in self.policy.model.parameters():
            p.grad = None

    def begin(self) -> None:
        """Forget the gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add this rank's gradient; after the `last` of an update it is summed over the ranks."""
        loss.backward()  # type: ignore[no-untyped-call]
        if last and self.ranks.size > 1:
            reached_P = torch.tensor([float(p.grad is not None) for p in self._learning()], device=self.device)
            self.ranks.add_up([reached_P])
            for p, num_ranks in zip(self._learning(), reached_P.tolist(), strict=True):
                if (
                    num_ranks and p.grad is None
                ):  # parameters that the loss reaches on no rank have no gradient, as on one rank, and stay unchanged
                    p.grad = torch.zeros_like(p)
            self.ranks.add_up([p.grad for p in self._learning() if p.grad is not None])

    def gradient(self) -> Tensor:
        """float32 [P], a copy: what `backward` has summed, of every parameter that learns, one after the other; 0 for one that
        the loss does not reach. Raises ConfigError where ranks hold only parts of it."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._learning()]
        return torch.cat([grad.detach().float().reshape(-1) for grad in grads])

    def apply(self, step: int, finite: bool, rate: float | None = None) -> tuple[float, bool]:
        """Norm of the gradient before clipping, and whether the update was made: not when `finite` is False or the norm is
        not; weights and optimizer are then as they were. rate: in place of `learner.learning_rate`. Waits for a snapshot or a
        publication that still reads the weights."""
        norm = torch.nn.utils.clip_grad_norm_(self._learning(), self.config.max_grad_norm)
        if not finite or not bool(torch.isfinite(norm)):
            return float(norm), False
        self._await_readers()
        set_learning_rate(self._optimizer, self.config, step, self.max_steps, rate)
        self._optimizer.step()
        if self.policy.images is not None and self.config.train_vision:
            self.policy.images.forget()
        return float(norm), True

    def _await_readers(self) -> None:
        for read in self._readers:
            read()
        self._readers.clear()

    def _learning(self) -> Iterator[nn.Parameter]:
        return (p for p in self.policy.parameters() if p.requires_grad)

    # -- what leaves -------------------------------------------------------------------------------------------------

    def tensors(self) -> Mapping[str, RawTensor]:
        """See `Controller.tensors`."""
        model = self.policy.model
        if self._lora is not None and self._lora.publish == "adapter":
            return {name: raw(tensor.to("cpu", copy=True)) for name, tensor in lora.factors(model)}
        leaving = {name: tensor for name, tensor in lora.merged(model).items() if name not in self._stays}
        self._lends = self.device.type == "cpu" and all(tensor.dtype == self.publish_dtype for tensor in leaving.values())
        return {name: raw(tensor) for name, tensor in leaving.items()} if self._lends else self._copies(leaving)

    def is_read(self, until: threading.Event) -> None:
        """See `Controller.is_read`: `apply` waits where `tensors` gave the parameters themselves."""
        if not self._lends:
            return

        def wait() -> None:
            if not until.wait(_READ_S):
                raise DeadlineError(f"the copy of the weights that are published was not made within {_READ_S:.0f} s")

        self._readers.append(wait)

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

    @torch.no_grad()
    def canary(self, ids: Sequence[int] = ()) -> Canary:
        """The beginning of a text, or without one any tokens, with the log-probabilities under the present weights in the dtype
        that engines serve, behind made-up images where prompts have some. Raises NonFiniteError when they are no numbers."""
        prompt = None if self.policy.images is None else self.policy.images.sample
        most = min(_PROBE_TOKENS, self.policy.room(prompt))
        text = np.array(ids[:most], np.int64)
        if len(text) < 2:
            text = np.random.default_rng(0).integers(self.policy.vocabulary, size=min(most, _PROBE_TOKENS // 4))
        with _rounded(self.policy.model, self.publish_dtype):
            logprobs = self.policy.probe(torch.from_numpy(text).to(self.device), prompt)
        if not torch.isfinite(logprobs).all():
            raise NonFiniteError("the model's log-probabilities are not finite")
        return Canary(ids=text.tolist(), logprobs=logprobs.tolist(), behind_images=prompt is not None)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> Callable[[Path], None]:
        """See `Controller.snapshot`. On a CPU it is written from where it lies, and `apply` copies what is not written by then;
        from a device a thread copies it, and `apply` waits for that."""
        model, critic = self.policy.model, self.policy.critic
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": lora.merged_state(model),
            "adapter": {name: p.detach() for name, p in lora.adapters(model).items()},
            "optimizer": {f"{name}.{key}": value.detach() for name, key, value in self._moments()},
            "critic": {} if critic is None else critic.state_dict(),
        }
        tensors = {f"{part} {name}": tensor for part, named in parts.items() for name, tensor in named.items()}
        if self.device.type == "cpu":
            lent = Lent([*self._learning(), *(value for _, _, value in self._moments())], tensors.values())
            self._readers.append(lent.take_back)
            return partial(self._write, parts=parts, written=lent.is_written)
        wait = begin_copy(tensors, self._memory)
        self._readers.append(wait)

        def write(directory: Path) -> None:
            copied = wait()
            self._write(directory, {part: {n: copied[f"{part} {n}"] for n in named} for part, named in parts.items()})

        return write

    def _write(
        self,
        directory: Path,
        parts: Mapping[str, Mapping[str, Tensor]],
        written: Callable[[Iterable[Tensor]], None] = lambda tensors: None,
    ) -> None:
        """The files of a checkpoint: state dicts of the `model`, its `adapter`, the `optimizer` and the `critic`. Tensors are
        `written` as soon as a file has them, or when none will have them."""
        try:
            write_model(directory / "model", self.policy.model, parts["model"], self._model_dir)
            written(parts["model"].values())
            moments = iter(parts["optimizer"].items())
            for number, bucket in enumerate(buckets(parts["optimizer"].values(), _FILE_NUMBERS), 1):
                save_file(dict(islice(moments, len(bucket))), directory / f"optimizer-{number:05d}.safetensors")
                written(bucket)
            if self._lora is not None:
                lora.write_adapter(directory / "adapter", parts["adapter"], self._lora)
            if self.policy.critic is not None:
                save_file(dict(parts["critic"]), directory / "critic.safetensors")
        finally:
            written(tensor for named in parts.values() for tensor in named.values())

    def load(self, directory: Path | str) -> None:
        """See `Controller.load`."""
        self._await_readers()
        learned = self._learned()
        saved = self._saved(Path(directory), learned)
        for name, value in saved["model"].items():
            learned[name].data.copy_(value)
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in saved["optimizer"].items():
            name, _, kind = key.rpartition(".")
            state.setdefault(name, {})[kind] = value
        for name, p in self._named():  # a parameter without a state begins anew
            self._optimizer.state[p] = {kind: value.to(p.device) for kind, value in state.get(name, {}).items()}
        if self.policy.critic is not None:
            self.policy.critic.load_state_dict(saved["critic"])
        if self.policy.images is not None:
            self.policy.images.forget()

    def _learned(self) -> Mapping[str, Tensor]:
        """The model's weights that a checkpoint restores: all of them, or its adapters."""
        model = self.policy.model
        return model.state_dict() if self._lora is None else lora.adapters(model)

    def _saved(self, directory: Path, like: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint by part, on every rank's CPU: `model` (its adapters, where those learn), `optimizer`,
        `critic`. Rank 0 reads the files: other ranks may be on hosts without them. like: gives names and shapes.

        Raises CheckpointError.
        """

        def read() -> dict[str, Tensor]:
            learned = saved_weights(directory, like) if self._lora is None else lora.read_adapter(directory / "adapter", like)
            parts = {"model": learned, "optimizer": {}}
            for path in sorted(directory.glob("optimizer*.safetensors")):
                parts["optimizer"] |= load_file(path)
            if self.policy.critic is not None:
                parts["critic"] = load_file(directory / "critic.safetensors")
            return {f"{part} {name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

        saved: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "critic": {}}
        for key, tensor in self.ranks.shared(read).items():
            part, _, name = key.partition(" ")
            saved[part][name] = tensor
        return saved

    def _moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """(parameter, key, values) of each tensor that the optimizer holds."""
        for name, p in self._named():
            for key, value in self._optimizer.state.get(p, {}).items():
                yield name, key, value

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything that learns, under the names that the optimizer's file has."""
        yield from self.policy.model.named_parameters()
        if self.policy.critic is not None:
            yield from self.policy.critic.named_parameters(prefix="critic")


def learning_rate(config: LearnerConfig, step: int, max_steps: int | None, peak: float | None = None) -> float:
    """The learning rate of step `step` (from 0): linear rise over the warm-up, then constant, linear or cosine fall to 0 at
    `max_steps`.

    The cosine is that of SGDR without restarts (Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5). `peak` is another
    highest rate on the same curve, as the critic's.
    """
    scale = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    peak = config.learning_rate if peak is None else peak
    if config.schedule == "constant" or max_steps is None or scale < 1.0:
        return peak * scale
    whole = max(1, max_steps - config.warmup_steps)
    done = min(1.0, max(0, step - config.warmup_steps) / whole)
    return peak * (1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, config: LearnerConfig, step: int, max_steps: int | None, rate: float | None = None
) -> None:
    for group in optimizer.param_groups:
        peak = config.critic.learning_rate if group.get("name") == "critic" else rate
        group["lr"] = learning_rate(config, step, max_steps, peak)


def make_adamw(
    policy: Mapping[str, nn.Parameter], critic: Mapping[str, nn.Parameter], config: LearnerConfig, device: torch.device
) -> torch.optim.AdamW:
    """AdamW of the trained parameters, fused where possible; the critic's parameters have their own learning rate."""
    named = {"policy": policy, "critic": critic}
    learning = {name: [p for p in parameters.values() if p.requires_grad] for name, parameters in named.items()}
    groups = [{"params": parameters, "name": name} for name, parameters in learning.items() if parameters]
    rate, decay = config.learning_rate, config.weight_decay
    return torch.optim.AdamW(groups, lr=rate, betas=_BETAS, weight_decay=decay, fused=device.type in _FUSED)


@contextmanager
def _rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within, each module computes with its own parameters as they are in `dtype`; copied for one module at a time.

    Rounding swallows small updates (steps of 1e-6 move few bfloat16 numbers), and all of them point one way: so an engine that
    serves the rounded weights, as it should, lags behind the others by whole nats.
    """
    masters: dict[nn.Module, dict[str, nn.Parameter | None]] = {}

    def put(module: nn.Module, _: object) -> None:
        masters[module] = dict(module._parameters)
        for name, held in masters[module].items():
            if held is not None:
                module._parameters[name] = nn.Parameter(held.to(dtype).to(held.dtype), requires_grad=False)

    def take_back(module: nn.Module, *_: object) -> None:
        module._parameters.update(masters.pop(module))

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
    """The tensor's row-major bytes: a view where it is in CPU memory already."""
    data = tensor.cpu().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
