"""What goes into the record: a rollout that was finished and judged, and those of a group behind one prompt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from async_rlhf.actors.engine import RolloutKey
from async_rlhf.actors.loop.context import FinishedRollout
from async_rlhf.actors.scoring.pool import Scored
from async_rlhf.buffers.record import Int32Array, Rollout, Score, Span, sampled


def rollout_of(
    finished: FinishedRollout, scored: Scored[RolloutKey], by_environment: Mapping[str, Score], timings: Mapping[str, float]
) -> Rollout:
    """Of a rollout that has been judged, behind its own prompt. by_environment: as `Environments.scores`."""
    completion, reference = finished.completion, scored.reference
    if reference is not None and len(reference) > len(completion.logprobs):
        reference = reference[sampled(completion.spans)]
    return Rollout(
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        spans=completion.spans,
        finish_reason=completion.finish_reason,
        scores={**scored.scores, **by_environment},
        text=finished.text,
        timings=timings,
        sampling_mask=completion.sampling_mask,
        reference=reference,
        routing=completion.routing,
        turn_scores=() if all(score is None for score in finished.turn_scores) else finished.turn_scores,
    )


def behind_one_prompt(
    prompts: Sequence[tuple[int, ...]], rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str]
) -> tuple[Int32Array, tuple[Rollout, ...]]:
    """The prompt of a group, int32 [P]: the longest beginning that its members' prompts share; and its rollouts behind it.

    What a member's prompt has beyond it stands at the head of its completion, as what was read. prompts: of each member, with
    one token at least that all begin with. decode: of tokens to text.
    """
    shared = [column[0] for column in takewhile(lambda column: len({*column}) == 1, zip(*prompts, strict=False))]
    further = (prompt[len(shared) :] for prompt in prompts)
    return np.array(shared, np.int32), tuple(
        _behind(read, rollout, decode) if read else rollout for read, rollout in zip(further, rollouts, strict=True)
    )


def _behind(read: tuple[int, ...], rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> Rollout:
    count, spans = len(read), rollout.spans
    if spans[0].version is None:  # turns that are not trained on come before its first one
        count, spans = count + spans[0].num_tokens, spans[1:]
    return replace(
        rollout,
        completion_ids=np.concatenate([np.array(read, np.int32), rollout.completion_ids]),
        spans=(Span(None, count), *spans),
        text=decode(read) + rollout.text,
    )
