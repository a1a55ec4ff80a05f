"""One rollout as it grows, and what of it goes into the record. Pure.

Its turns stand in *rows*, as the engine reads them: a whole prompt, and behind it turns of the model with what was read
between them. Most episodes have one. Each conversation of an agent has its own, and a conversation goes on in another when an
image comes, or where the chat template rewrites its earlier turns (`render = "split"`). What is here is never tokenised again:
a row only gets longer, exactly as the engine saw it.

    in time            turn 0 in row 0, turn 1 in row 1, turn 2 in row 0
    in the record      row 0: prompt, turn 0, answer, turn 2;  row 1: prompt, turn 1

In the record rows follow each other in the order of their first trained turns: the prompt of the first is the rollout's, and
with those of the others it begins anew (`Span.restarts`). A turn that is not trained on stands there as what was read. A row
without a trained turn is left out, and of each row what comes behind the last one.

Turns of several rows may be written at the same time, and which of them began first is then chance. So from the first turn on
that begins beside another, neither order nor random numbers depend on it: rows whose first trained turns began since the
moment before, when nothing was being written, are in the order of their prompts; and a turn's number, which its seed is made
of, is a digest of all that it reads, and of how many turns had read the same. Chance decides this much: which turn began
with nothing beside it, and which of two rows that begin the episode leads the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from async_rlhf.actors.engine import Completion, Prompt
from async_rlhf.actors.environments import Content, Message
from async_rlhf.actors.environments.rendering import conversation
from async_rlhf.actors.prompts import digest_of
from async_rlhf.actors.rewards.answer import as_text
from async_rlhf.buffers.record import FinishReason, Rollout, SamplingMask, Span, pieces

# Hexadecimal, of the digest of an image: a number below 2**63.
_DIGITS = 15


@dataclass(eq=False)
class Turn:
    """A turn of the model, with its input before."""

    conversation: int
    """Its number; an environment that is no agent has one."""
    row: int
    """Its number, in the order in which rows begin."""
    content: Content
    """The input, as the environment gave it."""
    ids: tuple[int, ...]
    """Tokens of the input; in a new row, of its whole prompt."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools of its conversation."""
    trained: bool = True
    """Whether it is trained on."""
    images: tuple[str, ...] = ()
    """In a new row the digests of the images in its prompt, in the order of their places; else none."""
    wrote: Completion | None = None
    """None until it has ended."""
    text: str = ""
    """Empty until it has ended."""
    behind: int = 0
    """Tokens between the prompt of its row and its sampled tokens."""
    most: int = 0
    """Largest allowed number of sampled tokens."""
    number: int = 0
    """See the module docstring; without parallel turns, how many turns began before."""
    rank: int = 0
    """See the module docstring; without parallel turns, as `number`."""
    digest: int = 0
    """Digest of all that it reads."""
    score: float | None = None
    """The environment's, once it has one."""


class Transcript:
    """See the module docstring. turns: as they began; one of each row may still be written. length: tokens so far, without
    the first prompt."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.length = 0
        self._is_parallel = False

    @property
    def num_conversations(self) -> int:
        return len({turn.conversation for turn in self.turns})

    @property
    def num_rows(self) -> int:
        return len({turn.row for turn in self.turns})

    @property
    def num_sampled(self) -> int:
        """Tokens of turns that have ended."""
        return sum(len(turn.wrote.token_ids) for turn in self.turns if turn.wrote is not None)

    @property
    def unfinished(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.wrote is None]

    @property
    def first(self) -> Turn | None:
        """The first of the turns that are trained on."""
        return next((turn for turn in self.turns if turn.trained), None)

    def conversation(self, number: int) -> list[Turn]:
        return [turn for turn in self.turns if turn.conversation == number]

    def turns_of(self, row: int) -> list[Turn]:
        return [turn for turn in self.turns if turn.row == row]

    def tokens(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The prompt of a row, and all tokens behind it."""
        first, *others = self.turns_of(row)
        behind = [] if first.wrote is None else first.wrote.token_ids.tolist()
        for turn in others:
            behind += [*turn.ids, *(() if turn.wrote is None else turn.wrote.token_ids.tolist())]
        return first.ids, tuple(behind)

    def begin(self, turn: Turn) -> tuple[Prompt, tuple[int, ...]]:
        """Begins a turn of at least one token; returns the row that the engine continues: its prompt, and all behind it."""
        before, unfinished = len(self.turns), self.unfinished
        assert turn.ids and all(other.conversation != turn.conversation for other in unfinished)
        self._is_parallel = self._is_parallel or bool(unfinished)
        self.length += len(turn.ids) if self.turns else 0
        self.turns.append(turn)
        prompt_ids, behind = self.tokens(turn.row)
        images = self.turns_of(turn.row)[0].images
        seen = (int(digest[:_DIGITS], 16) for digest in images)
        turn.behind, turn.digest = len(behind), digest_of([*prompt_ids, *behind, *seen])
        turn.number = turn.rank = before
        if self._is_parallel:
            same = sum(other.digest == turn.digest for other in self.turns[:before])
            turn.number, turn.rank = digest_of([turn.digest, same]), self.turns[before - 1].rank
        return (prompt_ids, images), behind

    def end(self, row: int, wrote: Completion, text: str) -> Turn:
        """Ends the turn of a row with the model's completion."""
        turn = next(turn for turn in self.unfinished if turn.row == row)
        turn.wrote, turn.text = wrote, text
        self.length += len(wrote.token_ids)
        return turn

    # Of what follows each needs a trained turn, and none that is still being written.

    def recorded(self) -> list[list[Turn]]:
        """The turns of each row in the record, in the record's order."""
        trained = [turn for turn in self.turns if turn.trained]
        first, last = {turn.row: turn for turn in reversed(trained)}, {turn.row: turn for turn in trained}
        rows = [self.turns_of(number) for number in dict.fromkeys(turn.row for turn in trained)]
        rows[1:] = sorted(rows[1:], key=lambda row: (first[row[0].row].rank, row[0].ids, row[0].images))
        return [row[: row.index(last[row[0].row]) + 1] for row in rows]

    def rollout(
        self,
        rows: Sequence[Sequence[Turn]],
        finish_reason: FinishReason,
        decode: Callable[[Sequence[int]], str],
        is_agent: bool,
    ) -> Rollout:
        """The whole of it, behind the prompt of the first row. rows: as `recorded`. is_agent: its last turn has a score of its
        own."""
        trained = [turn for row in rows for turn in row if turn.trained]
        sampled = [turn.wrote for turn in trained if turn.wrote is not None]
        masks = [wrote.sampling_mask for wrote in sampled if wrote.sampling_mask is not None]
        wholes = [None if row[-1].wrote is None else row[-1].wrote.routing for row in rows]  # the last turn's covers the row
        routings = [routing for routing in wholes if routing is not None]
        parts = list(_parts(rows))
        ids, spans = [id for ids, _ in parts for id in ids], _merged(span for _, spans in parts for span in spans)
        scores = tuple(turn.score for turn in (trained if is_agent else trained[:-1]))
        return Rollout(
            completion_ids=np.array(ids, np.int32),
            logprobs=np.concatenate([wrote.logprobs for wrote in sampled]),
            spans=spans,
            finish_reason=finish_reason,
            text=self._text(rows, ids, spans, decode),
            sampling_mask=_joined(masks) if len(masks) == len(sampled) else None,
            turn_scores=() if all(score is None for score in scores) else scores,
            routing=np.concatenate(routings) if len(routings) == len(rows) else None,
            images=((), *(row[0].images for row in rows[1:])) if any(row[0].images for row in rows[1:]) else (),
        )

    def messages(self) -> tuple[list[Message], Content]:
        """The conversation of the last turn that is trained on, up to it, as chat messages; and what it began with."""
        last = next(turn for turn in reversed(self.turns) if turn.trained)
        turns = self.conversation(last.conversation)
        turns = turns[: turns.index(last) + 1]
        read = [*(turn.content for turn in turns[1:]), None]
        return conversation(turns[0].content, zip((turn.text for turn in turns), read, strict=True)), turns[0].content

    def _text(
        self, rows: Sequence[Sequence[Turn]], ids: Sequence[int], spans: Sequence[Span], decode: Callable[[Sequence[int]], str]
    ) -> str:
        """For people: where a row begins, what was read there and not the whole prompt."""
        if len(self.turns) == 1:
            return self.turns[0].text
        (first, *others), shown = pieces(spans), list[str]()
        for row, piece in zip(rows[1:], others, strict=True):
            shown += [as_text(row[0].content), decode(ids[piece.start + piece.num_prompt : piece.stop])]
        return "\n".join([decode(ids[: first.stop]), *shown])


def _parts(rows: Sequence[Sequence[Turn]]) -> Iterator[tuple[Sequence[int], Sequence[Span]]]:
    """Tokens and their spans, of what is read and of what was sampled."""
    for number, row in enumerate(rows):
        for at, turn in enumerate(row):
            if number or at:
                yield turn.ids, [Span(None, len(turn.ids), restarts=at == 0)]
            assert turn.wrote is not None
            ids = turn.wrote.token_ids.tolist()
            yield ids, turn.wrote.spans if turn.trained else [Span(None, len(ids))]


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans, with adjacent ones that were read, not sampled, merged into one."""
    merged: list[Span] = []
    for span in spans:
        if merged and span.version is None and merged[-1].version is None:
            merged[-1] = replace(merged[-1], num_tokens=merged[-1].num_tokens + span.num_tokens)
        else:
            merged.append(span)
    return tuple(merged)


def _joined(masks: Sequence[SamplingMask]) -> SamplingMask:
    return SamplingMask(np.concatenate([mask.sizes for mask in masks]), np.concatenate([mask.ids for mask in masks]))
