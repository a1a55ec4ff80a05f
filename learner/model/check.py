"""Holds a policy to its model when a learner starts: log-probabilities of its micro-batches against plain passes."""

from __future__ import annotations

import logging
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.attention import max_length, probe_length
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.images.tower import ImageTower
from async_rlhf.buffers.record import Group, Rollout, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.batch.packing import Packing, Sharing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.model.logprobs import token_logprobs
from async_rlhf.learner.model.policy import Policy

_log = logging.getLogger(__name__)
# Mean difference of log-probabilities, in nats. Rounding in float32 makes 1e-6 to 1e-5; a wrong mask or state 1e-2 and more.
MAX_DIFFERENCE = 5e-4


@torch.no_grad()
def check_policy(policy: Policy) -> None:
    """Hold a policy to its model when a learner starts, with the weights that it starts from: log-probabilities from
    micro-batches against plain passes, one text at a time. Sets `policy.sharing`: the first way in which siblings share the
    computation of their prompt that gives the plain numbers. Raises ConfigError when none does."""
    groups = [_made_up(policy), *([_with_images(policy, policy.images)] if policy.images else ())]
    plain = [torch.cat([_plain(policy, group, rollout) for rollout in group.rollouts]) for group in groups]
    difference = float("nan")
    for sharing in policy.sharings:
        policy.sharing = sharing
        try:
            difference = max(_difference(policy, group, own) for group, own in zip(groups, plain, strict=True))
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            if policy.compiled and isinstance(error, torch._dynamo.exc.TorchDynamoException):
                reason = " ".join(str(error).strip().partition("\n\n")[0].split())
                raise ConfigError(f"learner.compile = true: this model is not compiled here: {reason}. Use false") from error
            if policy.sharing != "blocks":  # which asks more of a model than that it is right
                _log.warning("a pass over padded rows ended with %s: %s", type(error).__name__, error)
            continue
        if difference <= MAX_DIFFERENCE:
            if policy.sharing == "none" and len(policy.sharings) > 1:
                _log.warning("completions of a prompt do not share its computation: in one row this model mixes them")
            return
    raise ConfigError(
        f"model type {policy.config.get('model_type')!r}: log-probabilities of padded rows differ from plain passes by "
        f"{difference:.3g} nats on average (at most {MAX_DIFFERENCE:g}), as of a model that looks ahead or mixes the texts "
        "of a batch. Use a causal language model"
    )


def check_together(policy: Policy, other: Policy) -> None:
    """Check another that reads the same rows; then both have the same `sharing`. Raises ConfigError as `check_policy`."""
    check_policy(other)
    order = get_args(Sharing)
    while policy.sharing != other.sharing:
        better = min(policy, other, key=lambda each: order.index(each.sharing))
        better.sharings = better.sharings[better.sharings.index(better.sharing) + 1 :]
        check_policy(better)


def _difference(policy: Policy, group: Group, plain: Tensor) -> float:
    """Mean |log-probability - plain| of the tokens of the group; infinite where one of them is NaN."""
    rows = make_rows([group], [[0.0] * len(group.rollouts)])
    batches = make_micro_batches(rows, Packing(1 << 30, policy.sharing))
    logp = torch.cat([policy.exactly(batch.to(policy.device)) for batch in batches])
    # Micro-batches hold the longest rows first, and the group has its completions in that order.
    return float((logp - plain).abs().mean().nan_to_num(torch.inf))


def _plain(policy: Policy, group: Group, rollout: Rollout) -> Tensor:
    ids = torch.from_numpy(np.concatenate([group.prompt_ids, rollout.completion_ids]).astype(np.int64)).to(policy.device)
    if group.images and policy.images is not None:
        logits = policy.images.plain(ids[:-1].tolist(), len(group.prompt_ids), group.images)
        return token_logprobs(logits, ids[1:], torch.ones(len(ids) - 1, device=ids.device))[len(group.prompt_ids) - 1 :]
    return policy.probe(ids)[len(group.prompt_ids) - 1 :]


def _with_images(policy: Policy, images: ImageTower) -> Group:
    """Three completions of a prompt with two images."""
    prompt, names = images.processor.sample
    random = np.random.default_rng(0)
    texts = [random.integers(policy.vocabulary, size=length).astype(np.int32) for length in (7, 5, 2)]
    texts = [np.where(ids == images.place_id, 0, ids) for ids in texts]
    rollouts = [Rollout(ids, np.zeros(len(ids), np.float32), (Span(0, len(ids)),), "length") for ids in texts]
    return Group(1, 0, np.array(prompt, np.int32), tuple(rollouts), Sampling(), images=names)


def _made_up(policy: Policy) -> Group:
    """Three completions of one prompt, the longest longer than any window where that is affordable."""
    num_parameters = sum(p.numel() for p in policy.model.parameters())
    length = probe_length(num_parameters, policy.vocabulary, policy.attention, max_length(policy.config))
    prompt = max(1, length // 4)
    longest = length - prompt
    rng = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return rng.integers(policy.vocabulary, size=max(1, count)).astype(np.int32)

    lengths = (longest, longest // 2 + 1, longest // 5)
    rollouts = [Rollout(ids(n), np.zeros(max(1, n), np.float32), (Span(0, max(1, n)),), "length") for n in lengths]
    return Group(number=0, attempt=0, prompt_ids=ids(prompt), rollouts=tuple(rollouts), sampling=Sampling())
