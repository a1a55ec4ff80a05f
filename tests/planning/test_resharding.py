"""Volumes of resharding, held against numbered shards that are handed from device to device and counted."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis.strategies import sampled_from

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.resharding import (
    Sharding as Layout,
)
from async_rlhf.experiments.planning.model.resharding import (
    Transition,
    gather_from_zero,
    gather_micro_data_parallel,
    gather_model_parallel,
)

SIZES = (1, 2, 3, 4, 6)
Device = tuple[int, int, int]  # replica, stage of the pipeline, place in its tensor group
Held = dict[Device, set[int]]


def devices(layout: Layout) -> list[Device]:
    return list(product(range(layout.data), range(layout.pipeline), range(layout.tensor)))


def all_gather(held: Held, groups: list[list[Device]]) -> dict[Device, int]:
    """A ring in each group: in every round a device hands on what it received in the one before. Gives what each received."""
    received = dict.fromkeys(held, 0)
    for group in groups:
        parcels = {device: set(held[device]) for device in group}
        for _ in range(len(group) - 1):
            parcels = {device: parcels[group[place - 1]] for place, device in enumerate(group)}
            for device, parcel in parcels.items():
                assert not parcel & held[device], "a ring brings nothing twice"
                held[device] |= parcel
                received[device] += len(parcel)
    return received


def seen(before: Held, held: Held, received: dict[Device, int], shards: int, *, in_place: bool) -> Transition:
    """What a device saw; all must have seen the same. in_place: the shard of training is part of that of generation."""
    found = {
        Transition(
            received=Fraction(received[device], shards),
            peak=Fraction(len(held[device]), shards),
            redundant=Fraction(len(before[device] - held[device]) if in_place else len(before[device]), shards),
        )
        for device in held
    }
    assert len(found) == 1
    return found.pop()


def grouped(layout: Layout, key: Callable[[Device], object]) -> list[list[Device]]:
    groups: dict[object, list[Device]] = {}
    for device in devices(layout):
        groups.setdefault(key(device), []).append(device)
    return list(groups.values())


LAYOUTS = [Layout(tensor=t, pipeline=p, data=d) for t, p, d in product(SIZES, (1, 2, 4), (1, 2, 3))]
PAIRS = [
    (layout, Layout(tensor=t_g, pipeline=p_g))
    for layout in LAYOUTS
    for t_g, p_g in product(SIZES, (1, 2, 4))
    if layout.tensor % t_g == 0 and layout.pipeline % p_g == 0
]


@given(layout=sampled_from(LAYOUTS))
def test_gathering_from_zero_moves_what_was_counted(layout: Layout) -> None:
    held = {device: {number} for number, device in enumerate(devices(layout))}
    before = {device: set(shards) for device, shards in held.items()}
    received = all_gather(held, [devices(layout)])
    assert gather_from_zero(layout) == seen(before, held, received, len(held), in_place=False)


@given(layout=sampled_from(LAYOUTS))
def test_gathering_the_model_parallel_group_moves_what_was_counted(layout: Layout) -> None:
    held = {device: {device[1] * layout.tensor + device[2]} for device in devices(layout)}
    before = {device: set(shards) for device, shards in held.items()}
    received = all_gather(held, grouped(layout, lambda device: device[0]))
    assert gather_model_parallel(layout) == seen(before, held, received, layout.tensor * layout.pipeline, in_place=False)


@given(pair=sampled_from(PAIRS))
def test_gathering_micro_data_parallel_groups_moves_what_was_counted_and_leaves_whole_models(
    pair: tuple[Layout, Layout],
) -> None:
    layout, generation = pair
    rows, columns = layout.pipeline // generation.pipeline, layout.tensor // generation.tensor
    held = {device: {device[1] * layout.tensor + device[2]} for device in devices(layout)}
    before = {device: set(shards) for device, shards in held.items()}
    received = all_gather(held, grouped(layout, lambda device: (device[0], device[1] // rows, device[2] // columns)))
    moved = seen(before, held, received, layout.tensor * layout.pipeline, in_place=True)
    assert gather_micro_data_parallel(layout, generation) == moved
    # At the stride there is one device of each micro data-parallel group: together they hold each shard once.
    for group in grouped(layout, lambda device: (device[0], device[1] % rows, device[2] % columns)):
        assert len(group) == generation.tensor * generation.pipeline
        assert sorted(shard for device in group for shard in held[device]) == list(range(layout.tensor * layout.pipeline))


@given(pair=sampled_from(PAIRS))
def test_no_way_moves_or_holds_less_than_that_of_the_stride(pair: tuple[Layout, Layout]) -> None:
    layout, generation = pair
    strided = gather_micro_data_parallel(layout, generation)
    for other in (gather_model_parallel(layout), gather_from_zero(layout)):
        assert strided.received <= other.received and strided.peak <= other.peak and strided.redundant < other.redundant


def test_seventy_billion_parameters_on_a_node() -> None:
    training, generation = Layout(tensor=8), Layout(tensor=2)
    assert gather_micro_data_parallel(training, generation).received == Fraction(3, 8)
    assert gather_model_parallel(training).received == Fraction(7, 8)


def test_layouts_that_do_not_divide_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="generation with tensor = 3 must divide training's 8; nearest: 2"):
        gather_micro_data_parallel(Layout(tensor=8), Layout(tensor=3))
    with pytest.raises(ConfigError, match="generation with pipeline = 4 must divide training's 2; nearest: 2"):
        gather_micro_data_parallel(Layout(8, 2), Layout(8, 4))
