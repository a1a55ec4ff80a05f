"""A record that exists is well formed; what is observed is kept apart from what is believed; and the settings of sampling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from async_rlhf.actors.config import GenerationConfig
from async_rlhf.buffers.errors import RecordError, WeightsError
from async_rlhf.buffers.record import Group, Piece, Rollout, SamplingMask, Score, Span, staleness
from async_rlhf.buffers.sampling import GREEDY, TRUNCATING, Sampling
from async_rlhf.buffers.tensors import ITEM_BYTES, RawTensor


def rollout(**changed: Any) -> Rollout:
    fields: dict[str, Any] = {
        "completion_ids": np.array([5, 6, 7], np.int32),
        "logprobs": np.array([-0.5, -1.0, 0.0], np.float32),
        "spans": (Span(3, 2), Span(4, 1)),
        "finish_reason": "stop",
        "scores": {"right": Score(1.0)},
    }
    return Rollout(**fields | changed)


IMAGE = "0" * 32
# A first piece that begins with a token that was read.
BEHIND = {"spans": (Span(None, 1), Span(4, 2)), "logprobs": np.zeros(2, np.float32)}
# Of 2 tokens of the prompt, and of 2 that are read behind it.
ROUTING = np.zeros((4, 3, 2), np.uint8)


def group(**changed: Any) -> Group:
    fields: dict[str, Any] = {
        "number": 0, "attempt": 0, "prompt_ids": np.array([1, 2], np.int32), "rollouts": (rollout(), rollout()),
        "sampling": Sampling(),
    }  # fmt: skip
    return Group(**fields | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"completion_ids": np.array([5, 6, 7])}, "completion_ids must be int32"),
        ({"completion_ids": np.array([], np.int32)}, "T > 0"),
        ({"completion_ids": np.zeros((3, 1), np.int32)}, "completion_ids must be int32"),
        ({"logprobs": np.zeros(3)}, r"logprobs must be float32 \(3,\), got float64"),
        ({"logprobs": np.zeros(2, np.float32)}, r"logprobs must be float32 \(3,\), got float32 \(2,\)"),
        ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "logprobs must be finite and at most 0, got nan at token 1"),
        ({"logprobs": np.array([0, 0, -np.inf], np.float32)}, "logprobs must be finite and at most 0, got -inf at token 2"),
        ({"reference": np.zeros(2, np.float32)}, r"reference must be float32 \(3,\), got float32 \(2,\)"),
        ({"reference": np.array([0, np.nan, 0], np.float32)}, "reference must be finite and at most 0, got nan at token 1"),
        ({"spans": ()}, "spans must cover all 3 tokens"),
        ({"spans": (Span(0, 2),)}, "spans must cover all 3 tokens"),
        ({"spans": (Span(0, 4),)}, "spans must cover all 3 tokens"),
        ({"spans": (Span(0, 3), Span(1, 0))}, "spans must be non-empty"),
        ({"spans": (Span(0, 4), Span(1, -1))}, "spans must be non-empty"),
        ({"spans": (Span(0, 2), Span(None, 1))}, "the last token must be a sampled one"),
        ({"spans": (Span(None, 3),)}, "the last token must be a sampled one"),
        ({"spans": (Span(None, 1, restarts=True), Span(0, 2))}, "a span that restarts must be read, between two that were"),
        ({"spans": (Span(0, 2), Span(0, 1, restarts=True))}, "a span that restarts must be read, between two that were"),
        ({"spans": (Span(0, 1, restarts=True), Span(0, 2))}, "a span that restarts must be read"),
        ({"spans": (Span(0, 1), Span(None, 1, restarts=True), Span(0, 1))}, r"logprobs must be float32 \(2,\), got"),
        ({"routing": np.zeros((4, 3, 2), np.int64)}, r"routing must be uint8 or uint16 \[N, L, k\], got int64 \(4, 3, 2\)"),
        ({"routing": np.zeros((4, 6), np.uint8)}, r"routing must be .* got uint8 \(4, 6\)"),
        ({"images": ((IMAGE,),)}, r"images must be of 1 pieces, in what each begins with, got \(\('0000"),
        ({**BEHIND, "images": ((IMAGE, IMAGE),)}, "images must be of 1 pieces, in what each begins with"),
        ({**BEHIND, "images": ((IMAGE,), (IMAGE,))}, "images must be of 1 pieces"),
    ],
)
def test_a_rollout_that_contradicts_itself_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        rollout(**changed)


@pytest.mark.parametrize(
    ("sizes", "ids", "message"),
    [
        ([1, 1], [5, 6], "sampling_mask must be int32 sizes"),
        ([1, 1, 1], [5, 6], "2 ids in 3 parts"),
        ([2, 0, 1], [5, 6, 7], "at least 1"),
        ([1, 2, 1], [5, 1, 2, 7], "token 1 is not once in its own sampling mask"),
        ([1, 2, 1], [5, 6, 6, 7], "token 1 is not once in its own sampling mask"),
    ],
)
def test_a_support_that_does_not_hold_what_was_sampled_is_refused(sizes: list[int], ids: list[int], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        rollout(
            completion_ids=np.array([5, 6, 7], np.int32),
            sampling_mask=SamplingMask(np.array(sizes, np.int32), np.array(ids, np.int32)),
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"number": -1}, "number and attempt must be >= 0, got -1 and 0"),
        ({"attempt": -1}, "number and attempt must be >= 0, got 0 and -1"),
        ({"prompt_ids": np.array([1])}, "prompt_ids must be int32"),
        ({"prompt_ids": np.array([], np.int32)}, "P > 0"),
        ({"rollouts": ()}, "group 0 has no rollouts"),
        ({"rollouts": (rollout(), rollout(scores={}))}, r"must carry the same rewards, first has \['right'\]"),
        ({"rollouts": (rollout(routing=ROUTING), rollout())}, r"of all 2 rollouts must be \[\(4, 3, 2\), \(4, 3, 2\)\]"),
        ({"rollouts": (rollout(), rollout(routing=ROUTING))}, r"routing of all 2 rollouts must be \[None, None\]"),
        (
            {"images": (IMAGE,), "rollouts": (rollout(), rollout(**BEHIND, images=((IMAGE,),)))},
            "group 0 has images in its prompt, and some behind it in a first piece",
        ),
        ({"rollouts": (rollout(routing=ROUTING[1:]),)}, r"must be \[\(4, 3, 2\)\], got \[\(3, 3, 2\)\]"),
    ],
)
def test_a_group_that_contradicts_itself_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        group(**changed)


def test_what_an_environment_gave_has_a_place_and_nothing_else() -> None:
    made = rollout(
        completion_ids=np.array([5, 6, 7, 8, 9], np.int32),
        spans=(Span(3, 1), Span(None, 2), Span(4, 2)),
        sampling_mask=SamplingMask(np.array([1, 1, 1], np.int32), np.array([5, 8, 9], np.int32)),
    )
    assert (made.length, made.num_tokens) == (5, 3)
    assert made.sampled.tolist() == [True, False, False, True, True] and made.sampled_ids.tolist() == [5, 8, 9]
    assert made.versions.tolist() == [3, 4, 4]
    both = group(rollouts=(made, made))
    assert (both.oldest_version, both.newest_version, both.num_tokens) == (3, 4, 6)
    assert made.turn_lengths == [1, 2] and rollout().turn_lengths == [3]
    assert replace(made, turn_scores=(0.5,)).turn_scores == (0.5,)
    assert replace(made, turn_scores=(None, 0.5)).turn_scores == (None, 0.5)
    for scores, message in (((0.5, 1.0, 1.0), "must be of 1 turns, an agent's of 2"), ((math.inf,), "must be finite")):
        with pytest.raises(RecordError, match=message):
            replace(made, turn_scores=scores)


def test_a_row_begins_anew_between_two_turns_and_nowhere_else() -> None:
    spans = (Span(3, 1), Span(None, 1), Span(3, 1), Span(None, 2, restarts=True), Span(4, 2))
    made = rollout(completion_ids=np.arange(7, dtype=np.int32), logprobs=np.zeros(4, np.float32), spans=spans)
    assert made.restarts == [3] and made.pieces == [Piece(0, 0, 3), Piece(3, 2, 7)]
    assert made.turn_lengths == [1, 1, 2] and made.num_read == 5 == sum(piece.num_read for piece in made.pieces)
    for wrong in ((Span(3, 2), Span(None, 1), Span(None, 2, restarts=True), Span(4, 2)),
                  (Span(3, 2), Span(None, 2, restarts=True), Span(None, 1), Span(4, 2))):  # fmt: skip
        with pytest.raises(RecordError, match="a span that restarts must be read, between two that were sampled"):
            replace(made, spans=wrong)


def test_what_stands_before_the_first_turn_is_no_turn_and_no_piece() -> None:
    spans = (Span(None, 2), Span(3, 1), Span(None, 2, restarts=True), Span(3, 1), Span(None, 1), Span(4, 2))
    made = rollout(completion_ids=np.arange(9, dtype=np.int32), logprobs=np.zeros(4, np.float32), spans=spans)
    assert (made.turn_lengths, made.piece_lengths, made.pieces) == ([1, 1, 2], [1, 3], [Piece(0, 0, 3), Piece(3, 2, 9)])
    assert made.num_read == 7 == sum(piece.num_read for piece in made.pieces) and made.sampled_ids.tolist() == [2, 5, 7, 8]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=6))
def test_every_token_has_the_version_of_its_span(spans: list[tuple[int, int]]) -> None:
    length = sum(num_tokens for _, num_tokens in spans)
    made = rollout(
        completion_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        spans=tuple(Span(version, num_tokens) for version, num_tokens in spans),
    )
    assert made.versions.tolist() == [version for version, num_tokens in spans for _ in range(num_tokens)]
    both = group(rollouts=(made, rollout()))
    assert both.oldest_version == min(3, *(version for version, _ in spans))
    assert both.newest_version == max(4, *(version for version, _ in spans))
    assert both.num_tokens == length + 3


def test_a_score_is_a_value_or_not_applicable_or_failed() -> None:
    assert [Score(0.0).state, Score().state, Score(failure="timed out").state] == ["value", "not_applicable", "failed"]
    with pytest.raises(RecordError, match="a value or a failure, not both"):
        Score(1.0, "failed too")
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(RecordError, match="a score must be finite"):
            Score(value)


def test_staleness_counts_in_both_directions() -> None:
    assert [staleness(3, 5), staleness(5, 5), staleness(6, 5)] == [2, 0, 1]


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_tensor_has_the_bytes_of_its_shape(dtype: str) -> None:
    for shape, count in (((), 1), ((0, 5), 0), ((2, 3), 6)):
        data = bytes(count * ITEM_BYTES[dtype])
        assert RawTensor(dtype, shape, data).data == data
        with pytest.raises(WeightsError, match=f"needs {len(data)} bytes, got {len(data) + 1}"):
            RawTensor(dtype, shape, data + b"x")


def test_a_tensor_of_an_unknown_dtype_cannot_travel() -> None:
    with pytest.raises(WeightsError, match=r"'complex64' cannot travel; known: float64"):
        RawTensor("complex64", (1,), bytes(8))


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": "1"}, {"top_k": -1}, {"top_k": 3.0},
        {"top_k": True}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 1.0}, {"min_p": -0.1}, {"top_q": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_out_of_range_or_of_another_type_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sampling(**given)


def test_the_first_setting_that_cuts_something_off_is_named_and_greedy_cuts_nothing() -> None:
    assert Sampling(temperature=0.5).truncation == GREEDY.truncation == ""
    assert Sampling(min_p=0.1, top_p=0.9).truncation == "top_p = 0.9"
    assert Sampling(temperature=0, top_k=5).truncation == ""
    assert [Sampling(**{name: 0.5 if name != "top_k" else 1}).truncation.split()[0] for name in TRUNCATING] == list(TRUNCATING)


def test_the_configuration_holds_every_setting_and_gives_them_as_one() -> None:
    config = GenerationConfig.model_validate({"group_size": 4, "temperature": 0.5, "top_k": 7})
    assert config.sampling == Sampling(temperature=0.5, top_k=7) and config.truncation == "top_k = 7"
    with pytest.raises(ValidationError, match="greater than 0"):
        GenerationConfig(temperature=0)
