"""Rollout routing replay: in a pass of the policy each router takes the experts that were recorded (Ma et al. 2025, arXiv
2510.11370), so that a token's log-probability is that of the same part of the network under any weights.

They are mixed by the router's own logits of this pass: their softmax over all experts, or their sigmoids, divided by the sum
over the chosen ones where the model does so (`norm_topk_prob`), times its `routed_scaling_factor`. Through these numbers
gradients reach the logits, as without replay; what only chooses (groups, correction biases) is left out.

Axes: P positions, M mixture layers, k experts of a position in each, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.routing import SIGMOID, Routing, not_recorded, routers


class RoutingReplay:
    """Owns a hook on each router of a model; without experts given it changes nothing. Raises ConfigError for a model whose
    experts cannot be recorded, or are mixed otherwise."""

    def __init__(self, model: nn.Module) -> None:
        modules = routers(model)
        self.routing = Routing(len(modules), modules[0].top_k, modules[0].num_experts)
        self._kind = str(model.config.get_text_config().model_type)  # type: ignore[union-attr, operator]
        self._experts_PMk: Tensor | None = None
        self._check(modules[0])
        for layer, router in enumerate(modules):
            router.register_forward_hook(partial(self._replace, layer))

    @contextmanager
    def given(self, experts_PMk: Tensor | None) -> Iterator[None]:
        """Within, passes replay these experts. int16; -1 leaves the choice to the router."""
        before, self._experts_PMk = self._experts_PMk, experts_PMk
        try:
            yield
        finally:
            self._experts_PMk = before

    def again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a part of a pass and of its recomputation in the backward pass, which may come when others are given."""
        return nullcontext(), self.given(self._experts_PMk)

    def _replace(self, layer: int, router: Any, inputs: Any, outputs: Any) -> Any:
        """The router's outputs as if it had chosen the given experts of this layer; None leaves its outputs."""
        if self._experts_PMk is None:
            return None
        logits_PE, weights_Pk, own_Pk = outputs
        given_Pk = self._experts_PMk[:, layer].long()
        chosen_Pk = torch.where(given_Pk < 0, own_Pk, given_Pk)
        return logits_PE, self._weights(router, logits_PE, chosen_Pk).to(weights_Pk.dtype), chosen_Pk

    def _weights(self, router: Any, logits_PE: Tensor, chosen_Pk: Tensor) -> Tensor:
        """[P, k]"""
        is_sigmoid = self._kind in SIGMOID
        scores_PE = logits_PE.sigmoid() if is_sigmoid else logits_PE.softmax(-1, dtype=torch.float)
        weights_Pk = scores_PE.gather(1, chosen_Pk)
        if getattr(router, "norm_topk_prob", True):
            weights_Pk = weights_Pk / (weights_Pk.sum(-1, keepdim=True) + (1e-20 if is_sigmoid else 0.0))
        return weights_Pk * getattr(router, "routed_scaling_factor", 1.0)

    @torch.no_grad()
    def _check(self, router: Any) -> None:
        """Check that `_weights` gives a router's own weights for its own choice. Raises ConfigError."""
        states = torch.randn(8, router.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(router.weight)
        logits_PE, weights_Pk, own_Pk = router(states)
        if not torch.allclose(self._weights(router, logits_PE, own_Pk).to(weights_Pk.dtype), weights_Pk, rtol=1e-5):
            raise ConfigError(not_recorded(self._kind))
