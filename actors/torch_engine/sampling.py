"""One token per row from logits, by the inverse of the cumulative distribution. No random state: numbers come in.

Axes: `N` rows, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Truncation:
    """Which tokens may be sampled: top_k int64 [N] (0: all), top_p float32 [N] (1: all), min_p float32 [N] (0: all)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def kept(self, logprobs: torch.Tensor) -> torch.Tensor:
        """bool [N, V]: at least `min_p` times as likely as the likeliest; of these the `top_k` likeliest; of these the
        fewest likeliest whose share of what is left reaches `top_p`. Never empty; of equally likely tokens the lower id
        comes first. Order and meaning are vLLM's.
        """
        ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
        kept = (ordered >= ordered[:, :1] + self.min_p.log()[:, None]) & (ordered > -torch.inf)
        kept &= (ranks < self.top_k[:, None]) | (self.top_k == 0)[:, None]
        probabilities = torch.where(kept, ordered.exp(), 0.0).double()
        sums = probabilities.cumsum(dim=-1)
        enough = (sums - probabilities) >= self.top_p[:, None] * sums[:, -1:]
        # A sum that rounding keeps from growing cuts nothing off when all are wanted.
        kept &= ~enough | (self.top_p >= 1)[:, None]
        kept[:, 0] = True
        return torch.zeros_like(kept).scatter_(1, ids, kept)


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    truncation: Truncation | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Choose the first token whose cumulative probability exceeds the row's random number.

    logits: [N, V] of any float type. uniforms: float64 [N], 0 <= u < 1.
    temperatures: float32 [N], or None where all are 1. greedy: bool [N], rows that take the most likely token instead,
    or None where there are none. truncation: None where no row leaves tokens out.
    Returns int64 [N] tokens, float32 [N] log-probabilities of the distribution at that temperature, renormalised after
    truncation, and bool [N, V], what truncation kept (None without).
    """
    scaled = logits.float()
    if temperatures is not None:
        scaled = scaled / temperatures[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    kept = None
    if truncation is not None:
        kept = truncation.kept(logprobs)
        logprobs = torch.log_softmax(logprobs.masked_fill(~kept, -torch.inf), dim=-1)
    # In float64 the sum over a large vocabulary stays monotonic and loses no token to rounding.
    cumulative = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True)
    # Only rows that are not numbers get past the end; their log-probability says so.
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], scaled.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0], kept
