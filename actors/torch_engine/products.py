"""Products with weights on a CPU: weights are packed once per weight set, the way the processor wants to read them.

A decode step multiplies few rows with every weight there is. An ordinary product brings the weights into the order of
the processor's kernels each time, which for few rows takes as long as the product itself, or leaves them to a library
that does not use all of the processor. oneDNN takes weights that are in its own order already.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this processor have such products; else the ordinary one gives the same up to rounding."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class Product:
    """x W^T for the weights of one or more linear layers without bias, one below the other, computed in their type.

    Owns a copy of the weights, so it is made again when they change.
    """

    @torch.no_grad()
    def __init__(self, *weights: torch.Tensor) -> None:
        joined = torch.cat(weights)
        self._dtype = joined.dtype
        self._packed = can_pack(joined.dtype)
        self._weights = torch.ops.mkldnn._reorder_linear_weight(joined) if self._packed else joined

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [S, in] -> float32 [S, out], fresh memory."""
        x = x.to(self._dtype)
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weights, None, "none", [], "")
        else:
            product = F.linear(x, self._weights)
        return product.float()
