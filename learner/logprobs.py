"""Log-probabilities of chosen tokens, in float32. Pure.

Axes: N tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits_NV: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
    """float32 [N]: log softmax(logits / temperature)[target], the distribution the engine sampled from."""
    scaled = logits_NV.float() / temperature_N[:, None]
    return scaled.gather(-1, target_N[:, None]).squeeze(-1) - torch.logsumexp(scaled, dim=-1)


def token_entropy(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """float32 [N]: entropy of softmax(logits / temperature) in nats; carries no gradient."""
    with torch.no_grad():
        logp = torch.log_softmax(logits_NV.float() / temperature_N[:, None], dim=-1)
        # 0 log 0 is 0: a masked token of the vocabulary has log-probability -inf
        return -(logp.exp() * logp.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
