"""The losses: PPO's clipped surrogate, REINFORCE with a bounded weight in place of the clip, a regression
of log-ratios, rankings within a group, and distillation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from async_rlhf.learner.objective.corrections import binary_kl, log_ratio, ratio, sequence_log_ratio
from async_rlhf.learner.objective.objective import LossInputs
from async_rlhf.learner.registry import loss

Terms = tuple[Tensor, Mapping[str, Tensor]]
Clip = tuple[float, float, float | None]
"""`clip_low`, `clip_high`, `dual_clip`."""
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


@loss(corrects="masks", needs=("behaviour",))
def ppo_clip(inputs: LossInputs, weight_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None) -> Terms:
    """[N]: - w_t S(r_t, A_t) with r = p_current / p_behaviour: `ppo_clip`. The clip region is that of the stale policy."""
    return _of_tokens(inputs, weight_N, inputs.logp_behaviour_N, (clip_low, clip_high, dual_clip))


@loss()
def decoupled_ppo(inputs: LossInputs, weight_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None) -> Terms:
    """[N]: - w_t S(r_t, A_t) with r = p_current / p_proximal, and w the correction of proximal against behaviour.

    Hilton et al. 2021 (arXiv 2110.00641) split PPO's old policy into a proximal one, around which it clips, and a
    behaviour one, against which it weighs; AReaL (arXiv 2505.24298, eq. 5) uses it for stale data. In the first update of
    a step r = 1, and the gradient is that of truncated importance-weighted policy gradient.
    """
    return _of_tokens(inputs, weight_N, inputs.logp_proximal_N, (clip_low, clip_high, dual_clip))


def _of_tokens(inputs: LossInputs, weight_N: Tensor, logp_old_N: Tensor, clip: Clip) -> Terms:
    loss_N, outside_N = clipped_surrogate(ratio(inputs.logp_current_N, logp_old_N), inputs.advantage_N, clip)
    return weight_N * loss_N, _region(outside_N)


def clipped_surrogate(r: Tensor, advantage: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """-S(r, A), and where its gradient is clipped away; both of the shape of r.

    S(r, A) = min(r A, clip(r, 1 - low, 1 + high) A) (Schulman et al. 2017, arXiv 1707.06347, eq. 7), and for A < 0 never
    below c A, the dual clip of Ye et al. 2020 (arXiv 1912.09729, eq. 5): without it S has no lower limit in r.
    """
    clip_low, clip_high, dual_clip = clip
    high, low = 1 + clip_high, 1 - clip_low
    value = torch.minimum(r * advantage, r.clamp(low, high) * advantage)
    outside = ((r > high) & (advantage > 0)) | ((r < low) & (advantage < 0))
    if dual_clip is not None:
        value = torch.where(advantage < 0, torch.maximum(value, dual_clip * advantage), value)
        outside = outside | ((r > dual_clip) & (advantage < 0))
    return -value, outside


def _region(outside_N: Tensor) -> Mapping[str, Tensor]:
    """The metric of every loss that clips: tokens outside its region, or at its limit."""
    return {"clip_ratio/region_mean": outside_N.float().sum()}


@loss(level="sequence")
def gspo(inputs: LossInputs, weight_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None) -> Terms:
    """[S]: - w S(s, A) with s the geometric mean of p_current / p_proximal over a completion's tokens.

    Zheng et al. 2025 (arXiv 2507.18071, eq. 5 and 7), around the proximal policy; w is the correction against behaviour. Mean
    ratios stay close to 1: `clip_low` and `clip_high` of some 1e-4 are what the paper uses.
    """
    return _of_sequences(inputs, weight_N, inputs.logp_proximal_N, (clip_low, clip_high, dual_clip), mean=True)


@loss(level="sequence", corrects="masks", needs=("behaviour",))
def proximal_rloo(inputs: LossInputs, weight_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None) -> Terms:
    """[S]: - m S(s, A) with s = p_current(y) / p_behaviour(y), the whole completion being one action, m the masks.

    Noukhovitch et al. 2025 (arXiv 2410.18252, section 4.1), meant for leave-one-out advantages.
    """
    return _of_sequences(inputs, weight_N, inputs.logp_behaviour_N, (clip_low, clip_high, dual_clip), mean=False)


def _of_sequences(inputs: LossInputs, weight_N: Tensor, logp_old_N: Tensor, clip: Clip, *, mean: bool) -> Terms:
    lengths_S, first_S = _sequences(inputs)
    log_ratio_S = sequence_log_ratio(inputs.logp_current_N, logp_old_N, inputs.sequence_N, mean=mean)
    loss_S, outside_S = clipped_surrogate(log_ratio_S.exp(), inputs.advantage_N[first_S], clip)
    return weight_N[first_S] * loss_S, _region(outside_S * lengths_S)


def _sequences(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """[S] twice: the length of each completion, and its first token; advantage and weight are equal along it."""
    lengths_S = torch.bincount(inputs.sequence_N)
    return lengths_S, lengths_S.cumsum(0) - lengths_S


def _summed(inputs: LossInputs, each_N: Tensor) -> Tensor:
    """[S]: the sum over each completion's tokens; sums that are not exponentiated need no clamp."""
    return each_N.new_zeros(len(inputs.group_S)).index_add(0, inputs.sequence_N, each_N)


@loss()
def cispo(inputs: LossInputs, weight_N: Tensor, *, clip_high: float) -> Terms:
    """[N]: - w_t sg(min(r_t, 1 + high)) A_t log p_current, with r = p_current / p_proximal.

    MiniMax-M1 (2025, arXiv 2506.13585, eq. 4), with its lower limit left out, as there. w is the correction of proximal against
    behaviour. A token with a high ratio is not dropped as by PPO's clip, its weight stops growing.
    """
    r_N = ratio(inputs.logp_current_N.detach(), inputs.logp_proximal_N)
    high = 1 + clip_high
    return -weight_N * r_N.clamp(max=high) * inputs.advantage_N * inputs.logp_current_N, _region(r_N > high)


@loss(corrects="masks", needs=("behaviour",))
def truncated_is(inputs: LossInputs, weight_N: Tensor, *, is_cap: float | None) -> Terms:
    """[N]: - m_t sg(min(r_t, cap)) A_t log p_current, with r = p_current / p_behaviour and m the masks.

    The loss of AIPO in LlamaRL (Wu et al. 2025, arXiv 2505.24034, section 4.2): truncated above only. Without `is_cap` the
    weight is 1 and it is plain REINFORCE.
    """
    return _within(inputs, weight_N, is_cap, outside_N=torch.zeros_like(inputs.advantage_N, dtype=torch.bool))


def _within(inputs: LossInputs, weight_N: Tensor, most: float | None, *, outside_N: Tensor) -> Terms:
    """REINFORCE, truncated at `most`, of the tokens that lie in a region; the others count, and teach nothing."""
    r_N = ratio(inputs.logp_current_N.detach(), inputs.logp_behaviour_N)
    cap = math.inf if most is None else most
    truncated_N = torch.ones_like(r_N) if most is None else r_N.clamp(max=cap)
    loss_N = -weight_N * ~outside_N * truncated_N * inputs.advantage_N * inputs.logp_current_N
    return loss_N, _region(outside_N | (r_N > cap))


@loss(corrects="masks", needs=("behaviour",))
def dppo_tv(inputs: LossInputs, weight_N: Tensor, *, is_cap: float | None, delta: Fraction = 0.2) -> Terms:
    """[N]: the terms of `truncated_is`, and 0 where |p_current - p_behaviour| > `delta` and A_t leads further away.

    Qi et al. 2026 ("Rethinking the trust region in LLM reinforcement learning", arXiv 2602.04879, eq. 11 and 12). The total
    variation over two events, this token or another (eq. 13), bounds how far a likely token may move, where PPO's clip binds
    the unlikely ones. The gradient of the paper's M r A is this one; it does not truncate r, verl does at 20.
    """
    return _divergent(inputs, weight_N, is_cap, _moved(inputs).abs() > delta)


@loss(corrects="masks", needs=("behaviour",))
def dppo_kl(inputs: LossInputs, weight_N: Tensor, *, is_cap: float | None, delta: Positive = 0.05) -> Terms:
    """[N]: `dppo_tv` with KL(behaviour | current) of "this token or another" above `delta` nats (eq. 14)."""
    divergence_N = binary_kl(inputs.logp_behaviour_N, inputs.logp_current_N.detach())
    return _divergent(inputs, weight_N, is_cap, divergence_N > delta)


def _divergent(inputs: LossInputs, weight_N: Tensor, is_cap: float | None, far_N: Tensor) -> Terms:
    return _within(inputs, weight_N, is_cap, outside_N=far_N & (_moved(inputs) * inputs.advantage_N > 0))


def _moved(inputs: LossInputs) -> Tensor:
    """[N], no gradient: p_current - p_behaviour of the token that was sampled."""
    return inputs.logp_current_N.detach().exp() - inputs.logp_behaviour_N.exp()


@loss(corrects="masks", needs=("behaviour",))
def ipo(inputs: LossInputs, weight_N: Tensor, *, is_cap: float | None, epsilon: Fraction = 0.3) -> Terms:
    """[N]: the terms of `truncated_is`, and 0 where |p_current - p_behaviour| > `epsilon`, whatever the advantage.

    The loss of prime-rl ("importance policy optimization"; its `eps` is 0.3, its divergence term off), which does not truncate
    the ratio. It shares a name with a preference loss (Azar et al. 2023) and nothing else.
    """
    return _within(inputs, weight_N, is_cap, outside_N=_moved(inputs).abs() > epsilon)


@loss(corrects="masks", needs=("behaviour",))
def sao(
    inputs: LossInputs,
    weight_N: Tensor,
    *,
    low: Annotated[float, Field(ge=0, lt=1)] = 0.2,
    high: Annotated[float, Field(gt=1)] = 4.0,
) -> Terms:
    """[N]: - m_t sg(f(r_t)) A_t log p_current with r = p_current / p_behaviour, f(r) = r from `low` to `high` and 0 outside.

    The direct two-sided importance sampling of SAO ("Single-rollout asynchronous optimization", arXiv 2607.07508, section 3.1):
    no policy of the step's start, and no clip. Within its band it is untruncated REINFORCE.
    """
    r_N = ratio(inputs.logp_current_N.detach(), inputs.logp_behaviour_N)
    return _within(inputs, weight_N, math.inf, outside_N=(r_N < low) | (r_N > high))


@loss()
def sapo(inputs: LossInputs, weight_N: Tensor, *, tau: tuple[Positive, Positive] = (1.0, 1.05)) -> Terms:
    """[N]: - w_t (4 / tau) sigmoid(tau (r_t - 1)) A_t with r = p_current / p_proximal, w the correction of proximal against
    behaviour, and two `tau`, for A > 0 and for others.

    Gao et al. 2025 ("Soft adaptive policy optimization", arXiv 2511.20347), as in TRL and verl. In place of a clip a gate,
    whose slope is 1 at r = 1 and falls on both sides, the faster the larger tau: tokens fade out instead of being dropped.
    """
    r_N = ratio(inputs.logp_current_N, inputs.logp_proximal_N)
    tau_N = _by_sign(inputs.advantage_N > 0, tau, r_N)
    return -weight_N * 4 / tau_N * torch.sigmoid(tau_N * (r_N - 1)) * inputs.advantage_N, {}


def _by_sign(good_N: Tensor, values: tuple[float, float], like_N: Tensor) -> Tensor:
    """[N], with the type of `like_N`: the first value where `good_N`, the second elsewhere."""
    return torch.where(good_N, like_N.new_tensor(values[0]), like_N.new_tensor(values[1]))


@loss(corrects="masks", needs=("behaviour",))
def vespo(
    inputs: LossInputs,
    weight_N: Tensor,
    *,
    k: tuple[Positive, Positive] = (2.0, 3.0),
    lam: tuple[Positive, Positive] = (3.0, 2.0),
) -> Terms:
    """[N]: - m_t phi(W) A_t log p_current, phi(W) = sg(W^k exp(lam (1 - W))), W the completion's ratio p_current / p_behaviour.

    `k` and `lam` are two each, for A >= 0 and for A < 0 (VESPO, arXiv 2602.10693, as in TRL; its clamp of W at
    1e-8 is at 2e-9 here). phi is 1 on the policy's own data, has its peak at W = k / lam and vanishes on both sides: a
    completion's ratio needs no cut. Its slope at W = 1 is k - lam, by default -1 and 1, where an importance weight has 1: of
    good completions those that have become likelier count less, and the bias begins at the first step.
    """
    log_W_S = sequence_log_ratio(inputs.logp_current_N.detach(), inputs.logp_behaviour_N, inputs.sequence_N, mean=False)
    log_W_N = log_W_S[inputs.sequence_N]
    k_N = _by_sign(inputs.advantage_N >= 0, k, log_W_N)
    lam_N = _by_sign(inputs.advantage_N >= 0, lam, log_W_N)
    phi_N = (k_N * log_W_N + lam_N * (1 - log_W_N.exp())).exp()
    return -weight_N * phi_N * inputs.advantage_N * inputs.logp_current_N, {}


@loss(corrects="masks", needs=("behaviour",))
def topr(inputs: LossInputs, weight_N: Tensor) -> Terms:
    """[N]: - m_t a A_t log p_current with a = 1 for A > 0 and sg(min(R, 1)) for A <= 0, m the masks.

    R is the completion's ratio p_current / p_behaviour, the product over its tokens (Le Roux et al. 2025, "Tapered off-policy
    REINFORCE", arXiv 2503.14286, eq. 8 with its canonical limits). It can only shrink a weight here, so its growth with the
    length is harmless: a long bad completion that the policy has left weighs nothing.
    """
    log_ratio_S = sequence_log_ratio(inputs.logp_current_N.detach(), inputs.logp_behaviour_N, inputs.sequence_N, mean=False)
    taper_N = log_ratio_S.exp().clamp(max=1.0)[inputs.sequence_N]
    bad_N = inputs.advantage_N <= 0
    loss_N = -weight_N * torch.where(bad_N, taper_N, 1.0) * inputs.advantage_N * inputs.logp_current_N
    return loss_N, _region(bad_N & (log_ratio_S > 0)[inputs.sequence_N])


@loss(level="sequence", corrects="masks", needs=("behaviour",))
def oapl(inputs: LossInputs, weight_N: Tensor, *, beta: Positive = 1.0) -> Terms:
    """[S]: m (beta log(p_current(y) / p_behaviour(y)) - A)^2 with A = r - V of `advantage.kind = "oapl"`, m the masks.

    Ritter et al. 2026 ("LLMs can learn to reason via off-policy RL", arXiv 2602.19362): of all policies the one that maximises
    r - beta KL(p | p_behaviour) is p_behaviour exp((r - V) / beta), and this is 0 there. Whatever policy sampled is the one to
    stay near, so there is nothing to correct. On the policy's own data its gradient is that of - 2 beta A log p_current(y).
    """
    _, first_S = _sequences(inputs)
    log_ratio_S = _summed(inputs, inputs.logp_current_N - inputs.logp_behaviour_N)
    return weight_N[first_S] * (beta * log_ratio_S - inputs.advantage_N[first_S]).square(), {}


@loss(level="pair", corrects="nothing", learns_from="pair", needs=("reference",))
def online_dpo(inputs: LossInputs, weight_N: Tensor, *, beta: Positive = 0.1) -> Terms:
    """[P]: - log sigmoid(beta (h(best) - h(worst))), h(y) = log p_current(y) - log p_reference(y), for P groups.

    Rafailov et al. 2023 (arXiv 2305.18290, eq. 7) on pairs the policy wrote itself (Guo et al. 2024, arXiv 2402.04792). Which
    policy wrote them does not enter, so there is nothing to correct: of the losses compared in arXiv 2410.18252 it bears
    staleness best. Best and worst are by advantage; the trainer leaves out all others, and groups without a difference.
    """
    if inputs.logp_reference_N is None:
        raise ValueError("online_dpo needs log-probabilities under the reference")
    lengths_S, first_S = _sequences(inputs)
    h_S = _summed(inputs, inputs.logp_current_N - inputs.logp_reference_N)
    worth_S = inputs.advantage_N[first_S]
    members = [(inputs.group_S == group).nonzero().squeeze(-1) for group in sorted(set(inputs.group_S.tolist()))]
    best_P = torch.stack([each[worth_S[each].argmax()] for each in members])
    worst_P = torch.stack([each[worth_S[each].argmin()] for each in members])
    margin_P = beta * (h_S[best_P] - h_S[worst_P])
    # `sums` are divided by tokens: a pair's share of tokens makes that a mean over pairs, weighed by their length
    tokens_P = (lengths_S[best_P] + lengths_S[worst_P]).float()
    sums = {"dpo/margin": (margin_P.detach() * tokens_P).sum(), "dpo/accuracy": ((margin_P > 0) * tokens_P).sum()}
    return -logsigmoid(margin_P), sums


@loss(corrects="nothing", learns_from="best", needs=())
def best_of_n(inputs: LossInputs, weight_N: Tensor) -> Terms:
    """[N]: - log p_current, of the only completion that the trainer leaves in each group (arXiv 2410.18252, section 4.1).

    Who wrote it does not enter: nothing to correct.
    """
    return -inputs.logp_current_N, {}


@loss(corrects="masks", learns_from="teacher", needs=("behaviour", "reference"))
def reverse_kl(inputs: LossInputs, weight_N: Tensor, *, is_cap: float | None) -> Terms:
    """[N]: - m_t sg(min(r_t, cap) log(q_t / p_current)) log p_current, r = p_current / p_behaviour, q the teacher, m the masks.

    On-policy distillation (Agarwal et al. 2024, arXiv 2306.13649; as policy gradient Thinking Machines 2025, in TRL, verl and
    NeMo-RL): `truncated_is` with log q / p as the advantage of a token. Its mean is the descent of KL(p_current | q) behind the
    prefixes that behaviour wrote, as long as the cap cuts nothing; without a weight only where the data are the policy's own.
    """
    worth_N = log_ratio(_teacher(inputs), inputs.logp_current_N.detach())
    return truncated_is(replace(inputs, advantage_N=worth_N), weight_N, is_cap=is_cap)


@loss(corrects="masks", learns_from="teacher", needs=("behaviour", "reference"))
def forward_kl(inputs: LossInputs, weight_N: Tensor, *, cap: Positive = 10.0) -> Terms:
    """[N]: - m_t sg(min(q_t / p_behaviour, cap) - min(p_current / p_behaviour, cap)) log p_current, q the teacher, m the
    masks.

    Its mean is the descent of KL(q | p_current) behind the prefixes that behaviour wrote, as long as `cap` cuts nothing: the
    divergence that AsyncOPD (arXiv 2606.24143) found to stand age, from one token a place instead of the teacher's best. The
    second ratio has the mean 0, and without it the spread grows to ten times as the policy comes near to the teacher.
    """
    logp_N, behaviour_N = inputs.logp_current_N, inputs.logp_behaviour_N
    w_N, r_N = ratio(_teacher(inputs), behaviour_N), ratio(logp_N.detach(), behaviour_N)
    return -weight_N * (w_N.clamp(max=cap) - r_N.clamp(max=cap)) * logp_N, _region((w_N > cap) | (r_N > cap))


@loss(corrects="nothing", learns_from="teacher", needs=("reference", "top_k"))
def reverse_kl_top_k(inputs: LossInputs, weight_N: Tensor, *, top_k: Annotated[int, Field(ge=1, le=1024)] = 32) -> Terms:
    """[N]: sum over v in S of p_v log(p_v / q_v) + p_R log(p_R / q_R), with p the current policy, q the teacher, S the
    `top_k` likeliest tokens under p (all of a smaller vocabulary), and p_R, q_R what is left to all others.

    KL(p_current | q) of the token's place, over its likeliest tokens and one event for the rest, as in TRL's SDPO: at most the
    divergence over the whole vocabulary (data processing), the nearer the larger S, and 0 only where both agree on S. Without
    the rest a policy would gain by leaving S. No token is a sample here: what behaviour wrote decides where p and q are
    compared, and no more.
    """
    if inputs.logp_current_NK is None or inputs.logp_reference_NK is None:
        raise ValueError("reverse_kl_top_k needs the log-probabilities of the likeliest tokens under policy and teacher")
    p_NK, q_NK = inputs.logp_current_NK, inputs.logp_reference_NK
    rest_N, other_N = _rest(p_NK), _rest(q_NK)
    divergence_N = (p_NK.exp() * (p_NK - q_NK)).sum(-1) + rest_N * (rest_N / other_N).log()
    return divergence_N, {"top_k/mass": p_NK.detach().exp().sum()}


def _rest(logp_NK: Tensor) -> Tensor:
    """[N]: the probability of all other tokens, at least 1e-6: below that it is lost in float32's rounding of a sum near 1."""
    return (-torch.expm1(logp_NK.logsumexp(-1))).clamp(min=1e-6)


def _teacher(inputs: LossInputs) -> Tensor:
    if inputs.logp_reference_N is None:
        raise ValueError("distillation needs log-probabilities under the reference, the teacher")
    return inputs.logp_reference_N
