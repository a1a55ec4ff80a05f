"""What the host knows about every running row: counters, settings, random numbers, and the tokens sampled so far.

Structure of arrays, so that one step touches every row with a handful of numpy operations and no Python loop. Never
holds a torch tensor and never decides anything; the engine owns it and keeps it in step with the scheduler.

Axes: `R` rows (slots), `N` running rows (a prefix of R), `T` completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from actors.engine import Completion, Request
from buffers.record import FinishReason, Span

# Keeps u * total strictly below total after rounding, so that a token of probability 0 is never chosen.
_BELOW_ONE = 1.0 - 2.0**-40


class Rows:
    """Arrays over rows. `T` grows to the longest completion ever asked for.

    positions: int64 [R], index of the last token in its sequence; the next token is predicted from there.
    counts, limits: int64 [R], tokens sampled and tokens allowed.
    temperatures: float32 [R], 1 for greedy rows. greedy: bool [R].
    """

    def __init__(self, slots: int) -> None:
        self.positions = np.zeros(slots, np.int64)
        self.counts = np.zeros(slots, np.int64)
        self.limits = np.zeros(slots, np.int64)
        self.temperatures = np.ones(slots, np.float32)
        self.greedy = np.zeros(slots, np.bool_)
        self._uniforms = np.zeros((slots, 0), np.float64)
        self._tokens = np.zeros((slots, 0), np.int32)
        self._logprobs = np.zeros((slots, 0), np.float32)
        # Tokens of weights that have been replaced since; what is missing is the present version's.
        self._spans: list[tuple[Span, ...]] = [()] * slots

    def admit(self, row: int, request: Request) -> None:
        """Begin a request: its random numbers are one Philox stream, drawn up front from its seed alone."""
        limit = request.max_new_tokens
        if limit > self._tokens.shape[1]:
            self._grow(limit)
        self.positions[row] = len(request.prompt_ids) - 1
        self.counts[row] = 0
        self._spans[row] = ()
        self.limits[row] = limit
        self.greedy[row] = request.temperature == 0
        self.temperatures[row] = request.temperature or 1.0
        if not self.greedy[row]:
            stream = np.random.Generator(np.random.Philox(request.seed))
            self._uniforms[row, :limit] = stream.random(limit) * _BELOW_ONE

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Row `target` becomes what row `source` was, for every (source, target)."""
        sources, targets = (list(side) for side in zip(*moves, strict=True))
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self._spans[target] = self._spans[source]

    def uniforms(self, num_rows: int) -> npt.NDArray[np.float64]:
        """float64 [N] in [0, 1): the random number of each row's next token."""
        return self._uniforms[np.arange(num_rows), self.counts[:num_rows]]

    def record(self, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]) -> None:
        """Append one sampled token to each of the first N rows: int64 [N], float32 [N]."""
        num_rows = len(tokens)
        at = (np.arange(num_rows), self.counts[:num_rows])
        self._tokens[at] = tokens
        self._logprobs[at] = logprobs
        self.counts[:num_rows] += 1
        self.positions[:num_rows] += 1

    def close_spans(self, num_rows: int, version: int) -> None:
        """The weights are about to be replaced: what the first N rows hold beyond their spans is `version`'s."""
        for row in range(num_rows):
            self._spans[row] = self._all_spans(row, version)

    def completion(self, row: int, request: Request, version: int, finish_reason: FinishReason) -> Completion:
        """What a finished row produced, copied out of the arrays; `version` are the present weights."""
        count = int(self.counts[row])
        return Completion(
            key=request.key,
            token_ids=self._tokens[row, :count].copy(),
            logprobs=self._logprobs[row, :count].copy(),
            spans=self._all_spans(row, version),
            finish_reason=finish_reason,
        )

    def _all_spans(self, row: int, version: int) -> tuple[Span, ...]:
        spans = self._spans[row]
        num_new = int(self.counts[row]) - sum(span.num_tokens for span in spans)
        return (*spans, Span(version, num_new)) if num_new else spans

    def _grow(self, num_tokens: int) -> None:
        for name in ("_uniforms", "_tokens", "_logprobs"):
            old = getattr(self, name)
            setattr(self, name, np.pad(old, ((0, 0), (0, num_tokens - old.shape[1]))))
