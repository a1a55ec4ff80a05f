"""The optimizer on plain parameters: AdamW, its learning rate over steps, its state as named tensors.

Axis-free and stateless but for torch's own optimizer; nothing waits here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from async_rlhf.learner.config import LearnerConfig

# Where torch has AdamW as one kernel for a whole list of parameters.
_FUSED = ("cpu", "cuda", "mps", "xpu")


def learning_rate(config: LearnerConfig, step: int, peak: float | None = None) -> float:
    """The learning rate of step `step` (from 0): linear rise over the warm-up, then constant, linear or cosine fall.

    The cosine is that of SGDR without restarts (Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5). `peak` is another
    highest rate on the same curve, as the critic's.
    """
    scale = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    peak = config.learning_rate if peak is None else peak
    if config.schedule == "constant" or config.schedule_steps is None or scale < 1.0:
        return peak * scale
    whole = max(1, config.schedule_steps - config.warmup_steps)
    done = min(1.0, max(0, step - config.warmup_steps) / whole)
    left = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    final = config.final_learning_rate * peak / config.learning_rate
    return final + (peak - final) * left


def parameter_groups(policy: Mapping[str, nn.Parameter], critic: Mapping[str, nn.Parameter]) -> list[dict[str, object]]:
    """Those that learn, the critic's apart: it has a learning rate of its own. Each group says whose it is."""
    named = {"policy": policy, "critic": critic}
    wanted = {name: [p for p in parameters.values() if p.requires_grad] for name, parameters in named.items()}
    return [{"params": parameters, "name": name} for name, parameters in wanted.items() if parameters]


def make_adamw(groups: list[dict[str, object]], config: LearnerConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW, fused where there is such a kernel."""
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=config.adam_betas,
        weight_decay=config.weight_decay,
        fused=device.type in _FUSED,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, config: LearnerConfig, step: int) -> None:
    for group in optimizer.param_groups:
        peak = config.critic.learning_rate if group.get("name") == "critic" else config.learning_rate
        group["lr"] = learning_rate(config, step, peak)


def optimizer_state(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """State tensors as `parameter.key` (`exp_avg`, `exp_avg_sq`, `step`), views of live memory."""
    return {f"{name}.{key}": value for name, p in named for key, value in optimizer.state.get(p, {}).items()}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]], state: Mapping[str, Tensor]
) -> None:
    """Puts back what `optimizer_state` gave; parameters without any begin anew."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        name, _, kind = key.rpartition(".")
        by_name.setdefault(name, {})[kind] = value
    for name, p in named:
        optimizer.state[p] = {kind: value.to(p.device) for kind, value in by_name.get(name, {}).items()}
