"""Times of stages: sums by hand, and the laws that rooflines keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.devices import Device, catalogue, device
from async_rlhf.experiments.planning.model.model_costs import ModelCosts, read
from async_rlhf.experiments.planning.model.stages import (
    Efficiency,
    Link,
    Place,
    decode_step_s,
    inference_s,
    knee_rows,
    optimizer_s,
    prefill_s,
    publication_s,
    training_s,
    weights_read_bytes,
)
from tests.planning.specs import LLAMA_1B

DENSE = read(LLAMA_1B)
EXPERTS = read({**LLAMA_1B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
# Round figures: 100 FLOPs a byte, links of 1 GB/s without latency.
ROUND = Device(
    peak_flops=1e14,
    memory_bytes=1e11,
    memory_bytes_per_s=1e12,
    link_bytes_per_s=1e9,
    link_latency_s=0.0,
    network_bytes_per_s=1e8,
    network_latency_s=1e-3,
    host_bytes_per_s=1e9,
)
FAST_LINKS = ROUND.model_copy(update={"link_bytes_per_s": 1e30, "network_bytes_per_s": 1e30, "network_latency_s": 0.0})

places = st.builds(
    Place,
    model=st.sampled_from([DENSE, EXPERTS]),
    device=st.sampled_from(list(catalogue().values())),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 3, 8]),
    context=st.sampled_from([1, 1, 2, 4]),
    spread=st.booleans(),
    efficiency=st.builds(
        Efficiency,
        flops=st.floats(0.05, 1),
        memory=st.floats(0.05, 1),
        links=st.floats(0.05, 1),
        launch_s=st.floats(0, 1e-3),
    ),
)
rows = st.integers(1, 512)
tokens = st.integers(1, 4096)
more = st.integers(1, 512)


def at_most(less: float, greater: float) -> bool:
    return less <= greater * (1 + 1e-12)


@given(places, rows, tokens, more)
def test_more_rows_and_longer_ones_never_take_less(place: Place, rows: int, tokens: int, more: int) -> None:
    for stage in (prefill_s, inference_s, training_s, decode_step_s):
        assert stage(place, rows, tokens) > 0
        assert at_most(stage(place, rows, tokens), stage(place, rows + more, tokens))
        assert at_most(stage(place, rows, tokens), stage(place, rows, tokens + more))


@given(places, rows, tokens, st.integers(2, 8))
def test_more_replicas_never_make_inference_slower_and_at_best_divide_it(
    place: Place, rows: int, tokens: int, times: int
) -> None:
    wider = Place(**{**vars(place), "data": place.data * times})
    assert at_most(inference_s(wider, rows, tokens), inference_s(place, rows, tokens))
    even = rows * wider.data
    assert inference_s(wider, even * times, tokens) == pytest.approx(inference_s(place, even, tokens))


@given(places, rows, tokens, st.sampled_from(["flops", "memory", "links"]), st.floats(0.1, 0.9))
def test_a_smaller_efficiency_never_takes_less(place: Place, rows: int, tokens: int, name: str, factor: float) -> None:
    reached = Efficiency(**{**vars(place.efficiency), name: getattr(place.efficiency, name) * factor})
    slower = Place(**{**vars(place), "efficiency": reached})
    for stage in (prefill_s, inference_s, training_s, decode_step_s):
        assert at_most(stage(place, rows, tokens), stage(slower, rows, tokens))
    assert at_most(optimizer_s(place), optimizer_s(slower))


@given(st.sampled_from([DENSE, EXPERTS]), rows, tokens)
def test_with_links_that_take_no_time_a_tensor_group_divides_each_stage(costs: ModelCosts, rows: int, tokens: int) -> None:
    one, four = (Place(model=costs, device=FAST_LINKS, tensor=tensor) for tensor in (1, 4))
    for stage in (prefill_s, inference_s, training_s, decode_step_s):
        assert stage(four, rows, tokens) == pytest.approx(stage(one, rows, tokens) / 4)


@settings(max_examples=50)
@given(st.sampled_from(sorted(catalogue())), st.floats(0.1, 1), st.floats(0.1, 1))
def test_below_the_knee_a_row_more_costs_nothing_and_above_it_its_arithmetic(name: str, flops: float, memory: float) -> None:
    place = Place(model=DENSE, device=device(name), efficiency=Efficiency(flops=flops, memory=memory))
    knee = knee_rows(place)
    assert knee == pytest.approx(place.flops / place.memory_bytes_per_s, rel=0.001)
    below, above = math.floor(knee), math.ceil(knee)
    assert (
        decode_step_s(place, 1, 0) == decode_step_s(place, below, 0) == weights_read_bytes(DENSE, 1) / place.memory_bytes_per_s
    )
    assert decode_step_s(place, 2 * above, 0) == pytest.approx(2 * above * DENSE.forward_flops(0) / place.flops)


def test_a_step_of_one_row_reads_the_experts_it_meets_and_many_rows_read_all() -> None:
    embedding = EXPERTS.vocabulary * EXPERTS.hidden
    assert weights_read_bytes(EXPERTS, 1) == pytest.approx(2 * (EXPERTS.active_parameters - embedding))
    assert weights_read_bytes(EXPERTS, math.inf) == 2 * (EXPERTS.parameters - embedding)
    assert weights_read_bytes(EXPERTS, 1) < weights_read_bytes(EXPERTS, 2) < weights_read_bytes(EXPERTS, math.inf)
    assert weights_read_bytes(DENSE, 1) == weights_read_bytes(DENSE, math.inf)


def test_collectives_are_the_sums_of_their_rounds() -> None:
    link = Link(latency_s=1.0, bytes_per_s=8.0)
    assert link.gather_s(64, 4) == 3 * (1 + 16 / 8)
    assert link.reduce_s(64, 4) == 2 * 3 * 1 + 2 * 3 / 4 * 64 / 8
    assert link.reduce_s(64, 1) == 0
    assert link.send_s(64) == 1 + 8


def test_a_decode_step_by_hand() -> None:
    place = Place(model=DENSE, device=ROUND, tensor=2, efficiency=Efficiency(launch_s=1e-4))
    read = weights_read_bytes(DENSE, 8) + 8 * 1000 * DENSE.kv_bytes_per_token
    all_reduces = 2 * 16 * (2 * 8 * 2048 * 2 / 2 / 1e9)
    assert decode_step_s(place, 8, 1000) == pytest.approx(read / 2e12 + all_reduces + 1e-4)
    assert decode_step_s(place, 0, 1000) == 0


def test_training_by_hand() -> None:
    alone = Place(model=DENSE, device=ROUND)
    forward = 4 * DENSE.sequence_flops(100) / 1e14
    assert inference_s(alone, 4, 100) == pytest.approx(forward)
    assert training_s(alone, 4, 100) == pytest.approx(3 * forward)
    assert training_s(alone, 4, 100, recompute="full") == pytest.approx(4 * forward)
    pair = Place(model=DENSE, device=ROUND, data=2, spread=True)
    half = 1e-3 + DENSE.weight_bytes / 2 / 1e8
    assert training_s(pair, 8, 100) == pytest.approx(3 * forward + 2 * half)
    assert training_s(pair, 8, 100, zero_stage=2) == training_s(pair, 8, 100)
    assert training_s(pair, 8, 100, zero_stage=3, micro_batches=4) == pytest.approx(3 * forward + 3 * 4 * half)
    # 1F1B with p stages and m micro-batches: (m + p - 1) / m of the work of a stage.
    piped = Place(model=DENSE, device=FAST_LINKS, pipeline=4)
    assert training_s(piped, 4, 100, micro_batches=4) == pytest.approx(3 * forward / 4 * 7 / 4)


def test_four_all_reduces_a_layer_are_the_price_of_a_tensor_group_in_training() -> None:
    pair, fast = (Place(model=DENSE, device=each, tensor=2) for each in (ROUND, FAST_LINKS))
    size = 2 * 4 * 100 * 2048
    assert training_s(pair, 4, 100) - training_s(fast, 4, 100) == pytest.approx(4 * 16 * size / 1e9)
    assert inference_s(pair, 4, 100) - inference_s(fast, 4, 100) == pytest.approx(2 * 16 * size / 1e9)


def test_groups_that_share_the_positions_of_long_rows_divide_the_work_and_hide_their_ring_behind_attention() -> None:
    links = Device(**{**vars(device("H100")), "link_latency_s": 0.0, "link_bytes_per_s": 1e15})
    one, four = (Place(model=DENSE, device=links, context=context) for context in (1, 4))
    assert four.devices == 4 and inference_s(four, 1, 32768) == pytest.approx(inference_s(one, 1, 32768) / 4)
    slow = Place(model=DENSE, device=Device(**{**vars(device("H100")), "link_bytes_per_s": 25e9}), context=4)
    long, short = (inference_s(slow, 1, tokens) / inference_s(one, 1, tokens) for tokens in (131072, 1024))
    # Attention grows with the square of a row, what the ring carries with the row.
    assert long == pytest.approx(1 / 4, rel=0.02) and short > 1 / 2


def test_tokens_travel_to_their_experts_and_back_in_each_layer() -> None:
    alone, shared = (Place(model=EXPERTS, device=device("H100"), data=2, experts=number) for number in (1, 2))
    size = 2 * 4 * 100 * EXPERTS.hidden * EXPERTS.active_experts / 2
    extra = 2 * EXPERTS.layers * shared.far.send_s(size)
    assert inference_s(shared, 8, 100) == pytest.approx(inference_s(alone, 8, 100) + extra)


def test_experts_that_are_shared_have_fewer_gradients_to_exchange() -> None:
    links = Device(**{**vars(device("H100")), "link_latency_s": 0.0, "network_latency_s": 0.0})
    alone, shared = (Place(model=EXPERTS, device=links, data=8, experts=number) for number in (1, 8))
    of_passes = [inference_s(place, 8, 1) for place in (alone, shared)]
    gradients = [training_s(place, 8, 1) - 3 * passes for place, passes in zip((alone, shared), of_passes, strict=True)]
    dense = EXPERTS.weight_bytes - EXPERTS.expert_bytes
    assert gradients[1] / gradients[0] == pytest.approx(dense / EXPERTS.weight_bytes, rel=0.05)


def test_the_head_meets_the_last_token_of_a_prompt_only() -> None:
    place = Place(model=DENSE, device=ROUND)
    head = 2 * DENSE.vocabulary * DENSE.hidden
    assert prefill_s(place, 3, 50) == pytest.approx(inference_s(place, 3, 50, head=False) + 3 * head / 1e14)
    assert prefill_s(place, 3, 0) == 0


def test_optimizer_and_publication_by_hand() -> None:
    place = Place(model=DENSE, device=ROUND, data=4)
    assert optimizer_s(place) == pytest.approx(32 * DENSE.parameters / 1e12)
    assert optimizer_s(place, zero_stage=1) == pytest.approx(8 * DENSE.parameters / 1e12)
    size = 2 * DENSE.parameters
    assert publication_s(place, 1) == pytest.approx(size / 1e9)
    assert publication_s(place, 5, links=4) == pytest.approx(size / 4e9)
    far = Place(model=DENSE, device=ROUND, spread=True)
    assert publication_s(far, 5) == pytest.approx(size / 1e8 + 4 * 1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Efficiency(flops=0), "efficiency flops = 0: above 0 and at most 1"),
        (lambda: Efficiency(launch_s=-1), "launch_s = -1: seconds, 0 or more"),
        (lambda: Place(model=DENSE, device=ROUND, data=0), "data = 0: at least 1"),
        (lambda: Place(model=DENSE, device=ROUND, tensor=5), "tensor = 5 must divide the model's 32 heads; nearest: 4"),
        (lambda: Place(model=DENSE, device=ROUND, pipeline=17), "pipeline = 17 of a model with 16 layers; nearest: 16"),
        (lambda: training_s(Place(model=DENSE, device=ROUND), 1, 1, zero_stage=5), "zero_stage = 5: 0 to 3; nearest: 3"),
        (lambda: inference_s(Place(model=DENSE, device=ROUND), 1, 1, micro_batches=0), "micro_batches = 0: at least 1"),
        (lambda: prefill_s(Place(model=DENSE, device=ROUND), -1, 1), "rows = -1: 0 or more"),
        (lambda: publication_s(Place(model=DENSE, device=ROUND), 0), "replicas = 0.* each at least 1"),
    ],
)
def test_what_is_no_place_or_no_stage_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
