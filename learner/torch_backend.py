"""The seam on one device with plain torch."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from buffers.errors import ConfigError
from buffers.tensors import RawTensor
from buffers.wire import Canary
from learner.backend import StepReport
from learner.batch import MicroBatch, Row, make_micro_batches
from learner.config import LearnerConfig, LossConfig
from learner.corrections import effective_sample_size, ratio
from learner.logprobs import token_entropy, token_logprobs
from learner.losses import LOSSES, Counts, LossInputs, divisor, objective
from learner.targets import Observation

# Written by `save_pretrained`; everything else beside the weights comes from the model that training began with.
_OWN_FILES = ("config.json", "model")

# Enough that a wrong tensor anywhere shows, few enough to cost nothing beside a step.
_PROBE_TOKENS = 32


class TorchBackend:
    """See `backend.Backend`. Dropout is off: a policy gradient needs the policy that was sampled from.

    Raises ConfigError when `model_dir` holds no causal language model or the device is not there.
    """

    def __init__(self, model_dir: Path, config: LearnerConfig, loss: LossConfig, publish_dtype: str = "float32") -> None:
        torch.set_num_threads(config.threads)
        self._publish_dtype: torch.dtype = getattr(torch, publish_dtype)  # what the engines serve
        self._config, self._loss_config, self._loss = config, loss, objective
        self._model_dir, self._device = model_dir, _device(config.device)
        self._model = self._load_model(model_dir)
        self._reference = self._load_model(model_dir).requires_grad_(False) if loss.needs_reference else None
        model: Any = self._model
        vocabulary = model.get_input_embeddings().num_embeddings
        self._probe = np.random.default_rng(0).integers(vocabulary, size=_PROBE_TOKENS)
        # Fused AdamW does the same arithmetic in one kernel a parameter list, on CPU too.
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=config.learning_rate,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def _load_model(self, directory: Path) -> torch.nn.Module:
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model = {str(directory)!r} is no Hugging Face causal language model: {error}") from error
        return cast(torch.nn.Module, model.to(self._device).eval())

    def step(self, updates: Sequence[Sequence[Row]], step: int) -> StepReport:
        """See `Backend.step`. The proximal policy is the one before the first update."""
        micro = [self._micro_batches(rows) for rows in updates]
        proximal = self._proximal(micro)
        seen = _Seen()
        applied = all(self._update(batches, known, step, seen) for batches, known in zip(micro, proximal, strict=True))
        return StepReport(seen.metrics(), seen.weights, applied)

    def _micro_batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        whole_groups = LOSSES[self._loss_config.kind].level == "pair"
        batches = make_micro_batches(rows, self._config.micro_batch_tokens, whole_groups=whole_groups)
        return [batch.to(self._device) for batch in batches]

    @torch.no_grad()
    def observe(self, rows: Sequence[Row]) -> Mapping[int, Observation]:
        found = {}
        for batch in self._micro_batches(rows):
            proximal_N = self._logprobs(self._model, batch).numpy(force=True)
            reference_N = None if self._reference is None else self._logprobs(self._reference, batch).numpy(force=True)
            member_N = batch.member_N.numpy(force=True)
            for member in set(member_N.tolist()):
                own = member_N == member
                found[member] = Observation(proximal_N[own], None if reference_N is None else reference_N[own])
        return found

    def _logprobs(self, model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        """[N] of the chosen tokens under `model`."""
        return token_logprobs(self._logits(batch, model), batch.target_N, batch.temperature_N)

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self._reference is None or batch.logp_reference_N is not None:
            return batch.logp_reference_N
        with torch.no_grad():
            return self._logprobs(self._reference, batch)

    def _proximal(self, micro: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor | None]]:
        """Log-probabilities before the first update; None where the first update computes them anyway."""
        if self._loss_config.proximal == "interpolate":  # the loss finds it between the other two
            return [[None for _ in batches] for batches in micro]
        first: list[Tensor | None] = [None for _ in micro[0]]
        with torch.no_grad():
            later = [[self._logprobs(self._model, batch) for batch in batches] for batches in micro[1:]]
        return [first, *[list[Tensor | None](logps) for logps in later]]

    def _update(self, batches: Sequence[MicroBatch], proximal: Sequence[Tensor | None], step: int, seen: _Seen) -> bool:
        """One optimizer update; False, and nothing changed, when loss or gradient is not finite."""
        self._optimizer.zero_grad(set_to_none=True)
        counts = Counts(
            num_tokens=sum(len(batch.target_N) for batch in batches),
            num_sequences=sum(len(batch.group_S) for batch in batches),
            num_groups=len({group for batch in batches for group in batch.group_S.tolist()}),
        )
        divided_by = divisor(self._loss_config, counts)
        loss = 0.0
        for batch, known in zip(batches, proximal, strict=True):
            logits_NV = self._logits(batch)
            current_N = token_logprobs(logits_NV, batch.target_N, batch.temperature_N)
            known = batch.logp_proximal_N if batch.logp_proximal_N is not None else known
            proximal_N = current_N.detach() if known is None else known
            entropy_N = token_entropy(logits_NV, batch.temperature_N)
            inputs = LossInputs(
                logp_current_N=current_N,
                logp_proximal_N=proximal_N,
                logp_behaviour_N=batch.logp_behaviour_N,
                advantage_N=batch.advantage_N,
                sequence_N=batch.sequence_N,
                group_S=batch.group_S,
                staleness_N=step - batch.version_N,
                mask_N=batch.mask_N,
                logp_reference_N=self._reference_logprobs(batch),
                entropy_N=entropy_N,
            )
            outputs = self._loss(inputs, self._loss_config)
            (outputs.total / divided_by).backward()  # type: ignore[no-untyped-call]
            loss += float(outputs.total.detach()) / divided_by
            seen.add(batch, outputs.sums, proximal_N, entropy_N)
        seen.losses.append(loss)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        seen.grad_norms.append(norm)
        if not math.isfinite(loss) or not bool(torch.isfinite(norm)):
            return False
        warmup = min(1.0, (step + 1) / self._config.warmup_steps) if self._config.warmup_steps else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * warmup
        self._optimizer.step()
        return True

    def _logits(self, batch: MicroBatch, model: torch.nn.Module | None = None) -> Tensor:
        """[N, V]: logits at the positions that predict a loss-bearing token."""
        mask = torch.zeros(batch.mask_RLL.shape, dtype=torch.float32, device=self._device)
        mask.masked_fill_(~batch.mask_RLL, torch.finfo(torch.float32).min)
        out: Any = (model or self._model)(
            input_ids=batch.ids_RL, position_ids=batch.positions_RL, attention_mask=mask[:, None], use_cache=False
        )
        logits: Tensor = out.logits
        return logits.flatten(0, 1)[batch.source_N]

    def tensors(self) -> Mapping[str, RawTensor]:
        dtype = str(self._publish_dtype).removeprefix("torch.")
        return {
            name: RawTensor(dtype, tuple(p.shape), _bytes(p.detach().to(self._publish_dtype)))
            for name, p in self._model.named_parameters()
        }

    @torch.no_grad()
    def canary(self) -> Canary:
        ids = torch.from_numpy(self._probe).to(self._device)
        out: Any = self._model(input_ids=ids[None, :-1], use_cache=False)
        ones = torch.ones(len(ids) - 1, device=self._device)
        return Canary(ids=ids.tolist(), logprobs=token_logprobs(out.logits[0], ids[1:], ones).tolist())

    def save(self, directory: Path) -> None:
        model: Any = self._model
        if (self._model_dir / "generation_config.json").exists():
            model.generation_config = GenerationConfig()  # many published ones do not pass the check made when saving
        model.save_pretrained(directory / "model", safe_serialization=True)
        for path in self._model_dir.iterdir():  # the tokenizer comes along, so that the directory loads unchanged
            if path.suffix in {".json", ".txt", ".model", ".jinja"} and not path.name.startswith(_OWN_FILES):
                shutil.copy2(path, directory / "model" / path.name)
        state = {
            f"{name}.{key}": value
            for name, p in self._model.named_parameters()
            for key, value in self._optimizer.state.get(p, {}).items()
        }
        save_file({key: value.contiguous() for key, value in state.items()}, directory / "optimizer.safetensors")

    def load(self, directory: Path) -> None:
        loaded = self._load_model(directory / "model")
        self._model.load_state_dict(loaded.state_dict())
        state = load_file(directory / "optimizer.safetensors", device=str(self._device))
        for name, p in self._model.named_parameters():
            keys = [key for key in state if key.rpartition(".")[0] == name]
            self._optimizer.state[p] = {key.rpartition(".")[2]: state[key] for key in keys}


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"learner.device = {name!r} cannot be used: {error}; use 'cpu'") from error
    return device


def _bytes(tensor: Tensor) -> bytes | memoryview:
    """Its row-major bytes: a view where it lies in CPU memory already."""
    if not tensor.numel():
        return b""
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().data


class _Seen:
    """Sums over the micro-batches of one learner step."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.losses: list[float] = []
        self.entropy = 0.0
        self.sums: dict[str, float] = {}
        self.ratios: list[Tensor] = []
        self.kl = 0.0
        self.weights: dict[int, float] = {}
        self.grad_norms: list[Tensor] = []

    def add(self, batch: MicroBatch, sums: Mapping[str, Tensor], proximal_N: Tensor, entropy_N: Tensor) -> None:
        self.num_tokens += len(batch.target_N)
        self.entropy += float(entropy_N.sum())
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        ratio_N = ratio(proximal_N, batch.logp_behaviour_N)
        self.ratios.append(ratio_N)
        self.kl += float((batch.logp_behaviour_N - proximal_N).sum())
        for member in set(batch.member_N.tolist()):
            self.weights[member] = float(ratio_N[batch.member_N == member].mean())

    def metrics(self) -> dict[str, float]:
        """Means over tokens; `is/*` of the ratio proximal / behaviour before truncation."""
        ratio_N = torch.cat(self.ratios)
        return {
            "loss": sum(self.losses) / len(self.losses),
            "entropy": self.entropy / self.num_tokens,
            "grad_norm": float(torch.stack(self.grad_norms).mean()),
            "is/ratio_max": float(ratio_N.max()),
            "is/ratio_mean": float(ratio_N.mean()),
            "is/ess": float(effective_sample_size(ratio_N)),
            "kl/behaviour": self.kl / self.num_tokens,
            **{name: value / self.num_tokens for name, value in self.sums.items()},
        }
