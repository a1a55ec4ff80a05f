"""A third engine: ends each request at once, with tokens that it was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from async_rlhf.actors.engine import Bits, Completion, Partial, Request, RolloutKey, check_requests
from async_rlhf.buffers.record import Float32Array, Span
from async_rlhf.buffers.tensors import RawTensor


class ParrotEngine:
    """`Engine` that computes nothing."""

    bits = Bits(obstacle="a parrot promises nothing")

    def __init__(self, says: Sequence[int], version: int) -> None:
        self._says, self.version, self.progress = np.array(says, np.int32), version, 0
        self._running: dict[RolloutKey, Request] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self._running.keys())
        self._running.update({request.key: request for request in requests})

    def abort(self, keys: Iterable[RolloutKey]) -> int:
        for key in keys:
            self._running.pop(key, None)
        return 0  # nothing is sampled before the end

    def step(self) -> list[Completion]:
        ended, self._running = list(self._running.values()), {}
        self.progress += len(ended) * len(self._says)
        return [self._completion(request) for request in ended]

    def _completion(self, request: Request) -> Completion:
        ids = self._says[: request.max_new_tokens]
        return Completion(request.key, ids, np.zeros(len(ids), np.float32), (Span(self.version, len(ids)),), "stop")

    def partials(self, known: Mapping[RolloutKey, int]) -> list[Partial]:
        return []

    def load_weights(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        self.version = version

    def probe(self, token_ids: Sequence[int], *, behind_images: bool = False) -> Float32Array:
        return np.zeros(len(token_ids) - 1, np.float32)

    def close(self) -> None: ...
