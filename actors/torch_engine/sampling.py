"""One token per row from logits, by the inverse of the cumulative distribution. No random state: numbers come in.

Axes: `N` rows, `V` vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Tokens of a block; a vocabulary of up to so many is searched at once.
_BLOCK = 256


def kept_tokens(
    logprobs: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool [N, V]: which tokens may be sampled, from log-probabilities [N, V].

    The others are `Sampling`'s settings of every row, [N]; None: the default in all. At least `min_p` times as likely as the
    likeliest; of these the `top_k` likeliest; of these the fewest likeliest whose share of what is left reaches `top_p`.
    Never empty; of equally likely tokens the lower id comes first. Order and meaning are vLLM's.
    """
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    kept = ordered > -torch.inf
    if min_p is not None:
        kept &= ordered >= ordered[:, :1] + min_p.log()[:, None]
    if top_k is not None:
        ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
        kept &= (ranks < top_k[:, None]) | (top_k == 0)[:, None]
    if top_p is not None:
        probabilities = torch.where(kept, ordered.exp(), 0.0).double()
        sums = probabilities.cumsum(dim=-1)
        enough = (sums - probabilities) >= top_p[:, None] * sums[:, -1:]
        # A sum that rounding keeps from growing cuts nothing off when all are wanted.
        kept &= ~enough | (top_p >= 1)[:, None]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, ids, kept)


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    greedy: torch.Tensor | None = None,
    is_truncated: bool = False,
    *,
    temperature: torch.Tensor | None = None,
    **settings: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Choose the first token whose cumulative probability exceeds the row's random number.

    logits: [N, V] of any float type. uniforms: float64 [N], 0 <= u < 1.
    greedy: bool [N], rows that take the most likely token instead, or None where there are none. is_truncated: whether some
    row may leave tokens out. temperature: float32 [N], or None where all are 1. settings: as `kept_tokens` takes them.
    Returns int64 [N] tokens, float32 [N] log-probabilities of the distribution at that temperature, renormalised after
    truncation, and bool [N, V], what truncation kept (None without).
    """
    scaled = logits.float()
    if temperature is not None:
        scaled = scaled / temperature[:, None]
    kept = None
    if is_truncated:
        kept = kept_tokens(torch.log_softmax(scaled, dim=-1), **settings)
        scaled = scaled.masked_fill(~kept, -torch.inf)
    probabilities = torch.softmax(scaled, dim=-1)
    tokens = _first_above(probabilities, uniforms)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], scaled.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log(), kept


def _first_above(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """int64 [N, 1]: the first token at which the running sum of [N, V] exceeds the share `uniforms` [N] of the whole sum.

    A large vocabulary is searched by blocks first: running sums of all of it would take longer than the softmax does.
    """
    num_tokens = probabilities.shape[-1]
    if num_tokens <= _BLOCK:
        sums = torch.cumsum(probabilities, dim=-1, dtype=torch.float64)
        return _search(sums, uniforms[:, None] * sums[:, -1:])
    if num_tokens % _BLOCK:
        probabilities = F.pad(probabilities, (0, -num_tokens % _BLOCK))
    blocks = probabilities.view(len(probabilities), -1, _BLOCK)
    sums = torch.cumsum(blocks.sum(dim=-1, dtype=torch.float64), dim=-1)
    thresholds = uniforms[:, None] * sums[:, -1:]
    block = _search(sums, thresholds)
    within = torch.cumsum(blocks[torch.arange(len(block), device=block.device), block[:, 0]], dim=-1, dtype=torch.float64)
    whole = within[:, -1:]
    # The same numbers are summed in two orders, so rounding could lead out of the block at either end.
    rest = (whole - (sums.gather(1, block) - thresholds)).clamp_(min=0).minimum(whole.nextafter(torch.zeros_like(whole)))
    return (block * _BLOCK + _search(within, rest)).clamp_(max=num_tokens - 1)


def _search(sums: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """int64 [N, 1]: the first of running sums [N, K] above its threshold [N, 1]."""
    # Only rows that are not numbers get past the end; their log-probability shows it.
    return torch.searchsorted(sums, thresholds, right=True).clamp_(max=sums.shape[-1] - 1)
