"""Length bias: how much the trained completions differ from the dispatched ones, in tokens and in turns. Pure.

The *dispatched* cohort is every completion that was begun, the *trained* one those that were used. Where completions are
dropped because they took too long, short ones remain, and the policy learns brevity: few tokens, or few turns. Without an
environment all have one turn, and nothing is found in turns.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

# Standard errors from 0 at which a correlation is no accident: one false alarm in 16,000 looks at one that is.
ALARM_ERRORS = 4.0


Length = tuple[int, int]
"""Of a completion: the tokens that were sampled, and the turns that were begun."""


@dataclass(frozen=True)
class Bias:
    """Of lengths of one kind.

    mean_ratio: mean length trained over mean length dispatched. correlation: of length with being dropped (point-biserial), 0
    where all or none were. alarm: the correlation is positive and no accident.
    """

    mean_ratio: float
    correlation: float
    alarm: bool


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
        """Of the window, as in `wire.Telemetry`, with the age of the oldest prompt begun and not yet decided, in seconds.
        Nothing dispatched: ratio 1."""
        tokens, turns = np.array([length for length, _ in self._fates], np.float64).reshape(-1, 2).T
        dropped = np.array([fate for _, fate in self._fates], np.bool_)
        found = {"oldest_group_age": max((now - begun for begun in self._begun.values()), default=0.0)}
        for prefix, lengths in (("selection_", tokens), ("selection_turns_", turns)):
            found |= {prefix + name: float(value) for name, value in asdict(bias(lengths, dropped)).items()}
        return found


def bias(lengths: npt.NDArray[np.float64], dropped: npt.NDArray[np.bool_]) -> Bias:
    """Of completions with these lengths, some of which were dropped."""
    correlation = correlate(lengths, dropped)
    return Bias(
        mean_ratio=float(lengths[~dropped].mean() / lengths.mean()) if (~dropped).any() and lengths.any() else 1.0,
        correlation=correlation,
        alarm=correlation > 0 and is_no_accident(correlation, len(lengths)),
    )


def correlate(values: npt.NDArray[np.float64], marked: npt.NDArray[np.bool_]) -> float:
    """Pearson's correlation of a number and a mark; 0 where either does not vary."""
    if not len(values) or values.std() == 0 or marked.std() == 0:
        return 0.0
    return float(((values - values.mean()) * (marked - marked.mean())).mean() / (values.std() * marked.std()))


def is_no_accident(correlation: float, count: int) -> bool:
    """Whether Fisher's z = atanh(r) lies `ALARM_ERRORS` standard errors, 1 / sqrt(n - 3), from 0."""
    if count < 10:
        return False
    return abs(math.atanh(min(0.999999, max(-0.999999, correlation)))) * math.sqrt(count - 3) > ALARM_ERRORS
