"""What is said is what is heard; and what cannot be a message is refused as one error, whatever it is."""

from __future__ import annotations

import datetime
from contextlib import suppress
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.record import Group, Rollout, SamplingMask, Score, Span
from async_rlhf.buffers.sampling import Sampling
from tests.buffers.protocol.any_message import JSON, MESSAGES, TEXT, like

LIMIT = 1 << 20


def hear(frames: wire.Frames) -> tuple[int, wire.Message, wire.Frames]:
    return wire.decode(frames, max_frame_bytes=LIMIT)


# Round trips


@pytest.mark.parametrize("model", MESSAGES, ids=lambda model: model.__name__)
def test_every_message_arrives_as_it_was_sent(model: type[Any]) -> None:
    @settings(max_examples=25, deadline=None)
    @given(like(model), st.integers(0, 1 << 40), st.lists(st.binary(max_size=50), max_size=3))
    def check(message: wire.Message, request: int, arrays: list[bytes]) -> None:
        assert hear(wire.encode(message, arrays, request)) == (request, message, arrays)

    check()


LIMITED = st.floats(-1e18, 1e18)
SCORES = st.builds(Score, LIMITED) | st.builds(Score) | st.builds(Score, st.none(), TEXT)


SPANS = st.builds(Span, st.integers(-5, (1 << 31) - 1), st.integers(1, 4), st.none() | st.integers(-5, (1 << 31) - 1))
DIGESTS = st.sampled_from(("0" * 32, "0123456789abcdef" * 2))
OBSERVATIONS = st.builds(Span, st.none(), st.integers(1, 3))


@st.composite
def sampling_masks(draw: st.DrawFn, ids: list[int]) -> SamplingMask:
    others = [draw(st.sets(st.integers(0, 9), max_size=2)) - {token} for token in ids]
    kept = [sorted({token, *more}) for token, more in zip(ids, others, strict=True)]
    flat = [token for part in kept for token in part]
    return SamplingMask(np.array([len(part) for part in kept], np.int32), np.array(flat, np.int32))


def logprobs_of(length: int) -> st.SearchStrategy[list[float]]:
    number = st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)
    return st.lists(number, min_size=length, max_size=length)


@st.composite
def rollouts(draw: st.DrawFn, names: list[str]) -> Rollout:
    spans = draw(st.lists(SPANS, min_size=1, max_size=3))
    observed = draw(st.lists(OBSERVATIONS, max_size=2)) if len(spans) > 1 else []
    if len(observed) == 1 and draw(st.booleans()):
        observed = [replace(observed[0], restarts=True)]
    spans[1:1] = observed
    spans = draw(st.lists(OBSERVATIONS, max_size=1)) + spans
    length = sum(span.num_tokens for span in spans)
    ids = draw(st.lists(st.integers(0, (1 << 31) - 1), min_size=length, max_size=length))
    chosen = [span.version is not None for span in spans for _ in range(span.num_tokens)]
    sampled = [token for token, was in zip(ids, chosen, strict=True) if was]
    logprobs, reference = draw(st.lists(logprobs_of(len(sampled)), min_size=2, max_size=2))
    images = tuple(draw(st.lists(DIGESTS, max_size=count).map(tuple)) for count in heads(spans))
    return Rollout(
        completion_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        spans=tuple(spans),
        finish_reason=draw(st.sampled_from(("stop", "length"))),
        scores={name: draw(SCORES) for name in names},
        text=draw(TEXT),
        timings=draw(st.dictionaries(TEXT, LIMITED, max_size=2)),
        sampling_mask=draw(st.none() | sampling_masks(sampled)),
        reference=draw(st.none() | st.just(np.array(reference, np.float32))),
        turn_scores=draw(st.sampled_from([(), (0.5,) if observed else (), (None, 0.5) if observed else (0.5,)])),
        images=draw(st.sampled_from([(), images])) if any(images) else (),
    )


def heads(spans: list[Span]) -> list[int]:
    """How many tokens each piece begins with that were read."""
    first = spans[0].num_tokens if spans[0].version is None else 0
    return [first, *(span.num_tokens for span in spans if span.restarts)]


def with_routing(group: Group, dtype: str) -> Group:
    """The same, with experts of 2 in each of 3 layers, another number for each but those of the prompt."""
    prompt, number = len(group.prompt_ids), 0
    rollouts = []
    for rollout in group.rollouts:
        count = 6 * (prompt + rollout.num_read)
        routing = np.arange(number, number + count).astype(dtype).reshape(-1, 3, 2)
        routing[:prompt] = np.arange(6 * prompt).reshape(-1, 3, 2)
        rollouts.append(replace(rollout, routing=routing))
        number += count
    return replace(group, rollouts=tuple(rollouts))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    names = draw(st.lists(TEXT, unique=True, max_size=3))
    dtype = draw(st.sampled_from(("", "uint8", "uint16")))
    members = tuple(draw(st.lists(rollouts(names), min_size=1, max_size=3)))
    made = Group(
        number=draw(st.integers(0, 1 << 40)),
        attempt=draw(st.integers(0, 9)),
        prompt_ids=np.array(draw(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=5)), np.int32),
        rollouts=members,
        images=()
        if any(each.images and each.images[0] for each in members)
        else draw(st.lists(DIGESTS, max_size=2).map(tuple)),
        sampling=draw(like(Sampling)),
        actor=draw(TEXT),
        prompt=draw(TEXT),
        columns=draw(st.dictionaries(TEXT, JSON, max_size=3)),
    )
    return with_routing(made, dtype) if dtype else made


def same(one: Group, other: Group) -> bool:
    def plain(group: Group) -> Any:
        flat = vars(group) | {"prompt_ids": (group.prompt_ids.dtype, group.prompt_ids.tolist())}
        arrays = ("completion_ids", "logprobs")
        flat["rollouts"] = [
            {field.name: getattr(r, field.name) for field in fields(r)}
            | {name: (getattr(r, name).dtype, getattr(r, name).tobytes()) for name in arrays}
            | {"reference": r.reference is not None and (r.reference.dtype, r.reference.tobytes())}
            | {"routing": r.routing is not None and (r.routing.dtype, r.routing.tolist())}
            | {"sampling_mask": r.sampling_mask and [(ids.dtype, ids.tolist()) for ids in vars(r.sampling_mask).values()]}
            for r in group.rollouts
        ]
        return flat

    return bool(plain(one) == plain(other))


@settings(max_examples=80, deadline=None)
@given(groups())
def test_a_group_arrives_as_it_was_made_over_the_wire_and_through_a_journal(group: Group) -> None:
    header, arrays = packing.pack_group(group)
    frames = wire.encode(wire.Put(group=header), arrays, request=7)
    assert same(packing.decode_put(frames), group)
    assert same(packing.decode_put(packing.from_bytes(b"".join(packing.to_parts(frames)))), group)


def a_group(**changed: Any) -> Group:
    fields: dict[str, Any] = {
        "number": 3,
        "attempt": 0,
        "prompt_ids": np.array([1, 2], np.int32),
        "rollouts": (
            Rollout(np.array([5, 6, 7], np.int32), np.array([-1, -2, 0], np.float32), (Span(0, 3),), "stop", {"r": Score(1.0)}),
            Rollout(np.array([8], np.int32), np.array([-3], np.float32), (Span(0, 1),), "length", {"r": Score(failure="x")}),
        ),
        "sampling": Sampling(),
    }
    return Group(**fields | changed)


def test_experts_cost_their_bytes_once_for_the_prompt_of_a_group_which_are_those_of_its_first_member() -> None:
    plain, routed = a_group(), with_routing(a_group(), "uint8")
    first, second = (rollout.routing for rollout in routed.rollouts)
    assert first is not None and second is not None
    second[:2] += 1
    size = sum(map(len, put_frames(routed))) - sum(map(len, put_frames(plain)))
    assert 0 <= size - 6 * (2 + 2 + 0) < 8, "of 2 tokens of the prompt, and of 2 and 0 that are read behind it"
    heard = packing.decode_put(put_frames(routed)).rollouts
    np.testing.assert_array_equal(heard[0].routing, first)
    np.testing.assert_array_equal(heard[1].routing[:2], first[:2])


@pytest.mark.parametrize("routing", [[3, 2], [3, 2, 1, 1], [3, 2, 4], [4, 2, 1], [1 << 40, 1 << 40, 2]])
def test_experts_that_do_not_fit_their_header_are_refused(routing: list[int]) -> None:
    header, arrays = packing.pack_group(with_routing(a_group(), "uint8"))
    with pytest.raises(WireError, match=r"routing must be layers|arrays of"):
        packing.check_group(header.model_copy(update={"routing": routing}), [b"", *arrays])
    with pytest.raises(WireError, match="arrays of"):
        packing.check_group(header, [b"", arrays[0][:-1], arrays[1]])


@pytest.mark.parametrize("images", [[[["../secret"]], [[]]], [[["0" * 32]]], [[["0" * 32]], [[]]]])
def test_what_names_no_image_and_images_of_no_piece_are_refused(images: Any) -> None:
    """The last of them where nothing was read before the first sampled token."""
    header, arrays = packing.pack_group(a_group())
    frames = wire.encode(wire.Put(group=header.model_copy(update={"images_of_pieces": images})), arrays)
    with pytest.raises(WireError, match=r"images_of_pieces|images must be of"):
        packing.check_group(packing.put_header(frames), frames)


def test_columns_that_json_cannot_say_travel_as_their_text() -> None:
    """Tasks put such things into their rows; a group must not be lost for it."""
    deep: Any = "bottom"
    for _ in range(1000):
        deep = [deep]
    sent_and_heard: dict[str, tuple[Any, Any]] = {
        "fraction": (Fraction(1, 3), "1/3"),
        "date": (datetime.date(2024, 2, 29), "2024-02-29"),
        "keys": ({1: "one", (2, 3): "pair"}, {"1": "one", "(2, 3)": "pair"}),
        "tuple": ((1, (2, "b")), [1, [2, "b"]]), "set": ({3, 1, 2}, [1, 2, 3]), "bytes": (b"\x00a", "b'\\x00a'"),
        "infinite": (float("inf"), "inf"), "large": (1 << 70, str(1 << 70)), "half": ("\ud800!", "?!"),
        "numpy": (np.float64(0.5), 0.5), "none": (None, None),
    }  # fmt: skip
    columns = {name: sent for name, (sent, _) in sent_and_heard.items()}
    arrived = packing.decode_put(put_frames(a_group(columns=columns, prompt="\udfff"))).columns
    assert arrived == {name: heard for name, (_, heard) in sent_and_heard.items()}
    nested = packing.decode_put(put_frames(a_group(columns={"deep": deep}))).columns["deep"]
    while isinstance(nested, list):
        nested = nested[0]
    assert nested == "[[[[[[[...]]]]]]]"


# What is no message


def put_frames(group: Group) -> wire.Frames:
    header, arrays = packing.pack_group(group)
    return wire.encode(wire.Put(group=header), arrays)


def packed(message: Any, *, request: Any = 1) -> wire.Frames:
    return [msgpack.packb([wire.PROTOCOL, request, message])]


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


# Beside those of `tests/buffers/hub/test_refusals.py`, and the random ones of `tests/fuzz`.
MALFORMED = {
    "no frames": [],
    "nesting in a column": [packed({"type": "x"})[0][:-1] + nested(900)],
    "a huge declared string": [b"\xdb\xff\xff\xff\xff"],
    "a huge declared array": [b"\xdd\xff\xff\xff\xff"],
    "a huge declared map": [b"\xdf\xff\xff\xff\xff"],
    "huge declared bytes": [b"\xc6\xff\xff\xff\xff"],
    "bytes": packed(b"bytes"),
    "a time stamp": [msgpack.packb([1, 1, msgpack.Timestamp(1, 1)])],
    "an extension": [msgpack.packb([1, 1, msgpack.ExtType(5, b"")])],
    "text that is no text": [b"\x93\x01\x01\xa2\xff\xff"],
    "keys that are no text": packed({1: 2}),
    "a list for a map": packed([1, 2]),
    "a request that is no number": packed({"type": "bye"}, request="1"),
    "a type that is no text": packed({"type": []}),
    "a number with a fraction": packed({"type": "release", "numbers": [1.5]}),
    "a name without end": packed({"type": "gone", "actor": "a" * 201}),
    "no name": packed({"type": "gone", "actor": ""}),
    "infinity": packed({"type": "batch", "step": 1, "telemetry": {"x": float("inf")}}),
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_message_is_refused(frames: wire.Frames) -> None:
    with pytest.raises(WireError) as refused:
        hear(frames)
    assert 0 < len(str(refused.value)) < 600


def test_a_column_too_deep_is_refused_however_it_came() -> None:
    (frame,) = packed({"type": "put", "group": packing.pack_group(a_group(columns={"deep": "HERE"}))[0].model_dump()})
    for depth in (300, 500, 1000):
        with pytest.raises(WireError):
            hear([frame.replace(msgpack.packb("HERE"), nested(depth))])


FIELDS = packing.pack_group(a_group())[0].model_dump()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_k": 3.0}, "top_k' = '3.0'"),
        ({"top_p": 0.0}, "top_p' = '0.0'"),
        ({"top_q": 1}, "top_q' = '1'"),
        ({"temperature": None}, "temperature' = 'None'"),
    ],
)
def test_sampling_that_is_none_is_refused_and_so_is_one_that_leaves_a_setting_out(given: dict[str, Any], message: str) -> None:
    sampling = FIELDS["sampling"]
    lacking = {name: value for name, value in sampling.items() if name != "min_p"}
    for wrong, words in ((sampling | given, f".{message}"), (lacking, r"' = .*'min_p'. not given")):
        with pytest.raises(WireError, match=f"field 'put.group.sampling{words}"):
            hear(packed({"type": "put", "group": FIELDS | {"sampling": wrong}}))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_what_the_hub_lets_in_can_be_unpacked(data: st.DataObject) -> None:
    """The quick check of the hub refuses everything that would end a learner."""
    header, arrays = packing.pack_group(data.draw(groups()))
    fields = header.model_dump()
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from(sorted(fields)))
        other = packing.pack_group(data.draw(groups()))[0].model_dump()
        fields[name] = data.draw(st.sampled_from((other[name], -1 if isinstance(fields[name], int) else other[name])))
    with suppress(WireError, ValueError):
        changed = wire.GroupHeader.model_validate(fields)
        try:
            entry = packing.check_group(changed, [b"header", *arrays])
        except WireError:
            if changed == header:
                raise AssertionError("an honest group was refused") from None
            return
        group = packing.unpack_group(changed, arrays)
        found = (entry.attempt, entry.oldest_version, entry.newest_version, entry.num_tokens)
        assert found == (group.attempt, group.oldest_version, group.newest_version, group.num_tokens)
