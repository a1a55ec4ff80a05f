"""The catalogue of devices: `devices.toml` has the values and where each comes from."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from async_rlhf.buffers.errors import ConfigError, did_you_mean


class Device(BaseModel):
    """One accelerator and its links, each in one direction. Peaks: which share of them is reached is given beside it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    peak_flops: float = Field(gt=0, description="dense bfloat16 FLOP/s")
    memory_bytes: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    link_bytes_per_s: float = Field(gt=0, description="to the other devices of the node")
    link_latency_s: float = Field(ge=0)
    network_bytes_per_s: float = Field(gt=0, description="of the device's share of its node's ports")
    network_latency_s: float = Field(ge=0)
    host_bytes_per_s: float = Field(gt=0, description="to the memory of the host")
    is_cpu: bool = Field(default=False, description="a processor's socket, not an accelerator")


@cache
def catalogue() -> dict[str, Device]:
    """Name to device, as packed with the code."""
    return parse((resources.files(__package__) / "devices.toml").read_text())


def parse(text: str) -> dict[str, Device]:
    """A catalogue in TOML, one table a device. Raises ConfigError with the device and its keys that are missing or wrong."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the catalogue of devices is no TOML: {error}") from None
    found = {}
    for name, table in tables.items():
        try:
            found[name] = Device.model_validate(table)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ConfigError(f"device {name!r} of the catalogue: {wrong}") from None
    return found


def device(name: str) -> Device:
    """Raises ConfigError for a name that the catalogue lacks, with the nearest one."""
    known = catalogue()
    if name not in known:
        raise ConfigError(f"device {name!r} is not in the catalogue; {did_you_mean(name, known)}")
    return known[name]
