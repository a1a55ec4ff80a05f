"""Holds an engine that reads images to plain passes: what it samples behind two made-up images."""

from __future__ import annotations

from collections.abc import Callable

import torch

from async_rlhf.actors.engine import Completion, Engine, Request, RolloutKey, check_room, completed
from async_rlhf.buffers.attention import max_length
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.buffers.images.tower import ImageTower
from async_rlhf.buffers.sampling import Sampling

_NUM_NEW = 8


def check_behind_images(engine: Engine, tower: ImageTower, limit: float, refused: Callable[[str], ConfigError]) -> None:
    """Two completions of a prompt with images. tower: of the model that the engine serves. limit: largest mean difference of
    log-probabilities, in nats. Raises `refused` with the reason, ConfigError where there is no room to try."""
    requests = behind_images(tower)
    ids = requests[0].prompt_ids
    room = max_length(tower.model.config.get_text_config().to_dict()) or len(ids) + _NUM_NEW
    if len(ids) + _NUM_NEW > room:
        raise ConfigError(f"two small images take {len(ids)} tokens of this model, which holds {room}; choose another")
    check_room(engine, len(ids), _NUM_NEW)
    try:
        together = completed(engine, requests)
        found = torch.cat([_differences(tower, request, together[request.key]) for request in requests])
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, AsyncRLHFError) as error:
        raise refused(f"a prompt with images ends with {type(error).__name__}: {error}") from error
    if not (difference := float(found.mean().nan_to_num(torch.inf))) <= limit:
        raise refused(f"behind images log-probabilities differ from plain passes by {difference:.3g} nats on average")


def behind_images(tower: ImageTower) -> list[Request]:
    """Two of the prompt with made-up images."""
    ids, images = tower.processor.sample
    keys = (RolloutKey(1, 0, member) for member in range(2))
    return [Request(key, tuple(ids), _NUM_NEW, Sampling(), seed=key.member, images=images) for key in keys]


@torch.inference_mode()
def _differences(tower: ImageTower, request: Request, completion: Completion) -> torch.Tensor:
    sampled = completion.token_ids.tolist()
    if tower.place_id in sampled:  # which a plain pass would take for a place
        sampled = sampled[: sampled.index(tower.place_id)]
    prompt = len(request.prompt_ids)
    ids = torch.tensor([*request.prompt_ids, *sampled])
    table = torch.log_softmax(tower.plain(ids[:-1].tolist(), prompt, request.images)[prompt - 1 :].float(), dim=-1).cpu()
    plain = table.gather(-1, ids[prompt:, None])[:, 0]
    return (plain - torch.from_numpy(completion.logprobs[: len(sampled)])).abs()
