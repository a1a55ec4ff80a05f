"""What was sampled from part of the vocabulary is learned from on that part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.buffers.errors import RecordError
from async_rlhf.buffers.record import Group, Rollout, SamplingMask
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.gradient_laws.__main__ import CASES, Case
from async_rlhf.learner.batch.micro_batch import Packing, SamplingMasks, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.model.logprobs import token_logprobs
from async_rlhf.learner.objective import enumerable as policy
from async_rlhf.learner.objective.loss import LossInputs
from async_rlhf.learner.objective.objective import objective
from tests.learner.making import TINY_SPELLER, make_backend, make_group

REWARD = policy.rewards()
BEHAVIOUR = policy.initial()
FAR = policy.later(BEHAVIOUR, REWARD, 16)
ONES = torch.ones(policy.Y * policy.T, dtype=torch.float64)
EXACT = next(case.config for case in CASES if case.name == "sequence weight, not truncated")


def nucleus(logits: Tensor, top_p: float = 0.7) -> Tensor:
    """bool [C, V]: the fewest likeliest tokens that reach `top_p`."""
    p, ids = torch.softmax(logits, -1).sort(-1, descending=True)
    return torch.zeros_like(p, dtype=torch.bool).scatter(-1, ids, p.cumsum(-1) - p < top_p)


def supports_of(kept_NV: Tensor) -> SamplingMasks:
    return SamplingMasks(kept_NV.sum(-1), kept_NV.nonzero()[:, 1])


def masked_reward(logits: Tensor, kept: Tensor) -> Tensor:
    """Expected reward of the policy restricted to `kept`; by enumeration, written like the definition."""
    p = torch.softmax(logits, -1) * kept
    p = p / p.sum(-1, keepdim=True)
    return (p[policy.PREFIXES, policy.COMPLETIONS].prod(1) * REWARD).sum()


def gradient_of_masked_reward(logits: Tensor, kept: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    masked_reward(leaf, kept).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


def expected(config: LossConfig, current: Tensor, kept: Tensor, *, restricted: bool = True) -> Tensor:
    """[C, V]: the expected ascent direction over completions of the behaviour policy, cut off at `kept`."""
    inside = kept[policy.PREFIXES, policy.COMPLETIONS].all(1)
    prefix_N, token_N = policy.PREFIXES[inside].flatten(), policy.COMPLETIONS[inside].flatten()
    sampling_masks = supports_of(kept[prefix_N])
    ones_N, each = ONES[: len(token_N)], torch.arange(len(token_N) // policy.T)
    behaviour_N = token_logprobs(BEHAVIOUR[prefix_N], token_N, ones_N, sampling_masks).double()
    leaf = current.clone().requires_grad_()
    now_N = token_logprobs(leaf[prefix_N], token_N, ones_N, sampling_masks if restricted else None).double()
    weights_Y = behaviour_N.reshape(-1, policy.T).sum(1).exp()
    reward_Y = REWARD[inside]
    inputs = LossInputs(
        logp_current_N=now_N.detach().requires_grad_(),
        logp_proximal_N=now_N.detach(),
        logp_behaviour_N=behaviour_N,
        advantage_N=(reward_Y - (weights_Y * reward_Y).sum()).repeat_interleave(policy.T),
        sequence_N=each.repeat_interleave(policy.T),
        group_S=each,
        staleness_N=torch.zeros_like(token_N),
    )
    objective(inputs, config).total.backward()  # type: ignore[no-untyped-call]
    assert inputs.logp_current_N.grad is not None
    now_N.backward(-inputs.logp_current_N.grad * weights_Y.repeat_interleave(policy.T))  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_of_its_own_truncated_samples_every_estimator_gives_the_gradient_of_the_truncated_policy(case: Case) -> None:
    kept = nucleus(BEHAVIOUR)
    found = expected(case.config, BEHAVIOUR, kept) / case.scale
    torch.testing.assert_close(found, gradient_of_masked_reward(BEHAVIOUR, kept), rtol=1e-5, atol=1e-6)


def test_that_gradient_is_the_slope_of_what_is_sampled_with_the_truncation_done_again() -> None:
    direction = policy.initial(seed=5, scale=1.0)
    near = [BEHAVIOUR + sign * 1e-6 * direction for sign in (1, -1)]
    slope = (masked_reward(near[0], nucleus(near[0])) - masked_reward(near[1], nucleus(near[1]))) / 2e-6
    found = (expected(EXACT, BEHAVIOUR, nucleus(BEHAVIOUR)) * direction).sum()
    assert float(found) == pytest.approx(float(slope), rel=1e-4)


def test_stale_samples_give_the_gradient_of_the_policy_restricted_to_what_they_were_chosen_among() -> None:
    kept = nucleus(BEHAVIOUR)
    found = expected(EXACT, FAR, kept)
    torch.testing.assert_close(found, gradient_of_masked_reward(FAR, kept), rtol=1e-4, atol=1e-6)
    assert not found[~kept].any()
    # ratios to the whole vocabulary would be wrong already for the policy that sampled
    exact, wrong = gradient_of_masked_reward(BEHAVIOUR, kept), expected(EXACT, BEHAVIOUR, kept, restricted=False)
    assert float((wrong - exact).norm() / exact.norm()) > 0.3


def with_sampling_mask(rollout: Rollout, *, extra: int) -> Rollout:
    """As if each token had been one of `extra` more."""
    ids = [np.unique([token, *range(extra)]).astype(np.int32) for token in rollout.completion_ids]
    return replace(rollout, sampling_mask=SamplingMask(np.array([len(each) for each in ids], np.int32), np.concatenate(ids)))


def truncated_group(number: int, extras: list[int | None]) -> Group:
    group = make_group(number, [3 + index for index in range(len(extras))])
    rollouts = [r if e is None else with_sampling_mask(r, extra=e) for r, e in zip(group.rollouts, extras, strict=True)]
    return replace(group, rollouts=tuple(rollouts), sampling=Sampling(top_p=0.9))


def test_a_token_finds_its_own_support_however_rows_are_cut_and_ordered() -> None:
    groups = [truncated_group(0, [2, None, 5]), truncated_group(1, [4]), make_group(2, [3])]
    rows = make_rows(groups, [[1.0] * len(group.rollouts) for group in groups], 8)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for batch in (batch for tokens in (8, 64) for batch in make_micro_batches(rows, Packing(tokens))):
        recorded = [rollouts[member].sampling_mask for member in batch.member_N.unique_consecutive().tolist()]
        masks = batch.sampling_masks
        assert (masks is None) == all(each is None for each in recorded)
        if masks is not None:
            assert masks.ids_K.tolist() == [token for each in recorded if each is not None for token in each.ids.tolist()]
            for one, size, target in zip(masks.chunks(1), masks.sizes_N, batch.target_N, strict=True):
                assert size == 0 or int(target) in one.ids_K.tolist()


def test_a_truncated_sample_without_its_support_is_refused_by_a_loss_of_ratios_and_by_no_other() -> None:
    rows = make_rows([truncated_group(7, [2, None])], [[1.0, -1.0]], 512)
    for loss in (LossConfig(kind="best_of_n"), LossConfig(allow_uncorrected=True)):
        ((update,),) = make_backend(TINY_SPELLER, loss).partition([rows])
        assert (update.batches[0].sampling_masks is None) == (loss.kind == "best_of_n"), "likelihoods are of all tokens"
    with pytest.raises(RecordError, match=r"group 7 was sampled with top_p = 0.9,.*Sample from all of it"):
        make_backend(TINY_SPELLER).partition([rows])


@pytest.mark.parametrize("cut_off", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_what_the_engine_has_just_sampled_has_ratio_one(cut_off: dict[str, float]) -> None:
    engine = load_engine(str(TINY_SPELLER), EngineConfig(slots=8), version=0)
    prompt = tuple(range(4, 12))
    engine.submit([Request(RolloutKey(0, 0, m), prompt, 12, Sampling(temperature=4.0, **cut_off), seed=m) for m in range(8)])  # type: ignore[arg-type]
    done = []
    while engine.num_unfinished:
        done += engine.step()
    rollouts = [Rollout(c.token_ids, c.logprobs, c.spans, c.finish_reason, sampling_mask=c.sampling_mask) for c in done]
    assert any(r.sampling_mask is not None and r.sampling_mask.sizes.max() > 1 for r in rollouts)
    group = Group(0, 0, np.array(prompt, np.int32), tuple(rollouts), Sampling(temperature=4.0, **cut_off))  # type: ignore[arg-type]
    rows = make_rows([group], [[1.0, -1.0] * 4], 512)
    seen = make_backend(TINY_SPELLER).evaluate(rows)
    for index, rollout in enumerate(rollouts):
        np.testing.assert_allclose(seen[index].logp_proximal, rollout.logprobs, atol=2e-5)
