"""Length bias: how much the trained completions differ from the dispatched ones, in tokens and in turns. Pure.

The *dispatched* cohort is every completion that was begun, the *trained* one those that were used. Where completions are
dropped because they took too long, short ones remain, and the policy learns brevity: few tokens, or few turns. Without an
environment all have one turn, and nothing is found in turns.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

# Standard errors from 0 at which a correlation is no accident: one false alarm in 16,000 looks at one that is.
ALARM_ERRORS = 4.0


Length = tuple[int, int]
"""Of a completion: the tokens that were sampled, and the turns that were begun."""


class LengthBiasMonitor:
    """The fate of the last `window` completions, and when those still undecided were begun.

    A completion dropped in mid-sequence counts with the length it had: the bias is then underestimated.
    """

    def __init__(self, window: int = 4096) -> None:
        self._fates: deque[tuple[Length, bool]] = deque(maxlen=window)
        self._begun: dict[int, float] = {}

    def begin(self, group: int, now: float) -> None:
        """A group begins; a repeated one keeps its age, because its prompt has waited all the while."""
        self._begun.setdefault(group, now)

    def trained(self, group: int, lengths: Iterable[Length]) -> None:
        """The group's completions are used."""
        self._begun.pop(group, None)
        self._fates += ((length, False) for length in lengths)

    def dropped(self, group: int, lengths: Iterable[Length], *, again: bool) -> None:
        """The group's completions are not used. again: its prompt will be repeated."""
        if not again:
            self._begun.pop(group, None)
        self._fates += ((length, True) for length in lengths)

    def report(self, now: float) -> dict[str, float]:
        """The window's metrics, as in `wire.Telemetry`, with the age of the oldest undecided prompt, in seconds.

        mean_ratio: mean length trained over mean length dispatched. correlation: of length with being dropped (point-biserial),
        0 where all or none were. alarm: the correlation is positive and no accident. Nothing dispatched: ratio 1.
        """
        tokens, turns = np.array([length for length, _ in self._fates], np.float64).reshape(-1, 2).T
        dropped = np.array([fate for _, fate in self._fates], np.bool_)
        metrics = {"oldest_group_age": max((now - begun for begun in self._begun.values()), default=0.0)}
        for kind, lengths in (("selection", tokens), ("selection_turns", turns)):
            varies = len(lengths) and lengths.std() > 0 and dropped.std() > 0
            correlation = float(np.corrcoef(lengths, dropped)[0, 1]) if varies else 0.0
            is_known = not dropped.all() and lengths.any()
            metrics |= {
                f"{kind}_mean_ratio": float(lengths[~dropped].mean() / lengths.mean()) if is_known else 1.0,
                f"{kind}_correlation": correlation,
                f"{kind}_alarm": float(correlation > 0 and _is_no_accident(correlation, len(lengths))),
            }
        return metrics


def _is_no_accident(correlation: float, count: int) -> bool:
    """Whether Fisher's z = atanh(r) lies `ALARM_ERRORS` standard errors, 1 / sqrt(n - 3), from 0."""
    return count >= 10 and abs(math.atanh(max(-0.999999, min(0.999999, correlation)))) * math.sqrt(count - 3) > ALARM_ERRORS
