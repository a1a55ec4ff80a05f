"""How much memory does the loss take? Chunked log-probabilities beside the plain ones, forward and backward.

Each is measured in a process of its own: the peak of its resident memory less what it held just before, with hidden states
and output layer already there. The gradient of the output layer belongs to both. The plain one is left out, and
said to be, where it would not fit: it needs six float32 matrices of tokens by vocabulary. Run as
`python -m async_rlhf.experiments.throughput.loss_memory [--tokens 8192] [--vocabulary 131072]`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer

from async_rlhf.learner.model.logprobs import CHUNK_MIB, chunk_tokens, chunked_logprobs, token_entropy, token_logprobs

ROOT = Path(__file__).resolve().parents[2]
# Measured: logits, their log-softmax and its exponential, and the gradients of each.
_PLAIN_MATRICES = 6


class Side(StrEnum):
    """Which of the two a child process measures."""

    PLAIN = "plain"
    CHUNKED = "chunked"


def peak_bytes(side: Side, tokens: int, vocabulary: int, width: int, logits_mib: int) -> tuple[int, float]:
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
    if side is Side.CHUNKED:
        rows, remembered = chunk_tokens(vocabulary, min(CHUNK_MIB, logits_mib)), chunk_tokens(vocabulary, logits_mib)
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


def measured(side: Side, tokens: int, vocabulary: int, width: int, logits_mib: int) -> tuple[int, float]:
    """`peak_bytes` in a fresh process."""
    options = [f"--tokens={tokens}", f"--vocabulary={vocabulary}", f"--width={width}", f"--logits-mib={logits_mib}"]
    command = [sys.executable, "-m", "async_rlhf.experiments.throughput.loss_memory", *options, f"--only={side}"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=1800)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["bytes"], found["seconds"]


def compared(tokens: int, vocabulary: int, width: int, logits_mib: int) -> dict[str, float]:
    """Both sides; where the plain one would not fit into free memory, the chunked one and what the plain one would need."""
    chunked, chunked_s = measured(Side.CHUNKED, tokens, vocabulary, width, logits_mib)
    result = {"tokens": tokens, "vocabulary": vocabulary, "chunked_mib": chunked // 2**20}
    needed, free = _PLAIN_MATRICES * tokens * vocabulary * 4, psutil.virtual_memory().available
    if needed > 0.9 * free:
        return {**result, "plain_needs_mib": needed // 2**20, "free_mib": free // 2**20}
    plain, plain_s = measured(Side.PLAIN, tokens, vocabulary, width, logits_mib)
    return {
        **result,
        "plain_mib": plain // 2**20,
        "ratio": round(chunked / plain, 4),
        "time_ratio": round(chunked_s / plain_s, 2),
    }


def main(
    tokens: Annotated[int, typer.Option(min=1)] = 2048,
    vocabulary: Annotated[int, typer.Option(min=2)] = 128 * 1024,
    width: Annotated[int, typer.Option(min=1)] = 64,
    logits_mib: Annotated[int, typer.Option(min=1, help="As learner.logits_mib.")] = 256,
    only: Annotated[Side | None, typer.Option(help="Measure one in this process.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compare the peak memory of the loss."""
    if only is not None:
        found, seconds = peak_bytes(only, tokens, vocabulary, width, logits_mib)
        typer.echo(json.dumps({"bytes": found, "seconds": seconds}))
        return
    result = compared(tokens, vocabulary, width, logits_mib)
    typer.echo(json.dumps(result) if as_json else "\n".join(f"{name:<14}{value}" for name, value in result.items()))


if __name__ == "__main__":
    typer.run(main)
