"""How many tokens have their logits at a time: what the loss computes with, and what its memory is estimated by. Pure."""

from __future__ import annotations

# One chunk of logits on a CPU. The C library fetches what is larger than 32 MiB from the system each time, and for a narrow
# model first touching its pages takes longer than computing what stands on them. But each chunk reads the whole output layer,
# and adds to the whole of its gradient: of a large vocabulary it has so many tokens at least.
_CPU_MIB = 16
_CPU_TOKENS = 128
FLOAT32_BYTES = 4


def tokens_within(vocabulary: int, mib: int) -> int:
    """Tokens whose float32 logits fit into so much; one at least."""
    return max(1, mib * 2**20 // (FLOAT32_BYTES * vocabulary))


def chunk_tokens(vocabulary: int, logits_mib: int, device: str) -> int:
    """Tokens to treat at a time on a type of device, within `logits_mib`. All of it on an accelerator, whose products want
    many tokens and whose memory is kept by its allocator."""
    within = tokens_within(vocabulary, logits_mib)
    return min(within, max(_CPU_TOKENS, tokens_within(vocabulary, _CPU_MIB))) if device == "cpu" else within
