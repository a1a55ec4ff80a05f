"""The catalogue of devices."""

from __future__ import annotations

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.devices import catalogue, device, parse

LINES = {
    "peak_flops": "1e12",
    "memory_bytes": "8e9",
    "memory_bytes_per_s": "1e11",
    "link_bytes_per_s": "1e10",
    "link_latency_s": "0.0",
    "network_bytes_per_s": "1e9",
    "network_latency_s": "1e-5",
    "host_bytes_per_s": "1e10",
}


def table(**changes: str) -> str:
    return "[small]\n" + "\n".join(f"{key} = {value}" for key, value in {**LINES, **changes}.items())


def test_the_catalogue_has_the_devices_that_runs_are_planned_for() -> None:
    accelerators = {"A100-40GB", "A100-80GB", "A800", "H20", "H100", "H200", "H800", "B200", "MI300X", "L40S"}
    assert set(catalogue()) == accelerators | {"CPU"}


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_links_grow_slower_the_further_they_reach_and_a_row_alone_is_bound_by_memory(name: str) -> None:
    found = device(name)
    assert found.memory_bytes_per_s > found.link_bytes_per_s >= found.network_bytes_per_s
    # FLOPs for each byte read: between thirty and a thousand on all of them, so that no value is off by a power of a thousand.
    assert 30 < found.peak_flops / found.memory_bytes_per_s < 1000
    assert found.link_latency_s <= found.network_latency_s < 1e-3


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="device 'H1000' is not in the catalogue; did you mean 'H100'"):
        device("H1000")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (table(peak_flops="-1.0"), "'small' of the catalogue: peak_flops: Input should be greater than 0"),
        (table(memory_bytes="inf"), "memory_bytes: Input should be a finite number"),
        (table(memory_bytes='"8e9"'), "memory_bytes: Input should be a valid number"),
        (table(colour="1.0"), "colour: Extra inputs are not permitted"),
        ("[small]\npeak_flops = 1e12", "memory_bytes: Field required; memory_bytes_per_s: Field required"),
        ("small = 3", "'small' of the catalogue: "),
        ("[small", "is no TOML"),
    ],
)
def test_a_catalogue_that_is_wrong_is_refused_by_device_and_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)
