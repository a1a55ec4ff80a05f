"""How the policy is computed changes memory and rounding alone; every family is computed as its own plain passes are."""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path
from typing import Any

import making
import numpy as np
import oracles
import pytest
import torch
from making import ADVANTAGES, GROUPS, ROWS, assert_same_gradients, make_group, weights, with_returns
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

from async_rlhf.buffers.attention import FAMILIES
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.doctor import families
from async_rlhf.learner.batch.packing import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model import blocks
from async_rlhf.learner.model.check import check_policy
from async_rlhf.learner.model.policy import Policy
from async_rlhf.learner.step.controller import Controller

make_backend = partial(making.make_backend, max_grad_norm=1e6)


def gradient(backend: Controller) -> dict[str, Tensor]:
    assert backend.step([ROWS], 0).applied
    return {name: p.grad.clone() for name, p in backend.machine.policy.model.named_parameters() if p.grad is not None}


def test_layers_that_compute_their_activations_again_give_the_same_gradient(model_dir: Path) -> None:
    backends = [make_backend(model_dir, gradient_checkpointing=on) for on in (False, True)]
    calls: list[bool] = []
    for on, backend in enumerate(backends):
        model: Any = backend.machine.policy.model
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, on=bool(on): calls.append(on))
    plain, again = map(gradient, backends)
    assert calls == [False, True, True], "their forward pass is run twice"
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("setting", ["gradient_checkpointing", "compile"])
def test_a_model_without_such_layers_or_that_the_compiler_refuses_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    def refuses(*_: object) -> None:
        raise NotImplementedError("no such processor")

    torch._dynamo.reset()
    monkeypatch.setattr("async_rlhf.learner.model.policy._COMPILER", refuses)
    with pytest.raises(ConfigError, match=rf"learner\.{setting} = true: this model has no layers that support it; use false"):
        Policy(torch.nn.Module(), LearnerConfig(**{setting: True}))
    if setting == "compile":
        with pytest.raises(ConfigError, match=r"learner.compile = true: this model is not compiled here: .*no such processor"):
            make_backend(model_dir, compile=True)


def test_products_in_half_precision_leave_weights_gradient_and_optimizer_in_float32(model_dir: Path) -> None:
    half, whole = make_backend(model_dir, dtype="bfloat16"), make_backend(model_dir)
    ours, exact = gradient(half), gradient(whole)
    for name, grad in ours.items():
        assert grad.dtype == torch.float32
        assert float((grad - exact[name]).norm()) < 0.1 * float(exact[name].norm()) + 1e-3
    assert any(not torch.equal(ours[name], exact[name]) for name in ours)
    state = [value for each in half.machine._optimizer.state.values() for value in each.values()]
    assert state and all(value.dtype == torch.float32 for value in [*state, *half.machine.policy.model.parameters()])


def test_one_mask_in_the_type_of_the_products_serves_all_layers_and_rows_of_one_completion_have_none(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_backend(model_dir, dtype="bfloat16", row_tokens=8).machine
    machine.policy.sharing = "rows"
    backend = Controller(machine, LossConfig())
    made: list[dict[str, Any]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spied(*args: Any, **named: Any) -> Tensor:
        made.append(named)
        return attend(*args, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    with torch.no_grad():
        backend.evaluate(make_rows(GROUPS, ADVANTAGES))  # of each group two share a row and one is alone
    first, second, *alone = made
    mask, same = first["attn_mask"], second["attn_mask"]
    assert mask.data_ptr() == same.data_ptr() and mask.dtype == same.dtype == torch.bfloat16
    assert mask.shape == (4, 1, 7, 7) and all(size % 8 == 0 for size in mask.stride()[:3])
    assert [(each["attn_mask"], each["is_causal"], each["enable_gqa"]) for each in alone] == [(None, True, True)] * 2


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_compiled_layers_give_the_same_steps_and_are_not_compiled_anew_for_other_lengths(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the compiler's front end and its gradients; what it then makes of them (inductor) takes half a minute."""
    torch._dynamo.reset()
    compiler = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr("async_rlhf.learner.model.policy._COMPILER", compiler)
    compiled, plain = (make_backend(model_dir, compile=on) for on in (True, False))
    counts = []
    for step in range(4):
        lengths = np.random.default_rng(step).integers(2, 16, (4, 3)).tolist()
        groups = [make_group(n, each, prompt_length=31 + step) for n, each in enumerate(lengths)]
        rows = make_rows(groups, ADVANTAGES)
        ours, theirs = compiled.step([rows], step), plain.step([rows], step)
        assert ours.metrics["grad_norm"] == pytest.approx(theirs.metrics["grad_norm"], rel=1e-5)
        counts.append(compiler.frame_count)
    assert 0 < counts[0] == counts[-1]
    same = zip(compiled.machine.policy.parameters(), plain.machine.policy.parameters(), strict=True)
    assert all(float((one - other).detach().abs().max()) < 1e-5 for one, other in same)


def test_a_reference_in_half_precision_gives_nearly_the_divergence_of_a_whole_one(model_dir: Path) -> None:
    found = []
    for kind in ("float32", "bfloat16"):
        backend = make_backend(model_dir, LossConfig(kl_coef=0.1), reference=model_dir, reference_dtype=kind)
        reference: Any = backend.machine._reference
        assert {p.dtype for p in reference.parameters()} == {getattr(torch, kind)}
        found.append(backend.evaluate(ROWS)[0].logp_reference)
    assert found[0] is not None and found[1] is not None
    assert 0 < np.abs(found[0] - found[1]).max() < 0.2


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_critic_learns_the_returns_and_only_it_does_while_it_warms_up(model_dir: Path, kind: str) -> None:
    backend = make_backend(model_dir, critic={"kind": kind, "learning_rate": 3e-2, "warmup_steps": 40})
    before = weights(backend)
    first = backend.evaluate(ROWS)[0].value
    assert first is not None and not first.any()
    losses = [backend.step([with_returns(backend, 2.0)], step).metrics["critic/loss"] for step in range(40)]
    values = backend.evaluate(ROWS)[0].value
    assert losses[0] == pytest.approx(2.0) and losses[-1] < 0.2
    assert values is not None and abs(float(values.mean()) - 2.0) < 0.7
    # a head shares the policy's trunk, which the value loss moves
    assert (weights(backend) == before) == (kind == "model")


# Their layers carry a state, or look at places and not at positions.
ONE_A_ROW = ("bloom", "gpt_neo", "mamba", "mamba2", "minimax", "mpt", "olmo_hybrid", "recurrent_gemma", "rwkv")


MIXED = [
    make_group(0, [20, 3, 13], prompt_length=5, vocabulary=64),
    make_group(1, [9, 16], prompt_length=11, vocabulary=64),
    make_group(2, [22, 19], prompt_length=7, vocabulary=64, observed=[(4, 16)], anew=[0]),
]
MEMBERS = [(group, rollout) for group in MIXED for rollout in group.rollouts]
# Nats: rounding makes up to 1e-5, on whichever processor; a wrong mask or state 1e-2 and more.
ROUNDING = 1e-4
# Of the norm of a gradient: as much as comes from one number that rounding puts beyond a bend of its activation (Apertus' has
# one of width 1e-6). A token that is left out makes several times as much.
BENT = 1e-2


def of_parameters(model: PreTrainedModel, logp: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Regions pair by pair; of longer ones short blocks together; each block by itself.
LIMITS = [(blocks._SHORT_REGION, blocks._SHORT_BLOCK), (25, 32), (0, 0)]


@pytest.mark.parametrize("kind", [*sorted(FAMILIES), *ONE_A_ROW])
def test_log_probabilities_and_gradients_are_those_of_plain_passes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.model(kind)
    policy = Policy(model, LearnerConfig())
    check_policy(policy)
    assert policy.packs == (kind not in ONE_A_ROW)
    assert (policy.sharing == policy.sharings[0]) == (kind != "doge"), "the way that costs least; Doge makes its own mask"
    rows = make_rows(MIXED, [[1.0] * len(group.rollouts) for group in MIXED])
    plain = [oracles.rollout_logprobs(model, *each) for each in MEMBERS]
    ways = [
        (each, LIMITS[0]) for each in policy.sharings[policy.sharings.index(policy.sharing) :]
    ]  # on other devices a later one
    for sharing, limits in [*ways, *((policy.sharing, each) for each in LIMITS[1:] if policy.sharing == "blocks")]:
        policy.sharing = sharing
        for name, limit in zip(("_SHORT_REGION", "_SHORT_BLOCK"), limits, strict=True):
            monkeypatch.setattr(blocks, name, limit)
        (batch,) = make_micro_batches(rows, Packing(8192, sharing))
        found, *_ = policy(batch)
        wanted = torch.cat([plain[member] for member in batch.member_N.unique_consecutive().tolist()])
        torch.testing.assert_close(found, wanted, rtol=0, atol=ROUNDING)
        assert_same_gradients(of_parameters(model, found), of_parameters(model, wanted), BENT, f"{sharing} {limits}")


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
