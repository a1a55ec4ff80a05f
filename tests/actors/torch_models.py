"""Models that tests of the built-in engine may change, and what all of them do with an engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Completion, Engine, Request, RolloutKey
from async_rlhf.buffers.routing import routers
from async_rlhf.experiments.doctor import families


def own_model(kind: str, seed: int, **settings: Any) -> PreTrainedModel:
    """Of a family, in float32, with weights so large that a wrong mask, position or row shows; others for each seed."""
    torch.set_num_threads(1)
    made, drawn = copy.deepcopy(families.model(kind, **settings)), torch.Generator().manual_seed(seed)
    for weights in made.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.15, generator=drawn)
    return made


def finished(engine: Engine, asked: Sequence[Request] = (), before: Sequence[Completion] = ()) -> dict[RolloutKey, Completion]:
    """What all that is submitted becomes, each once. before: what had ended already."""
    engine.submit(asked)
    done = {completion.key: completion for completion in before}
    while engine.num_unfinished:
        for completion in engine.step():
            assert completion.key not in done, "returned twice"
            done[completion.key] = completion
    return done


@torch.no_grad()
def chosen_experts(model: PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    """[T, layers, k], ascending, of one plain pass."""
    found: list[torch.Tensor] = []
    hooks = [each.register_forward_hook(lambda _, inputs, outputs: found.append(outputs[2])) for each in routers(model)]
    model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1)[0].numpy()
