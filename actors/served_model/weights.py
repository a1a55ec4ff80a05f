"""A weight set enters a model whole or not at all. Knows names, shapes and bytes; nothing about engines or versions.

A set is all parameters, of a model that reads images perhaps without those of its tower, which then stay as they are; or the
low-rank adapters of some, W = W0 + B A, with W0 read from the model directory: it then has
`<parameter>.lora_A` (float32 [r, columns]) and `<parameter>.lora_B` (float32 [rows, r], alpha / r times the factor) of every
adapted parameter. The sum is made in float32 and rounded once, to the type that is served, as the learner makes it where it
publishes merged weights (Hu et al. 2021, arXiv 2106.09685).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.images.tower import tower_parameters
from async_rlhf.buffers.tensors import RawTensor

A, B = ".lora_A", ".lora_B"
# Bytes; where products find their operands further off they round in another order.
_ALIGNED = 64


def check_weights(model: torch.nn.Module, tensors: Mapping[str, RawTensor], base: Base | None = None) -> None:
    """Raise WeightsError when a name is missing or unknown, or a shape or dtype differs.

    Tied parameters appear once, as in `named_parameters`. Those of a tower that does not learn may be left out, all of them.
    base: what adapters are added to.
    """
    if adapted_parameters(tensors):
        _check_adapters(model, tensors, base)
        return
    parameters = dict(model.named_parameters())
    tower = tower_parameters(model)
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if unknown or (missing and missing != sorted(tower)):
        beside = f", or all but the {len(tower)} of what reads images" if tower else ""
        raise WeightsError(
            f"a weight set must name all {len(parameters)} parameters of the model{beside}; "
            f"missing: {_some(missing)}; unknown: {_some(unknown)}; publish the model the engine was started with"
        )
    for name, tensor in tensors.items():
        parameter = parameters[name]
        dtype = str(parameter.dtype).removeprefix("torch.")
        if tensor.shape != tuple(parameter.shape) or tensor.dtype != dtype:
            raise WeightsError(
                f"parameter {name}: got {tensor.dtype} {tensor.shape}, "
                f"the model has {dtype} {tuple(parameter.shape)}; publish the model the engine was started with"
            )


@torch.no_grad()
def adopt_weights(model: torch.nn.Module, tensors: Mapping[str, RawTensor], base: Base | None = None) -> None:
    """Give every parameter that the set names its tensor; the set has passed `check_weights`.

    On a CPU sealed memory is not copied: the parameters lie in it from then on, in the one copy that all processes of the
    machine have. It does not change, and is there, as long as it is mapped.
    """
    adapted = adapted_parameters(tensors)
    if adapted and base is not None:
        for name, parameter in model.named_parameters():
            if name in adapted:
                a, b = (_as_tensor(tensors[name + end]).clone().to(parameter.device) for end in (A, B))
                _put(parameter, with_adapter(base.tensor(name).to(parameter.device), a, b))
        return
    for name, parameter in model.named_parameters():
        if name not in tensors or not parameter.numel():
            continue
        value, is_sealed = _as_tensor(tensors[name]), tensors[name].part is not None
        if is_sealed and parameter.device.type == "cpu" and value.data_ptr() % _ALIGNED == 0:
            parameter.data = value
        else:
            _put(parameter, value)


def changes_tower(model: torch.nn.Module, tensors: Mapping[str, RawTensor]) -> bool:
    """Whether a set that has passed `check_weights` has weights of what reads images."""
    return not tower_parameters(model).keys().isdisjoint(adapted_parameters(tensors) or tensors.keys())


def _put(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Into memory of its own, which recorded passes know by its address."""
    if parameter.untyped_storage().resizable():
        parameter.copy_(value)
    else:  # it lies in a set, or in a file
        parameter.data = value.to(parameter.dtype, copy=True)


def _as_tensor(raw: RawTensor) -> torch.Tensor:
    """A view of the bytes, wherever they lie; to be read only, for they may be sealed, which no tensor can express."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(raw.data, dtype=getattr(torch, raw.dtype)).reshape(raw.shape)


def _some(names: list[str]) -> str:
    """The first few names, for a message."""
    shown = ", ".join(names[:3]) or "none"
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


class Base:
    """The weights of a model directory, read from its safetensors files at each call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: dict[str, Path] = {}
        for path in sorted(directory.glob("model*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._file |= dict.fromkeys(file.keys(), path)

    @property
    def names(self) -> Iterable[str]:
        return self._file

    def tensor(self, name: str) -> torch.Tensor:
        """As it is stored. Raises WeightsError for a name that no file has."""
        if name not in self._file:
            raise WeightsError(
                f"the adapter of {name} has nothing to be added to: {self._directory} has no tensor of that name. "
                'Set learner.lora.publish = "merged"'
            )
        with safe_open(self._file[name], framework="pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]


def adapted_parameters(names: Iterable[str]) -> set[str]:
    """The parameters that a set of these names has adapters of; none for a set of whole weights."""
    return {name.removesuffix(suffix) for name in names for suffix in (A, B) if name.endswith(suffix)}


def with_adapter(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32: base + b a."""
    return base.float() + b @ a


def _check_adapters(model: torch.nn.Module, tensors: Mapping[str, RawTensor], base: Base | None) -> None:
    """Raises WeightsError for half an adapter, one of no parameter, one of another shape, and where there is no base."""
    if base is None:
        raise WeightsError("an engine without a model directory cannot take adapters alone; publish merged weights")
    parameters = dict(model.named_parameters())
    pairs = adapted_parameters(tensors)
    if unknown := sorted((pairs - parameters.keys()) | (tensors.keys() - {name + end for name in pairs for end in (A, B)})):
        raise WeightsError(f"a set of adapters holds {unknown[0]}, which adapts no parameter of this model")
    for name in sorted(pairs):
        shape = tuple(parameters[name].shape)
        b, a = (tensors.get(name + end) for end in (B, A))
        if a is None or b is None or not _is_adapter(a, b, shape):
            got = " x ".join("nothing" if tensor is None else f"{tensor.dtype} {tensor.shape}" for tensor in (b, a))
            raise WeightsError(
                f"parameter {name}: got the adapter {got}, the model has {shape} and wants float32; publish adapters of the "
                "model the engine was started with"
            )
        if tuple(base.tensor(name).shape) != shape:
            raise WeightsError(f"parameter {name} is {tuple(base.tensor(name).shape)} in the model directory, {shape} here")


def _is_adapter(a: RawTensor, b: RawTensor, shape: tuple[int, ...]) -> bool:
    return (
        a.dtype == b.dtype == "float32"
        and a.shape[1:] == shape[1:]
        and b.shape == (*shape[:1], *a.shape[:1])
        and len(shape) == 2
    )
