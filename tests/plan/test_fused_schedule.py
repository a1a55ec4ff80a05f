"""Fused schedules: published instances, all orders of tiny ones, and laws that every order keeps."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.plan.flexfusion import PUBLISHED, Published, searched
from async_rlhf.plan.fused_schedule import (
    Fusion,
    Orders,
    Pipeline,
    Preference,
    end_times,
    greedy,
    makespan_s,
    one_f_one_b,
    peak_bytes,
)
from async_rlhf.plan.schedule_search import search
from async_rlhf.plan.task_graph import TaskGraph


def fusion_of(depths: tuple[int, int], micro_batches: tuple[int, int], forwards: tuple[float, float]) -> Fusion:
    first, second = (
        Pipeline(depth=depth, micro_batches=count, forward_s=forward, activation_bytes=1.0)
        for depth, count, forward in zip(depths, micro_batches, forwards, strict=True)
    )
    return Fusion(first, second)


fusions = st.builds(
    fusion_of,
    st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (2, 4), (3, 3)]),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
extras = st.none() | st.integers(0, 2)
preferences = st.builds(
    Preference,
    ratio=st.floats(0.5, 2),
    out=st.floats(0, 2),
    back=st.floats(0, 3),
    wait=st.floats(0, 1),
    extra=st.tuples(extras, extras),
)


@pytest.mark.parametrize("published", PUBLISHED)
def test_serial_time_and_bound_are_the_published_ones(published: Published) -> None:
    assert published.fusion.serial_s == published.serial_s
    assert published.fusion.bound_s == published.bound_s


@pytest.mark.parametrize("number", [1, 2])
def test_the_search_ends_at_the_published_makespan(number: int) -> None:
    published = PUBLISHED[number]
    found = search(published.fusion, memory_steps=0)
    assert makespan_s(published.fusion, found.orders) == found.makespan_s == published.annealed_s


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("model", [0, 1])
def test_one_pipeline_alone_takes_its_1f1b_time_and_holds_a_micro_batch_for_each_stage(number: int, model: int) -> None:
    both = PUBLISHED[number].fusion.models
    idle = [Pipeline(depth=each.depth, micro_batches=0, forward_s=each.forward_s) for each in both]
    alone = Fusion(both[0], idle[1]) if model == 0 else Fusion(idle[0], both[1])
    orders = one_f_one_b(alone, model)
    assert makespan_s(alone, orders) == both[model].alone_s == alone.serial_s
    assert peak_bytes(alone, orders) == pytest.approx(
        min(both[model].depth, both[model].micro_batches) * both[model].activation_bytes
    )


def all_orders(fusion: Fusion) -> list[Orders]:
    """Every choice of a row for each stage in which no backward task comes before its forward one."""
    tasks = [kind for kind in range(4) for _ in range(fusion.models[kind // 2].micro_batches)]
    rows = [
        row
        for row in sorted(set(permutations(tasks)))
        if all(row[: n + 1].count(kind) >= row[: n + 1].count(kind + 1) for n in range(len(row)) for kind in (0, 2))
    ]
    return list(product(rows, repeat=fusion.stages))


@pytest.mark.parametrize(
    ("depths", "micro_batches", "forwards"),
    [((2, 2), (2, 1), (1, 1)), ((2, 2), (1, 2), (3, 2)), ((2, 1), (1, 2), (2, 1)), ((1, 2), (2, 1), (1, 3))],
)
def test_no_order_of_a_tiny_instance_takes_less_than_what_the_search_finds(
    depths: tuple[int, int], micro_batches: tuple[int, int], forwards: tuple[int, int]
) -> None:
    fusion = fusion_of(depths, micro_batches, forwards)
    takes = []
    for orders in all_orders(fusion):
        try:
            takes.append(makespan_s(fusion, orders))
        except ConfigError as error:
            assert "in a circle" in str(error)
    assert search(fusion, starts=20, steps=400, memory_steps=100).makespan_s == min(takes)


@settings(deadline=None, max_examples=60)
@given(fusions, preferences)
def test_an_order_is_never_below_the_bound_and_each_task_follows_those_it_needs(fusion: Fusion, preference: Preference) -> None:
    orders = greedy(fusion, preference)
    ends = end_times(fusion, orders)
    assert fusion.bound_s <= makespan_s(fusion, orders) + 1e-9
    for stage, order in enumerate(orders):
        done = [0, 0, 0, 0]
        free = 0.0
        for kind in order:
            begins = ends[stage][kind][done[kind]] - fusion.duration_s(kind)
            source = fusion.source(kind, stage)
            assert begins >= free and (source is None or begins >= ends[source[0]][source[1]][done[kind]])
            free = ends[stage][kind][done[kind]]
            done[kind] += 1
        assert done == [fusion.models[kind // 2].micro_batches for kind in range(4)]


@settings(deadline=None, max_examples=60)
@given(fusions, st.data())
def test_times_after_an_exchange_are_those_of_the_new_orders_and_taking_it_back_restores_the_old(
    fusion: Fusion, data: st.DataObject
) -> None:
    graph = TaskGraph(fusion, greedy(fusion))
    places = [(stage, place) for stage, row in enumerate(graph.order) for place in range(len(row) - 1)]
    for stage, place in data.draw(st.lists(st.sampled_from(places), max_size=12)) if places else []:
        before = graph.orders(), list(graph.start)
        undo = graph.exchange(stage, place)
        if undo is None:
            assert (graph.orders(), graph.start) == before
            continue
        assert graph.makespan == makespan_s(fusion, graph.orders())
        if data.draw(st.booleans()):
            graph.take_back(stage, place, undo)
            assert (graph.orders(), graph.start) == before


def test_the_second_pass_lowers_the_peak_and_keeps_the_makespan() -> None:
    fusion = PUBLISHED[1].fusion
    first, second = (search(fusion, starts=10, memory_steps=steps) for steps in (0, 2_000))
    assert second.makespan_s == first.makespan_s and second.peak_bytes < first.peak_bytes
    assert second.peak_bytes == peak_bytes(fusion, second.orders)


def test_equal_seeds_give_equal_orders() -> None:
    fusion = PUBLISHED[2].fusion
    assert search(fusion, seed=3, starts=4, steps=200, memory_steps=200) == search(
        fusion, seed=3, starts=4, steps=200, memory_steps=200
    )


def test_searched_uses_the_numbered_instance() -> None:
    assert searched(5).makespan_s == PUBLISHED[5].bound_s


def test_what_is_no_fusion_or_no_order_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"8 and 3 stages .* nearest: 2 and 8"):
        fusion_of((8, 3), (1, 1), (1, 1))
    with pytest.raises(ConfigError, match="is no pipeline"):
        Pipeline(depth=0, micro_batches=1, forward_s=1)
    with pytest.raises(ConfigError, match=r"wait = 2: .* 0 to 1"):
        Preference(wait=2)
    with pytest.raises(ConfigError, match="stands still"):
        Preference(extra=(-1, 0))
    fusion = fusion_of((2, 2), (1, 0), (1, 1))
    with pytest.raises(ConfigError, match=r"stages \[0, 1\] wait for each other in a circle"):
        makespan_s(fusion, ((1, 0), (1, 0)))
    with pytest.raises(ConfigError, match="stage 1 has 2 tasks of kind 0, 1 belong"):
        makespan_s(fusion, ((0, 1), (0, 0, 1)))
    with pytest.raises(ConfigError, match="1 orders are given, the fusion has 2 stages"):
        makespan_s(fusion, ((0, 1),))
