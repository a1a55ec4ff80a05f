"""What the bias of old data does to learning: the enumerable policy, trained on samples of its own past, exactly k steps old.

Every step takes groups sampled by version max(0, step - k) and makes several updates from them with the learner's own losses.
Sampled like a run, measured like a law: the reward reached is the exact expectation under the final policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import mean, stdev

import torch
from torch import Tensor

from async_rlhf.experiments.gradient_laws import policy
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective.advantages import leave_one_out, pair
from async_rlhf.learner.objective.loss import Counts, LossInputs, denominator
from async_rlhf.learner.objective.objective import objective
from async_rlhf.learner.registry import LOSS_SPECS

STALENESS = (0, 4, 16)
SEEDS = range(10)
STEPS, UPDATES, GROUPS, MEMBERS, LEARNING_RATE = 60, 4, 8, 8, 0.05
LOSSES: Mapping[str, LossConfig] = {
    "PPO around behaviour (naive)": LossConfig(kind="ppo_clip"),
    "decoupled PPO without weight": LossConfig(is_cap=None),
    "decoupled PPO": LossConfig(),
    "truncated-IS REINFORCE": LossConfig(kind="truncated_is"),
    "CISPO": LossConfig(kind="cispo"),
    "Online DPO": LossConfig(kind="online_dpo"),
}
# 97.5 % point of Student's t for 10 seeds
_T = 2.262


def final_reward(config: LossConfig, staleness: int, seed: int) -> float:
    """Expected reward at the end, as a share of the way from the initial policy's to the best completion's."""
    reward, generator = policy.rewards(seed), torch.Generator().manual_seed(seed)
    initial = policy.initial(seed + 1000)
    logits = initial.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    versions = [initial]
    for step in range(STEPS):
        behaviour = versions[max(0, step - staleness)]
        drawn = torch.multinomial(policy.probabilities(behaviour), GROUPS * MEMBERS, replacement=True, generator=generator)
        proximal = logits.detach().clone()
        for part in drawn.reshape(UPDATES, -1):
            _update(logits, optimizer, proximal, behaviour, initial, part, reward, min(step, staleness), config)
        versions.append(logits.detach().clone())
    start = float((policy.probabilities(initial) * reward).sum())
    end = float((policy.probabilities(logits.detach()) * reward).sum())
    return (end - start) / (float(reward.max()) - start)


def _update(
    logits: Tensor,
    optimizer: torch.optim.Optimizer,
    proximal: Tensor,
    behaviour: Tensor,
    initial: Tensor,
    drawn_S: Tensor,
    reward_Y: Tensor,
    age: int,
    config: LossConfig,
) -> None:
    """One optimizer update from whole groups of completions, by their numbers `drawn_S`."""
    rewards = reward_Y[drawn_S].reshape(-1, MEMBERS).tolist()
    chosen = [pair(group) if LOSS_SPECS[config.kind].learns_from == "pair" else group for group in rewards]
    advantages = [
        advantage
        for group, some in zip(rewards, chosen, strict=True)
        for advantage, kept in zip(leave_one_out(group), some, strict=True)
        if kept is not None
    ]
    kept_S = torch.tensor([value is not None for group in chosen for value in group])
    if not advantages:
        return
    group_S = (torch.arange(len(drawn_S)) // MEMBERS)[kept_S]
    used_S = drawn_S[kept_S]
    each = torch.arange(len(used_S))
    inputs = LossInputs(
        logp_current_N=policy.logprobs(logits)[used_S].flatten(),
        logp_proximal_N=policy.logprobs(proximal)[used_S].flatten(),
        logp_behaviour_N=policy.logprobs(behaviour)[used_S].flatten(),
        logp_reference_N=policy.logprobs(initial)[used_S].flatten(),
        advantage_N=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(policy.T),
        sequence_N=each.repeat_interleave(policy.T),
        group_S=group_S,
        staleness_N=torch.full((len(used_S) * policy.T,), age),
    )
    counts = Counts(len(used_S) * policy.T, len(used_S), len(set(group_S.tolist())))
    optimizer.zero_grad()
    (objective(inputs, config).total / denominator(config, counts)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def markdown() -> str:
    """The table of `docs/learner.md`: mean over seeds, and the paired difference to staleness 0 with its 95 % interval."""
    first, *others = STALENESS
    heads = [f"staleness {first}", *(f"staleness {k}, and minus {first}" for k in others)]
    lines = ["| loss | " + " | ".join(heads) + " |", "|---|" + "---|" * len(STALENESS)]
    for name, config in LOSSES.items():
        found = {k: [final_reward(config, k, seed) for seed in SEEDS] for k in STALENESS}
        cells = [f"{mean(found[first]):.2f}"]
        for k in others:
            gaps = [after - before for after, before in zip(found[k], found[first], strict=True)]
            half = _T * stdev(gaps) / math.sqrt(len(gaps))
            cells.append(f"{mean(found[k]):.2f} ({mean(gaps):+.2f} ± {half:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
