"""How much memory does the loss take? Chunked log-probabilities beside the plain ones, forward and backward.

Each is measured in a process of its own: the peak of its resident memory less what it held just before, with hidden states
and output layer already there. The gradient of the output layer belongs to both. The plain one is left out, and
extrapolated where it would not fit: it needs six float32 matrices of tokens by vocabulary.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import psutil
import torch
import typer

from async_rlhf.experiments.throughput.harness import Bench, Row
from async_rlhf.learner.model.chunks import chunk_tokens, tokens_within
from async_rlhf.learner.model.logprobs import chunked_logprobs, token_entropy, token_logprobs

_LIMIT_S = 1200.0
# Measured: logits, their log-softmax and its exponential, and the gradients of each.
_PLAIN_MATRICES = 6


def loss_memory(
    bench: Bench,
    tokens: Annotated[int | None, typer.Option(min=1)] = None,
    vocabulary: Annotated[int, typer.Option(min=2)] = 128 * 1024,
    width: Annotated[int, typer.Option(min=1)] = 64,
    logits_mib: Annotated[int, typer.Option(min=1, help="As learner.logits_mib.")] = 256,
) -> Iterator[Row]:
    """Compare the peak memory of the loss, in MiB. By itself 2,048 and 4,096 tokens of a vocabulary of 131,072."""
    for count in [tokens] if tokens else bench.size([2048, 4096], [64]):
        load = f"{count} tokens, vocabulary {vocabulary}"
        needed, free = _PLAIN_MATRICES * count * vocabulary * 4, psutil.virtual_memory().available
        sides = ("chunked",) if needed > 0.9 * free else ("chunked", "plain")
        peaks, seconds = dict[str, list[float]](), dict[str, float]()
        for side in sides:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                peak, seconds[side] = fresh.submit(peak_bytes, side, count, vocabulary, width, logits_mib).result(_LIMIT_S)
            peaks[side] = [peak / 2**20]
        further = (
            {"time_ratio": seconds["chunked"] / seconds["plain"]}
            if "plain" in seconds
            else {"plain_needs_mib": needed // 2**20}
        )
        yield Row.of(load, peaks, "MiB", counted=True, figures=further)


def peak_bytes(side: str, tokens: int, vocabulary: int, width: int, logits_mib: int) -> tuple[int, float]:
    """Peak of this process above what it held before, and seconds of one forward and backward."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=random).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=random) / width**0.5).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), generator=random)
    temperature = torch.ones(tokens)
    process, peak, done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    if side == "chunked":
        rows, remembered = chunk_tokens(vocabulary, logits_mib, "cpu"), tokens_within(vocabulary, logits_mib)
        logp, _ = chunked_logprobs(hidden, weight, None, target, temperature, rows, remembered=remembered)
    else:
        logits = hidden @ weight.T
        logp = token_logprobs(logits, target, temperature)
        with torch.no_grad():
            token_entropy(logits, temperature)
    logp.sum().backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    return peak[0] - before, seconds
