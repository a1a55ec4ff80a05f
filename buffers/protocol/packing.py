"""A group as frames, and back: a validated header, and two little-endian arrays; and what the groups of one run look like.

What an actor sends with a Put, a journal keeps and a Batch hands on, unchanged. Knows no socket and no file.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, cast

import numpy as np
from pydantic import JsonValue

from async_rlhf.buffers.errors import RecordError, WireError
from async_rlhf.buffers.protocol.wire import MAX_FRAME_BYTES, Frames, GroupHeader, Put, decode
from async_rlhf.buffers.record import MAX_LOGPROB, Entry, Float32Array, Group, Int32Array, Rollout, SamplingMask, Score, Span
from async_rlhf.buffers.routing import Routing, RoutingArray, misfit
from async_rlhf.buffers.sampling import Sampling

# Deep enough for any row of a data set, and far from the depth at which encoders give up.
_MAX_DEPTH = 32
# The oldest protocol whose Put reads like today's: a journal keeps puts as they came, and hands them on after an upgrade. It is
# raised with a change to Put, and `files.JOURNAL.oldest` with it.
_OLDEST_PUT = 8


def pack_group(group: Group) -> tuple[GroupHeader, Frames]:
    """A group as header and two array frames."""
    rollouts = group.rollouts
    names = {_text(name): name for name in rollouts[0].scores}
    scores = {text: [rollout.scores[name] for rollout in rollouts] for text, name in names.items()}
    header = GroupHeader(
        number=group.number,
        attempt=group.attempt,
        num_prompt_tokens=len(group.prompt_ids),
        images=[*group.images],
        images_of_pieces=[[[*of] for of in r.images] for r in rollouts] if any(r.images for r in rollouts) else [],
        num_tokens=[rollout.length for rollout in rollouts],
        spans=[[(span.version, span.num_tokens, span.cache_version) for span in rollout.spans] for rollout in rollouts],
        restarts=[rollout.restarts for rollout in rollouts] if any(rollout.restarts for rollout in rollouts) else [],
        num_support=[None if rollout.sampling_mask is None else len(rollout.sampling_mask.ids) for rollout in rollouts],
        has_reference=[rollout.reference is not None for rollout in rollouts],
        routing=[] if (first := rollouts[0].routing) is None else [*first.shape[1:], first.itemsize],
        turn_scores=[list(rollout.turn_scores) for rollout in rollouts] if any(r.turn_scores for r in rollouts) else [],
        finish_reasons=[rollout.finish_reason for rollout in rollouts],
        scores={
            text: [score.value if score.failure is None else _text(score.failure) for score in column]
            for text, column in scores.items()
        },
        metrics={
            text: [{_text(name): value for name, value in score.metrics.items()} for score in column]
            for text, column in scores.items()
            if any(score.metrics for score in column)
        },
        texts=[_text(rollout.text) for rollout in rollouts],
        timings=[dict(rollout.timings) for rollout in rollouts],
        sampling=group.sampling,
        actor=group.actor,
        prompt=_text(group.prompt),
        columns={_text(str(name)): _plain(value) for name, value in group.columns.items()},
    )
    sampling_masks = [rollout.sampling_mask for rollout in rollouts if rollout.sampling_mask is not None]
    kept = [part for sampling_mask in sampling_masks for part in (sampling_mask.sizes, sampling_mask.ids)]
    ids = np.concatenate([group.prompt_ids, *(rollout.completion_ids for rollout in rollouts), *kept])
    references = [rollout.reference for rollout in rollouts if rollout.reference is not None]
    logprobs = np.concatenate([*(rollout.logprobs for rollout in rollouts), *references])
    return header, [ids.astype("<i4").tobytes() + _routing_bytes(group), logprobs.astype("<f4").tobytes()]


def _routing_bytes(group: Group) -> bytes:
    prompts = (0, *[len(group.prompt_ids)] * (len(group.rollouts) - 1))  # the first member's stands for all
    parts = [each.routing[start:] for start, each in zip(prompts, group.rollouts, strict=True) if each.routing is not None]
    return b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes() for part in parts)


def _plain(value: Any, depth: int = 0) -> JsonValue:
    """A column as JSON can hold it: tuples and sets are lists, keys are texts, and everything else is its text.

    Columns are for the record a person reads; tasks put fractions, dates and sets into them.
    """
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {_text(str(key)): _plain(item, depth + 1) for key, item in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(item, depth + 1) for item in items]
    # Values that are nested too deep are abbreviated.
    return _text(reprlib.repr(value) if isinstance(value, bytes | Mapping | list | tuple | set | frozenset) else str(value))


def _text(text: str) -> str:
    """The text without unpaired surrogates, which JSON lines of a data set may hold."""
    return text.encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class GroupSchema:
    """The shape that a run's configuration requires of every group; checked before a group is made durable.

    A group that the learner cannot read, or would train on wrongly, must not enter: batches are repeated unchanged, so it would
    end the learner at every start.
    """

    group_size: int
    vocabulary: int
    """Rows of the model's embedding; token ids are below."""
    max_prompt_length: int
    max_completion_length: int
    """Limit of all tokens behind a prompt."""
    rewards: frozenset[str]
    sampling: Sampling
    environment: bool = False
    """Whether there is one, whose observations may stand between turns."""
    splits: bool = False
    """Whether observations may begin a row anew."""
    calls: bool = False
    """Whether it is an agent, whose conversations do that too, and whose first prompts may go on behind the group's."""
    routing: Routing | None = None
    """The model's routing, None where nothing is recorded of it."""
    images: Container[str] | None = None
    """The digests of the run's images; None: they are not looked at."""

    def check(self, header: GroupHeader, ids: Int32Array, routing: RoutingArray | None) -> None:
        """ids: the prompt's and the completions'. Raises WireError (`schema`): what, the value, the limit."""
        for name, value, wanted in (
            ("members", len(header.num_tokens), self.group_size),
            ("rewards", header.scores.keys(), self.rewards),
            ("sampling", header.sampling, self.sampling),
        ):
            if value != wanted:
                raise _not_of_run(header.number, f"{name}: {_shown(value)}; this run's: {_shown(wanted)}")
        # The part of a member's prompt beyond the group's is at the head of its completion.
        beyond = self.max_prompt_length - header.num_prompt_tokens
        begins_read = [spans[0][0] is None for spans in header.spans]
        longest = max(count - is_read * beyond for count, is_read in zip(header.num_tokens, begins_read, strict=True))
        for name, value, most in (
            ("prompt tokens", header.num_prompt_tokens, self.max_prompt_length),
            ("tokens of a completion", longest, self.max_completion_length),
            ("largest token id", int(ids.max()), self.vocabulary - 1),
        ):
            if value > most:
                raise _not_of_run(header.number, f"{name}: {value}; at most {most}")

        if not self.environment and any(version is None for spans in header.spans for version, *_ in spans):
            raise _not_of_run(header.number, "tokens that were not sampled; this run has no environment")
        if not (self.splits or self.calls) and any(header.restarts):
            raise _not_of_run(header.number, "a row that begins anew; this run has environment.render other than 'split'")
        if not self.calls and any(begins_read):
            raise _not_of_run(header.number, "a completion that begins with what was read; this run has no agent")
        named = chain(header.images, *chain.from_iterable(header.images_of_pieces))
        if self.images is not None and (digest := next((each for each in named if each not in self.images), None)):
            raise _not_of_run(header.number, f"image {digest}, which this run does not have")
        if routing is not None and (problem := misfit(self.routing, routing)):
            raise _not_of_run(header.number, problem)

    def check_supports(self, group: Group) -> None:
        """The tokens that others were chosen among exist. Raises WireError (`schema`)."""
        top = max(
            (int(rollout.sampling_mask.ids.max()) for rollout in group.rollouts if rollout.sampling_mask is not None), default=0
        )
        if top >= self.vocabulary:
            raise _not_of_run(group.number, f"largest token id in a sampling mask: {top}; at most {self.vocabulary - 1}")


def _shown(value: object) -> str:
    return str(sorted(value) if isinstance(value, Set) else value)[:200]


def _not_of_run(number: int, detail: str) -> WireError:
    return WireError(f"group {number}: {detail}", "schema")


def check_group(header: GroupHeader, frames: Frames, schema: GroupSchema | None = None) -> Entry:
    """The `Entry` of the group in the frames of a Put. Raises WireError when it cannot be unpacked or does not fit this run.

    The reasons: `lengths` (what disagrees with what), `logprobs`, `tokens`, `spans`, `schema` (`GroupSchema`), and `record` for
    everything else. Does not make the group, which costs ten times as much, unless something in it is rare.
    """
    ids, logprobs, routing = _arrays(header, frames[1:])
    low, high = float(logprobs.min()), float(logprobs.max())
    if not (math.isfinite(low) and high <= MAX_LOGPROB):
        at = int(np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB)))[0])
        raise _wrong(header, "logprobs", f"logprobs must be finite and at most 0, got {logprobs[at]} at token {at}")
    if int(ids.min()) < 0:
        raise _wrong(header, "tokens", f"token ids must be at least 0, got {ids.min()}")
    if schema is not None:
        schema.check(header, ids[: header.num_prompt_tokens + sum(header.num_tokens)], routing)
    rare = header.metrics, header.turn_scores, header.restarts, header.images_of_pieces
    if any(rare) or header.num_support.count(None) < len(header.num_support):
        group = unpack_group(header, frames[1:])
        if schema is not None:
            schema.check_supports(group)
    versions = [span[0] for spans in header.spans for span in spans if span[0] is not None]
    return Entry(header.attempt, min(versions), max(versions), sum(_num_sampled(header)), sum(map(len, frames)))


def unpack_group(header: GroupHeader, arrays: Frames) -> Group:
    """The group; raises WireError when header and arrays do not fit, or the record breaks an invariant."""
    ids, logprobs, routing = _arrays(header, arrays)
    id_lengths, logprob_lengths = _lengths(header)
    size = len(header.num_tokens)
    prompt, *parts = (ids[end - length : end] for length, end in zip(id_lengths, accumulate(id_lengths), strict=True))
    numbers = [logprobs[end - length : end] for length, end in zip(logprob_lengths, accumulate(logprob_lengths), strict=True)]
    masks, references = iter(parts[size:]), iter(numbers[size:])
    routed = None if routing is None else np.split(routing, np.cumsum(_num_routed(header))[:-1])
    try:
        rollouts = tuple(
            Rollout(
                completion_ids=parts[member],
                logprobs=numbers[member],
                spans=_spans(header, member),
                finish_reason=header.finish_reasons[member],
                scores={name: _score(header, name, member) for name in header.scores},
                text=header.texts[member],
                timings=header.timings[member],
                sampling_mask=None if header.num_support[member] is None else SamplingMask(next(masks), next(masks)),
                reference=next(references) if header.has_reference[member] else None,
                turn_scores=tuple(header.turn_scores[member]) if header.turn_scores else (),
                routing=None if routed is None else np.concatenate((routed[0], routed[member + 1])),
                images=tuple(map(tuple, header.images_of_pieces[member])) if header.images_of_pieces else (),
            )
            for member in range(size)
        )
        return Group(
            number=header.number,
            attempt=header.attempt,
            prompt_ids=prompt,
            rollouts=rollouts,
            sampling=header.sampling,
            actor=header.actor,
            prompt=header.prompt,
            columns=header.columns,
            images=tuple(header.images),
        )
    except RecordError as error:
        raise _wrong(header, "record", str(error)) from error


def _arrays(header: GroupHeader, arrays: Frames) -> tuple[Int32Array, Float32Array, RoutingArray | None]:
    """Ids, log-probabilities and experts; raises WireError when lengths or spans disagree."""
    size = len(header.num_tokens)
    names = ("spans", "num_support", "has_reference", "finish_reasons", "texts", "timings")
    columns: list[tuple[str, Sequence[Any]]] = [(name, getattr(header, name)) for name in names]
    columns += [(name, column) for name in ("turn_scores", "restarts", "images_of_pieces") if (column := getattr(header, name))]
    for name, column in (*columns, *header.scores.items(), *header.metrics.items()):
        if len(column) != size:
            raise _wrong(header, "lengths", f"{name!r} has {len(column)} items for {size} members")
    if not header.metrics.keys() <= header.scores.keys():
        raise _wrong(header, "lengths", f"metrics of {sorted(header.metrics)} and scores of {sorted(header.scores)}")
    for num_tokens, spans in zip(header.num_tokens, header.spans, strict=True):
        lengths = [span[1] for span in spans]
        if sum(lengths) != num_tokens or min(lengths) < 1:
            raise _wrong(header, "spans", f"spans must be non-empty and cover all {num_tokens} tokens, got {spans[:8]}")
        if spans[-1][0] is None:
            raise _wrong(header, "spans", f"the last token must be a sampled one, got {spans[:8]}")
    if len(header.routing) not in (0, 3) or (header.routing and header.routing[2] > 2):
        raise _wrong(header, "lengths", f"routing must be layers, experts, and 1 or 2 bytes, got {header.routing}")
    num_ids, num_logprobs = map(sum, _lengths(header))
    num_routed = sum(_num_routed(header)) * math.prod(header.routing) if header.routing else 0
    wanted = [4 * num_ids + num_routed, 4 * num_logprobs]
    if [len(array) for array in arrays] != wanted:
        raise _wrong(header, "lengths", f"arrays of {[len(a) for a in arrays[:8]]} bytes, its header has {wanted}")
    ids, logprobs = np.frombuffer(arrays[0], "<i4", num_ids), np.frombuffer(arrays[1], "<f4")
    routing: RoutingArray | None = None
    if header.routing:
        layers, choices, size = header.routing
        routing = np.frombuffer(arrays[0], f"<u{size}", offset=4 * num_ids).reshape(-1, layers, choices)
    return ids.astype(np.int32, copy=False), logprobs.astype(np.float32, copy=False), routing


def _num_routed(header: GroupHeader) -> list[int]:
    """Positions whose experts are recorded: of the prompt, and of each member."""
    restarts = header.restarts or [[]] * len(header.num_tokens)
    read = (max(0, count - 1 - len(own)) for count, own in zip(header.num_tokens, restarts, strict=True))
    return [header.num_prompt_tokens, *read]


def _num_sampled(header: GroupHeader) -> list[int]:
    """Sampled tokens of each member."""
    return [sum(num_tokens for version, num_tokens, _ in spans if version is not None) for spans in header.spans]


def _lengths(header: GroupHeader) -> tuple[list[int], list[int]]:
    """Lengths of the parts of the two arrays, in the order of `GroupHeader`."""
    sampled = _num_sampled(header)
    supports = zip(sampled, header.num_support, strict=True)
    masks = [part for num_tokens, kept in supports if kept is not None for part in (num_tokens, kept)]
    references = [num_tokens for num_tokens, has in zip(sampled, header.has_reference, strict=True) if has]
    return [header.num_prompt_tokens, *header.num_tokens, *masks], [*sampled, *references]


def _spans(header: GroupHeader, member: int) -> tuple[Span, ...]:
    """Raises WireError for a restart of a span that is not there, or not in its order."""
    spans, restarts = header.spans[member], set(header.restarts[member] if header.restarts else ())
    if restarts and (sorted(restarts) != header.restarts[member] or max(restarts) >= len(spans)):
        raise _wrong(header, "spans", f"restarts must be ascending and below {len(spans)}, got {header.restarts[member][:8]}")
    return tuple(Span(*span, restarts=index in restarts) for index, span in enumerate(spans))


def _score(header: GroupHeader, name: str, member: int) -> Score:
    score = header.scores[name][member]
    metrics = header.metrics[name][member] if name in header.metrics else {}
    return Score(failure=score, metrics=metrics) if isinstance(score, str) else Score(score, metrics=metrics)


def _wrong(header: GroupHeader, reason: str, detail: str) -> WireError:
    return WireError(f"group {header.number}: {detail}", reason)


def decode_put(frames: Frames) -> Group:
    """The group in the frames of a Put, which a journal may have kept since an older protocol; raises WireError."""
    return unpack_group(put_header(frames), frames[1:])


def put_header(frames: Frames) -> GroupHeader:
    """The header of `decode_put`, without the arrays."""
    _, put, _ = decode(frames, max_frame_bytes=MAX_FRAME_BYTES, oldest=_OLDEST_PUT)
    if not isinstance(put, Put):
        raise WireError(f"a batch holds a {put.type!r} where a put belongs")
    return put.group


def to_parts(frames: Frames) -> Frames:
    """Several frames as the parts of one string of bytes (a journal's payload): how long they are, then they themselves."""
    return [struct.pack(f"<{len(frames) + 1}I", len(frames), *map(len, frames)), *frames]


def from_bytes(payload: bytes | memoryview) -> Frames:
    """Views of the frames of `to_parts`, joined."""
    (count,) = struct.unpack_from("<I", payload)
    frames, start, view = [], 4 * (count + 1), memoryview(payload)
    for length in struct.unpack_from(f"<{count}I", payload, 4):
        frames.append(view[start : start + length])
        start += length
    return cast("Frames", frames)
