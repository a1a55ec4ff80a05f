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
    Sharding,
    Transition,
    gather_from_zero,
    gather_micro_data_parallel,
    gather_model_parallel,
)

SIZES = (1, 2, 3, 4, 6)
Device = tuple[int, int, int]  # replica, stage of the pipeline, place in its tensor group
LAYOUTS = [Sharding(*sizes) for sizes in product(SIZES, (1, 2, 4), (1, 2, 3))]
PAIRS = [
    (layout, Sharding(t_g, p_g))
    for layout in LAYOUTS
    for t_g, p_g in product(SIZES, (1, 2, 4))
    if layout.tensor % t_g == 0 and layout.pipeline % p_g == 0
]


def devices(layout: Sharding) -> list[Device]:
    return list(product(range(layout.data), range(layout.pipeline), range(layout.tensor)))


def gathered(
    held: dict[Device, set[int]], shards: int, key: Callable[[Device], object], *, in_place: bool
) -> tuple[Transition, dict[Device, set[int]]]:
    """A ring in each group of devices with one key: in every round a device hands on what it received in the one before.

    Gives what each device saw, the same for all, and what it then holds. in_place: its shard of training is part of that of
    generation.
    """
    now, received = {device: set(own) for device, own in held.items()}, dict.fromkeys(held, 0)
    groups: dict[object, list[Device]] = {}
    for device in held:
        groups.setdefault(key(device), []).append(device)
    for group in groups.values():
        parcels = {device: held[device] for device in group}
        for _ in range(len(group) - 1):
            parcels = {device: parcels[group[place - 1]] for place, device in enumerate(group)}
            for device, parcel in parcels.items():
                assert not parcel & now[device], "a ring brings nothing twice"
                now[device] |= parcel
                received[device] += len(parcel)
    (found,) = {
        Transition(
            Fraction(received[each], shards),
            Fraction(len(now[each]), shards),
            Fraction(len(held[each] - now[each]) if in_place else len(held[each]), shards),
        )
        for each in held
    }
    return found, now


@given(sampled_from(LAYOUTS))
def test_gathering_from_zero_and_from_the_model_parallel_group_moves_what_was_counted(layout: Sharding) -> None:
    zero = {device: {number} for number, device in enumerate(devices(layout))}
    assert gather_from_zero(layout) == gathered(zero, len(zero), lambda device: 0, in_place=False)[0]
    held = {device: {device[1] * layout.tensor + device[2]} for device in zero}
    shards = layout.tensor * layout.pipeline
    assert gather_model_parallel(layout) == gathered(held, shards, lambda device: device[0], in_place=False)[0]


@given(sampled_from(PAIRS))
def test_gathering_micro_data_parallel_groups_moves_what_was_counted_the_least_and_leaves_whole_models(
    pair: tuple[Sharding, Sharding],
) -> None:
    layout, generation = pair
    rows, columns = layout.pipeline // generation.pipeline, layout.tensor // generation.tensor
    held = {device: {device[1] * layout.tensor + device[2]} for device in devices(layout)}
    shards = layout.tensor * layout.pipeline
    moved, now = gathered(held, shards, lambda each: (each[0], each[1] // rows, each[2] // columns), in_place=True)
    assert gather_micro_data_parallel(layout, generation) == moved
    # At the stride there is one device of each micro data-parallel group: together they hold each shard once.
    models: dict[object, list[Device]] = {}
    for device in now:
        models.setdefault((device[0], device[1] % rows, device[2] % columns), []).append(device)
    for group in models.values():
        assert sorted(shard for device in group for shard in now[device]) == list(range(shards))
    for other in (gather_model_parallel(layout), gather_from_zero(layout)):
        assert moved.received <= other.received and moved.peak <= other.peak and moved.redundant < other.redundant


def test_seventy_billion_parameters_on_a_node_and_layouts_that_do_not_divide() -> None:
    assert gather_micro_data_parallel(Sharding(8), Sharding(2)).received == Fraction(3, 8)
    assert gather_model_parallel(Sharding(8)).received == Fraction(7, 8)
    with pytest.raises(ConfigError, match="generation with tensor = 3 must divide training's 8; nearest: 2"):
        gather_micro_data_parallel(Sharding(8), Sharding(3))
    with pytest.raises(ConfigError, match="generation with pipeline = 4 must divide training's 2; nearest: 2"):
        gather_micro_data_parallel(Sharding(8, 2), Sharding(8, 4))
