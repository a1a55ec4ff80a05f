"""A rollout from its end to the record: what judges are given, what they answer, and its group behind one prompt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from async_rlhf.actors.engine import Prompt, RolloutKey
from async_rlhf.actors.environments import Content, Message
from async_rlhf.actors.prompts import PLAIN, Row, Template
from async_rlhf.actors.rewards.answer import as_text
from async_rlhf.actors.scoring.pool import Scored, fields_of
from async_rlhf.buffers.images import IMAGES, images_of
from async_rlhf.buffers.record import Int32Array, Rollout, Score, Span


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that has ended."""

    key: RolloutKey
    rollout: Rollout
    """For the record, behind its own prompt; `judged` adds scores, reference and timings."""
    read: Prompt
    """Tokens and images of the first observation, or of the row's prompt."""
    turns: tuple[str, ...]
    """The model's texts, in the order of time."""
    prompt: str = ""
    """The first observation; empty for the row's prompt and for an agent."""
    anew: tuple[Content, ...] = ()
    """The inputs with which a row began anew."""
    messages: Sequence[Message] = ()
    """The conversation of the last turn."""
    num_prompt: int = 0
    """Number of messages before the first turn."""
    is_chat: bool = True
    """Whether the conversation is a chat."""
    score: Score | None = None
    """The environment's."""
    steps: tuple[tuple[float, float], ...] = ()
    """Begin and end of the environment's steps, in seconds since the epoch."""
    last: int = -1
    """Index of the last trained turn."""
    num_sampled: int = 0
    """Sampled tokens of all turns."""

    @property
    def answer(self) -> str:
        """The completion as rewards get it."""
        return self.turns[self.last]

    def fields(self, row: Row, template: Template = PLAIN) -> dict[str, Any]:
        """As `fields_of`, and what rewards may ask for besides where there is an environment."""
        fields = fields_of(row, self.read[0], self.rollout, self.answer, template)
        if not self.messages:
            return fields
        seen = images_of(self.messages)
        return {
            **fields,
            **({IMAGES: [*seen]} if seen or row.images else {}),
            "messages": [*self.messages],
            "completion_messages": [*self.messages[self.num_prompt :]],
            "model_prompt": self.messages[:-1] if self.is_chat else as_text(self.messages[:-1], ""),
            "turns": [*self.turns],
            "sampled": self.rollout.sampled.tolist(),
        }

    def judged(
        self, scored: Scored[RolloutKey], by_environment: Mapping[str, Score], timings: Mapping[str, float]
    ) -> FinishedRollout:
        """With all its scores, and timings. by_environment: as `Environments.scores`."""
        rollout, reference = self.rollout, scored.reference
        if reference is not None and len(reference) > len(rollout.logprobs):
            reference = reference[rollout.sampled]
        scores = {**scored.scores, **by_environment}
        return replace(self, rollout=replace(rollout, scores=scores, reference=reference, timings=timings))


def behind_one_prompt(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str], place_id: int | None = None
) -> tuple[Int32Array, tuple[str, ...], tuple[Rollout, ...]]:
    """The prompt of a group, int32 [P]: the longest beginning that its members' prompts share; its images; and its rollouts
    behind it.

    What a member's prompt has beyond it stands at the head of its completion, as what was read. Of prompts that differ it ends
    before the first image. prompts: of each member, with one token at least that all begin with, and that is of no image.
    decode: of tokens to text. place_id: the token of images.
    """
    if len({*prompts}) == 1:
        return np.array(prompts[0][0], np.int32), prompts[0][1], tuple(rollouts)
    end = place_id if any(images for _, images in prompts) else None
    columns = zip(*(ids for ids, _ in prompts), strict=False)
    shared = [column[0] for column in takewhile(lambda column: {*column} == {column[0]} - {end}, columns)]
    behind = tuple(
        _behind(ids[len(shared) :], images, rollout, decode) if len(ids) > len(shared) else rollout
        for (ids, images), rollout in zip(prompts, rollouts, strict=True)
    )
    return np.array(shared, np.int32), (), behind


def _behind(
    read: tuple[int, ...], images: tuple[str, ...], rollout: Rollout, decode: Callable[[Sequence[int]], str]
) -> Rollout:
    further = rollout.images[1:] or ((),) * len(rollout.restarts)
    count, spans = len(read), rollout.spans
    if spans[0].version is None:  # turns that are not trained on come before its first one
        count, spans = count + spans[0].num_tokens, spans[1:]
    return replace(
        rollout,
        completion_ids=np.concatenate([np.array(read, np.int32), rollout.completion_ids]),
        spans=(Span(None, count), *spans),
        text=decode(read) + rollout.text,
        images=(images, *further) if images or rollout.images else (),
    )
