"""The seam with plain torch: every rank holds everything, gradients are summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from async_rlhf.buffers.protocol.manifest import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.checkpoint.writer import Snapshot
from async_rlhf.learner.model import lora
from async_rlhf.learner.model.files import load_model, write_model
from async_rlhf.learner.model.policy import Policy
from async_rlhf.learner.model.verification import check_policy
from async_rlhf.learner.parallel.ranks import Ranks
from async_rlhf.learner.step.machine import Machine, MachineSettings, probe, raw
from async_rlhf.learner.step.optimizer import (
    load_optimizer_state,
    make_adamw,
    optimizer_state,
    parameter_groups,
    set_learning_rate,
)


class TorchMachine(Machine):
    """See `Machine`."""

    def __init__(self, settings: MachineSettings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        config = self.config
        self._lora = config.lora if config.lora.rank else None
        self._model = load_model(settings.model_dir, self.device)
        if self._lora is not None:
            lora.add_adapters(self._model, self._lora)
        self.policy = Policy(self._model, config, with_critic=True)
        check_policy(self.policy)
        if settings.with_reference:
            self._reference = self._load_reference(self.device)
        critic = {} if self.policy.critic is None else dict(self.policy.critic.named_parameters())
        groups = parameter_groups(dict(self._model.named_parameters()), critic)
        self._optimizer = make_adamw(groups, config, self.device)
        self._readers: list[Callable[[], object]] = []  # of the weights as they are
        self._memory: dict[int, Tensor] = {}

    # -- the machine of a step ---------------------------------------------------------------------------------------

    def predict(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.policy(batch)  # type: ignore[no-any-return]

    def begin(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if last and self._ranks.size > 1:
            for p in self._learning():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self._ranks.add_up([p.grad for p in self._learning() if p.grad is not None])

    def gradient(self) -> Tensor:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._learning()]
        return torch.cat([grad.detach().float().reshape(-1) for grad in grads])

    def apply(self, step: int, finite: bool) -> tuple[float, bool]:
        norm = torch.nn.utils.clip_grad_norm_(self._learning(), self.config.max_grad_norm)
        if not finite or not bool(torch.isfinite(norm)):
            return float(norm), False
        self._await_readers()
        set_learning_rate(self._optimizer, self.config, step)
        self._optimizer.step()
        return float(norm), True

    def _await_readers(self) -> None:
        for read in self._readers:
            read()
        self._readers.clear()

    def _learning(self) -> Iterator[torch.nn.Parameter]:
        return (p for p in self.policy.parameters() if p.requires_grad)

    # -- what leaves -------------------------------------------------------------------------------------------------

    def tensors(self) -> Mapping[str, RawTensor]:
        if self._lora is not None and self._lora.publish == "adapter":
            return {name: raw(tensor.to("cpu", copy=True)) for name, tensor in lora.factors(self._model)}
        return self._copies(dict(self._model.named_parameters()) if self._lora is None else lora.merged(self._model))

    @torch.no_grad()
    def canary(self, ids: Sequence[int] = ()) -> Canary:
        return probe(self.policy, self.device, ids, self.publish_dtype)

    def snapshot(self) -> Callable[[Path], None]:
        """The copy is made by a thread; `apply` waits for it."""
        critic = self.policy.critic
        parts = {
            "model": self._model.state_dict() if self._lora is None else lora.merged_state(self._model),
            "adapter": {} if self._lora is None else {n: p.detach() for n, p in lora.adapters(self._model).items()},
            "optimizer": optimizer_state(self._optimizer, self._named()),
            "critic": {} if critic is None else critic.state_dict(),
        }
        tensors = {f"{part} {name}": tensor for part, named in parts.items() for name, tensor in named.items()}
        snapshot = Snapshot(tensors, self._memory)
        self._readers.append(snapshot.wait)

        def write(directory: Path) -> None:
            copied = snapshot.wait()
            by_part = {part: {name: copied[f"{part} {name}"] for name in named} for part, named in parts.items()}
            write_model(directory / "model", self._model, by_part["model"], self.settings.model_dir)
            save_file(by_part["optimizer"], directory / "optimizer.safetensors")
            if self._lora is not None:
                lora.write_adapter(directory / "adapter", by_part["adapter"], self._lora)
            if critic is not None:
                save_file(by_part["critic"], directory / "critic.safetensors")

        return write

    def load(self, directory: Path) -> None:
        self._await_readers()
        own = self._model.state_dict() if self._lora is None else lora.adapters(self._model)
        saved = self._saved(directory, own)
        if self._lora is None:
            self._model.load_state_dict(saved["model"])
        else:
            for name, value in saved["model"].items():
                own[name].data.copy_(value)
        load_optimizer_state(self._optimizer, self._named(), saved["optimizer"])
        if self.policy.critic is not None:
            self.policy.critic.load_state_dict(saved["critic"])

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Everything that learns, under the names that the optimizer's file has."""
        yield from self._model.named_parameters()
        if self.policy.critic is not None:
            yield from self.policy.critic.named_parameters(prefix="critic")
