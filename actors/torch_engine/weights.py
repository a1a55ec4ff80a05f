"""A weight set enters a model whole or not at all. Knows names, shapes and bytes; nothing about engines or versions.

A set is all parameters, or the adapters of some (see `adapters`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from async_rlhf.actors.torch_engine.adapters import A, B, Base, adapted_parameters, check_adapters, with_adapter
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.tensors import RawTensor


def check_weights(model: torch.nn.Module, tensors: Mapping[str, RawTensor], base: Base | None = None) -> None:
    """Raise WeightsError when a name is missing or unknown, or a shape or dtype differs.

    Tied parameters appear once, as in `named_parameters`. base: what adapters are added to.
    """
    if adapted_parameters(tensors):
        check_adapters(model, tensors, base)
        return
    parameters = dict(model.named_parameters())
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or unknown:
        raise WeightsError(
            f"a weight set must name all {len(parameters)} parameters of the model; "
            f"missing: {_some(missing)}; unknown: {_some(unknown)}; publish the model the engine was started with"
        )
    for name, parameter in parameters.items():
        tensor, dtype = tensors[name], str(parameter.dtype).removeprefix("torch.")
        if tensor.shape != tuple(parameter.shape) or tensor.dtype != dtype:
            raise WeightsError(
                f"parameter {name}: got {tensor.dtype} {tensor.shape}, "
                f"the model has {dtype} {tuple(parameter.shape)}; publish the model the engine was started with"
            )


@torch.no_grad()
def adopt_weights(model: torch.nn.Module, tensors: Mapping[str, RawTensor], base: Base | None = None) -> None:
    """Copy every tensor into the parameter of that name; the set has passed `check_weights`."""
    adapted = adapted_parameters(tensors)
    if adapted and base is not None:
        for name, parameter in model.named_parameters():
            if name in adapted:
                a, b = (_as_tensor(tensors[name + end], torch.float32).to(parameter.device) for end in (A, B))
                parameter.copy_(with_adapter(base.tensor(name).to(parameter.device), a, b))
        return
    for name, parameter in model.named_parameters():
        if parameter.numel():
            parameter.copy_(_as_tensor(tensors[name], parameter.dtype))


def _as_tensor(raw: RawTensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of the bytes (they may be read-only, which torch refuses to view) as a tensor on the CPU."""
    return torch.frombuffer(bytearray(raw.data), dtype=dtype).reshape(raw.shape)


def _some(names: list[str]) -> str:
    """The first few names, for a message."""
    shown = ", ".join(names[:3]) or "none"
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
