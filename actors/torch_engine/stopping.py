"""Where a completion ends: stop tokens, stop strings, length. Reads what the rows hold; decides nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from async_rlhf.actors.torch_engine.rows import Rows

Decode = Callable[[Sequence[int]], str]

# A character takes up to four tokens of one byte each; some more for tokens that are no text.
_TOKENS_A_CHARACTER, _SPARE_TOKENS = 4, 8


class Stopping:
    """stop_ids end any completion. decode: tokens to text; None where no request may have stop strings."""

    def __init__(self, stop_ids: Iterable[int], decode: Decode | None) -> None:
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self.decode = decode

    def stopped(
        self, rows: Rows, tokens: npt.NDArray[np.int64], ready: npt.NDArray[np.int64], stops: Callable[[int], Sequence[str]]
    ) -> npt.NDArray[np.bool_]:
        """bool [N]: which of the rows `ready`, to each of which one of int64 [N] `tokens` was just added, are to end.

        `stops` gives the stop strings of a row that has some.
        """
        stopped: npt.NDArray[np.bool_] = (tokens[:, None] == self._stop_ids).any(axis=1)
        for index in np.flatnonzero(rows.stoppable[ready] & ~stopped).tolist():
            row = int(ready[index])
            stopped[index] = self._ends_with(rows, row, stops(row))
        return stopped

    def _ends_with(self, rows: Rows, row: int, stops: Sequence[str]) -> bool:
        """Whether the text of the newest tokens holds a stop string; had it held one before, the row would have ended."""
        assert self.decode is not None
        window = _TOKENS_A_CHARACTER * max(map(len, stops)) + _SPARE_TOKENS
        text = self.decode(rows.newest(row, window))
        return any(stop in text for stop in stops)
