"""Holds a policy to its model: log-probabilities from micro-batches against plain passes, one text at a time.

Run when a learner starts, with the weights that it starts from. Decides how completions share rows: siblings in one row where
that gives the plain numbers, else a row for each, else the model is refused.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.attention import max_length, probe_length
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.record import Group, Rollout, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.batch.micro_batch import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.model.policy import Policy

_log = logging.getLogger(__name__)
# Mean difference of log-probabilities, in nats. Rounding in float32 makes 1e-6 to 1e-5; a wrong mask or state 1e-2 and more.
MAX_DIFFERENCE = 5e-4


@torch.no_grad()
def check_policy(policy: Policy) -> None:
    """Sets `policy.packs`. Raises ConfigError when log-probabilities differ from plain passes either way."""
    group = _made_up(policy)
    plain = torch.cat([_plain(policy, group, rollout) for rollout in group.rollouts])
    packs, difference = policy.packs, float("nan")
    for policy.packs in (True, False) if packs else (False,):
        try:
            difference = _difference(policy, group, plain)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            if policy.compiled and isinstance(error, torch._dynamo.exc.TorchDynamoException):
                reason = " ".join(str(error).strip().partition("\n\n")[0].split())
                raise ConfigError(f"learner.compile = true: this model is not compiled here: {reason}. Use false") from error
            _log.warning("a pass over padded rows ended with %s: %s", type(error).__name__, error)
            continue
        if difference <= MAX_DIFFERENCE:
            if packs and not policy.packs:
                _log.warning("completions of a prompt do not share its computation: in one row this model mixes them")
            return
    raise ConfigError(
        f"model type {policy.config.get('model_type')!r}: log-probabilities of padded rows differ from plain passes by "
        f"{difference:.3g} nats on average (at most {MAX_DIFFERENCE:g}), as of a model that looks ahead or mixes the texts "
        "of a batch. Use a causal language model"
    )


def _difference(policy: Policy, group: Group, plain: Tensor) -> float:
    """Mean |log-probability - plain| of the tokens of the group; infinite where one of them is no number."""
    rows = make_rows([group], [[0.0] * len(group.rollouts)], 1 << 30 if policy.packs else 1)
    batches = make_micro_batches(rows, Packing(1 << 30))
    found = torch.cat([policy.exactly(batch.to(policy.device)) for batch in batches])
    # Micro-batches hold the longest rows first, and the group has its completions in that order.
    return float((found - plain).abs().mean().nan_to_num(torch.inf))


def _plain(policy: Policy, group: Group, rollout: Rollout) -> Tensor:
    ids = torch.from_numpy(np.concatenate([group.prompt_ids, rollout.completion_ids]).astype(np.int64)).to(policy.device)
    return policy.probe(ids)[len(group.prompt_ids) - 1 :]


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
