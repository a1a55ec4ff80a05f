"""Every loss against its twin, and the laws every loss obeys, whatever its kind."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import loss_oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_oracles import Completion
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective.loss import Counts, LossInputs, denominator
from async_rlhf.learner.objective.objective import objective
from async_rlhf.learner.registry import loss_spec, losses

ALL = sorted(losses())
OF_TOKENS = [kind for kind in ALL if loss_spec(kind).level == "token"]
# What only some losses take is switched on in the cases below; everything here is on top of the defaults.
CORRECTIONS: dict[str, dict[str, object]] = {
    "token": {},
    "none": {"is_cap": None},
    "sequence": {"is_level": "sequence", "is_cap": 1.5},
    "product": {"is_level": "sequence", "sequence_ratio": "product"},
    "icepop": {"token_mask": (0.6, 1.6)},
    "sequence mask": {"sequence_mask": (0.8, 1.2)},
    "off-policy mask": {"off_policy_delta": 0.1},
    "interpolated": {"proximal": "interpolate"},
    "k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "k3, no dual clip": {"kl_coef": 0.3, "dual_clip": None},
    "per sequence": {"reduction": "sequence"},
    "fixed": {"reduction": "fixed", "fixed_length": 7},
}


CORRECTED = [kind for kind in ALL if loss_spec(kind).corrects != "nothing"]


def completions(seed: int, *, groups: int = 3, members: int = 2, spread: float = 0.4) -> list[Completion]:
    """Groups of completions of 1 to 5 tokens, whose policies differ by about `spread`."""
    draw = random.Random(seed)
    found = []
    for group in range(groups):
        for _ in range(members):
            length = draw.randint(1, 5)
            behaviour = [draw.uniform(-3, -0.2) for _ in range(length)]
            proximal = [b + draw.gauss(0, spread) for b in behaviour]
            current = [torch.tensor(p + draw.gauss(0, spread / 2), dtype=torch.float64, requires_grad=True) for p in proximal]
            reference = [b + draw.gauss(0, spread) for b in behaviour]
            staleness = [draw.randint(0, 4) for _ in range(length)]
            found.append(Completion(current, proximal, behaviour, reference, staleness, draw.gauss(0, 1), group))
    return found


def inputs_of(batch: list[Completion], start: int = 0) -> LossInputs:
    """The packed layout of these completions; all float64, so that twins agree to the last digits."""

    def flat(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        values = [value for c in batch for value in getattr(c, name)]
        return torch.tensor([float(v.detach() if isinstance(v, Tensor) else v) for v in values], dtype=dtype)

    lengths = torch.tensor([len(c) for c in batch])
    return LossInputs(
        logp_current_N=flat("current").requires_grad_(),
        logp_proximal_N=flat("proximal"),
        logp_behaviour_N=flat("behaviour"),
        logp_reference_N=flat("reference"),
        advantage_N=torch.tensor([c.advantage for c in batch], dtype=torch.float64).repeat_interleave(lengths),
        sequence_N=torch.arange(len(batch)).repeat_interleave(lengths),
        group_S=torch.tensor([c.group for c in batch]),
        staleness_N=flat("staleness", torch.int64),
    )


def counts_of(batch: list[Completion]) -> Counts:
    return Counts(sum(len(c) for c in batch), len(batch), len({c.group for c in batch}))


def value_and_gradient(batch: list[Completion], config: LossConfig, counts: Counts | None = None) -> tuple[float, Tensor]:
    inputs = inputs_of(batch)
    loss = objective(inputs, config).total / denominator(config, counts or counts_of(batch))
    loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.logp_current_N.grad is not None
    return float(loss.detach()), inputs.logp_current_N.grad


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
        expected = torch.stack([torch.zeros(()) if logp.grad is None else logp.grad for c in batch for logp in c.current])
        torch.testing.assert_close(gradient, expected.double(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("reduction", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("kind", ALL)
def test_micro_batches_and_ranks_add_exactly_and_report_what_is_promised(kind: str, reduction: str) -> None:
    config = LossConfig.model_validate({"kind": kind, "reduction": reduction, "fixed_length": 6, "kl_coef": 0.1})
    batch = completions(7, groups=4)
    value, gradient = value_and_gradient(batch, config)
    sums = objective(inputs_of(batch), config).sums
    assert sums.keys() >= {"clip_ratio/region_mean", "is/weight_mean", "is/masked_ratio", "is/clamped_ratio"}
    for cut in (2, 6):  # between groups, which a loss on pairs needs whole
        cut_up = batch[:cut], batch[cut:]
        parts = [value_and_gradient(part, config, counts_of(batch)) for part in cut_up]
        assert sum(part for part, _ in parts) == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(torch.cat([each for _, each in parts]), gradient)
        of_parts = [objective(inputs_of(part), config).sums for part in cut_up]
        assert sums == {name: pytest.approx(sum(float(each[name]) for each in of_parts)) for name in sums}


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
        assert float(gradient.abs().max()) <= 3.0  # the dual clip, the cap of 2, or 1 where nothing weighs
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
    )  # fmt: skip
    total = objective(inputs, config).total
    total.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(float(total.detach())) and bool(torch.isfinite(current.grad).all())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ALL)
def test_a_log_probability_that_is_read_and_no_number_refuses_the_step_and_a_masked_completion_is_counted(kind: str) -> None:
    config, spec = LossConfig.model_validate({"kind": kind}), loss_spec(kind)
    for name in {"current", *spec.needs, *(("behaviour",) if kind in CORRECTED else ())}:
        batch = completions(1)
        nan = [math.nan] * len(batch[0])
        batch[0] = replace(batch[0], advantage=-1.0, **{name: list(map(torch.tensor, nan)) if name == "current" else nan})
        value, gradient = value_and_gradient(batch, config)
        assert not (math.isfinite(value) and bool(torch.isfinite(gradient).all())), name
    inputs = inputs_of(completions(11))
    masked_N = inputs.sequence_N == 2  # that a masked token gives no gradient is a law of `try_loss`
    sums = objective(replace(inputs, mask_N=(~masked_N).double()), config).sums
    assert float(sums["is/masked_ratio"]) == (int(masked_N.sum()) if kind in CORRECTED else 0)


def test_an_entropy_bonus_pulls_towards_entropy_and_needs_it() -> None:
    batch = completions(2)
    inputs = inputs_of(batch)
    entropy = torch.ones_like(inputs.advantage_N, requires_grad=True)
    config = LossConfig(entropy_coef=0.5)
    out = objective(replace(inputs, entropy_N=entropy), config)
    (out.total / denominator(config, counts_of(batch))).backward()  # type: ignore[no-untyped-call]
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, torch.full_like(entropy, -0.5 / len(entropy)))
    with pytest.raises(ValueError, match="entropy"):
        objective(inputs, config)


def test_shipped_losses_are_found_by_their_declarations_and_an_unknown_name_is_refused() -> None:
    shipped = "decoupled_ppo ppo_clip cispo gspo topr truncated_is proximal_rloo online_dpo best_of_n"
    assert set(losses()) >= set(shipped.split())
    with pytest.raises(ValueError, match=r"'ppo' is none of .*decoupled_ppo"):
        LossConfig.model_validate({"kind": "ppo"})
