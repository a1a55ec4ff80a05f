"""Passes of the policy take the experts that were recorded, and mix them by their own logits."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import torch
from making import assert_same_gradients, make_group
from test_policy import BENT, MIXED, ROUNDING, of_parameters
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.buffers.errors import ConfigError, RecordError
from async_rlhf.buffers.record import Group, Rollout
from async_rlhf.buffers.routing import SIGMOID, SOFTMAX, Routing, routers, routing_of
from async_rlhf.experiments.doctor import families
from async_rlhf.experiments.doctor.checks import MIXTURES, mismatches
from async_rlhf.learner.batch.packing import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model.check import check_policy
from async_rlhf.learner.model.policy import Policy
from async_rlhf.learner.model.routing import RoutingReplay

QUICK = ("deepseek_v3", "olmoe", "qwen3_moe")
ALL = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.rest) for kind in sorted(SOFTMAX | SIGMOID)]


def moe(kind: str) -> PreTrainedModel:
    """2 of 4 experts, with what a trained router of the family has besides."""
    own = {"norm_topk_prob": True} if kind in ("qwen3_moe", "dots1") else {}
    made = copy.deepcopy(families.model(kind, **own))
    for router in routers(made):
        if (bias := getattr(router, "e_score_correction_bias", None)) is not None:
            bias.copy_(torch.tensor([0.9, -0.5, 0.2, 0.0]))
    return made


def routed(group: Group, routing: Routing) -> Group:
    """The same, with any experts; those of the prompt are the same in all members."""
    rng = np.random.default_rng(group.number)

    def drawn(count: int) -> np.ndarray:
        order = rng.random((count, routing.layers, routing.experts)).argsort(-1)
        return order[..., : routing.choices].astype(np.uint8)

    prompt = drawn(len(group.prompt_ids))
    rollouts = (replace(each, routing=np.concatenate((prompt, drawn(each.num_read)))) for each in group.rollouts)
    return replace(group, rollouts=tuple(rollouts))


def by_hand(router: Any, is_sigmoid: bool, layer: int, given: dict[str, Any], plain: Any, states: Tensor) -> Any:
    """The oracle of a router: given experts, weights as its family's paper has them."""
    if given["experts"] is None:
        return plain(states)
    logits = states.reshape(-1, states.shape[-1]).float() @ router.weight.float().T
    scores = 1 / (1 + (-logits).exp()) if is_sigmoid else logits.exp() / logits.exp().sum(-1, keepdim=True)
    chosen = torch.from_numpy(given["experts"][:, layer].astype(np.int64))
    weights = torch.stack([row[experts] for row, experts in zip(scores, chosen, strict=True)])
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * getattr(router, "routed_scaling_factor", 1.0), chosen


def oracle(model: PreTrainedModel, groups: list[Group]) -> list[Tensor]:
    """[N] of each rollout, with gradient: a plain pass over each of its pieces, its experts put into the routers by hand."""
    given: dict[str, Any] = {}
    is_sigmoid = model.config.model_type in SIGMOID
    for layer, router in enumerate(routers(model)):
        router.forward = partial(by_hand, router, is_sigmoid, layer, given, router.forward)
    return [_logprobs(model, group, rollout, given) for group in groups for rollout in group.rollouts]


def _logprobs(model: PreTrainedModel, group: Group, rollout: Rollout, given: dict[str, Any]) -> Tensor:
    found, at = [], 0
    for piece in rollout.pieces:
        head = group.prompt_ids.tolist() if piece.start == 0 else []
        ids = torch.tensor([[*head, *rollout.completion_ids[piece.start : piece.stop].tolist()]])
        read = ids.shape[1] - 1
        given["experts"] = None if rollout.routing is None else rollout.routing[at : at + read]
        at += read
        logp = torch.log_softmax(model(input_ids=ids[:, :-1], use_cache=False).logits[0], -1).gather(-1, ids[0, 1:, None])[:, 0]
        sampled = torch.from_numpy(rollout.sampled[piece.start : piece.stop])
        found.append(logp[len(head) - 1 :][sampled] if head else logp[sampled[1:]])
    return torch.cat(found)


@pytest.mark.parametrize("kind", ALL)
def test_replayed_numbers_and_gradients_are_those_of_the_same_experts_by_hand(kind: str) -> None:
    model = moe(kind)
    policy = Policy(model, LearnerConfig())
    assert policy.routing is not None and policy.routing == routing_of(model.config)
    check_policy(policy)
    groups = [routed(MIXED[0], policy.routing), MIXED[1], routed(MIXED[2], policy.routing)]  # one of a time before
    rows = make_rows(groups, [[1.0] * len(group.rollouts) for group in groups])
    other = moe(kind)
    plain = oracle(other, groups)
    for sharing in policy.sharings:
        policy.sharing = sharing
        (batch,) = make_micro_batches(rows, Packing(8192, sharing))
        found, *_ = policy(batch)
        members = batch.member_N.unique_consecutive().tolist()
        wanted = torch.cat([plain[member] for member in members])
        torch.testing.assert_close(found, wanted, rtol=0, atol=ROUNDING)
        unreplayed = policy(replace(batch, experts_PMk=None))[0].detach()
        assert float((unreplayed - wanted.detach()).abs().mean()) > 1e-2, "other experts are another policy"
        want = of_parameters(other, wanted)
        assert any("gate" in name for name in want)
        assert_same_gradients(of_parameters(model, found), want, BENT, sharing)


def test_layers_that_are_computed_again_see_the_experts_of_their_own_pass() -> None:
    gradients = []
    for again in (False, True):
        model = moe("olmoe")
        policy = Policy(model, LearnerConfig(gradient_checkpointing=again))
        assert policy.routing is not None
        groups = [routed(group, policy.routing) for group in MIXED]
        batches = [
            batch
            for group in groups
            for batch in make_micro_batches(make_rows([group], [[1.0] * len(group.rollouts)]), Packing(8192, policy.sharing))
        ]
        found = [policy(batch)[0] for batch in batches]  # all of them before the first backward pass
        gradients.append(of_parameters(model, torch.cat(found)))
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_the_reference_chooses_its_own_experts(tmp_path: Path) -> None:
    moe("qwen3_moe").save_pretrained(tmp_path)
    backend = making.make_backend(tmp_path, LossConfig(kl_coef=0.1), reference=tmp_path)
    machine = backend.machine
    assert machine.policy.routing is not None
    group = routed(MIXED[0], machine.policy.routing)
    (update,) = backend.partition([make_rows([group], [[1.0] * 3])])[0]
    batch, own = update.batches[0], replace(update.batches[0], experts_PMk=None)
    for each, same in ((machine.reference, True), (machine.predict, False)):
        assert torch.equal(each(batch).logp_N, each(own).logp_N) == same
    assert backend.step([make_rows([group], [[1.0, -1.0, 0.5]])], 0).applied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:, 1:], "2 experts in each of 3 layers; the model takes 2 in 4"),
        (lambda r: r[..., :1], "1 experts in each of 4 layers; the model takes 2 in 4"),
        (lambda r: r + np.uint8(4), "expert 7; the model has those from 0 to 3"),
    ],
)
def test_experts_of_another_model_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    moe("qwen3_moe").save_pretrained(tmp_path)
    backend = making.make_backend(tmp_path)
    group = routed(MIXED[1], Routing(4, 2, 4))
    wrong = replace(group, rollouts=tuple(replace(each, routing=change(each.routing)) for each in group.rollouts))
    with pytest.raises(RecordError, match=f"group 1 was recorded with {message}, which this learner does not replay"):
        backend.partition([make_rows([wrong], [[1.0, 1.0]])])


def test_a_learner_that_cannot_replay_says_so(model_dir: Path) -> None:
    group = routed(make_group(0, [3, 4]), Routing(4, 2, 4))
    with pytest.raises(RecordError, match="group 0 was recorded with experts that are not known here, which"):
        making.make_backend(model_dir).partition([make_rows([group], [[1.0, 1.0]])])


def test_a_router_that_mixes_otherwise_than_its_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = moe("qwen3_moe")
    monkeypatch.setattr(routers(model)[0], "routed_scaling_factor", 2.0, raising=False)
    with pytest.raises(ConfigError, match="model type 'qwen3_moe', whose choice of experts cannot be recorded"):
        RoutingReplay(model)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.rest] * (kind != "olmoe")) for kind in MIXTURES])
def test_replay_brings_the_learner_nearer_to_the_engine_and_no_further_with_the_same_weights(kind: str, tmp_path: Path) -> None:
    found = mismatches(kind, tmp_path)
    assert max(found["nothing"]) < 1e-5
    for case in ("bfloat16", "an update"):
        own, replayed, differ = found[case]
        assert differ > 0.01 and replayed < 0.75 * own
