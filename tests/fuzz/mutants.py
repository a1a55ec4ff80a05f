"""Frames that no honest peer sends: every message of the protocol, spoilt in one of many ways. Random numbers come from a seed.

A mutant that is by chance an order of somebody who may give it (a learner's with the right fence, an operator's, an actor's
that asks for work) is not rubbish, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any, get_args

import msgpack
import numpy as np

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol import packing, wire
from tests.buffers.hub.place import a_group

MAX_FRAME_BYTES = 1 << 20
FENCE = 2
"""The fence of the honest learner; messages below carry that of the one before."""
_OTHER = 1
_VALUES = (
    None, True, 0, -1, 1 << 63, -(1 << 63), 0.5, float("nan"), float("inf"), "", "x" * 5000, b"b",
    [],
    {},
    [[1]],
    {"a": 1},
)  # fmt: skip
_ABSURD = (
    *((1 << 63) - 1, (1 << 64) - 1, (1 << 31) - 1, 1 << 31, -(1 << 31) - 1),
    *(1e308, -1e308, 5e-324, 1e18, 2.0, "1" * 30, "-1", "nan", False),
)
"""Valid in form, absurd in size, or of a type that a careless reader takes for another."""
_DEPTHS = (5, 40, 500, 1000)
_WORDS = ("exec", "hub", "", 7, None, [], "putt", "__class__")
_ORDERS = (wire.Register, wire.Halt, wire.Drain, wire.Gone, wire.Quarantine)


def a_put(number: int) -> wire.Frames:
    group = a_group(0, 0, 0, "stranger")
    plain = group.rollouts[0]
    changed = replace(group, number=number, rollouts=(plain, replace(plain, reference=plain.logprobs)))
    header, arrays = packing.pack_group(changed)
    return wire.encode(wire.Put(group=header), arrays, 5)


def originals() -> list[wire.Frames]:
    """One of every message, the hub's own answers among them."""
    given: dict[str, Any] = {
        "actor": "stranger", "life": "1", "capacity": 2, "fence": _OTHER, "version": 3, "numbers": [1, 2], "number": 1,
        "attempt": 0, "step": 1, "committed": 1, "learner": "other", "index": 0, "num_bytes": 8, "tensors": [], "credits": [],
        "reason": "r", "detail": "d", "incarnation": "i", "max_frame_bytes": 1, "groups": [(1, 0)], "wait_s": 1.0,
        "telemetry": {"tokens_total": 1.0}, "status": {"a": 1}, "num_chunks": 1, "chunks": True, "delta": True,
        "delta_next": False, "done": True, "place": {"pid": 1, "descriptor": 0, "token": "t"},
        "epoch": 1, "store": "127.0.0.1:1", "rank": 1, "size": 2, "begun": 1,
    }  # fmt: skip
    found = [a_put(number) for number in (0, 1, 1 << 40)]
    for model in get_args(wire.Message):
        if model is not wire.Put:
            required = [
                name for name, field in model.model_fields.items() if field.is_required() or name in ("fence", "telemetry")
            ]
            fields = {name: given[name] for name in required}
            arrays = [b"12345678"] if model is wire.Chunk else []
            found.append(wire.encode(model.model_validate(fields), arrays, 5))
    return found


def mutants(seed: int) -> Iterator[wire.Frames]:
    """Without end."""
    rng, known = Random(seed), originals()
    while True:
        frames = list(rng.choice(known[:3] if rng.random() < 0.4 else known))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            frames = rng.choice(_WAYS)(rng, frames)
        if not _is_order(frames):
            yield frames


def _is_order(frames: wire.Frames) -> bool:
    try:
        message = wire.decode(frames, max_frame_bytes=MAX_FRAME_BYTES)[1]
    except WireError:
        return False
    return isinstance(message, _ORDERS) or getattr(message, "fence", None) == FENCE


def _flip(rng: Random, frames: wire.Frames) -> wire.Frames:
    if not frames:
        return frames
    which = rng.randrange(len(frames))
    data = bytearray(frames[which])
    for _ in range(rng.randint(1, 4)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return [*frames[:which], bytes(data), *frames[which + 1 :]]


def _cut(rng: Random, frames: wire.Frames) -> wire.Frames:
    which = rng.randrange(len(frames)) if frames else 0
    return [
        *frames[:which],
        *(frame[: rng.randint(0, len(frame))] for frame in frames[which : which + 1]),
        *frames[which + 1 :],
    ]


def _lengthen(rng: Random, frames: wire.Frames) -> wire.Frames:
    return [frame + rng.randbytes(rng.choice((0, 1, 4, 300))) for frame in frames]


def _reorder(rng: Random, frames: wire.Frames) -> wire.Frames:
    return rng.sample(frames, rng.randint(0, len(frames))) + frames[: rng.randint(0, 2)]


def _noise(rng: Random, frames: wire.Frames) -> wire.Frames:
    return [rng.randbytes(rng.choice((0, 1, 7, 60))) for _ in range(rng.choice((1, 1, 3, 40)))]


def _oversize(rng: Random, frames: wire.Frames) -> wire.Frames:
    return [*frames, bytes(MAX_FRAME_BYTES + 1)] if rng.random() < 0.01 else _flip(rng, frames)


def _field(rng: Random, frames: wire.Frames) -> wire.Frames:
    """One value somewhere in the header becomes another, vanishes, or gets company."""
    try:
        envelope: Any = msgpack.unpackb(frames[0])
    except (ValueError, IndexError, msgpack.exceptions.UnpackException):
        return _noise(rng, frames)
    place, inner = envelope, envelope
    while isinstance(inner, dict | list) and inner and rng.random() < 0.8:
        place = inner
        inner = place[rng.choice(list(place) if isinstance(place, dict) else range(len(place)))]
    if not isinstance(place, dict | list) or not place:
        return _noise(rng, frames)
    key: Any = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    what = rng.random()
    if what < 0.6:
        place[key] = _nested(rng.choice(_DEPTHS)) if rng.random() < 0.02 else rng.choice(_VALUES + _WORDS + _ABSURD)
    elif what < 0.8:
        del place[key]
    elif isinstance(place, dict):
        place["extra"] = rng.choice(_VALUES)
    else:
        place.append(rng.choice(_VALUES))
    return [msgpack.packb(envelope), *frames[1:]]


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def at_the_bounds() -> Iterator[wire.Frames]:
    """Every field of every message, nested ones too, with every value that is one of its bounds or absurd."""
    for frames in originals():
        for path in _paths(msgpack.unpackb(frames[0])[2]):
            for value in (*_ABSURD, *_VALUES, _nested(500)):
                envelope = msgpack.unpackb(frames[0])
                *way, last = path
                place = envelope[2]
                for key in way:
                    place = place[key]
                place[last] = value
                spoilt = [msgpack.packb(envelope), *frames[1:]]
                if not _is_order(spoilt):
                    yield spoilt


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _paths(value[key], (*path, key))


def _numbers(rng: Random, frames: wire.Frames) -> wire.Frames:
    """Arrays of the right length with wrong numbers in them."""
    wrong = rng.choice((float("nan"), float("inf"), -float("inf"), 0.5, 3e38))
    return [*frames[:-1], np.full(max(1, len(frames[-1]) // 4), wrong, "<f4").tobytes()] if frames else frames


_WAYS: tuple[Callable[[Random, wire.Frames], wire.Frames], ...] = (
    _flip, _cut, _lengthen, _reorder, _noise, _oversize, _numbers, *[_field] * 9,
)  # fmt: skip
