"""Decoding on a GPU without starting a thousand kernels from Python: the decode pass is recorded once per shape, then replayed.

A recorded pass reads its tokens and positions from fixed tensors and works on as many rows and columns as its shape
says: row counts are rounded up to a power of two, lengths to `LENGTH_STEP`. Rows that do not run write into rows that
nobody reads. Prefixes, whose shapes vary, are computed the ordinary way. What was recorded is forgotten when the cache
gets other buffers. Which parts of a GPU are used is decided by the recorder; the rest runs anywhere, and is tested so.

Axes: `N` running rows, `B` rows of the shape, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from async_rlhf.actors.torch_engine.cache import RowCache
from async_rlhf.actors.torch_engine.forward import ModelForward

LENGTH_STEP = 128

# Runs a pass, and returns what runs it again with what its inputs hold then.
Recorder = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]


class GraphedForward(ModelForward):
    """`Forward` whose decode pass is replayed. The cache must not be bounded in places: its rows are all there, always."""

    def __init__(self, model: PreTrainedModel, cache: RowCache, slots: int, record: Recorder) -> None:
        super().__init__(model, cache)
        self._slots, self._record = slots, record
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self._positions = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self._recorded: dict[tuple[int, int], Callable[[], torch.Tensor]] = {}
        self._buffers: tuple[int, ...] = ()

    def _decode(self, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        num_rows = len(tokens)
        rows = min(1 << (num_rows - 1).bit_length(), self._slots)
        columns = self._cache.columns_within(-(-length // LENGTH_STEP) * LENGTH_STEP)
        self._cache.reserve(columns)
        self._tokens[:num_rows], self._positions[:num_rows] = tokens, positions
        self._positions[num_rows:] = 0
        if (buffers := self._cache.addresses()) != self._buffers or not buffers:
            self._recorded.clear()
        run = self._recorded.get((rows, columns))
        if run is None:
            run = self._record(
                lambda: super(GraphedForward, self)._decode(self._tokens[:rows], self._positions[:rows], columns)
            )
            self._recorded[rows, columns] = run
            self._buffers = self._cache.addresses()
        return run()[:num_rows]


def record_on_cuda(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A CUDA graph of one pass. It runs beforehand, so that libraries set themselves up outside the recording."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay
