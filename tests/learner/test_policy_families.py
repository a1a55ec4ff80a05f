"""Every family is computed as its own plain passes are: log-probabilities and gradients, whatever shares a micro-batch."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rlhf.buffers.attention import FAMILIES
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.record import Group, Rollout, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from async_rlhf.learner.batch.micro_batch import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.model.policy import Policy
from async_rlhf.learner.model.verification import check_policy

# Their layers carry a state, or look at places and not at positions.
ONE_A_ROW = ("bloom", "gpt_neo", "mamba", "mamba2", "minimax", "mpt", "olmo_hybrid", "recurrent_gemma", "rwkv")


def group(number: int, prompt: int, lengths: list[int]) -> Group:
    rng = np.random.default_rng(number)

    def ids(count: int) -> np.ndarray:
        return rng.integers(3, 64, count).astype(np.int32)

    rollouts = tuple(Rollout(ids(n), np.zeros(n, np.float32), (Span(0, n),), "length") for n in lengths)
    return Group(number, 0, ids(prompt), rollouts, Sampling())


def group_begun_anew(number: int, prompt: int, turns: list[tuple[int, int, int]]) -> Group:
    """Of each member (sampled, read anew, sampled)."""
    plain = group(number, prompt, [sum(each) for each in turns])
    spans = [(Span(0, a), Span(None, b, restarts=True), Span(0, c)) for a, b, c in turns]
    rollouts = tuple(
        replace(r, spans=s, logprobs=r.logprobs[s[1].num_tokens :]) for r, s in zip(plain.rollouts, spans, strict=True)
    )
    return replace(plain, rollouts=rollouts)


GROUPS = [group(0, 5, [20, 3, 13]), group(1, 11, [9, 16]), group_begun_anew(2, 7, [(4, 12, 6), (9, 3, 2)])]


def pieces_of(group: Group, rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """(prompt, what was sampled behind it)"""
    ids = rollout.completion_ids.tolist()
    if len(rollout.spans) == 1:
        return [(group.prompt_ids.tolist(), ids)]
    first, anew = rollout.spans[0].num_tokens, sum(span.num_tokens for span in rollout.spans[:2])
    return [(group.prompt_ids.tolist(), ids[:first]), (ids[first:anew], ids[anew:])]


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [*sorted(FAMILIES), *ONE_A_ROW])
def test_log_probabilities_and_gradients_are_those_of_plain_passes(kind: str) -> None:
    model = families.model(kind)
    policy = Policy(model, LearnerConfig())
    check_policy(policy)
    assert policy.packs == (kind not in ONE_A_ROW)
    rows = make_rows(GROUPS, [[1.0] * 3, [1.0] * 2, [1.0] * 2], 512 if policy.packs else 1)
    (batch,) = make_micro_batches(rows, Packing(8192))
    found, _, _ = policy(batch)
    plain = {
        member: torch.cat([families.plain_logprobs(model, *texts) for texts in pieces_of(each, rollout)])
        for member, (each, rollout) in enumerate((each, rollout) for each in GROUPS for rollout in each.rollouts)
    }
    wanted = torch.cat([plain[int(member)] for member in batch.member_N.unique_consecutive()])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    weights = torch.linspace(-1, 1, len(wanted))
    want = gradients(model, (wanted * weights).sum())
    got = gradients(model, (found * weights).sum())
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=2e-4, msg=f"the gradient of {name} differs")


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model type 'bert': log-probabilities of padded rows differ from plain passes by"):
        check_policy(Policy(families.model("bert"), LearnerConfig()))


def test_a_family_that_cannot_share_rows_after_all_has_one_completion_a_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("async_rlhf.buffers.attention.FAMILIES", FAMILIES | {"mpt"})
    policy = Policy(families.model("mpt"), LearnerConfig())
    assert policy.packs
    with caplog.at_level(logging.WARNING):
        check_policy(policy)
    assert not policy.packs and "in one row this model mixes them" in caplog.text


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite", "llama"])
def test_a_cap_or_scale_of_logits_is_seen_also_where_logits_are_small(kind: str) -> None:
    small = copy.deepcopy(families.model(kind, **({"logits_scaling": 4.0} if kind == "granite" else {})))
    with torch.no_grad():
        for weights in small.parameters():
            weights.mul_(0.05)
    assert Policy(small, LearnerConfig())._chunked == (kind == "llama")
