"""One rollout as it grows: turns that the engine sampled, and what an environment answered between them. Pure.

What is here is never tokenised again: the tokens only get more, exactly as the engine saw them. Where the row begins anew, what
was sampled before stays here, and the engine reads on from there. Axes as in `record.Rollout`: T tokens behind the prompt, N
sampled ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rlhf.actors.engine import Completion, RolloutKey
from async_rlhf.buffers.record import FinishReason, Int32Array, SamplingMask, Span


class Transcript:
    """Begins and ends with a turn; turns and observations alternate."""

    def __init__(self) -> None:
        self.turns: list[Completion] = []
        self._observations: list[Int32Array] = []
        self._restarts: list[bool] = []
        self.length = 0
        """T so far."""

    @property
    def ids(self) -> Int32Array:
        """int32 [T] so far."""
        return np.concatenate([np.zeros(0, np.int32), *(ids for turn in self._parts() for ids in turn)])

    @property
    def restarted(self) -> bool:
        """Whether the row has begun anew."""
        return any(self._restarts)

    def row(self, prompt_ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the engine reads on from: the prompt of the row as it stands now, and the tokens behind it. prompt_ids: of the
        episode."""
        if not self.restarted:
            return prompt_ids, tuple(self.ids.tolist())
        last = len(self._restarts) - 1 - self._restarts[::-1].index(True)
        prompt, parts = self._observations[last], [ids for part in self._parts()[last + 1 :] for ids in part]
        return tuple(prompt.tolist()), tuple(id for ids in parts for id in ids.tolist())

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    def add_turn(self, turn: Completion) -> None:
        assert len(self.turns) == len(self._observations)
        self.turns.append(turn)
        self.length += len(turn.token_ids)

    def add_observation(self, ids: Sequence[int], restarts: bool = False) -> None:
        """At least one token: what follows is another turn. restarts: as of a `Span`."""
        assert ids and len(self.turns) == len(self._observations) + 1
        self._observations.append(np.array(ids, np.int32))
        self._restarts.append(restarts)
        self.length += len(ids)

    def completion(self, key: RolloutKey, finish_reason: FinishReason) -> Completion:
        """The whole of it; after a turn."""
        assert len(self.turns) == len(self._observations) + 1
        if len(self.turns) == 1 and self.turns[0].finish_reason == finish_reason:
            return self.turns[0]
        masks = [turn.sampling_mask for turn in self.turns]
        known = [mask for mask in masks if mask is not None]
        spans = [list(turn.spans) for turn in self.turns]
        for own, ids, restarts in zip(spans, self._observations, self._restarts, strict=False):
            own.append(Span(None, len(ids), restarts=restarts))
        return Completion(
            key=key,
            token_ids=self.ids,
            logprobs=np.concatenate([turn.logprobs for turn in self.turns]),
            spans=tuple(span for own in spans for span in own),
            finish_reason=finish_reason,
            sampling_mask=_joined(known) if len(known) == len(masks) else None,
        )

    def _parts(self) -> list[tuple[Int32Array, ...]]:
        after = [(ids,) for ids in self._observations] + [()] * (len(self.turns) - len(self._observations))
        return [(turn.token_ids, *ids) for turn, ids in zip(self.turns, after, strict=True)]


def _joined(masks: Sequence[SamplingMask]) -> SamplingMask:
    return SamplingMask(np.concatenate([mask.sizes for mask in masks]), np.concatenate([mask.ids for mask in masks]))
