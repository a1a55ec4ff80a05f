"""Log-probabilities and entropies are those of torch.distributions, also of a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical

from async_rlhf.actors.engine import Request, RolloutKey, completed
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.errors import RecordError
from async_rlhf.buffers.record import Group, Rollout, SamplingMask
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.gradient_laws.__main__ import CASES, Case
from async_rlhf.learner.batch.micro_batch import SamplingMasks
from async_rlhf.learner.batch.packing import Packing, Sharing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LossConfig, chunk_tokens
from async_rlhf.learner.model.logprobs import chunked_logprobs, token_energy, token_entropy, token_ids, token_logprobs
from async_rlhf.learner.objective import enumerable as policy
from async_rlhf.learner.objective.objective import LossInputs, objective
from tests.learner.making import TINY_SPELLER, make_backend, make_group

TARGET_N = torch.tensor([0, 10, 3, 3, 7, 1, 5])
TEMPERATURE_N = torch.tensor([1.0, 0.3, 2.0, 1.0, 0.7, 10.0, 1.5])


@given(
    seed=st.integers(0, 10**6), rows=st.integers(1, 9), remembered=st.sampled_from([0, 3, 7]), biased=st.booleans(),
    restricted=st.booleans(), others=st.sampled_from([0, 2, 20]),
)  # fmt: skip
def test_whole_and_in_chunks_they_and_their_gradients_are_those_of_the_tempered_distribution_of_each_token(
    seed: int, rows: int, remembered: int, biased: bool, restricted: bool, others: int
) -> None:
    """Also of one that is renormalised over part of the vocabulary; and of other tokens in its place, the likeliest."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((7, 5), (11, 5), (11,))[: 2 + biased]
    exact = [(2 * torch.randn(*shape, generator=random, dtype=torch.float64)).requires_grad_() for shape in shapes]
    given_ = [each.detach().float().requires_grad_() for each in exact]
    kept = torch.rand(7, 11, generator=random) < 0.4
    kept[torch.arange(7), TARGET_N] = True
    cut_off = torch.rand(7, generator=random) < 0.7  # the others come from the whole vocabulary
    sizes = kept.sum(-1) * cut_off
    masks = SamplingMasks(sizes, kept[cut_off].nonzero()[:, 1]) if restricted else None
    logits = exact[0] @ exact[1].T + (exact[2] if biased else 0)
    if restricted:
        logits = logits.masked_fill(~kept & cut_off[:, None], -1e30)
    distribution = Categorical(logits=logits / TEMPERATURE_N[:, None])
    others = 0 if restricted else others
    ids_NJ = torch.cat([TARGET_N[:, None], logits.topk(min(others, 11)).indices], 1)
    wanted = [distribution.logits.gather(1, ids_NJ), distribution.entropy()]  # type: ignore[no-untyped-call]
    hidden, weight, bias = [*given_, None][:3]
    assert hidden is not None and weight is not None
    whole_NV = hidden @ weight.T + (0 if bias is None else bias)
    assert torch.equal(ids_NJ, token_ids(whole_NV, TARGET_N, others))
    whole = [token_logprobs(whole_NV, ids_NJ, TEMPERATURE_N, masks), token_entropy(whole_NV, TEMPERATURE_N, masks)]
    tokens = TARGET_N, TEMPERATURE_N, rows, masks, remembered, False
    chunked = chunked_logprobs(hidden, weight, bias, *tokens, others)
    assert torch.equal(ids_NJ, chunked[3])
    torch.testing.assert_close(chunked_logprobs(hidden, weight, bias, *tokens, ids_NJ[:, 1:])[0], chunked[0], rtol=0, atol=0)
    assert chunked[2] is None
    energy = chunked_logprobs(hidden, weight, bias, TARGET_N, TEMPERATURE_N, rows, masks, energies=True)[2]
    p, one = distribution.probs.detach(), torch.nn.functional.one_hot(TARGET_N, 11)
    for each in (energy, token_energy(whole_NV.detach(), TARGET_N, TEMPERATURE_N, masks)):
        torch.testing.assert_close(each, (one - p).square().sum(-1).float(), rtol=1e-4, atol=1e-5)
    factors = torch.randn(7, ids_NJ.shape[1] + 1, generator=random)

    def with_gradients(pair: Sequence[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        both = torch.cat([pair[0], pair[1][:, None]], 1)
        gradients = torch.autograd.grad((both * factors).sum(), leaves, retain_graph=True)
        return [each.detach().float() for each in (*pair, *gradients)]

    for found in (whole, chunked[:2]):
        for mine, theirs in zip(with_gradients(found, given_), with_gradients(wanted, exact), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_logits_of_any_size_give_finite_numbers_and_gradients() -> None:
    """Of a token of the vocabulary that is masked, too, and of no tokens."""
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 1e30, 0.0], [float("-inf"), 0.0, 0.0]])
    for row, logp, entropy in zip(logits, [-2e4, 0.0, -0.6931472], [0.0, 0.0, 0.6931472], strict=True):
        hidden = torch.zeros(1, 2, requires_grad=True)
        tokens = torch.tensor([1]), torch.ones(1)
        logps, entropies, *_ = chunked_logprobs(hidden, torch.ones(3, 2), row, *tokens, 1)
        found = logps[:, 0], entropies
        (found[0] + found[1]).sum().backward()  # type: ignore[no-untyped-call]
        whole = token_logprobs(row[None], *tokens), token_entropy(row[None], tokens[1])
        assert torch.cat(found).tolist() == torch.cat(whole).tolist() == pytest.approx([logp, entropy])
        assert hidden.grad is not None and bool(torch.isfinite(hidden.grad).all())
        nothing = chunked_logprobs(hidden[:0], torch.ones(3, 2), row, tokens[0][:0], tokens[1][:0], 1)
        assert [len(each) for each in nothing[:2]] == [0, 0]


def test_from_half_precision_they_are_float32_and_so_is_the_gradient_of_the_layer() -> None:
    random = torch.Generator().manual_seed(1)
    hidden, weight = (2 * torch.randn(*shape, generator=random) for shape in ((7, 5), (11, 5)))
    layer = weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, *_ = chunked_logprobs(hidden, layer, None, TARGET_N, TEMPERATURE_N, 2)
    logp = logp[:, 0]
    logp.sum().backward()  # type: ignore[no-untyped-call]
    whole = hidden @ weight.T
    assert logp.dtype == token_logprobs(whole.bfloat16(), TARGET_N, TEMPERATURE_N).dtype == torch.float32
    assert layer.grad is not None and layer.grad.dtype == torch.float32
    torch.testing.assert_close(logp, token_logprobs(whole, TARGET_N, TEMPERATURE_N), rtol=0.02, atol=0.2)


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "device"),
    [(1024, 4096, "cpu"), (151_936, 128, "cpu"), (2**20, 64, "cpu"), (10**9, 1, "cpu"), (128 * 1024, 512, "cuda")],
)
def test_a_chunk_is_small_on_a_cpu_but_makes_up_for_reading_the_output_layer(vocabulary: int, tokens: int, device: str) -> None:
    assert chunk_tokens(vocabulary, device) == tokens


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
    rows = make_rows(groups, [[1.0] * len(group.rollouts) for group in groups])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    packings = [Packing(tokens, sharing, row_tokens=8) for tokens in (8, 64) for sharing in get_args(Sharing)]
    for batch in (batch for packing in packings for batch in make_micro_batches(rows, packing)):
        recorded = [rollouts[member].sampling_mask for member in batch.member_N.unique_consecutive().tolist()]
        masks = batch.sampling_masks
        assert (masks is None) == all(each is None for each in recorded)
        if masks is not None:
            assert masks.ids_K.tolist() == [token for each in recorded if each is not None for token in each.ids.tolist()]
            for one, size, target in zip(masks.chunks(1), masks.sizes_N, batch.target_N, strict=True):
                assert size == 0 or int(target) in one.ids_K.tolist()


def test_a_truncated_sample_without_its_support_is_refused_by_a_loss_of_ratios_and_by_no_other() -> None:
    rows = make_rows([truncated_group(7, [2, None])], [[1.0, -1.0]])
    for loss in (LossConfig(kind="best_of_n"), LossConfig(allow_uncorrected=True)):
        ((update,),) = make_backend(TINY_SPELLER, loss).partition([rows])
        assert (update.batches[0].sampling_masks is None) == (loss.kind == "best_of_n"), "likelihoods are of all tokens"
    with pytest.raises(RecordError, match=r"group 7 was sampled with top_p = 0.9,.*Sample from all of it"):
        make_backend(TINY_SPELLER).partition([rows])


@pytest.mark.parametrize("cut_off", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_what_the_engine_has_just_sampled_has_ratio_one(cut_off: dict[str, float]) -> None:
    engine = load_engine(str(TINY_SPELLER), TorchEngineConfig(slots=8), version=0)
    prompt = tuple(range(4, 12))
    requests = [Request(RolloutKey(0, 0, m), prompt, 12, Sampling(temperature=4.0, **cut_off), seed=m) for m in range(8)]  # type: ignore[arg-type]
    done = completed(engine, requests).values()
    rollouts = [Rollout(c.token_ids, c.logprobs, c.spans, c.finish_reason, sampling_mask=c.sampling_mask) for c in done]
    assert any(r.sampling_mask is not None and r.sampling_mask.sizes.max() > 1 for r in rollouts)
    group = Group(0, 0, np.array(prompt, np.int32), tuple(rollouts), Sampling(temperature=4.0, **cut_off))  # type: ignore[arg-type]
    rows = make_rows([group], [[1.0, -1.0] * 4])
    seen = make_backend(TINY_SPELLER).evaluate(rows)
    for index, rollout in enumerate(rollouts):
        np.testing.assert_allclose(seen[index].logp_proximal, rollout.logprobs, atol=1e-4)
