"""What it is worth that the learner replays the experts which sampled: its distance to the engine with and without, on small
random models with the routers of three families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Request, RolloutKey, completed
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.buffers.record import Group, Rollout
from async_rlhf.buffers.routing import routers
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from async_rlhf.learner.batch.packing import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.model.files import load_model
from async_rlhf.learner.model.policy import Policy

KINDS = ("qwen3_moe", "olmoe", "deepseek_v3")
_GROUPS, _SIZE, _TOKENS = 4, 4, 32
# By what is between learner and engine: the learner's type, and how far its weights have moved, in standard deviations of each
# tensor.
_CASES = {"nothing": ("float32", 0.0), "bfloat16": ("bfloat16", 0.0), "an update": ("float32", 0.003)}


class Mismatch(NamedTuple):
    """Mean |log-probability of learner - of engine| in nats with its own experts and with replayed ones; the share of
    positions that predict a token, x layers, in which its own are others."""

    own: float
    replayed: float
    differ: float


def mismatches(kind: str, directory: Path, device: str = "cpu") -> dict[str, Mismatch]:
    """By `_CASES`, of a model with 4 of 16 experts."""
    families.model(kind, **families.experts(kind, 16, 4)).save_pretrained(directory)
    groups, found = _sampled(directory, device), {}
    for case, (dtype, moved) in _CASES.items():
        policy = Policy(load_model(directory, torch.device(device)), LearnerConfig(device=device, dtype=dtype))
        drawn = torch.Generator().manual_seed(1)
        for each in policy.parameters():
            each.data += moved * each.std(correction=0) * torch.randn(each.shape, generator=drawn).to(each.device)
        found[case] = mismatch(policy, groups)
    return found


def _sampled(directory: Path, device: str) -> list[Group]:
    engine = load_engine(str(directory), EngineConfig(device=device, slots=6, prefill_tokens=16, replay_routing=True))
    rng, groups = np.random.default_rng(0), []
    for number in range(_GROUPS):
        prompt = tuple(rng.integers(64, size=12 + 3 * number).tolist())
        keys = [RolloutKey(number, 0, member) for member in range(_SIZE)]
        ended = completed(engine, [Request(key, prompt, _TOKENS, Sampling(), 100 * number + key.member) for key in keys])
        made = [
            Rollout(c.token_ids, c.logprobs, c.spans, c.finish_reason, routing=c.routing) for c in map(ended.get, keys) if c
        ]
        groups.append(Group(number, 0, np.array(prompt, np.int32), tuple(made), Sampling()))
    return groups


@torch.no_grad()
def mismatch(policy: Policy, groups: Sequence[Group]) -> Mismatch:
    """Of a policy and what was sampled."""
    own, replayed, differ, chosen = [], [], [], list[Tensor]()
    for router in routers(policy.model):
        router.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[2]))
    for packed in make_micro_batches(make_rows(groups, [[0.0] * _SIZE] * len(groups)), Packing(1 << 12, policy.sharing)):
        batch = packed.to(policy.device)
        replayed.append((policy(batch)[0] - batch.logp_behaviour_N).abs())
        chosen.clear()
        own.append((policy(replace(batch, experts_PMk=None))[0] - batch.logp_behaviour_N).abs())
        assert batch.experts_PMk is not None
        pair = (each[batch.source_N].long().sort(-1)[0] for each in (torch.stack(chosen, 1), batch.experts_PMk))
        differ.append(torch.ne(*pair).any(-1).flatten().float())
    return Mismatch(*(float(torch.cat(each).mean()) for each in (own, replayed, differ)))
