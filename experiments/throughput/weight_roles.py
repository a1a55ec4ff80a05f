"""The other processes of the weights benchmark: a hub, and a learner that publishes on command. No torch but to broadcast."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, process_time
from typing import Any, cast

import numpy as np

from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.config import QueueConfig, WeightsConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights.digests import in_threads, num_threads

DEADLINE_S = 120.0
NUM_TENSORS = 128
CHANGED_SHARE = 0.02
_BLOCK = 4 << 20


def weights_config(transport: str) -> WeightsConfig:
    """`delta` stands for chunks with deltas, `chunks` for chunks without."""
    kind = cast(Any, transport.replace("delta", "chunks"))
    return WeightsConfig(transport=kind, delta=transport == "delta", device_timeout_s=DEADLINE_S)


def make_words(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """bfloat16 patterns of normally distributed numbers."""
    block = np.random.default_rng(0).standard_normal(1 << 20).astype("<f4").view("<u4") >> 16
    return np.resize(block.astype("<u2"), num_bytes // 2)


def as_tensors(words: np.ndarray[Any, np.dtype[np.uint16]]) -> dict[str, RawTensor]:
    parts = np.array_split(words, NUM_TENSORS)
    return {f"layer{n}": RawTensor("bfloat16", (len(part),), part.view(np.uint8).data) for n, part in enumerate(parts)}


def copy(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """As torch copies: in several threads where there are cores."""
    starts = range(0, len(source), _BLOCK)
    in_threads(lambda at: np.copyto(target[at : at + _BLOCK], source[at : at + _BLOCK]), starts, num_threads())


def hub(address: str, directory: str, transport: str) -> None:
    """Serves until Halt."""
    bound = Bound(groups_per_batch=1, max_staleness=1, num_groups=1)
    Hub(address, Path(directory), QueueConfig(lease_s=600), bound, weights=weights_config(transport)).run()


def learner(address: str, transport: str, num_bytes: int, pipe: Connection) -> None:
    """For each message: publishes a set that differs a little from the last. Answers with its fence and when it began, had
    copied it into memory that it uses again (as a learner with a GPU does) and into what is sent, and the hub had verified it,
    in seconds of a clock that all processes share; and with the seconds of processor time for it."""
    broadcaster = None
    if transport == "device":
        import torch

        from async_rlhf.buffers.device.ends import LearnerEnd

        torch.set_num_threads(1)
        broadcaster = LearnerEnd(DEADLINE_S)
    config = weights_config(transport)
    client = LearnerClient(address, timeout_s=DEADLINE_S, weights=config, broadcaster=broadcaster)
    sent_from = list[float]()
    words, rng = make_words(num_bytes), np.random.default_rng(1)
    leaving = words.copy()
    while True:
        pipe.recv()
        client.register(0, 0)  # the same step under a new fence: nothing need be trained in between
        words[rng.integers(0, len(words), int(CHANGED_SHARE * len(words)))] += 1
        began, working = monotonic(), process_time()
        copy(leaving, words)
        publication = client.begin_publish(0, as_tensors(leaving), read=lambda: sent_from.append(monotonic()))
        copied = monotonic()
        publication.wait()
        pipe.send((client.fence, began, copied, sent_from[-1], monotonic(), process_time() - working))
