"""Whether a torch device is there, without taking memory on it."""

from __future__ import annotations

import torch

from async_rlhf.buffers.errors import ConfigError


def check_device(setting: str, name: str) -> None:
    """Raises ConfigError naming the setting."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{setting} = {name!r} is no torch device; use 'cuda', 'cuda:N' or 'cpu'") from error
    if device.type == "cpu":
        return
    there = getattr(getattr(torch, device.type, None), "device_count", lambda: 0)()
    if not there:
        raise ConfigError(
            f"{setting} = {name!r}: torch {torch.__version__} sees no {device.type} device on this machine; use 'cpu', or "
            "install a torch that is built for it"
        )
    needed = 1 if device.index is None else device.index + 1
    if there < needed:
        raise ConfigError(f"{setting} = {name!r} needs {needed} {device.type} devices, this machine has {there}")
