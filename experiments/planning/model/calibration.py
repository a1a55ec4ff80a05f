"""The file that `async-rlhf try machine` writes: what this machine reaches, and what the stages of one model cost on it.

`device` serves the rooflines of `stages` for any model, `costs` the simulation of a run of the measured one. `fits` give how
far the constants are from the measured points.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.formats import Format
from async_rlhf.experiments.planning.model.costs import Costs, Fit
from async_rlhf.experiments.planning.model.devices import Device

FORMAT = Format("a calibration", 1)


class Calibration(BaseModel):
    """model: its name; engine_device, dtype, threads: with which it was measured. seconds: that measuring took."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT.newest
    measured: str
    machine: str
    model: str
    engine_device: str
    dtype: str
    threads: int
    seconds: float
    device: Device
    costs: Costs
    fits: Mapping[str, Fit]


def save(calibration: Calibration, path: Path) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        path.write_text(calibration.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"the calibration cannot be written: {error}") from error


def load(path: Path) -> Calibration:
    """Raises ConfigError for a file that is none, with the keys that are missing or wrong; FormatError for one of another
    format."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"calibration {str(path)!r} does not exist; async-rlhf try machine --out FILE makes one") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration {str(path)!r} cannot be read: {error}") from error
    if not isinstance(values, dict) or "format" not in values:
        raise ConfigError(f"{str(path)!r} is no calibration: it is JSON without a format; async-rlhf try machine makes one")
    FORMAT.check(values["format"], path)
    try:
        # As JSON, so that its arrays are the tuples they were.
        return Calibration.model_validate_json(json.dumps(values))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"calibration {str(path)!r}: {wrong}") from None
