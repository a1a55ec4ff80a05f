"""Every family is computed as its own plain passes are: log-probabilities and gradients, whatever shares a micro-batch."""

from __future__ import annotations

import copy
import logging

import oracles
import pytest
import torch
from making import make_group
from transformers import PreTrainedModel

from async_rlhf.buffers.attention import FAMILIES
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.doctor import families
from async_rlhf.learner.batch.micro_batch import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.model.policy import Policy
from async_rlhf.learner.model.verification import check_policy

# Their layers carry a state, or look at places and not at positions.
ONE_A_ROW = ("bloom", "gpt_neo", "mamba", "mamba2", "minimax", "mpt", "olmo_hybrid", "recurrent_gemma", "rwkv")


GROUPS = [
    make_group(0, [20, 3, 13], prompt_length=5, vocabulary=64),
    make_group(1, [9, 16], prompt_length=11, vocabulary=64),
    make_group(2, [22, 19], prompt_length=7, vocabulary=64, observed=[(4, 16)], anew=[0]),
]
MEMBERS = [(group, rollout) for group in GROUPS for rollout in group.rollouts]


def gradients(model: PreTrainedModel, logp: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [*sorted(FAMILIES), *ONE_A_ROW])
def test_log_probabilities_and_gradients_are_those_of_plain_passes(kind: str) -> None:
    model = families.model(kind)
    policy = Policy(model, LearnerConfig())
    check_policy(policy)
    assert policy.packs == (kind not in ONE_A_ROW)
    rows = make_rows(GROUPS, [[1.0] * len(group.rollouts) for group in GROUPS], 512 if policy.packs else 1)
    (batch,) = make_micro_batches(rows, Packing(8192))
    found, _, _ = policy(batch)
    plain = [oracles.rollout_logprobs(model, *each) for each in MEMBERS]
    wanted = torch.cat([plain[member] for member in batch.member_N.unique_consecutive().tolist()])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    want, got = gradients(model, wanted), gradients(model, found)
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
