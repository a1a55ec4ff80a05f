"""Times of stages and of a step: sums by hand, a plain recurrence over many steps, and the laws that both keep."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.experiments.planning import validation
from async_rlhf.experiments.planning.model.model_costs import ModelCosts, read
from async_rlhf.experiments.planning.model.stages import (
    Device,
    DeviceLink,
    Efficiency,
    Layout,
    Place,
    catalogue,
    decode_step_s,
    generation_ends_s,
    inference_s,
    prefill_s,
    training_s,
    weights_read_bytes,
)
from async_rlhf.experiments.planning.placement.step import AROUND, Seconds, StepTime, step_time
from async_rlhf.experiments.planning.validation.__main__ import Figure, figures, table
from tests.planning.specs import LLAMA_1B

DENSE = read(LLAMA_1B)
EXPERTS = read({**LLAMA_1B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
# Round figures: 100 FLOPs a byte, links of 1 GB/s without latency.
ROUND = Device(
    peak_flops=1e14, memory_bytes=1e11, memory_bytes_per_s=1e12, link_bytes_per_s=1e9, link_latency_s=0.0,
    network_bytes_per_s=1e8, network_latency_s=1e-3, host_bytes_per_s=1e9,
)  # fmt: skip
FAST_LINKS = ROUND.model_copy(update={"link_bytes_per_s": 1e30, "network_bytes_per_s": 1e30, "network_latency_s": 0.0})
OPTIMIZER_S = 32 * DENSE.parameters / 1e12


def place(
    model: ModelCosts = DENSE, device: Device = ROUND, *, spread: bool = False, launch_s: float = 0.0, **sizes: Any
) -> Place:
    efficiency = Efficiency(launch_s=launch_s)
    return Place(model=model, device=device, layout=Layout(**sizes), spread=spread, efficiency=efficiency)


def trained_s(place: Place, rows: int, tokens: int) -> float:
    return training_s(place, rows, tokens, micro_batches=1)


STAGES = (prefill_s, inference_s, trained_s, decode_step_s)
shares = st.floats(0.05, 1)
places = st.builds(
    Place,
    model=st.sampled_from([DENSE, EXPERTS]),
    device=st.sampled_from(list(catalogue().values())),
    layout=st.builds(
        Layout,
        tensor=st.sampled_from([1, 2, 4, 8]),
        pipeline=st.sampled_from([1, 2, 4]),
        data=st.sampled_from([1, 2, 3, 8]),
        context=st.sampled_from([1, 1, 2, 4]),
    ),
    spread=st.booleans(),
    efficiency=st.builds(Efficiency, flops=shares, memory=shares, links=shares, launch_s=st.floats(0, 1e-3)),
)
rows = st.integers(1, 512)
tokens = st.integers(1, 4096)


def at_most(less: float, greater: float) -> bool:
    return less <= greater * (1 + 1e-12)


@given(places, rows, tokens, st.integers(1, 512), st.sampled_from(["flops", "memory", "links"]), st.floats(0.1, 0.9))
def test_more_rows_longer_ones_and_less_efficiency_never_take_less(
    place: Place, rows: int, tokens: int, more: int, name: str, factor: float
) -> None:
    reached = Efficiency(**{**vars(place.efficiency), name: getattr(place.efficiency, name) * factor})
    slower = Place(**{**vars(place), "efficiency": reached})
    for stage in STAGES:
        assert stage(place, rows, tokens) > 0
        assert at_most(stage(place, rows, tokens), stage(place, rows + more, tokens))
        assert at_most(stage(place, rows, tokens), stage(place, rows, tokens + more))
        assert at_most(stage(place, rows, tokens), stage(slower, rows, tokens))


@pytest.mark.parametrize("device", catalogue().values(), ids=catalogue())
def test_few_rows_wait_for_the_weights_and_many_for_their_arithmetic(device: Device) -> None:
    at, ratio = place(device=device), device.peak_flops / device.memory_bytes_per_s
    below, above = math.floor(0.99 * ratio), math.ceil(2 * ratio)
    read_s = weights_read_bytes(DENSE, 1) / at.memory_bytes_per_s
    assert decode_step_s(at, 1, 0) == decode_step_s(at, below, 0) == read_s
    assert decode_step_s(at, above, 0) == pytest.approx(above * DENSE.forward_flops(0) / at.flops)


def test_a_step_of_one_row_reads_the_experts_it_meets_and_many_rows_read_all() -> None:
    embedding = EXPERTS.vocabulary * EXPERTS.hidden
    assert weights_read_bytes(EXPERTS, 1) == pytest.approx(2 * (EXPERTS.active_parameters - embedding))
    assert weights_read_bytes(EXPERTS, 1) < weights_read_bytes(EXPERTS, 2) < weights_read_bytes(EXPERTS, math.inf)
    assert weights_read_bytes(EXPERTS, math.inf) == 2 * (EXPERTS.parameters - embedding)
    assert weights_read_bytes(DENSE, 1) == weights_read_bytes(DENSE, math.inf)


def test_collectives_a_decode_step_and_a_prompt_by_hand() -> None:
    link = DeviceLink(latency_s=1.0, bytes_per_s=8.0)
    assert (link.gather_s(64, 4), link.reduce_s(64, 4)) == (3 * (1 + 16 / 8), 2 * 3 * 1 + 2 * 3 / 4 * 64 / 8)
    assert link.reduce_s(64, 1) == 0 and link.send_s(64) == 1 + 8
    pair = place(tensor=2, launch_s=1e-4)
    read = weights_read_bytes(DENSE, 8) + 8 * 1000 * DENSE.kv_bytes_per_token
    all_reduces = 2 * 16 * (2 * 8 * 2048 * 2 / 2 / 1e9)
    assert decode_step_s(pair, 8, 1000) == pytest.approx(read / 2e12 + all_reduces + 1e-4)
    assert decode_step_s(pair, 0, 1000) == 0
    head = 3 * 2 * DENSE.vocabulary * DENSE.hidden / 1e14  # of the last token of each
    assert prefill_s(place(), 3, 50) == pytest.approx(inference_s(place(), 3, 50, head=False) + head)
    assert prefill_s(place(), 3, 0) == 0


def test_training_by_hand() -> None:
    forward = 4 * DENSE.sequence_flops(100) / 1e14
    assert inference_s(place(), 4, 100) == pytest.approx(forward)
    assert trained_s(place(), 4, 100) == pytest.approx(3 * forward + OPTIMIZER_S)
    assert trained_s(place(recompute=True), 4, 100) == pytest.approx(4 * forward + OPTIMIZER_S)
    half = 1e-3 + DENSE.weight_bytes / 2 / 1e8
    exchanged = {0: (2 * half, 1), 1: (2 * half, 2), 2: (2 * half, 2), 3: (3 * 4 * half, 2)}
    for stage, (seconds, devices) in exchanged.items():
        found = training_s(place(spread=True, data=2, zero_stage=stage), 8, 100, micro_batches=4)
        assert found == pytest.approx(3 * forward + seconds + OPTIMIZER_S / devices)
    # 1F1B with p stages and m micro-batches: (m + p - 1) / m of the work of a stage.
    piped = training_s(place(device=FAST_LINKS, pipeline=4), 4, 100, micro_batches=4)
    assert piped == pytest.approx(3 * forward / 4 * 7 / 4 + OPTIMIZER_S / 4)


def test_groups_that_share_the_positions_of_long_rows_divide_the_work_and_hide_their_ring_behind_attention() -> None:
    h100 = catalogue()["H100"]
    links = h100.model_copy(update={"link_latency_s": 0.0, "link_bytes_per_s": 1e15})
    one, four = (place(device=links, context=context) for context in (1, 4))
    assert four.layout.devices == 4 and inference_s(four, 1, 32768) == pytest.approx(inference_s(one, 1, 32768) / 4)
    slow = place(device=h100.model_copy(update={"link_bytes_per_s": 25e9}), context=4)
    long, short = (inference_s(slow, 1, tokens) / inference_s(one, 1, tokens) for tokens in (131072, 1024))
    # Attention grows with the square of a row, what the ring carries with the row.
    assert long == pytest.approx(1 / 4, rel=0.02) and short > 1 / 2


# -- continuous batching ---------------------------------------------------------------------------------------------

lists = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def step_s(alive: int, context: float) -> float:
    """Whole numbers, so that sums are exact: weights, then the cache."""
    return 100 + alive * context


@given(lists, st.integers(1, 12))
def test_stretches_of_steps_with_the_same_rows_take_what_the_steps_take_one_by_one(lengths: list[int], slots: int) -> None:
    waiting, produced, found, now = deque(range(len(lengths))), dict[int, int](), [0.0] * len(lengths), 0.0
    while waiting or produced:
        begun = min(slots - len(produced), len(waiting))
        now += 7 * begun
        produced.update({waiting.popleft(): 0 for _ in range(begun)})
        now += step_s(len(produced), 5 + 1 + sum(produced.values()) / len(produced))
        for row in list(produced):
            produced[row] += 1
            if produced[row] == lengths[row]:
                del produced[row]
                found[row] = now
    ends = generation_ends_s(lengths, prompt_tokens=5, slots=slots, step_s=step_s, prefill_s=lambda rows: 7 * rows)
    assert ends == pytest.approx(found)


# -- a step ----------------------------------------------------------------------------------------------------------

seconds = st.integers(0, 50).map(float)
stages = ("generate", "score", "train", "publish", "adopt")
times_of_stages = st.fixed_dictionaries(dict.fromkeys(stages, seconds))
# Lanes whose stages follow each other in a batch: a batch keeps its lane from the first to the last of them.
LANES = (("generate",), ("score",), ("train", "publish"), ("adopt",))


def stepped(times: Seconds, bound: int, longer: Seconds | None = None) -> StepTime:
    """longer: by how much stages span more than they keep their lane busy."""
    around = {stage: times[stage] + (longer or {}).get(stage, 0.0) for stage in stages}
    return step_time(bound, around, {" + ".join(lane): {stage: times[stage] for stage in lane} for lane in LANES})


@given(times_of_stages, st.integers(0, 5))
def test_batches_one_by_one_take_what_the_largest_circuit_says(times: dict[str, float], staleness: int) -> None:
    """A stage begins when its batch, its lane and, for generation, the weights are ready."""
    lane_of = {stage: number for number, lane in enumerate(LANES) for stage in lane}
    free, adopted, rounds = [0.0] * len(LANES), list[float](), 40 * (staleness + 1)
    for batch in range(2 * rounds):
        behind = batch - 1 - staleness
        now = adopted[behind] if behind >= 0 else 0.0
        for stage in stages:
            now = max(now, free[lane_of[stage]]) + times[stage]
            free[lane_of[stage]] = now
        adopted.append(now)
    # The recurrence is periodic with N + 1 batches once it has settled.
    assert (adopted[-1] - adopted[rounds - 1]) / rounds == pytest.approx(stepped(times, staleness).seconds, abs=1e-9)


@given(times_of_stages, seconds, st.integers(0, 8))
def test_more_staleness_is_never_slower_ends_at_the_slowest_lane_and_what_bounds_a_step_is_never_idle(
    times: dict[str, float], longer: float, staleness: int
) -> None:
    found = [stepped(times, bound, {"generate": longer}) for bound in (staleness, staleness + 1, 1000)]
    assert [each.seconds for each in found] == sorted((each.seconds for each in found), reverse=True)
    slowest = max(circuit.step_s for circuit in found[-1].circuits if circuit.name != AROUND)
    assert slowest <= found[-1].seconds <= slowest + 0.3  # once around takes 300 s at most, over 1001
    for each in found:
        assert len(each.idle_shares) == len(LANES) and all(0 <= share <= 1 for share in each.idle_shares.values())
        assert each.bound_by.name == AROUND or each.idle_shares[each.bound_by.name] == 0


# -- other systems ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", figures(), ids=lambda figure: figure.name)
def test_stages_give_the_figures_of_other_systems_as_in_the_tables(figure: Figure) -> None:
    assert figure.now == pytest.approx(figure.predicted, rel=1e-4)
    row, results = figure.name.partition(":")[0], (Path(validation.__file__).parent / "README.md").read_text()
    assert [line for line in results.splitlines() if line.startswith(f"| {row} |") and f"{figure.predicted:.3g}" in line]
    assert f"| {figure.name} | {figure.published:.3g} | {figure.predicted:.3g} | {figure.now:.3g} |" in table()
