"""The seam with DeepSpeed: ZeRO shares optimizer state (1), gradients (2) and parameters (3) out over the ranks, AutoTP layers.

Collective throughout: every method is called on all ranks at once, and what leaves is gathered to rank 0, parameter by
parameter or, to be published under ZeRO-3, one bucket at a time, so that no device ever holds the whole model. A
checkpoint is the one that plain torch writes: it can be resumed by either, in any number of ranks, at any stage.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    groups,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.functional import pad

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.protocol.message import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.config import LearnerConfig, check_division
from async_rlhf.learner.model import lora
from async_rlhf.learner.model.files import load_model
from async_rlhf.learner.model.policy import Policy, Predicted
from async_rlhf.learner.step.ranks import Ranks, buckets, communication
from async_rlhf.learner.step.torch_machine import Machine, raw, set_learning_rate

# Numbers gathered at once for publication: large enough that latency is nothing, small beside a model worth sharing out.
_BUCKET = 64 * 2**20
_MOMENTS = ("exp_avg", "exp_avg_sq")
_GROUPS = ("policy", "critic")  # as `make_adamw` names them

# Gradients reduced at once. DeepSpeed's own 500 million hold a GB on every rank, whatever the size of the model.
_REDUCE_ELEMENTS = 50_000_000
# Settings that the rest of the configuration decides.
_OURS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "optimizer",
    "scheduler", "fp16", "bf16", "torch_autocast", "tensor_parallel", "sequence_parallel_size",
)  # fmt: skip
# AutoTP's form of each entry of a model's own plan.
_STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": "column"},
    "rowwise": {"partition_type": "row"},
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
    "embedding_rowwise": {"partition_type": "skip"},
}


class DeepSpeedMachine(Machine):
    """Raises ConfigError for a configuration that DeepSpeed cannot be given."""

    collective = True

    def __init__(self, model_dir: Path, config: LearnerConfig, *given: Any, **named: Any) -> None:
        self._zero = deepspeed_settings(config)
        super().__init__(model_dir, config, *given, **named)
        self._shapes = {name: tensor.detach().to("meta") for name, tensor in self._learned().items()}
        whole = {name: p.shape for name, p in self.policy.named_parameters()}
        # the output layer's weight is used outside its own forward pass
        deepspeed.zero.register_external_parameter(self.policy, self.policy.output_layer.weight)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=self.policy, optimizer=self._optimizer, config=self._zero, dist_init_required=False
        )
        if config.tensor_parallel > 1:
            self._engine.first_dataloader_check.remove()  # it compares inputs as pickles; here they are one rank's, sent once
        self._stage = int(self._engine.zero_optimization_stage())
        shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in self._named()}
        self._dimensions = {name: split_dimension(shapes[name], shape) for name, shape in whole.items()}
        self._begin_moments()

    def _load_model(self) -> nn.Module:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        _join(self.ranks, self.device)
        model = load_model(self._model_dir, torch.device("cpu"))
        text = cast(Any, model).config.get_text_config()
        check_division(self.config, lambda name: getattr(text, name, None))
        if self.config.tensor_parallel > 1:
            self._zero["tensor_parallel"] = autotp_settings(model, self.config.tensor_parallel)
        self._aliases = _aliases(model)
        return model

    def _load_reference(self, directory: Path, device: torch.device | None = None) -> nn.Module:
        """Load the reference; at ZeRO-3 sharded over all ranks, even those that share the policy's layers."""
        if self.config.zero_stage < 3:
            return super()._load_reference(directory, device)
        reference = super()._load_reference(directory, torch.device("cpu"))
        deepspeed.zero.register_external_parameter(reference, cast(Policy, reference).output_layer.weight)
        engine, *_ = deepspeed.initialize(model=reference, config=reference_settings(self.config), dist_init_required=False)
        groups._release_process_group_references()
        return cast(nn.Module, engine)

    # -- the machine of a step ---------------------------------------------------------------------------------------

    def reference(self, batch: MicroBatch, others: int | Tensor = 0) -> Predicted | None:
        with self.ranks.named("a forward pass of the reference"):
            return super().reference(batch, others)

    def predict(self, batch: MicroBatch, energies: bool = False, others: int = 0) -> Predicted:
        with self.ranks.named("a forward pass"):
            return self._engine(batch, energies, others)  # type: ignore[no-any-return]

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        replicas = self.ranks.size // self.config.tensor_parallel
        with self.ranks.named("a backward pass"):
            self._engine.backward(loss * replicas)  # DeepSpeed takes the mean over them, the loss is a part of a sum

    def gradient(self) -> Tensor:
        raise ConfigError("learner.backend = 'deepspeed' gives no whole gradient; 'torch' does")

    def apply(self, step: int, finite: bool, rate: float | None = None) -> tuple[float, bool]:
        set_learning_rate(self._optimizer, self.config, step, self.max_steps, rate)
        # A parameter without a gradient has one of 0 here: a resting policy would decay, and its updates be counted.
        critic = self.config.critic
        resting = [*self._shards("policy")] if critic.kind == "model" and critic.learns_alone(step) else []
        for group in self._optimizer.param_groups if resting else ():
            group["lr"] *= group["name"] == "critic"
        if not finite:  # the last it calls before it looks whether to refuse, at every stage and in every type
            self._optimizer._update_scale = self._refuse
        try:
            with self.ranks.named("an update"):
                self._engine.step()
        finally:
            vars(self._optimizer).pop("_update_scale", None)
        for shard in resting:
            self._state(shard)["step"].zero_()
        return float(self._engine.get_global_grad_norm()), not self._optimizer.overflow

    def _refuse(self, *args: Any, **named: Any) -> None:
        self._optimizer.overflow = True

    # -- what leaves -------------------------------------------------------------------------------------------------

    def tensors(self) -> Mapping[str, RawTensor]:
        """Whole in host memory of rank 0, and empty elsewhere."""
        tensors: dict[str, RawTensor] = {}
        small = lora.adapters(self.policy.model)
        large = {name: p for name, p in self.policy.model.named_parameters() if name not in small | self._stays}
        with self.ranks.named("a gathering of adapters"), self._gathered(list(small.values())):
            if self._lora is not None and self._lora.publish == "adapter":
                leaving = lora.factors(self.policy.model) if self.ranks.rank == 0 else []
                return {name: raw(tensor.to("cpu", copy=True)) for name, tensor in leaving}
            waiting = iter(large.items())
            for bucket in buckets(large.values(), _BUCKET // self.config.tensor_parallel):
                with self.ranks.named("a gathering of weights"), self._gathered(bucket):
                    chosen = dict(islice(waiting, len(bucket))) | small
                    named = {name: self._joined(f"model.{name}", p.detach()) for name, p in chosen.items()}
                    if self.ranks.rank == 0:
                        tensors |= self._copies(lora.merged(self.policy.model, named))
        return tensors

    def canary(self, ids: Sequence[int] = ()) -> Canary:
        with self.ranks.named("the canary"):
            return super().canary(ids)

    def snapshot(self) -> Callable[[Path], None]:
        """Gathered before it returns; only rank 0's writer writes."""
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        with self.ranks.named("the gathering of a checkpoint"):
            for name, p in self._named():
                parts = {"": safe_get_full_fp32_param(p)} if p.requires_grad else {"": self._whole(p)}
                if p.requires_grad:
                    parts |= {key: safe_get_full_optimizer_state(p, key) for key in _MOMENTS}
                whole = {key: self._joined(name, value) for key, value in parts.items() if value is not None}
                if self.ranks.rank == 0:
                    weights[name] = whole.pop("").cpu().clone()
                    moments |= {f"{name}.{key}": value.cpu().clone() for key, value in whole.items()}
        counts = {part: self._state(shard)["step"].cpu() for part in _GROUPS for shard in self._shards(part)}
        moments |= {f"{name}.step": counts[_group(name)].clone() for name, p in self._named() if p.requires_grad}

        def write(directory: Path) -> None:
            if self.ranks.rank > 0:
                return
            model = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
            named = lora.merged(self.policy.model, model)
            parts = {
                "model": {name: named[first] for name, first in self._aliases.items()},
                "adapter": {} if self._lora is None else {name: model[name] for name in self._shapes},
                "optimizer": {name.removeprefix("model."): value for name, value in moments.items()},
                "critic": {n.removeprefix("critic."): v for n, v in weights.items() if n.startswith("critic.")},
            }
            self._write(directory, parts)

        return write

    def load(self, directory: Path | str) -> None:
        parts = self._saved(Path(directory), self._shapes)
        weights = {f"{part}.{name}": value for part in ("model", "critic") for name, value in parts[part].items()}
        saved = parts["optimizer"]
        counts = dict.fromkeys(_GROUPS, torch.zeros(()))
        with self.ranks.named("the sharing out of a checkpoint"):
            for name, p in self._named():
                if name not in weights:
                    continue  # base weights under adapters stay as they were loaded
                value = _own_part(weights[name], self._dimensions[name]).to(self.device)
                with self._gathered([p], writes=True):
                    p.data.copy_(value)
                if not p.requires_grad:
                    continue
                self._set(p, value.float())
                for key in _MOMENTS:
                    moment = saved.get(f"{name.removeprefix('model.')}.{key}", torch.zeros_like(weights[name]))
                    self._set(p, _own_part(moment, self._dimensions[name]).to(self.device), key)
                counts[_group(name)] = saved.get(f"{name.removeprefix('model.')}.step", counts[_group(name)])
        for part, count in counts.items():
            for shard in self._shards(part):
                self._state(shard)["step"].copy_(count)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything, under the policy's names: `model.*` and `critic.*`."""
        return self.policy.named_parameters()

    def _begin_moments(self) -> None:
        """AdamW makes its state at the first update, group by group; DeepSpeed looks for it once, after that of the first."""
        for shard in chain.from_iterable(map(self._shards, _GROUPS)):
            self._state(shard).update(step=torch.zeros((), device=shard.device))
            self._state(shard).update({key: torch.zeros_like(shard) for key in _MOMENTS})
        if self._stage < 3:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _shards(self, group: str) -> Iterator[Tensor]:
        """The shards of a group of parameters that AdamW updates on this rank."""
        names = [each["name"] for each in self._optimizer.param_groups]
        if self._stage == 3:
            shards, numbers = self._optimizer.fp32_partitioned_groups_flat, self._optimizer.sub_group_to_group_id
        else:
            shards = self._optimizer.single_partition_of_fp32_groups
            numbers = range(len(shards))
        yield from (shard for index, shard in enumerate(shards) if names[numbers[index]] == group)

    def _set(self, p: Any, value: Tensor, key: str | None = None) -> None:
        """Set the optimizer's copy of a parameter: its float32 weights, or the moment `key`."""
        if self._stage < 3:
            p.set_full_hp_param(value, key)
            return
        size = p.ds_tensor.numel()
        part = value.flatten()[self._optimizer._get_param_partition_rank(p) * size :][:size]
        # Padded: for one number, or an odd count, DeepSpeed's function for whole values reads past the end.
        self._optimizer.set_local_hp_param(pad(part, (0, size - len(part))), p, key)

    def _state(self, shard: Tensor) -> dict[str, Tensor]:
        return self._optimizer.optimizer.state[shard]  # type: ignore[no-any-return]

    def _gathered(self, parameters: Sequence[nn.Parameter], *, writes: bool = False) -> Any:
        """Within, these parameters are whole on every rank; with `writes` rank 0's values are everybody's after it."""
        return deepspeed.zero.GatheredParameters(
            list(parameters), modifier_rank=0 if writes else None, enabled=self._stage == 3
        )

    def _joined(self, name: str, part: Tensor) -> Tensor:
        """On rank 0 the whole tensor that ranks share by `learner.tensor_parallel`, elsewhere the part. Collective."""
        dimension, leads = self._dimensions[name], self.ranks.rank == 0
        if dimension is None:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.ranks.size)] if leads else None
        dist.gather(part, parts, dst=0)
        return part if parts is None else torch.cat(parts, dimension)

    def _whole(self, p: nn.Parameter) -> Tensor:
        with self._gathered([p]):
            return p.detach().float().cpu().clone()


def _join(ranks: Ranks, device: torch.device) -> None:
    """DeepSpeed finds itself in a process group, also when it is alone."""
    local = ranks.rank if device.index is None else device.index  # the device that DeepSpeed makes its own
    os.environ |= {"RANK": str(ranks.rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(ranks.size)}
    os.environ["LOCAL_SIZE"] = str(ranks.size)  # else ZeRO-3 starts `numactl` at every reduction to find it out
    # Collectives in shared memory would be compiled at the first start (minutes), and a rank that ended would hang the others.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        dist.init_process_group(communication(device.type), store=HashStore(), rank=0, world_size=1)
    groups._release_process_group_references()  # groups of an earlier engine may divide the ranks differently
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every name of the state dict -> the first name of the parameter (or buffer) with the same storage."""
    owner: dict[tuple[int, tuple[int, ...]], str] = {}
    state = model.state_dict()
    named = [name for name, _ in model.named_parameters()]
    for name in [*named, *(name for name in state if name not in set(named))]:
        owner.setdefault((state[name].data_ptr(), tuple(state[name].shape)), name)
    return {name: owner[tensor.data_ptr(), tuple(tensor.shape)] for name, tensor in state.items()}


def deepspeed_settings(config: LearnerConfig) -> dict[str, Any]:
    """DeepSpeed's configuration: ours, with the user's file laid over it. Raises ConfigError."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # sizes are decided in tokens, where rows are cut
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": _REDUCE_ELEMENTS,
        },
    }
    if config.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    return settings if config.deepspeed_config is None else _laid_over(settings, config.deepspeed_config)


def reference_settings(config: LearnerConfig) -> dict[str, Any]:
    """Settings of a frozen model at ZeRO-3; a file's settings of parameters hold for it too. Raises ConfigError."""
    zero = deepspeed_settings(config)["zero_optimization"]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "bf16": {"enabled": config.reference_dtype == "bfloat16"},
        "zero_optimization": {key: value for key, value in zero.items() if key != "offload_optimizer"},
    }


def _laid_over(settings: dict[str, Any], path: str) -> dict[str, Any]:
    try:
        file = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"learner.deepspeed_config = {path!r} cannot be read: {error}") from error
    if not isinstance(file, dict):
        raise ConfigError(f"learner.deepspeed_config = {path!r} must hold one JSON object")
    if taken := [key for key in _OURS if key in file]:
        raise ConfigError(
            f"learner.deepspeed_config = {path!r} sets {', '.join(taken)}, which this run's own settings decide; leave it out"
        )
    stage = file.get("zero_optimization", {}).get("stage", settings["zero_optimization"]["stage"])
    if stage != settings["zero_optimization"]["stage"]:
        raise ConfigError(f"learner.deepspeed_config = {path!r} asks for ZeRO stage {stage}; set learner.zero_stage = {stage}")
    merged = {**settings, **file}
    merged["zero_optimization"] = {**settings["zero_optimization"], **file.get("zero_optimization", {})}
    return merged


def autotp_settings(model: nn.Module, size: int) -> dict[str, Any]:
    """The section `tensor_parallel` of DeepSpeed's configuration (Shoeybi et al. 2019, arXiv 1909.08053): each of n ranks has
    1/n of the attention heads and of the columns between the two products of an MLP. What is split along what is the model's
    own plan (`base_model_tp_plan`). Embeddings, norms and the output layer are whole on every rank, which computes the whole
    loss. Raises ConfigError for a model that it cannot split."""
    owner: Any = model
    plan: dict[str, str] = getattr(owner.config.get_text_config(), "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - set(_STYLES))
    if unknown or not plan:
        raise ConfigError(
            f"learner.tensor_parallel = {size}: {type(model).__name__} "
            + (f"splits layers as {', '.join(unknown)}, which is not carried here" if plan else "has no plan how to be split")
            + "; set learner.tensor_parallel = 1, and learner.zero_stage = 3 to share its parameters out"
        )
    patterns = {name: re.escape(name).replace(re.escape("*"), "[0-9]+") for name in plan}
    layers = [{"patterns": [rf".*\.{patterns[name]}\.weight$"], **_STYLES[style]} for name, style in plan.items()]
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": layers}}


def split_dimension(own: torch.Size, whole: torch.Size) -> int | None:
    """The dimension along which a parameter of the shape `whole` is split, when a rank has the shape `own`."""
    return next((d for d, (part, all_of_it) in enumerate(zip(own, whole, strict=True)) if part != all_of_it), None)


def _group(name: str) -> str:
    """The optimizer's group that holds a parameter of the policy."""
    return "critic" if name.startswith("critic.") else "policy"


def _own_part(whole: Tensor, dimension: int | None) -> Tensor:
    """This rank's part; equal parts, in the order of the ranks."""
    return whole if dimension is None else whole.chunk(dist.get_world_size(), dimension)[dist.get_rank()]
