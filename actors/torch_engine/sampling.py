"""One token per row from logits, by the inverse of the cumulative distribution. No random state: numbers come in.

Axes: `N` rows, `V` vocabulary.
"""

from __future__ import annotations

import torch


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the first token whose cumulative probability exceeds the row's random number.

    logits: [N, V] of any float type. uniforms: float64 [N], 0 <= u < 1.
    temperatures: float32 [N], or None where all are 1. greedy: bool [N], rows that take the most likely token instead,
    or None where there are none.
    Returns int64 [N] tokens and float32 [N] log-probabilities of the distribution at that temperature.
    """
    scaled = logits.float()
    if temperatures is not None:
        scaled = scaled / temperatures[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    # In float64 the sum over a large vocabulary stays monotonic and loses no token to rounding.
    cumulative = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True)
    # Only rows that are not numbers get past the end; their log-probability says so.
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], scaled.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
