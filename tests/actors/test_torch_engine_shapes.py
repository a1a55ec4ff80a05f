"""A completion has the same bits whatever shapes a library rounds by: on made-up libraries, each with a rule of its own."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch

from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.llama_invariant import InvariantLlamaForward
from async_rlhf.actors.torch_engine.model_check import check_engine
from async_rlhf.actors.torch_engine.shapes import Attended, Columns, Sizes
from async_rlhf.buffers.sampling import Sampling
from tests.actors.strange_products import strange_products
from tests.actors.test_torch_engine_invariance import MAX_LENGTH, VOCABULARY, differing, elsewhere, make_model
from tests.actors.torch_models import finished

__all__ = ["elsewhere"]


@pytest.mark.parametrize(
    ("rule", "packs"),
    [("whole shape", True), ("borders", False)]
    + [pytest.param(*case, marks=pytest.mark.rest) for case in (("borders", True), ("place", True), ("place", False))],
)
def test_a_completion_has_the_same_bits_whatever_shapes_a_library_rounds_by(
    rule: str, packs: bool, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr("async_rlhf.actors.torch_engine.llama.can_pack", lambda dtype: False)
    with strange_products(rule):
        assert differing("grouped-query", torch.float32, 1, True, monkeypatch)[0] == 0


def _all_hold(self: Sizes, size: int) -> bool:
    return True


def _sixteen(attended: Attended, longest: int) -> Columns:
    return Columns(1024, 1024, tuple(range(16, 1025, 16)))


@pytest.mark.parametrize(
    ("place", "planted"),
    [("shapes.Sizes.holds", _all_hold), ("llama_invariant.choose_columns", _sixteen)],
    ids=["rows of any number together", "columns in steps of 16"],
)
def test_shapes_that_were_not_compared_are_found(
    place: str, planted: object, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"async_rlhf.actors.torch_engine.{place}", planted)
    with strange_products("borders"):
        assert differing("grouped-query", torch.float32, 1, True, monkeypatch)[0] > 0


def test_a_shape_that_rounds_otherwise_is_found_where_answers_of_16_bits_hide_it() -> None:
    with strange_products("borders"):
        engine = TorchEngine(make_model("many inputs", torch.bfloat16), slots=1, max_length=MAX_LENGTH, batch_invariant=True)
        forward = engine._forward
        assert isinstance(forward, InvariantLlamaForward)
        for sizes in (forward._layer_sizes, forward._output_sizes):
            assert not sizes.holds(1) and sizes.holds(2), "the library adds up a single row in another order"


def test_long_rows_are_the_models_in_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are normalised each by itself, of a library that forces the smallest, and of one that allows large ones."""
    model, draw = make_model("grouped-query", torch.float32), random.Random(3)
    request = Request(RolloutKey(0, 0, 0), tuple(draw.choices(range(VOCABULARY), k=700)), 8, Sampling(), 4)
    for most, rule in ((256, None), (2048, "whole shape")):
        monkeypatch.setattr("async_rlhf.actors.torch_engine.llama_invariant.MOST_COLUMNS", most)
        with strange_products(rule) if rule else nullcontext():
            engine = TorchEngine(model, slots=1, max_length=MAX_LENGTH, batch_invariant=True)
            check_engine(engine, model)
            completion = finished(engine, [request])[request.key]
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids.tolist()]])
        plain = torch.log_softmax(model(ids).logits[0, 699:-1], -1).gather(-1, ids[0, 700:, None])[:, 0].detach()
        torch.testing.assert_close(torch.from_numpy(completion.logprobs), plain, atol=1e-4, rtol=0)
