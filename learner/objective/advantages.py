"""Advantages of completions and of their tokens. Pure functions over rewards and values, in numpy.

The baseline is computed here, when a group is consumed, from the members that count: a failed score never becomes a
number and never moves a mean. A completion that is left out is None.

Axes: T tokens of one completion; N tokens of any number of completions, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from async_rlhf.buffers.composition import EPSILON
from async_rlhf.buffers.record import Float32Array
from async_rlhf.learner.objective.corrections import MAX_LOG_RATIO
from async_rlhf.learner.registry import advantage

Rewards = Sequence[float | None]
BoolArray = npt.NDArray[np.bool_]
Estimates = tuple[Float32Array, Float32Array]
Positive = Annotated[float, Field(gt=0)]
LamAlpha = Annotated[float | None, Field(gt=0)]
LamCritic = Annotated[float | None, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Tokens:
    """All tokens of the completions that count; float32 [N] unless noted otherwise.

    reward_N. value_N: the critic's estimate just before each token; log_ratio_N: proximal / behaviour; both [0] for an
    estimator without a critic. end_N: bool, True at the last token of each completion, or of each piece of one: nothing passes
    over it, so two completions in one trace are the two apart. length_N: int64, tokens of the completion that a token is of.
    """

    reward_N: Float32Array
    value_N: Float32Array
    log_ratio_N: Float32Array
    end_N: BoolArray
    length_N: npt.NDArray[np.int64]


@advantage()
def group_relative(rewards: Rewards, *, scale_by_std: bool = True) -> list[float | None]:
    """A_i = r_i - mean(r), divided by std(r) with `scale_by_std`; mean and std over the n members that count.

    Group-relative advantages of GRPO (Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, section 4.1.2); without the
    division it is the form of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783). The squares are divided by n - 1, as `torch.std`
    does in TRL and verl. Nothing is added to it, where TRL adds 1e-4 and verl 1e-6. None stays None. A group that is constant,
    or in which fewer than two members count, has advantage 0: no completion is known to be better.
    """
    counting = [reward for reward in rewards if reward is not None]
    if len(counting) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(counting) / len(counting)
    deviation = math.hypot(*(reward - mean for reward in counting)) / math.sqrt(len(counting) - 1)  # squares could overflow
    if deviation < EPSILON:
        return [None if reward is None else 0.0 for reward in rewards]
    scale = deviation if scale_by_std else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


@advantage()
def leave_one_out(rewards: Rewards) -> list[float | None]:
    """A_i = r_i - mean of the others' rewards, over the members that count.

    RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740, eq. 5): the baseline of a completion does not contain
    its own reward, so the gradient is unbiased. None stays None; a member without siblings that count has advantage 0.
    """
    counting = [reward for reward in rewards if reward is not None]
    if len(counting) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(counting) / len(counting)
    scale = len(counting) / (len(counting) - 1)  # r_i - (sum - r_i) / (n - 1) = n / (n - 1) (r_i - mean)
    return [None if reward is None else scale * (reward - mean) for reward in rewards]


@advantage()
def max_rl(rewards: Rewards) -> list[float | None]:
    """A_i = (r_i - mean) / mean, over the members that count: a prompt counts the more the less often it is solved.

    Maximum likelihood RL (Tajwar et al. 2026, arXiv 2602.02710), as in prime-rl. With rewards 0 and 1, a probability p
    of success and n members, the expected gradient is that of p times the sum over k < n of (1 - p)^(k - 1), which goes to
    1 / p: that of log p. (Up to n - 1, where prime-rl says n: in a group without success the baseline is left out too.) None
    stays None; a group whose rewards are all 0 has advantage 0. Raises ValueError for a reward below 0: a mean near 0 between
    two signs would make advantages of any size.
    """
    counting = [reward for reward in rewards if reward is not None]
    if any(reward < 0 for reward in counting):
        raise ValueError(
            f"advantage.kind = 'max_rl' divides by a group's mean reward, and one of {counting} is below 0: give rewards of 0 "
            "or more (best 0 and 1), or set advantage.kind = 'group_relative'"
        )
    mean = math.fsum(counting) / max(1, len(counting))
    return [None if reward is None else (reward - mean) / mean if mean > 0 else 0.0 for reward in rewards]


@advantage()
def oapl(rewards: Rewards, *, beta: Positive = 1.0) -> list[float | None]:
    """A_i = r_i - V with V = beta log mean exp(r / beta), over the members that count.

    For the loss of this name (Ritter et al. 2026, arXiv 2602.19362), as a rule with its `beta`. V estimates the value of the
    policy that is best when its divergence from the one that sampled costs beta a nat; it lies between the group's mean, for
    large beta, and its best reward. The mean of exp(A / beta) is 1. None stays None; a group that is constant has advantage 0.
    """
    counting = [reward for reward in rewards if reward is not None]
    highest = max(counting, default=0.0)  # beyond it nothing overflows
    shares = [math.exp((reward - highest) / beta) for reward in counting]
    value = highest + beta * math.log(math.fsum(shares) / len(counting)) if counting else 0.0
    return [None if reward is None else reward - value for reward in rewards]


@advantage(level="group_tokens")
def optimal_token(rewards: Sequence[float], energies: Sequence[Float32Array]) -> list[Float32Array]:
    """[T] each: A_it = r_i - sum W_jt r_j / sum W_jt over the siblings j that have a token t, with W_jt the sum of j's energies
    up to it.

    The optimal token baseline (Li et al. 2026, arXiv 2602.07078): of all baselines by position, the one with the least
    variance where the energy of a token is the squared norm of its score (in the logits, which stand for the weights), times
    the squared importance weight of the loss. verl's has the member itself in both sums, as the mean of GRPO has: its
    advantage is this one times the siblings' share of all W. Without it the gradient is unbiased. Where no sibling has a token,
    or none with energy, the baseline is the mean of the siblings' rewards; a member without siblings has advantage 0.
    """
    lengths = [len(energy) for energy in energies]
    weight_MT = np.zeros((len(rewards), max(lengths)))
    for row, energy in zip(weight_MT, energies, strict=True):
        row[: len(energy)] = np.cumsum(energy, dtype=np.float64)
    reward_M = np.array(rewards, np.float64)
    gap_MM = reward_M[:, None] - reward_M
    total_MT = (1 - np.eye(len(rewards))) @ weight_MT
    plain_MT = np.broadcast_to(gap_MM.sum(1, keepdims=True) / max(1, len(rewards) - 1), total_MT.shape)
    advantage_MT = np.divide(gap_MM @ weight_MT, total_MT, out=plain_MT.copy(), where=total_MT > 0)
    return [own[:length].astype(np.float32) for own, length in zip(advantage_MT, lengths, strict=True)]


@advantage(level="tokens")
def reinforce_pp(tokens: Tokens, *, gamma: float) -> Float32Array:
    """[N]: A_t = (G_t - mean(G)) / std(G) with G_t = r_t + gamma G_{t+1}, the return from token t on.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): without discount G_t is a completion's reward less the divergence that its
    tokens from t on cost, and mean and std are over the returns of all tokens of the batch, as in OpenRLHF, which divides by
    N, and in verl, which divides by N - 1 and adds 1e-8 to the variance: a long completion weighs as much as its tokens. A
    prompt's difficulty stays in the advantage, and no group can blow up by a tiny standard deviation of its own. A constant
    batch has advantage 0.
    """
    return_N = np.zeros(len(tokens.reward_N))
    ahead = 0.0
    for t in reversed(range(len(return_N))):
        ahead = float(tokens.reward_N[t]) + (0.0 if tokens.end_N[t] else gamma * ahead)
        return_N[t] = ahead
    deviation = float(np.std(return_N))
    scale = math.inf if deviation < EPSILON else deviation
    advantage_N: Float32Array = ((return_N - return_N.mean()) / scale).astype(np.float32)
    return advantage_N


def normalised(advantage_N: Float32Array) -> Float32Array:
    """[N]: normalised to mean 0 and standard deviation 1 over all tokens; constant advantages only lose their mean."""
    centred = advantage_N.astype(np.float64) - advantage_N.mean(dtype=np.float64)
    std = float(np.sqrt(np.mean(centred**2)))
    scaled: Float32Array = (centred / std if std >= EPSILON else centred).astype(np.float32)
    return scaled


def constant(rewards: Rewards) -> bool:
    """Whether all members that count have the same reward (also when fewer than two count)."""
    counting = [reward for reward in rewards if reward is not None]
    return len(counting) < 2 or max(counting) - min(counting) < EPSILON


def pair(rewards: Rewards) -> list[float | None]:
    """The best member and the worst keep their reward; the first of equals. None of a constant group."""
    counting = [(reward, m) for m, reward in enumerate(rewards) if reward is not None]
    kept = set() if constant(rewards) else {max(counting, key=lambda each: (each[0], -each[1]))[1], min(counting)[1]}
    return [reward if m in kept else None for m, reward in enumerate(rewards)]


def best(rewards: Rewards) -> list[float | None]:
    """The best member keeps its reward; the first of equals. None of a constant group."""
    highest = max((reward for reward in rewards if reward is not None), default=None)
    first = None if constant(rewards) else list(rewards).index(highest)
    return [reward if m == first else None for m, reward in enumerate(rewards)]


def drop_constant(groups: Sequence[Rewards]) -> list[list[float | None]]:
    """Constant groups lose all their members: they would add tokens to a denominator and nothing to a numerator.

    The filter of DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2). Its refill is the queue's: constant
    groups are replaced when they are put (`buffers/queue/bound.py`), and what still comes here makes the batch smaller.
    """
    return [[None for _ in rewards] if constant(rewards) else list(rewards) for rewards in groups]


@advantage(level="tokens", critic=True, off_policy=False)
def gae(tokens: Tokens, *, gamma: float, lam: float, lam_alpha: LamAlpha = None, lam_critic: LamCritic = None) -> Estimates:
    """Advantages and returns [N]; the ratios are not looked at. `lam_alpha`, `lam_critic`: see `_of_lambdas`.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  return_t = A_t + V_t, with V = A = 0 after the
    last token (Schulman et al. 2016, arXiv 1506.02438, eq. 16). value_N[t] is the value just before token t.
    """

    def estimated(lam_N: Sequence[float]) -> Estimates:
        advantage_N = np.zeros(len(lam_N))
        value = advantage = 0.0
        for t in reversed(range(len(lam_N))):
            if tokens.end_N[t]:
                value = advantage = 0.0
            delta = tokens.reward_N[t] + gamma * value - tokens.value_N[t]
            advantage = delta + gamma * lam_N[t] * advantage
            advantage_N[t], value = advantage, tokens.value_N[t]
        return advantage_N.astype(np.float32), (advantage_N + tokens.value_N).astype(np.float32)

    return _of_lambdas(estimated, tokens, lam, lam_alpha, lam_critic)


@advantage(level="tokens", critic=True)
def v_trace(
    tokens: Tokens,
    *,
    gamma: float,
    lam: float,
    lam_alpha: LamAlpha = None,
    lam_critic: LamCritic = None,
    rho_cap: Positive = 1.0,
    c_cap: Positive = 1.0,
    bootstrap: Literal["mixed", "target"] = "mixed",
) -> Estimates:
    """Advantages and value targets [N]. `lam_alpha`, `lam_critic`: see `_of_lambdas`.

    With ratio = p_proximal / p_behaviour, rho = min(rho_cap, ratio), c = lam min(c_cap, ratio):
    v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1}),  A_t = r_t + gamma q_{t+1} - V_t
    (Espeholt et al. 2018, "IMPALA", arXiv 1802.01561, eq. 1 and section 4.2; remark 2 for lam). `target`: q = v, as the paper
    has it. `mixed`: q = lam v + (1 - lam) V, as in rlax (`vtrace_td_error_and_advantage`), so that on fresh data A is
    generalised advantage estimation at any lam; at lam = 1 the two are one. The weight rho_t of the policy gradient is not in
    A_t: it is the loss's correction. The fixed point is the value of a policy between behaviour and proximal, the latter as
    rho_cap grows; c_cap sets how fast it is reached.
    """
    ratio_N = _ratio(tokens.log_ratio_N)
    rho_N = np.minimum(rho_cap, ratio_N)

    def estimated(lam_N: Sequence[float]) -> Estimates:
        c_N = lam_N * np.minimum(c_cap, ratio_N)
        advantage_N, target_N = np.zeros(len(lam_N)), np.zeros(len(lam_N))
        next_value = next_target = 0.0
        for t in reversed(range(len(lam_N))):
            if tokens.end_N[t]:
                next_value = next_target = 0.0
            value, share = float(tokens.value_N[t]), lam_N[t] if bootstrap == "mixed" else 1.0
            delta = rho_N[t] * (tokens.reward_N[t] + gamma * next_value - value)
            target_N[t] = value + delta + gamma * c_N[t] * (next_target - next_value)
            advantage_N[t] = tokens.reward_N[t] + gamma * (share * next_target + (1 - share) * next_value) - value
            next_value, next_target = value, target_N[t]
        return advantage_N.astype(np.float32), target_N.astype(np.float32)

    return _of_lambdas(estimated, tokens, lam, lam_alpha, lam_critic)


@advantage(level="tokens", critic=True)
def traced(
    tokens: Tokens,
    *,
    gamma: float,
    lam: float,
    lam_alpha: LamAlpha = None,
    lam_critic: LamCritic = None,
    rho_cap: Positive = 1.0,
    c_cap: Positive = 1.0,
) -> Estimates:
    """Advantages and value targets [N]: lambda-returns whose traces are cut. `lam_alpha`, `lam_critic`: see `_of_lambdas`.

    A_t = delta_t + gamma lam min(c_cap, ratio_{t+1}) A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t, and
    return_t = V_t + min(rho_cap, ratio_t) A_t: Retrace(lam) (Munos et al. 2016, arXiv 1606.02647, eq. 4) with the critic's
    value in place of an expectation over actions. On-policy it is generalised advantage estimation; with lam = 1 and equal
    caps its targets are those of V-trace.
    """
    ratio_N = _ratio(tokens.log_ratio_N)
    rho_N = np.minimum(rho_cap, ratio_N)

    def estimated(lam_N: Sequence[float]) -> Estimates:
        c_N = lam_N * np.minimum(c_cap, ratio_N)
        advantage_N = np.zeros(len(lam_N))
        next_value = trace = 0.0
        for t in reversed(range(len(lam_N))):
            if tokens.end_N[t]:
                next_value = trace = 0.0
            value = float(tokens.value_N[t])
            advantage_N[t] = tokens.reward_N[t] + gamma * next_value - value + gamma * trace
            next_value, trace = value, c_N[t] * advantage_N[t]
        return advantage_N.astype(np.float32), (tokens.value_N + rho_N * advantage_N).astype(np.float32)

    return _of_lambdas(estimated, tokens, lam, lam_alpha, lam_critic)


def _ratio(log_ratio_N: Float32Array) -> npt.NDArray[np.float64]:
    return np.exp(np.clip(log_ratio_N.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _of_lambdas(
    estimated: Callable[[Sequence[float]], Estimates],
    tokens: Tokens,
    lam: float,
    lam_alpha: float | None,
    lam_critic: float | None,
) -> Estimates:
    """[N] twice: advantages with one lambda, and what the critic is fitted to with another. estimated: both from one a token.

    With `lam_alpha` a completion of n tokens has 1 - 1 / (lam_alpha n) in its advantages, at least 0: the longer it is the
    longer its traces, the length-adaptive estimation of VAPO (Yue et al. 2025, arXiv 2504.05118, section 4.2), whose critic has
    a lambda of its own, `lam_critic` (VC-PPO, arXiv 2503.01491), as SAO's has.
    """
    own_N = [lam if lam_alpha is None else max(0.0, 1 - 1 / (lam_alpha * n)) for n in tokens.length_N.tolist()]
    critics_N = [lam if lam_critic is None else lam_critic] * len(own_N)
    advantage_N, return_N = estimated(own_N)
    return advantage_N, return_N if own_N == critics_N else estimated(critics_N)[1]
