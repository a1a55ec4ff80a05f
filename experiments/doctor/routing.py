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
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.batch.packing import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.model.files import load_model
from async_rlhf.learner.model.policy import Policy

KINDS = ("qwen3_moe", "olmoe", "deepseek_v3")
_GROUPS, _SIZE, _TOKENS = 4, 4, 32
# Of each tensor's standard deviation: what some updates may have changed.
_CHANGE = 0.003


class Mismatch(NamedTuple):
    """Mean |log-probability of learner - of engine| in nats with its own experts and with replayed ones; the share of
    positions that predict a token, x layers, in which its own are others."""

    own: float
    replayed: float
    differ: float


def make_model(kind: str, directory: Path) -> None:
    """4 of 16 experts; of DeepSeek-V3 from two of four groups."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    own = {name: 16 for name in names if hasattr(families.config(kind), name)} | {"num_experts_per_tok": 4}
    groups = {"n_group": 4, "topk_group": 2} if kind == "deepseek_v3" else {}
    families.model(kind, **own, **groups).save_pretrained(directory)


def sampled_groups(directory: Path, device: str = "cpu", groups: int = _GROUPS, tokens: int = _TOKENS) -> list[Group]:
    """Completions of a model, with their experts."""
    engine = load_engine(str(directory), EngineConfig(device=device, slots=6, prefill_tokens=16, replay_routing=True))
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(64, size=12 + 3 * number).tolist()) for number in range(groups)]
    keys = [RolloutKey(number, 0, member) for number in range(groups) for member in range(_SIZE)]
    ended = completed(
        engine, [Request(key, prompts[key.group], tokens, Sampling(), 100 * key.group + key.member) for key in keys]
    )
    made = {
        key: Rollout(each.token_ids, each.logprobs, each.spans, each.finish_reason, routing=each.routing)
        for key, each in ended.items()
    }
    return [
        Group(n, 0, np.array(prompt, np.int32), tuple(made[key] for key in keys if key.group == n), Sampling())
        for n, prompt in enumerate(prompts)
    ]


@torch.no_grad()
def mismatch(policy: Policy, groups: Sequence[Group]) -> Mismatch:
    """Of a policy and what was sampled."""
    own, replayed, differ = [], [], []
    for packed in make_micro_batches(make_rows(groups, [[0.0] * _SIZE] * len(groups)), Packing(1 << 12, policy.sharing)):
        batch = packed.to(policy.device)
        assert batch.experts_PMk is not None
        logp_N, own_PMk = _with_choice(policy, replace(batch, experts_PMk=None))
        own.append((logp_N - batch.logp_behaviour_N).abs())
        replayed.append((policy(batch)[0] - batch.logp_behaviour_N).abs())
        pair = (each[batch.source_N].long().sort(-1)[0] for each in (own_PMk, batch.experts_PMk))
        differ.append(torch.ne(*pair).any(-1).flatten().float())
    return Mismatch(*(float(torch.cat(each).mean()) for each in (own, replayed, differ)))


def _with_choice(policy: Policy, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of a pass, and the experts [P, M, k] that its routers chose."""
    found: list[Tensor] = []
    hooks = [
        each.register_forward_hook(lambda module, inputs, outputs: found.append(outputs[2])) for each in routers(policy.model)
    ]
    logp_N = policy(batch)[0]
    for hook in hooks:
        hook.remove()
    return logp_N, torch.stack(found, 1)


def mismatches(kind: str, directory: Path, device: str = "cpu") -> dict[str, Mismatch]:
    """By what is between learner and engine: nothing, rounding to bfloat16, an update."""
    make_model(kind, directory)
    groups = sampled_groups(directory, device)
    found = {}
    for case, dtype, change in (("nothing", "float32", 0.0), ("bfloat16", "bfloat16", 0.0), ("an update", "float32", _CHANGE)):
        policy = Policy(load_model(directory, torch.device(device)), LearnerConfig(device=device, dtype=dtype))
        generator = torch.Generator().manual_seed(1)
        for each in policy.parameters():
            noise = torch.randn(each.shape, generator=generator).to(each.device)
            each.data += change * (each.std() if each.numel() > 1 else 0) * noise
        found[case] = mismatch(policy, groups)
    return found
