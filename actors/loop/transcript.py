"""One rollout as it grows: turns that the engine sampled, and what an environment answered between them. Pure.

What is here is never tokenised again: the tokens only get more, exactly as the engine saw them. Where the row begins anew, what
was sampled before stays here, and the engine reads on from there. Axes as in `record.Rollout`: T tokens behind the prompt, N
sampled ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_rlhf.actors.engine import Completion, RolloutKey
from async_rlhf.actors.environments import Content
from async_rlhf.buffers.record import FinishReason, Int32Array, SamplingMask, Span


@dataclass(frozen=True)
class Answer:
    """Of an environment. content: as it gave it; ids: int32, what the engine reads of it; score: of the turn before it;
    restarts: as of a `Span`."""

    content: Content
    ids: Int32Array
    score: float | None = None
    restarts: bool = False


class Transcript:
    """Begins and ends with a turn; turns and answers alternate. texts: of the turns."""

    def __init__(self) -> None:
        self.turns: list[Completion] = []
        self.texts: list[str] = []
        self.answers: list[Answer] = []
        self.length = 0
        """T so far."""

    @property
    def ids(self) -> Int32Array:
        """int32 [T] so far."""
        return np.concatenate([np.zeros(0, np.int32), *self._parts(0)])

    @property
    def restarted(self) -> bool:
        """Whether the row has begun anew."""
        return any(answer.restarts for answer in self.answers)

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    def row(self, prompt_ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the engine reads on from: the prompt of the row as it stands now, and the tokens behind it. prompt_ids: of the
        episode."""
        first = max((number for number, answer in enumerate(self.answers, 1) if answer.restarts), default=0)
        prompt = tuple(self.answers[first - 1].ids.tolist()) if first else prompt_ids
        return prompt, tuple(id for ids in self._parts(first) for id in ids.tolist())

    def add_turn(self, turn: Completion, text: str) -> None:
        assert len(self.turns) == len(self.answers)
        self.turns.append(turn)
        self.texts.append(text)
        self.length += len(turn.token_ids)

    def add_answer(self, answer: Answer) -> None:
        """At least one token: what follows is another turn."""
        assert len(answer.ids) and len(self.turns) == len(self.answers) + 1
        self.answers.append(answer)
        self.length += len(answer.ids)

    def completion(self, key: RolloutKey, finish_reason: FinishReason) -> Completion:
        """The whole of it; after a turn."""
        assert len(self.turns) == len(self.answers) + 1
        if len(self.turns) == 1 and self.turns[0].finish_reason == finish_reason:
            return self.turns[0]
        masks = [turn.sampling_mask for turn in self.turns if turn.sampling_mask is not None]
        spans = list(self.turns[0].spans)
        for answer, turn in zip(self.answers, self.turns[1:], strict=True):
            spans += (Span(None, len(answer.ids), restarts=answer.restarts), *turn.spans)
        return Completion(
            key=key,
            token_ids=self.ids,
            logprobs=np.concatenate([turn.logprobs for turn in self.turns]),
            spans=tuple(spans),
            finish_reason=finish_reason,
            sampling_mask=_joined(masks) if len(masks) == len(self.turns) else None,
        )

    def _parts(self, first: int) -> list[Int32Array]:
        """Tokens of the turns from number `first` on, and of the answers behind them."""
        own = [part for turn, answer in zip(self.turns, self.answers, strict=False) for part in (turn.token_ids, answer.ids)]
        own += [turn.token_ids for turn in self.turns[len(self.answers) :]]
        return own[2 * first :]


def _joined(masks: Sequence[SamplingMask]) -> SamplingMask:
    return SamplingMask(np.concatenate([mask.sizes for mask in masks]), np.concatenate([mask.ids for mask in masks]))
