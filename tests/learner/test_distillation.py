"""Distillation: where its losses lead on data of any age, whom they learn from, and that they train."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import GROUPS, ROWS, make_backend, make_group, make_model
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rlhf.experiments.doctor import families
from async_rlhf.experiments.gradient_laws.__main__ import DISTILLED, Case, distilled, markdown_of_distillation
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import AdvantageConfig, LossConfig
from async_rlhf.learner.model.logprobs import token_ids
from async_rlhf.learner.objective import enumerable
from async_rlhf.learner.objective.estimation import estimate_advantages, select_members
from async_rlhf.learner.objective.objective import LossInputs, objective
from async_rlhf.learner.registry import LossSpec, load_function, loss_spec, losses
from tests.conftest import REPOSITORY

BEHAVIOUR, REWARD = enumerable.initial(), enumerable.rewards()
TEACHER = enumerable.later(BEHAVIOUR, REWARD, 32)
OF_TEACHERS = [kind for kind in losses() if loss_spec(kind).learns_from == "teacher"]
OPEN = {"reverse_kl": {"is_cap": 1e9}, "forward_kl": {"cap": 1e9}, "reverse_kl_top_k": {}}


def on_the_way(steps: int) -> Tensor:
    logits = BEHAVIOUR
    for _ in range(steps):
        logits = logits + 0.5 * enumerable.towards(logits, TEACHER, logits, forward=False).reshape(enumerable.C, enumerable.V)
    return logits


def expected(kind: str, current: Tensor, **settings: float | None) -> Tensor:
    config = LossConfig.model_validate({"kind": kind, **settings})
    return enumerable.expected(config, current, BEHAVIOUR, REWARD, 0, TEACHER)


@pytest.mark.parametrize("kind", OF_TEACHERS)
@pytest.mark.parametrize("age", [0, 4, 16])
def test_at_any_age_the_divergence_behind_the_prefixes_of_the_data_falls_fastest(kind: str, age: int) -> None:
    current = on_the_way(age)
    exact = enumerable.towards(current, TEACHER, BEHAVIOUR, forward=kind == "forward_kl")
    torch.testing.assert_close(expected(kind, current, **OPEN[kind]), exact)


def test_without_a_weight_old_data_lead_the_reverse_divergence_elsewhere_and_the_forward_one_has_no_such_weight() -> None:
    current = on_the_way(8)
    exact = enumerable.towards(current, TEACHER, BEHAVIOUR, forward=False)
    assert float((expected("reverse_kl", current, is_cap=None) - exact).norm() / exact.norm()) > 1
    torch.testing.assert_close(expected("forward_kl", current, is_cap=None), expected("forward_kl", current, is_cap=0.1))


@pytest.mark.parametrize("kind", OF_TEACHERS)
def test_a_policy_that_is_the_teacher_stays_whatever_sampled(kind: str) -> None:
    inputs = enumerable.inputs_for(TEACHER, BEHAVIOUR, torch.ones(enumerable.Y, dtype=torch.float64), 9, TEACHER)
    config = LossConfig(kind=kind, is_cap=1.5, **({"cap": 1.5} if kind == "forward_kl" else {}))
    assert float(enumerable.gradients(inputs, config, TEACHER).abs().max()) < 1e-15


@given(st.integers(0, 10**6), st.floats(0.1, 1.5))
def test_of_more_tokens_the_divergence_grows_to_that_of_the_whole_vocabulary(seed: int, spread: float) -> None:
    logits, teacher = (spread * torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(seed))).double()
    p, q = torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1)
    whole = float((p.exp() * (p - q)).sum())
    order = p.argsort(descending=True)
    found = [float(divergence(p.gather(1, order[:, :k]), q.gather(1, order[:, :k]))) for k in range(1, 10)]
    assert all(fewer > -1e-5 and fewer < more + 1e-5 for fewer, more in pairwise(found))
    assert found[-2:] == pytest.approx([whole, whole], abs=1e-4), "with one token left, the rest is that token"


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Summed over places, with these log-probabilities of their likeliest tokens."""
    one = torch.zeros(1, dtype=torch.int64)
    inputs = LossInputs(*[torch.zeros(1)] * 4, one, one, one, logp_current_NK=p, logp_reference_NK=q)
    terms: Tensor = load_function("loss", "reverse_kl_top_k")(inputs, torch.ones(1))[0]
    return terms.sum()


@pytest.mark.rest
def test_value_and_gradient_over_the_likeliest_tokens_are_those_of_trl() -> None:
    with warnings.catch_warnings(action="ignore"):  # of versions of vLLM, which is not used here
        trl = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    own, teacher = (2 * torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(0))).double()
    theirs = own.clone().requires_grad_()
    settings = {"distillation_topk": 5, "distillation_alpha": 1.0, "distillation_add_tail": True}
    wanted = trl.compute_topk_self_distillation_loss(theirs, teacher, **settings).sum()
    wanted.backward()
    ids = token_ids(own.requires_grad_(), torch.zeros(7, dtype=torch.int64), 5)[:, 1:]
    found = divergence(*(torch.log_softmax(each, -1).gather(1, ids) for each in (own, teacher)))
    found.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mpt"])
def test_whatever_its_family_a_teacher_in_the_learner_gives_the_divergence_of_plain_passes(
    family: str, model_dir: Path, tmp_path: Path
) -> None:
    """Of all tokens; its rows are shared as both models can."""
    families.model(family).save_pretrained(tmp_path)
    own = make_backend(model_dir, LossConfig(kind="reverse_kl_top_k", top_k=1024), reference=tmp_path)
    assert own.machine.policy.packs == (family != "mpt")
    found = own.step([ROWS], 0).metrics
    plain = [AutoModelForCausalLM.from_pretrained(each) for each in (model_dir, tmp_path)]
    exact = []
    for prompt, rollout in ((group.prompt_ids, rollout) for group in GROUPS for rollout in group.rollouts):
        ids = torch.from_numpy(np.concatenate([prompt, rollout.completion_ids[:-1]])).long()[None]
        logits_PV, logits_QV = (model(ids).logits[0, len(prompt) - 1 :].detach() for model in plain)
        p, q = torch.log_softmax(logits_PV, -1), torch.log_softmax(logits_QV, -1)
        exact += (p.exp() * (p - q[:, : p.shape[1]])).sum(-1).tolist()
    assert found["loss"] == pytest.approx(sum(exact) / len(exact), rel=1e-3) and found["top_k/mass"] == pytest.approx(
        1, abs=1e-5
    )


def test_beside_a_reward_the_divergence_of_the_second_estimator_is_the_reverse_loss() -> None:
    current = on_the_way(4)
    weighed = {"kind": "truncated_is", "kl_coef": 0.3, "kl_estimator": "k2"}
    both, alone = (LossConfig.model_validate({**weighed, "kl_coef": coefficient}) for coefficient in (0.3, 0.0))
    inputs = enumerable.inputs_for(current, BEHAVIOUR, REWARD, 4, TEACHER)
    found = enumerable.gradients(inputs, both, current) - enumerable.gradients(inputs, alone, current)
    torch.testing.assert_close(found, 0.3 * enumerable.gradients(inputs, LossConfig(kind="reverse_kl"), current))


def test_however_far_a_teacher_is_from_a_token_it_still_pulls() -> None:
    leaf = torch.tensor([-0.01], requires_grad=True)
    one = torch.zeros(1, dtype=torch.int64)
    inputs = replace(
        enumerable.inputs_for(BEHAVIOUR, BEHAVIOUR, REWARD, 0),
        logp_current_N=leaf, logp_proximal_N=leaf.detach(), logp_behaviour_N=leaf.detach(), advantage_N=torch.zeros(1),
        logp_reference_N=torch.tensor([-500.0]), sequence_N=one, group_S=one, staleness_N=one,
    )  # fmt: skip
    objective(inputs, LossConfig(kind="reverse_kl")).total.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None and leaf.grad.tolist() == [20.0], "where log-ratios are clamped"


@pytest.mark.parametrize("case", DISTILLED, ids=lambda case: case.name)
def test_the_guide_has_the_biases_of_distillation(case: Case) -> None:
    table = markdown_of_distillation()
    assert table in (REPOSITORY / "docs" / "learner.md").read_text(), "python -m async_rlhf.experiments.gradient_laws makes it"
    own, old, spread = distilled(case, BEHAVIOUR, BEHAVIOUR, TEACHER)
    assert f"| {case.name} | {own:.2f} / {old:.2f} / {spread:.1f} |" in table and own == old


def test_all_completions_are_learned_from_whatever_their_rewards_but_those_of_which_a_score_failed() -> None:
    groups = [make_group(0, [3, 2, 4], rewards=[1.0, None, 1.0], truncated=[2]), make_group(1, [2, 2], rewards=[0.0, 0.0])]
    rewards = [[1.0, None, 1.0], [None, None]]
    loss, advantage = LossConfig(kind="reverse_kl"), AdvantageConfig()
    chosen = select_members(groups, rewards, advantage, loss)
    assert chosen == [[0.0, None, 0.0], [0.0, 0.0]]
    assert estimate_advantages(groups, rewards, chosen, {}, advantage, loss).advantages == chosen
    assert select_members(groups, rewards, advantage, loss.model_copy(update={"mask_truncated": True}))[0] == [0.0, None, None]


def test_what_learns_from_a_teacher_reads_it() -> None:
    with pytest.raises(ValidationError, match='declare "reference" in needs too'):
        LossSpec(learns_from="teacher")


@pytest.mark.rest
@pytest.mark.parametrize("kind", OF_TEACHERS)
def test_twenty_steps_on_what_version_0_sampled_come_nearer_to_the_teacher(kind: str, model_dir: Path, tmp_path: Path) -> None:
    teacher = make_model("llama")
    with torch.no_grad():
        for p in teacher.parameters():
            p += 0.1 * torch.randn_like(p)
    teacher.save_pretrained(tmp_path / "teacher")
    sampled, asked = make_backend(model_dir).evaluate(ROWS), make_backend(tmp_path / "teacher").evaluate(ROWS)
    each = [(sampled[index].logp_proximal, asked[index].logp_proximal) for index in sorted(sampled)]
    told = iter(each)
    groups = [
        replace(group, rollouts=tuple(replace(r, logprobs=p, reference=q) for r, (p, q) in zip(group.rollouts, told)))  # noqa: B905
        for group in GROUPS
    ]
    held = tmp_path / "teacher" if "top_k" in loss_spec(kind).needs else None
    own = make_backend(model_dir, LossConfig(kind=kind), reference=held)
    rows = make_rows(groups, [[0.0] * 3] * 4)
    reports = [own.step([rows], step) for step in range(20)]
    assert all(report.applied and math.isfinite(report.metrics["loss"]) for report in reports)
    after = own.evaluate(rows)
    was, is_now = (
        sum(float(abs(p - q).mean()) for p, (_, q) in zip(policy, each, strict=True))
        for policy in ([p for p, _ in each], [after[index].logp_proximal for index in sorted(after)])
    )
    assert is_now < 0.8 * was
