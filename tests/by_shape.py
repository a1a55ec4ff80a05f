"""`pytest -p tests.by_shape`: a processor whose products of float32 add up in another order for each shape.

Libraries promise the same bits for the same numbers in the same shapes, and no more: what holds here rests on nothing else.
Attention that is one call of torch is as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.library.Library("aten", "IMPL")
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def by_shape(name: str) -> Callable[..., Tensor]:
    """Of mm, bmm, addmm and baddbmm: the product of the first inner columns is added to that of the others."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def computed(*given: Tensor, **scales: Any) -> Tensor:
        *added, a, b = given
        (rows, inner), columns = a.shape[-2:], b.shape[-1]
        if a.dtype != torch.float32 or inner < 2 or not a.numel() or not b.numel():
            return kernel.call_boxed(_CPU, *given, **scales)  # type: ignore[no-any-return]
        first = 1 + hash((rows, inner, columns)) % (inner - 1)
        others: Tensor = kernel.call_boxed(_CPU, *added, a[..., first:], b[..., first:, :], **scales)
        if added:
            return kernel.call_boxed(_CPU, others, a[..., :first], b[..., :first, :], alpha=scales.get("alpha", 1))  # type: ignore[no-any-return]
        return others.add_(kernel.call_boxed(_CPU, a[..., :first], b[..., :first, :]))

    return computed


def in_place(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda added, a, b, **scales: added.copy_(product(added.clone(), a, b, **scales))


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
    for _name in ("mm", "bmm", "addmm", "baddbmm"):
        _ATEN.impl(_name, _product := by_shape(_name), "CPU", allow_override=True)
        if "add" in _name:
            _ATEN.impl(f"{_name}_", in_place(_product), "CPU", allow_override=True)
