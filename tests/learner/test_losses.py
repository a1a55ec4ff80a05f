"""Every loss of the registry: its twin, its laws, its expected gradient over all completions of a small policy; and the
corrections that it is multiplied by."""

from __future__ import annotations

import math
import random
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import loss_oracles
import numpy as np
import oracles
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from loss_oracles import Completion
from torch import Tensor

from async_rlhf.experiments.gradient_laws.__main__ import CASES, Case, markdown
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective import enumerable
from async_rlhf.learner.objective.corrections import (
    MAX_LOG_RATIO,
    Estimator,
    effective_sample_size,
    estimate,
    interpolated,
    kl_loss,
    kl_penalty,
    ratio,
    second_moment_mask,
    truncated_weight,
)
from async_rlhf.learner.objective.objective import Counts, LossInputs, denominator, objective
from async_rlhf.learner.objective.trial import try_loss
from async_rlhf.learner.registry import loss_spec, losses
from tests.conftest import REPOSITORY

ALL = sorted(losses())
OF_TOKENS = [kind for kind in ALL if loss_spec(kind).level == "token"]
# What only some losses take is switched on in the cases below; everything here is on top of the defaults.
CORRECTIONS: dict[str, dict[str, object]] = {
    "token": {},
    "none": {"is_cap": None},
    "sequence": {"is_level": "sequence", "is_cap": 1.5},
    "product": {"is_level": "product"},
    "icepop": {"token_mask": (0.6, 1.6)},
    "sequence mask": {"sequence_mask": (0.8, 1.2)},
    "off-policy mask": {"off_policy_delta": 0.1},
    "mean divergence": {"divergence_mean": 0.06},
    "largest divergence": {"divergence_max": 0.2},
    "interpolated": {"proximal": "interpolate"},
    "k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "k3, no dual clip": {"kl_coef": 0.3, "dual_clip": None},
    "per sequence": {"reduction": "sequence"},
    "fixed": {"reduction": "fixed"},
}


CORRECTED = [kind for kind in ALL if loss_spec(kind).corrects != "nothing"]


def completions(seed: int, *, spread: float = 0.4) -> list[Completion]:
    """Three groups of two completions of 1 to 5 tokens, whose policies differ by about `spread`."""
    draw = random.Random(seed)
    found = []
    for group in range(3):
        for _ in range(2):
            length = draw.randint(1, 5)
            behaviour = [draw.uniform(-3, -0.2) for _ in range(length)]
            proximal = [b + draw.gauss(0, spread) for b in behaviour]
            current = [torch.tensor(p + draw.gauss(0, spread / 2), dtype=torch.float64, requires_grad=True) for p in proximal]
            reference = [b + draw.gauss(0, spread) for b in behaviour]
            staleness = [draw.randint(0, 4) for _ in range(length)]
            likeliest, taught = [[three(draw, spread) for _ in range(length)] for _ in range(2)]
            leaves = [[torch.tensor(logp, dtype=torch.float64, requires_grad=True) for logp in each] for each in likeliest]
            advantage = draw.gauss(0, 1)
            found.append(Completion(current, proximal, behaviour, reference, staleness, advantage, group, leaves, taught))
    return found


def three(draw: random.Random, spread: float) -> list[float]:
    """Log-probabilities of three tokens of four."""
    logits = [draw.gauss(0, spread) for _ in range(4)]
    return [logit - math.log(sum(map(math.exp, logits))) for logit in logits[:3]]


def inputs_of(batch: list[Completion]) -> LossInputs:
    """The packed layout of these completions; all float64, so that twins agree to the last digits."""

    def flat(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        values = [value for c in batch for value in getattr(c, name)]
        return torch.tensor([float(v.detach() if isinstance(v, Tensor) else v) for v in values], dtype=dtype)

    def of_others(name: str) -> Tensor | None:
        values = [[v.item() if isinstance(v, Tensor) else v for v in others] for c in batch for others in getattr(c, name)]
        return torch.tensor(values, dtype=torch.float64) if values else None

    lengths, others = torch.tensor([len(c) for c in batch]), of_others("likeliest")
    return LossInputs(
        logp_current_N=flat("current").requires_grad_(),
        logp_proximal_N=flat("proximal"),
        logp_behaviour_N=flat("behaviour"),
        logp_reference_N=flat("reference"),
        logp_current_NK=None if others is None else others.requires_grad_(),
        logp_reference_NK=of_others("taught"),
        advantage_N=torch.tensor([c.advantage for c in batch], dtype=torch.float64).repeat_interleave(lengths),
        sequence_N=torch.arange(len(batch)).repeat_interleave(lengths),
        group_S=torch.tensor([c.group for c in batch]),
        staleness_N=flat("staleness", torch.int64),
    )


def value_and_gradient(batch: list[Completion], config: LossConfig) -> tuple[float, Tensor]:
    inputs = inputs_of(batch)
    counts = Counts(sum(map(len, batch)), len(batch), len({c.group for c in batch}))
    loss = objective(inputs, config).total / denominator(config, counts, loss_oracles.LONGEST)
    loss.backward()  # type: ignore[no-untyped-call]
    leaf = inputs.logp_current_NK if "top_k" in loss_spec(config.kind).needs else inputs.logp_current_N
    assert leaf is not None and leaf.grad is not None
    return float(loss.detach()), leaf.grad


@pytest.mark.parametrize(
    ("kind", "correction"),
    [
        (kind, correction)
        for kind in ALL
        for correction in CORRECTIONS
        if kind in OF_TOKENS or correction not in {"per sequence", "fixed"}  # of whole completions there is one reduction
    ],
)
def test_value_and_gradient_are_the_twins(kind: str, correction: str) -> None:
    """Whatever the order of completions, and how far the policies are apart."""
    for seed in range(4):
        draw = random.Random(seed)
        limits = {"clip_low": draw.uniform(0.05, 0.9), "clip_high": draw.uniform(0.05, 3), "dual_clip": draw.uniform(1.5, 9)}
        drawn = {"is_cap": draw.uniform(0.5, 5), **limits} if seed else {}
        config = LossConfig.model_validate({"kind": kind, **drawn, **CORRECTIONS[correction]})
        batch = completions(seed, spread=0.4 if seed < 2 else 2.0)
        draw.shuffle(batch)
        loss = loss_oracles.objective(batch, config)
        loss.backward()  # type: ignore[no-untyped-call]
        value, gradient = value_and_gradient(batch, config)
        assert value == pytest.approx(float(loss.detach()), rel=1e-9, abs=1e-12)
        leaves = [[logp] if gradient.dim() == 1 else c.likeliest[t] for c in batch for t, logp in enumerate(c.current)]
        expected = torch.tensor(
            [[0.0 if leaf.grad is None else float(leaf.grad) for leaf in each] for each in leaves], dtype=torch.float64
        )
        torch.testing.assert_close(gradient.reshape(len(leaves), -1), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["sapo", "vespo", "cispo"])
def test_value_and_gradient_are_those_of_trl(kind: str) -> None:
    """Its `_compute_loss` on the same log-probabilities, with the ratio to the sampler as its vLLM correction has it."""
    with warnings.catch_warnings(action="ignore"):  # of versions of vLLM, which is not used here
        trainer_module = pytest.importorskip("trl.trainer.grpo_trainer")
    batch = completions(5, spread=0.8)
    longest = max(map(len, batch))
    mask = torch.tensor([[t < len(c) for t in range(longest)] for c in batch]).double()
    now, old, sampled = torch.zeros(3, *mask.shape, dtype=torch.float64)
    for i, c in enumerate(batch):
        now[i, : len(c)] = torch.stack([logp.detach() for logp in c.current])
        old[i, : len(c)], sampled[i, : len(c)] = torch.tensor(c.proximal).double(), torch.tensor(c.behaviour).double()
    now.requires_grad_()
    config = LossConfig(kind=kind, is_cap=1.5, reduction="sequence" if kind == "sapo" else "token")
    weight = (old - sampled).exp().clamp(max=math.inf if kind == "vespo" else 1.5)
    names = {"tau": "sapo_temperature", "k": "vespo_k", "lam": "vespo_lambda"}
    settings = {
        f"{names[name]}_{sign}": one
        for name, values in config.parameters.items()
        for sign, one in zip(("pos", "neg"), values, strict=True)
    }
    found = trainer_module.GRPOTrainer._compute_loss(
        SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
            get_gamma_weights=trainer_module.GRPOTrainer.get_gamma_weights,
            accelerator=SimpleNamespace(num_processes=1, reduce=lambda each, reduction: each),
            model=SimpleNamespace(training=False), args=SimpleNamespace(**settings), _metrics={"eval": defaultdict(list)},
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0,
            loss_type=kind, use_vllm=True, vllm_importance_sampling_correction=True, aux_loss_enabled=False,
            _entropy_bonus_enabled=False, epsilon_high=1 + config.clip_high,
        ),
        None,
        {
            "prompt_ids": torch.zeros(len(batch), 1), "prompt_mask": torch.ones(len(batch), 1), "completion_ids": mask,
            "completion_mask": mask, "advantages": torch.tensor([c.advantage for c in batch]).double(),
            "old_per_token_logps": old, "importance_sampling_ratio": weight, "num_items_in_batch": mask.sum(),
        },
    )  # fmt: skip
    found.backward()
    value, gradient = value_and_gradient(batch, config)
    assert now.grad is not None and value == pytest.approx(float(found.detach()), rel=1e-6)
    torch.testing.assert_close(gradient, now.grad[mask > 0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ALL)
def test_it_obeys_the_laws_and_reports_what_is_promised(kind: str) -> None:
    config = LossConfig.model_validate({"kind": kind, "kl_coef": 0.1})
    trial = try_loss(config)
    assert trial.holds, [law for law in trial.laws if law.holds is False]
    inputs = inputs_of(completions(11))
    masked_N = inputs.sequence_N == 2  # that a masked token gives no gradient is one of the laws
    sums = objective(replace(inputs, mask_N=(~masked_N).double()), config).sums
    assert sums.keys() >= {"clip_ratio/region_mean", "is/weight_mean", "is/masked_ratio", "is/clamped_ratio", "kl/reference"}
    assert float(sums["is/masked_ratio"]) == (int(masked_N.sum()) if kind in CORRECTED else 0)


@pytest.mark.parametrize("kind", CORRECTED)
def test_what_is_known_of_the_whole_batch_multiplies_the_weights_of_its_tokens(kind: str) -> None:
    inputs = inputs_of(completions(11))
    whole, doubled = (
        float(
            objective(replace(inputs, mask_N=torch.full_like(inputs.advantage_N, scale)), LossConfig(kind=kind)).total.detach()
        )
        for scale in (1.0, 2.0)
    )
    assert doubled == pytest.approx(2 * whole) and abs(whole) > 0.1


def test_every_loss_has_a_row_in_the_guide_and_one_of_all_completions_is_in_the_table_of_gradients() -> None:
    guide = (REPOSITORY / "docs" / "learner.md").read_text()
    rows = re.findall(r"(?m)^\| (`\w+`[^|]*)\| (?:token|completion|pair) \|", guide)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(ALL)
    assert {case.config.kind for case in CASES} == {kind for kind in ALL if loss_spec(kind).learns_from == "all"}
    assert markdown() in guide, "python -m async_rlhf.experiments.gradient_laws makes it"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_data_of_its_own_the_expected_gradient_is_that_of_the_expected_reward(case: Case) -> None:
    behaviour, reward = enumerable.initial(), enumerable.rewards()
    found = enumerable.expected(case.config, behaviour, behaviour, reward, 0) / case.scale
    torch.testing.assert_close(found, enumerable.exact_gradient(behaviour, reward))


@pytest.mark.parametrize("kind", ["decoupled_ppo", "ppo_clip", "gspo", "proximal_rloo"])
def test_outside_the_clip_region_nothing_pulls_further(kind: str) -> None:
    rows = [
        (0.3, 1.0, 0, 1),  # r = 1.35, liked already: no more
        (-0.3, -1.0, 0, 1),  # r = 0.74, disliked already: no less
        (0.3, -1.0, 1, 0),  # r = 1.35 though disliked: pulled back
        (-0.3, 1.0, -1, 0),  # r = 0.74 though liked: pulled back
        (0.2, 1.0, -1, 0),  # r = 1.22, inside
        (2.0, -1.0, 0, 1),  # r = 7.4 though disliked, beyond the dual clip: it costs no more
    ]
    config = LossConfig.model_validate({"kind": kind, "clip_low": 0.2, "clip_high": 0.3})
    for logp, advantage, sign, outside in rows:
        one = [Completion([torch.tensor(logp, dtype=torch.float64)], [0.0], [0.0], [0.0], [0], advantage, 0)]
        assert value_and_gradient(one, config)[1].sign().tolist() == [sign]
        assert float(objective(inputs_of(one), config).sums["clip_ratio/region_mean"]) == outside


@pytest.mark.parametrize("kind", CORRECTED)
def test_with_a_negative_advantage_nothing_grows_without_limit_in_the_ratio(kind: str) -> None:
    config = LossConfig.model_validate({"kind": kind})
    for ratio_log in (0.0, 1.0, 3.0, 10.0, 100.0):
        now = torch.tensor(-0.5, dtype=torch.float64, requires_grad=True)
        batch = [Completion([now], [-0.5], [-0.5 - ratio_log], [-0.5], [1], -1.0, 0)]
        _, gradient = value_and_gradient(batch, config)
        # the dual clip, the cap of 2, or 1 where nothing weighs; a square draws back by the logarithm
        assert float(gradient.abs().max()) <= (2 * (1 + ratio_log) if kind == "oapl" else 3.0)
        assert float(objective(inputs_of(batch), config).sums["is/clamped_ratio"]) == (ratio_log > 20)


extreme = st.sampled_from([-1e4, -20.0, -1.0, 0.0, 1e4])
rows = st.lists(st.tuples(extreme, extreme, extreme, extreme, st.sampled_from([-2.0, 0.0, 2.0])), min_size=2, max_size=6)


@given(rows, st.sampled_from(ALL), st.sampled_from(sorted(CORRECTIONS)), st.integers(1, 5))
def test_whatever_the_log_probabilities_loss_and_gradient_are_finite(
    drawn: list[tuple[float, float, float, float, float]], kind: str, correction: str, cut: int
) -> None:
    config = LossConfig.model_validate({"kind": kind, **CORRECTIONS[correction]})
    current, proximal, behaviour, reference, advantage = (torch.tensor(column) for column in zip(*drawn, strict=True))
    sequence = (torch.arange(len(drawn)) >= min(cut, len(drawn) - 1)).long()
    inputs = LossInputs(
        current.requires_grad_(), proximal, behaviour, advantage[sequence], sequence, torch.tensor([0, 0]),
        torch.arange(len(drawn)), logp_reference_N=reference,
        logp_current_NK=torch.stack([current, proximal], 1).clamp(max=0).detach().requires_grad_(),
        logp_reference_NK=torch.stack([behaviour, reference], 1).clamp(max=0),
    )  # fmt: skip
    total = objective(inputs, config).total
    total.backward()  # type: ignore[no-untyped-call]
    found = [each.grad for each in (current, inputs.logp_current_NK) if each is not None and each.grad is not None]
    assert found and math.isfinite(float(total.detach())) and all(bool(torch.isfinite(each).all()) for each in found)


def test_an_entropy_bonus_pulls_towards_entropy_and_needs_it() -> None:
    inputs = inputs_of(completions(2))
    entropy = torch.ones_like(inputs.advantage_N, requires_grad=True)
    config = LossConfig(entropy_coef=0.5)
    out = objective(replace(inputs, entropy_N=entropy), config)
    out.total.backward()  # type: ignore[no-untyped-call]
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, torch.full_like(entropy, -0.5))
    with pytest.raises(ValueError, match="entropy"):
        objective(inputs, config)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'ppo' is none of .*decoupled_ppo"):
        LossConfig.model_validate({"kind": "ppo"})


logps = st.lists(st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32)), min_size=1, max_size=20)


def columns(pairs: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = zip(*pairs, strict=True)
    return torch.tensor(a), torch.tensor(b)


@given(logps, st.floats(0.1, 10))
def test_a_ratio_is_the_twin_and_a_weight_is_cut_above_and_never_raised(pairs: list[tuple[float, float]], cap: float) -> None:
    expected = [oracles.ratio(*pair) for pair in pairs]
    assert ratio(*columns(pairs)).tolist() == pytest.approx(expected, rel=1e-4)
    assert truncated_weight(*columns(pairs), cap).tolist() == pytest.approx([min(each, cap) for each in expected], rel=1e-4)


def test_a_ratio_beyond_all_measure_is_finite_and_so_is_its_gradient() -> None:
    logp = torch.tensor([-1e4, 1e4, 0.0, -3e38, 3e38], requires_grad=True)
    r = ratio(logp, torch.zeros(5))
    r.sum().backward()  # type: ignore[no-untyped-call]
    low, high = math.exp(-MAX_LOG_RATIO), math.exp(MAX_LOG_RATIO)
    torch.testing.assert_close(r.detach(), torch.tensor([low, high, 1.0, low, high]))
    assert logp.grad is not None and logp.grad.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


@given(st.lists(st.floats(math.exp(-20), math.exp(20)), min_size=1, max_size=30))
@example([0.3] * 29)  # equal weights waste nothing, but for rounding
@example([math.exp(20.0), *[math.exp(-20.0)] * 9])  # one above all others leaves one sample
def test_the_effective_sample_size_is_the_twin_and_a_share(weights: list[float]) -> None:
    found = float(effective_sample_size(torch.tensor(weights)))
    assert 0 < found <= 1
    assert found == pytest.approx(min(1.0, oracles.effective_sample_size(weights)), rel=1e-4)


log_ratios = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=20, unique_by=abs)


@given(log_ratios, st.floats(1e-4, 4))
def test_the_second_moment_mask_is_the_twin_and_leaves_the_moment_below_its_limit(drawn: list[float], limit: float) -> None:
    kept = second_moment_mask(np.array(drawn, np.float32), limit)
    assert kept.tolist() == oracles.second_moment_mask(drawn, limit)
    assert not kept.any() or float(np.mean(np.square(np.array(drawn)[kept]))) <= limit * (1 + 1e-6)
    with_nan = second_moment_mask(np.array([*drawn, math.nan], np.float32), limit)
    assert with_nan.tolist() == [*kept.tolist(), True], "what is not a number is not hidden"


def test_the_interpolated_policy_lies_between_the_other_two_by_the_age_of_each_token() -> None:
    current, behaviour = torch.tensor([-1.0] * 5, requires_grad=True), torch.tensor([-3.0] * 5)
    found = interpolated(current, behaviour, torch.tensor([0, 1, 2, 4, -2]))
    # a version behind it is behaviour itself; two behind, half of the way; ages from the future count by their distance
    torch.testing.assert_close(found, torch.tensor([-3.0, -3.0, -2.0, -1.5, -2.0]))
    assert not found.requires_grad


P = torch.tensor([0.3, -0.2, 0.9, 0.0, -1.0], dtype=torch.float64)
Q = torch.tensor([-1.0, 0.7, 0.1, -0.5, 1.2], dtype=torch.float64)
SAMPLED_BY = torch.tensor([0.8, 0.1, 0.2, -0.6, 0.3], dtype=torch.float64)
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")


def exact() -> tuple[float, Tensor]:
    """KL(p | q) and its gradient in p's logits."""
    leaf = P.clone().requires_grad_()
    logp = torch.log_softmax(leaf, -1)
    divergence = (logp.exp() * (logp - torch.log_softmax(Q, -1))).sum()
    divergence.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return float(divergence.detach()), leaf.grad


def gradient_of(terms: Callable[[Tensor], Tensor]) -> Tensor:
    """Of the mean over `SAMPLED_BY` in P's logits."""
    leaf = P.clone().requires_grad_()
    (torch.log_softmax(SAMPLED_BY, -1).exp() * terms(torch.log_softmax(leaf, -1))).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimate_has_the_divergence_as_its_mean_and_weighed_by_importance_its_gradient(estimator: Estimator) -> None:
    logp, logq, behaviour = (torch.log_softmax(each, -1) for each in (P, Q, SAMPLED_BY))
    divergence, gradient = exact()
    found = estimate(logp, logq, estimator)
    assert (float((logp.exp() * found).sum()) == pytest.approx(divergence)) == (estimator != "k2")
    torch.testing.assert_close(gradient_of(lambda now: kl_loss(now, behaviour, logq, estimator, cap=None)), gradient)
    assert not torch.allclose(gradient_of(lambda now: estimate(now, logq, estimator)), gradient, atol=1e-2), "unweighed"
    np.testing.assert_allclose(kl_penalty(logp.float().numpy(), logq.float().numpy(), estimator), found, rtol=1e-5, atol=1e-6)
