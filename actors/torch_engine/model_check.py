"""Holds an engine to its model: what it samples against plain passes, one text at a time; and to itself, where it promises
the same bits in any batch. Of an engine that keeps a part of its cache the pass has a mask: each token sees what is kept then.

Run once, before anything is generated, with the weights that the engine starts from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import xxhash
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Bits, Completion, Request, RolloutKey, check_room, completed
from async_rlhf.actors.served_model.reading import behind_images, check_behind_images
from async_rlhf.actors.torch_engine.chunks import additive, attention_of
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.kv_policy import KVPolicy
from async_rlhf.buffers.attention import Attention, Reach, attention, max_length, probe_length
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.sampling import Sampling

# Mean difference of log-probabilities, in nats: rounding makes a hundredth of it, a wrong mask or state some times as much.
MAX_DIFFERENCE = {torch.float32: 5e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
_NUM_NEW = 8


def check_engine(engine: TorchEngine, model: PreTrainedModel) -> Bits:
    """Whether an engine that is to be batch invariant is so on this processor; of another an empty answer.

    Raises ConfigError when the log-probabilities of what the engine samples are not those of the model alone, and where it has
    no room to try.
    """
    requests = _requests(model, engine.kv_policy)
    check_room(engine, len(requests[0].prompt_ids), requests[0].max_new_tokens)
    shown = behind_images(engine.tower) if engine.tower and engine.is_batch_invariant else []
    try:
        together = completed(engine, [*requests, *shown])
        difference = _difference(model, requests, together, engine.kv_policy)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise _refused(model, f"a pass over cached keys and values ends with {type(error).__name__}: {error}") from error
    if not difference <= MAX_DIFFERENCE[model.dtype]:
        raise _refused(
            model,
            f"log-probabilities of sampled tokens differ from plain passes by {difference:.3g} nats on average "
            f"(at most {MAX_DIFFERENCE[model.dtype]:g} in {str(model.dtype).removeprefix('torch.')})",
        )
    return _bits(engine, [*requests, *shown], together) if engine.is_batch_invariant else Bits()


def check_reading(engine: TorchEngine, model: PreTrainedModel) -> None:
    """The same for two completions of a prompt with images, where the engine reads some. Raises ConfigError."""
    if engine.tower is not None:
        check_behind_images(engine, engine.tower, MAX_DIFFERENCE[model.dtype], partial(_refused, model))


def _bits(engine: TorchEngine, requests: Sequence[Request], together: dict[RolloutKey, Completion]) -> Bits:
    digest = xxhash.xxh3_64()
    for request in requests:
        alone, beside = (
            each[request.key].token_ids.tobytes() + each[request.key].logprobs.tobytes()
            for each in (completed(engine, [request]), together)
        )
        if alone != beside:
            return Bits(obstacle="on this processor the bits of a completion depend on what is computed beside it")
        digest.update(alone)
    return Bits(digest.hexdigest())


def _refused(model: PreTrainedModel, what: str) -> ConfigError:
    return ConfigError(
        f"model type {model.config.get_text_config().model_type!r} cannot be served by the torch engine: {what}. "
        "Set engine.kind = 'vllm'"
    )


@torch.inference_mode()
def _difference(
    model: PreTrainedModel, requests: Sequence[Request], ended: dict[RolloutKey, Completion], policy: KVPolicy | None
) -> float:
    differences = []
    for request in requests:
        completion = ended[request.key]
        ids = torch.tensor([*request.prompt_ids, *completion.token_ids.tolist()], device=model.device)
        mask = None if policy is None else _mask(model, policy, ids[:-1])
        whole = model(input_ids=ids[None, :-1], attention_mask=mask, use_cache=False).logits[0]
        logits = whole[len(request.prompt_ids) - 1 :].float()
        plain = torch.log_softmax(logits, dim=-1).gather(-1, ids[len(request.prompt_ids) :, None])[:, 0]
        differences.append((plain.cpu() - torch.from_numpy(completion.logprobs)).abs())
    return float(torch.cat(differences).mean().nan_to_num(torch.inf))


def _mask(model: PreTrainedModel, policy: KVPolicy, ids: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
    seen = torch.from_numpy(policy.mask(ids.cpu().numpy())).to(ids.device)[None, None]
    return attention_of(model.config).masks(lambda _: additive(seen, model.dtype))


def _requests(model: PreTrainedModel, policy: KVPolicy | None) -> list[Request]:
    """Two completions of a prompt longer than any window, where that is affordable, and one of a short prompt between them."""
    config = model.config.get_text_config().to_dict()
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    num_parameters = sum(p.numel() for p in model.parameters())
    reach = attention(config) if policy is None else Attention({"": Reach(window=policy.budget)})
    length = probe_length(num_parameters, vocabulary, reach, max_length(config))
    num_new = min(_NUM_NEW, length - 1)
    rng = np.random.default_rng(0)
    long = tuple(rng.integers(vocabulary, size=length - num_new).tolist())
    prompts = (long, long[: max(1, len(long) // 4)], long)
    return [Request(RolloutKey(0, 0, index), prompt, num_new, Sampling(), seed=index) for index, prompt in enumerate(prompts)]
