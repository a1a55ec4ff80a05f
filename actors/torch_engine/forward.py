"""One pass of any Hugging Face causal language model over the running rows: the generic way.

The last known token of every row is not part of its prefix: it is the first token the row decodes. So a decode pass is
the same for new and old rows, and the logits of all rows come from one place. Called by the engine once per token;
never samples and never sees a request.

`GraphedForward` saves the start of a thousand GPU kernels from Python: the decode pass is recorded once per shape, then
replayed. A recorded pass reads its tokens and positions from fixed tensors and works on as many rows and columns as its shape
has: row counts are rounded up to a power of two, lengths to `LENGTH_STEP`. Rows that do not run write into rows that are never
read. Prefixes, whose shapes vary, are computed the ordinary way. What was recorded is forgotten when the cache gets other
buffers. Which parts of a GPU are used is decided by the recorder; the rest runs anywhere, and is tested so.

Axes: `N` running rows, `B` rows of a recorded shape, `K` chunks, `P` longest chunk, `T` visible columns, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from async_rlhf.actors.torch_engine.cache import RowCache
from async_rlhf.actors.torch_engine.chunks import PaddedChunks, attention_of, position_mask
from async_rlhf.actors.torch_engine.scheduler import PrefillChunk
from async_rlhf.actors.torch_engine.segments import attend_in_segments, attending, segments
from async_rlhf.buffers.attention import cache_argument
from async_rlhf.buffers.images.tower import PromptPlace

LENGTH_STEP = 128

# Runs a pass, and returns what runs it again with what its inputs hold then.
Recorder = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]


class Forward:
    """Computes what the next token of every running row depends on, and keeps the cache: here through the model's own code, a
    padded pass when there are chunks, then a decode pass."""

    def __init__(self, model: PreTrainedModel, cache: RowCache) -> None:
        self._model: Any = model
        self._cache = cache
        self._cached = {cache_argument(model): cache}
        self._attention = attention_of(model.config)
        self._in_segments = attend_in_segments(model)

    def __call__(
        self, chunks: Sequence[PrefillChunk], tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Compute chunks of prefixes, then one token in each row.

        tokens, positions: int64 [N], each row's last token and its index in its sequence.
        length: columns the longest row occupies, this token included.
        Returns logits [N, V].
        """
        padded = PaddedChunks.of(chunks, tokens.device)
        if padded is not None:
            self._cache.begin_chunks(padded)
            self._prefill(chunks, padded)
        return self._decode(tokens, positions, length)

    def _prefill(self, chunks: Sequence[PrefillChunk], padded: PaddedChunks) -> None:
        masks = self._attention.masks(lambda reach: padded.mask(self._model.dtype, reach))
        self._pass(padded.ids, padded.positions, masks)

    def logits(self, ids: torch.Tensor, prompt: PromptPlace | None = None) -> torch.Tensor:
        """[T, V] of one sequence, int64 [T], by the same weights and the same arithmetic; the cache does not notice.
        prompt: with images, at its beginning."""
        logits: torch.Tensor = self._model(input_ids=ids[None], use_cache=False).logits
        return logits[0]

    def refresh(self) -> None:
        """The model's parameters were replaced in place."""

    def _decode(self, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """One token in each row: logits [N, V]."""
        self._cache.begin_tokens(positions, length)
        at = positions[:, None]
        masks = self._attention.masks(lambda reach: position_mask(at, length, self._model.dtype, reach))
        with attending(segments(positions.tolist()) if self._in_segments else ()):
            return self._pass(tokens[:, None], self._turned(positions)[:, None], masks)

    def _turned(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [N]: the rotary positions of tokens at these indices."""
        return positions

    def _pass(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits [rows, V] at the last position."""
        self._cache.is_in_pass = True
        outputs = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **self._cached,
        )
        self._cache.is_in_pass = False
        logits: torch.Tensor = outputs.logits
        return logits[:, -1]


class GraphedForward(Forward):
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
