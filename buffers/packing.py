"""A group as frames, and back: a validated header, and two little-endian arrays.

What an actor sends with a Put, a journal keeps and a Batch hands on, unchanged. Knows no socket and no file.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
from pydantic import JsonValue

from buffers.errors import RecordError, WireError
from buffers.record import Group, Int32Array, Rollout, Score, Span, Support
from buffers.wire import MAX_FRAME_BYTES, Frames, GroupHeader, Put, RolloutHeader, ScoreHeader, decode

# Deep enough for any row of a data set, and far from the depth at which encoders give up.
_MAX_DEPTH = 32


def pack_group(group: Group) -> tuple[GroupHeader, Frames]:
    """A group as header and two array frames."""
    header = GroupHeader(
        number=group.number,
        attempt=group.attempt,
        num_prompt_tokens=len(group.prompt_ids),
        rollouts=[
            RolloutHeader(
                num_tokens=rollout.num_tokens,
                spans=[(span.version, span.num_tokens, span.cache_version) for span in rollout.spans],
                num_support=None if rollout.support is None else len(rollout.support.ids),
                finish_reason=rollout.finish_reason,
                scores={name: _score(score) for name, score in rollout.scores.items()},
                text=_text(rollout.text),
                timings=dict(rollout.timings),
            )
            for rollout in group.rollouts
        ],
        temperature=group.temperature,
        top_k=group.top_k,
        top_p=group.top_p,
        min_p=group.min_p,
        actor=group.actor,
        prompt=_text(group.prompt),
        columns={_text(str(name)): _plain(value) for name, value in group.columns.items()},
    )
    supports = [rollout.support for rollout in group.rollouts if rollout.support is not None]
    kept = [part for support in supports for part in (support.sizes, support.ids)]
    ids = np.concatenate([group.prompt_ids, *(rollout.completion_ids for rollout in group.rollouts), *kept])
    logprobs = np.concatenate([rollout.logprobs for rollout in group.rollouts])
    return header, [ids.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes()]


def _score(score: Score) -> ScoreHeader:
    failure = None if score.failure is None else _text(score.failure)
    return ScoreHeader(
        value=score.value, failure=failure, metrics={_text(name): value for name, value in score.metrics.items()}
    )


def _plain(value: Any, depth: int = 0) -> JsonValue:
    """A column as JSON can say it: tuples and sets are lists, keys are texts, and everything else is its text.

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
    # What is nested too deep is abbreviated.
    return _text(reprlib.repr(value) if isinstance(value, bytes | Mapping | list | tuple | set | frozenset) else str(value))


def _text(text: str) -> str:
    """Without halves of surrogate pairs, which are no text (JSON lines of a data set may hold them)."""
    return text.encode("utf-8", "replace").decode()


def unpack_group(header: GroupHeader, arrays: Frames) -> Group:
    """The group; raises WireError when header and arrays do not fit, or the record breaks an invariant."""
    num_completion = sum(rollout.num_tokens for rollout in header.rollouts)
    num_support = sum(
        rollout.num_tokens + rollout.num_support for rollout in header.rollouts if rollout.num_support is not None
    )
    wanted = [4 * (header.num_prompt_tokens + num_completion + num_support), 4 * num_completion]
    if [len(array) for array in arrays] != wanted:
        raise WireError(f"group {header.number}: arrays of {[len(a) for a in arrays]} bytes, its header says {wanted}")
    ids = np.frombuffer(arrays[0], "<i4").astype(np.int32, copy=False)
    logprobs = np.frombuffer(arrays[1], "<f4").astype(np.float32, copy=False)
    starts = np.cumsum([0] + [rollout.num_tokens for rollout in header.rollouts])
    completions = ids[header.num_prompt_tokens :]
    supports = _supports(header.rollouts, completions[num_completion:])
    try:
        rollouts = tuple(
            Rollout(
                completion_ids=completions[start : start + rollout.num_tokens],
                logprobs=logprobs[start : start + rollout.num_tokens],
                spans=tuple(Span(*span) for span in rollout.spans),
                finish_reason=rollout.finish_reason,
                scores={n: Score(s.value, s.failure, s.metrics) for n, s in rollout.scores.items()},
                text=rollout.text,
                timings=rollout.timings,
                support=support,
            )
            for start, rollout, support in zip(starts[:-1], header.rollouts, supports, strict=True)
        )
        return Group(
            number=header.number,
            attempt=header.attempt,
            prompt_ids=ids[: header.num_prompt_tokens],
            rollouts=rollouts,
            temperature=header.temperature,
            top_k=header.top_k,
            top_p=header.top_p,
            min_p=header.min_p,
            actor=header.actor,
            prompt=header.prompt,
            columns=header.columns,
        )
    except RecordError as error:
        raise WireError(f"group {header.number}: {error}") from error


def _supports(rollouts: Sequence[RolloutHeader], ids: Int32Array) -> list[Support | None]:
    """The members' supports out of what follows their completions."""
    supports: list[Support | None] = []
    start = 0
    for rollout in rollouts:
        if rollout.num_support is None:
            supports.append(None)
            continue
        middle, end = start + rollout.num_tokens, start + rollout.num_tokens + rollout.num_support
        supports.append(Support(ids[start:middle], ids[middle:end]))
        start = end
    return supports


def decode_put(frames: Frames) -> Group:
    """The group in the frames of a Put; raises WireError."""
    _, put, arrays = decode(frames, max_frame_bytes=MAX_FRAME_BYTES)
    if not isinstance(put, Put):
        raise WireError(f"a batch holds a {put.type!r} where a put belongs")
    return unpack_group(put.group, arrays)


def to_bytes(frames: Frames) -> bytes:
    """Several frames as one string of bytes (a journal's payload)."""
    packed: bytes = msgpack.packb(frames)
    return packed


def from_bytes(payload: bytes) -> Frames:
    """The frames `to_bytes` joined."""
    frames: Frames = msgpack.unpackb(payload)
    return frames
