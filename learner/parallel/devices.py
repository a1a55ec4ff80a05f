"""Which device a rank computes on, and what its process must have set before the first tensor and the first collective."""

from __future__ import annotations

import os

import torch

from async_rlhf.buffers.errors import ConfigError


def take_device(name: str, rank: int = 0) -> torch.device:
    """The device of this rank, from now on the one that libraries mean by "cuda". Raises ConfigError when it cannot be used.

    `cuda` gives every rank its own: by its number among those that its process may see, which may be that one alone.
    """
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", rank % max(1, torch.cuda.device_count()))
        torch.empty(0, device=device)  # its error names what is missing
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape, and lengths of texts vary
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"learner.device = {name!r} cannot be used: {error}; use 'cpu'") from error
    return device


def communication(name: str, interface: str = "lo") -> str:
    """The backend of a process group whose ranks compute on `name`, as `init_process_group` takes it.

    Sets what gloo and nccl read from the environment: this rank listens on this network interface of its machine alone, and one
    whose collective fails or takes too long on the device is ended by nccl (SIGABRT) rather than left with what it has half
    summed.
    """
    # "=" for nccl: exactly this one, and not all whose names begin so
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    os.environ |= {**names, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    return "cpu:gloo,cuda:nccl" if torch.device(name).type == "cuda" else "gloo"
