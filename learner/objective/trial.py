"""A loss before a run depends on it: the laws that every shipped one obeys, and its bias on a policy small enough to enumerate.

The laws are those that micro-batches, ranks and refusals rest on. Numbers are float64, so that
what differs is no rounding; those of the law about finite numbers are float32, as in a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective import enumerable
from async_rlhf.learner.objective.objective import LossInputs, objective
from async_rlhf.learner.registry import load_function, loss_spec

STALENESS = (0, 1, 4, 16)
_CLOSE = 1e-9
_CLOSE_SUMS = 1e-5  # they may be float32
# Of three groups of two completions; where a loss is given the best alone, each second one is left out.
_LENGTHS = (3, 1, 4, 2, 5, 3)
_DIRECTION = 0.99
# The inputs that a loss reads, by its declaration; `current` without one.
_READ = {
    "current": ("logp_current_N", "logp_current_NK"),
    "proximal": ("logp_proximal_N",),
    "behaviour": ("logp_behaviour_N",),
    "reference": ("logp_reference_N", "logp_reference_NK"),
    "top_k": ("logp_current_NK", "logp_reference_NK"),
}


@dataclass(frozen=True)
class Law:
    name: str
    holds: bool | None
    """None where it does not apply."""
    detail: str
    """The number behind it, or the error."""


@dataclass(frozen=True)
class LossTrial:
    """bias, bias_of_none: of the gradient's expectation against the exact on-policy gradient, relative, by staleness; without
    correction in `bias_of_none`. Empty for a loss that does not learn from the advantages of all."""

    kind: str
    declaration: Mapping[str, Any]
    laws: Sequence[Law]
    bias: Mapping[int, float]
    bias_of_none: Mapping[int, float]

    @property
    def holds(self) -> bool:
        return all(law.holds is not False for law in self.laws)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def try_loss(config: LossConfig) -> LossTrial:
    """Run the laws that apply to the loss of this configuration. Raises ConfigError when it cannot be loaded."""
    spec = loss_spec(config.kind)
    load_function("loss", config.kind)
    term = {"token": "token", "sequence": "completion", "pair": "pair"}[spec.level]
    checks: dict[str, Callable[[LossConfig], tuple[bool | None, str]]] = {
        f"one term for each {term}": _terms,
        "adds up over micro-batches": _adds_up,
        "finite however far the policies are apart": _finite,
        "a log-probability that is no number is not hidden": _not_hidden,
        "reads only the log-probabilities it declares": _declared_only,
        "a masked completion gives no gradient and changes no other": _masks,
        "the exact direction on data of its own": _direction,
    }
    laws = []
    for name, check in checks.items():
        try:
            laws.append(Law(name, *check(config)))
        except Exception as error:  # noqa: BLE001 - the user's own code may raise anything
            laws.append(Law(name, False, f"raised {type(error).__name__}: {error}"))
    bias = bias_of_none = dict[int, float]()
    if spec.learns_from == "all" and laws[0].holds:
        bias, bias_of_none = _bias(config), _bias(LossConfig(is_cap=None))
    return LossTrial(config.kind, spec.model_dump(), laws, bias, bias_of_none)


def check_loss(config: LossConfig) -> None:
    """Take the gradient once on made-up completions. Raises ConfigError when that raises or is not finite.

    Found here, the defect ends a run before its first step; later the groups of the batch would be suspected.
    """
    load_function("loss", config.kind)
    try:
        total, gradient_N, _ = _gradient(_inputs(config), config)
        if not (total.isfinite() and gradient_N.isfinite().all()):
            raise ValueError(f"gave {float(total)} with the gradient {gradient_N.tolist()}")
    except Exception as error:
        raise ConfigError(f"loss.kind = {config.kind!r} cannot be used: {type(error).__name__}: {error}") from error


def lines(trial: LossTrial) -> list[str]:
    """A trial as a table."""
    declared = ", ".join(f"{name} = {value!r}" for name, value in trial.declaration.items())
    text = [f"{trial.kind}: {declared}", ""]
    words = {True: "holds", False: "FAILS", None: "does not apply"}
    width = max(len(law.name) for law in trial.laws)
    text += [f"  {law.name:<{width}}  {words[law.holds]:<15}{law.detail}".rstrip() for law in trial.laws]
    if trial.bias:
        text += ["", "  bias of the gradient    " + "".join(f"{f'staleness {n}':>14}" for n in trial.bias)]
        for name, of in (("this loss", trial.bias), ("none (no correction)", trial.bias_of_none)):
            text.append(f"  {name:<24}" + "".join(f"{value:>14.3f}" for value in of.values()))
    return text


def _inputs(config: LossConfig, scale: float = 0.3) -> LossInputs:
    """Made-up completions of three groups, as many of each as the loss learns from."""
    random = torch.Generator().manual_seed(0)
    kept = [n for n in range(len(_LENGTHS)) if loss_spec(config.kind).learns_from != "best" or n % 2 == 0]
    sequence_N = torch.arange(len(kept)).repeat_interleave(torch.tensor([_LENGTHS[n] for n in kept]))
    now = -torch.rand(len(sequence_N), generator=random, dtype=torch.float64) * 3 - 0.1
    proximal, behaviour, reference = (
        now + scale * torch.randn(len(now), generator=random, dtype=torch.float64) for _ in range(3)
    )
    top, top_reference = (
        torch.log_softmax(scale * torch.randn(len(now), 5, generator=random, dtype=torch.float64), -1)[:, :3] for _ in range(2)
    )
    worth = torch.tensor([1.0 if n % 2 == 0 else -0.7 for n in kept], dtype=torch.float64)
    return LossInputs(
        logp_current_N=now.clone().requires_grad_(),
        logp_proximal_N=proximal,
        logp_behaviour_N=behaviour,
        logp_reference_N=reference,
        logp_current_NK=top.requires_grad_(),
        logp_reference_NK=top_reference,
        advantage_N=worth[sequence_N],
        sequence_N=sequence_N,
        group_S=torch.tensor([n // 2 for n in kept]),
        staleness_N=torch.ones_like(sequence_N),
        entropy_N=torch.rand(len(now), generator=random, dtype=torch.float64),
    )


def _gradient(inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    """The sum, its gradient [N, 1 + K], and the sums over tokens."""
    assert inputs.logp_current_NK is not None
    leaf = torch.cat([inputs.logp_current_N[:, None], inputs.logp_current_NK], 1).detach().requires_grad_()
    value = objective(replace(inputs, logp_current_N=leaf[:, 0], logp_current_NK=leaf[:, 1:]), config)
    value.total.backward()  # type: ignore[no-untyped-call]
    return value.total.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, value.sums


def _terms(config: LossConfig) -> tuple[bool, str]:
    inputs = _inputs(config)
    terms, _ = load_function("loss", config.kind)(inputs, torch.ones_like(inputs.advantage_N), **config.arguments)
    counts = {"token": len(inputs.sequence_N), "sequence": len(inputs.group_S), "pair": len(set(inputs.group_S.tolist()))}
    expected = counts[loss_spec(config.kind).level]
    return tuple(terms.shape) == (expected,), f"shape {tuple(terms.shape)}, expected ({expected},)"


def _adds_up(config: LossConfig) -> tuple[bool, str]:
    inputs = _inputs(config)
    parts = [_gradient(_of_group(inputs, group), config) for group in sorted(set(inputs.group_S.tolist()))]
    whole, gradient_N, sums = _gradient(inputs, config)
    totals, gradients, of_parts = zip(*parts, strict=True)
    apart = max(abs(float(sum(totals) - whole)), float((torch.cat(gradients) - gradient_N).abs().max()))
    for name, value in sums.items():
        total = sum(float(each.get(name, 0.0)) for each in of_parts)
        if not math.isclose(total, value, rel_tol=_CLOSE_SUMS, abs_tol=_CLOSE_SUMS):
            return False, f"{name} is no sum over tokens: {float(value):.3g} of all, {total:.3g} in parts"
    return apart < _CLOSE, f"largest difference {apart:.1g}"


def _of_group(inputs: LossInputs, group: int) -> LossInputs:
    kept_S = inputs.group_S == group
    kept_N = kept_S[inputs.sequence_N]
    values = {name: value for name, value in vars(inputs).items() if value is not None}
    cut = {name: value[kept_S if name == "group_S" else kept_N] for name, value in values.items()}
    cut["sequence_N"] = torch.unique(cut["sequence_N"], return_inverse=True)[1]
    return replace(inputs, **cut)


def _finite(config: LossConfig) -> tuple[bool, str]:
    inputs = _inputs(config, scale=60.0)
    numbers = {name: x for name, x in vars(inputs).items() if x is not None and x.is_floating_point()}
    total, gradient, _ = _gradient(replace(inputs, **{name: x.float() for name, x in numbers.items()}), config)
    return bool(torch.isfinite(total) and torch.isfinite(gradient).all()), f"log-ratios up to 200, sum {float(total):.3g}"


def _not_hidden(config: LossConfig) -> tuple[bool, str]:
    inputs, spec = _inputs(config), loss_spec(config.kind)
    for name in ("current", *spec.needs, *(("behaviour",) if spec.takes_ratios else ())):
        total, gradient, _ = _gradient(_corrupted(inputs, name, inputs.advantage_N.argmin()), config)
        if torch.isfinite(total) and torch.isfinite(gradient).all():
            return False, f"the sum is finite where {_READ[name][0]} is not: the step would not be refused"
    return True, ""


def _declared_only(config: LossConfig) -> tuple[bool, str]:
    inputs, needs = _inputs(config), loss_spec(config.kind).needs
    function, weight_N = partial(load_function("loss", config.kind), **config.arguments), torch.ones_like(inputs.advantage_N)
    terms, _ = function(inputs, weight_N)
    for name in (name for name in _READ if name not in ("current", *needs)):
        corrupted, _ = function(_corrupted(inputs, name, slice(None)), weight_N)
        if not torch.equal(corrupted, terms):
            return False, f"{_READ[name][0]} is read: declare needs = {(*needs, name)!r}"
    return True, ""


def _corrupted(inputs: LossInputs, name: str, where: Tensor | slice) -> LossInputs:
    """The inputs with NaN at `where`, in everything that a loss reads by this name."""
    found = {field: getattr(inputs, field).detach().clone() for field in _READ[name]}
    for each in found.values():
        each[where] = torch.nan
    return replace(inputs, **found)


def _masks(config: LossConfig) -> tuple[bool | None, str]:
    if not loss_spec(config.kind).takes_ratios:
        return None, "it takes no masks"
    inputs = _inputs(config)
    masked_N = inputs.sequence_N == 1
    _, before, _ = _gradient(inputs, config)
    _, after, _ = _gradient(replace(inputs, mask_N=(~masked_N).double()), config)
    left, moved = float(after[masked_N].abs().max()), float((after - before)[~masked_N].abs().max())
    if left > 0 and config.kl_coef == config.entropy_coef == 0:
        return False, "the gradient of masked tokens is not 0: multiply the terms by weight_N"
    return moved < _CLOSE, f"others move by {moved:.1g}"


def _direction(config: LossConfig) -> tuple[bool | None, str]:
    learns_from = loss_spec(config.kind).learns_from
    if learns_from in ("pair", "best"):
        return None, "it learns from a part of each group"
    direction, exact = _towards_teacher(config) if learns_from == "teacher" else _expected(config, 0)
    cosine = float(torch.nn.functional.cosine_similarity(direction, exact, dim=0))
    return cosine > _DIRECTION, f"cosine {cosine:.4f}"


def _towards_teacher(config: LossConfig) -> tuple[Tensor, Tensor]:
    """[P] twice: the expected gradient on the policy's own completions, and the descent of its divergence from a teacher so
    near that KL in either direction falls the same way."""
    logits, reward = enumerable.initial(), enumerable.rewards()
    teacher = enumerable.later(logits, reward, 1)
    direction = enumerable.expected(config, logits, logits, reward, 0, teacher)
    return direction, enumerable.towards(logits, teacher, logits, forward=False)


def _bias(config: LossConfig) -> dict[int, float]:
    """|E g - g*| / |g*|, g in the unit in which it fits best on data of its own."""
    own, exact = _expected(config, 0)
    unit = float(own @ exact / exact.square().sum()) or 1.0
    found = {staleness: _expected(config, staleness) for staleness in STALENESS}
    return {n: float((gradient / unit - of).norm() / of.norm()) for n, (gradient, of) in found.items()}


def _expected(config: LossConfig, staleness: int) -> tuple[Tensor, Tensor]:
    """[P] twice: the expected gradient over completions of a policy that is `staleness` steps behind, and the exact one."""
    reward, behaviour = enumerable.rewards(), enumerable.initial()
    current = enumerable.later(behaviour, reward, staleness)
    found = enumerable.expected(config, current, behaviour, reward, staleness)
    return found, enumerable.exact_gradient(current, reward)
