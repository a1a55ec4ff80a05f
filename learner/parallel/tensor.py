"""Ranks that share every layer, for models too wide for one: tensor parallel (Shoeybi et al. 2019, arXiv 1909.08053).

DeepSpeed's AutoTP gives each of n ranks 1/n of the attention heads and of the columns between the two products of an MLP, and
sums what they add to the hidden states. Which layer is split along what is the model's own plan (`base_model_tp_plan` of
its Hugging Face configuration). Embeddings, norms and the output layer are whole on every rank, which computes the whole
loss. Equal parts, in the order of the ranks; waits for the other ranks as long as the process group does.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_rlhf.buffers.errors import ConfigError

# What DeepSpeed makes of each entry of a plan.
_STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": "column"},
    "rowwise": {"partition_type": "row"},
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
    "embedding_rowwise": {"partition_type": "skip"},
}


def autotp_settings(model: nn.Module, size: int) -> dict[str, Any]:
    """The section `tensor_parallel` of DeepSpeed's configuration. Raises ConfigError for a model that it cannot split."""
    owner: Any = model
    plan: dict[str, str] = getattr(owner.config.get_text_config(), "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - set(_STYLES))
    if unknown or not plan:
        raise ConfigError(
            f"learner.tensor_parallel = {size}: {type(model).__name__} "
            + (f"splits layers as {', '.join(unknown)}, which is not carried here" if plan else "has no plan how to be split")
            + "; set learner.tensor_parallel = 1, and learner.zero_stage = 3 to share its parameters out"
        )
    layers = [{"patterns": [_pattern(name)], **_STYLES[style]} for name, style in plan.items()]
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": layers}}


def _pattern(name: str) -> str:
    return rf".*\.{re.escape(name).replace(re.escape('*'), '[0-9]+')}\.weight$"


def split_dimension(own: torch.Size, whole: torch.Size) -> int | None:
    """Along which dimension a parameter of the shape `whole` is split, when a rank has `own` of it."""
    return next((d for d, (part, all_of_it) in enumerate(zip(own, whole, strict=True)) if part != all_of_it), None)


def joined(part: Tensor, dimension: int | None) -> Tensor:
    """The whole parameter on rank 0; elsewhere, and when it is not split, what was given. Called on all ranks at once."""
    if dimension is None:
        return part
    part = part.contiguous()
    leads = dist.get_rank() == 0
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())] if leads else None
    dist.gather(part, parts, dst=0)
    return part if parts is None else torch.cat(parts, dimension)


def own_part(whole: Tensor, dimension: int | None) -> Tensor:
    """What this rank has of it."""
    return whole if dimension is None else whole.chunk(dist.get_world_size(), dimension)[dist.get_rank()]
