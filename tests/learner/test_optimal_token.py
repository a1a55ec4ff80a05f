"""The baseline of each token that makes the gradient's variance least: its twins, its law, and what a step is given."""

from __future__ import annotations

from itertools import product

import numpy as np
import oracles
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from making import TINY_SPELLER, make_backend, make_group

from async_rlhf.buffers.record import Float32Array
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import AdvantageConfig, LossConfig
from async_rlhf.learner.loop.trainer import estimated
from async_rlhf.learner.objective import enumerable
from async_rlhf.learner.objective.advantages import leave_one_out, optimal_token
from async_rlhf.learner.objective.estimation import PolicyEvaluation, estimate_advantages

CONFIG = AdvantageConfig(kind="optimal_token")
member = st.tuples(st.floats(-5, 5, width=16), st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.75]), min_size=1, max_size=6))


def floats(values: list[float]) -> Float32Array:
    return np.array(values, np.float32)


@given(st.lists(member, min_size=1, max_size=6))
@example([(1.0, [0.0, 0.0]), (0.0, [0.0, 1.0]), (3.0, [1.0])])  # tokens without energy, and beyond all siblings
def test_it_is_the_twin_and_times_the_siblings_share_what_verl_computes(members: list[tuple[float, list[float]]]) -> None:
    rewards, energies = [reward for reward, _ in members], [own for _, own in members]
    found = optimal_token(rewards, [*map(floats, energies)])
    wanted, with_itself = (oracles.optimal_token(rewards, energies, itself=each) for each in (False, True))
    for i, own in enumerate(found):
        assert own.dtype == np.float32 and own.tolist() == pytest.approx(wanted[i], rel=1e-5, abs=1e-5)
        for t, advantage in enumerate(own):
            others = [each for j, each in enumerate(energies) if j != i and t < len(each)]
            theirs = sum(sum(each[: t + 1]) for each in others)
            if theirs > 0:
                share = theirs / (theirs + sum(energies[i][: t + 1]))
                assert advantage * share == pytest.approx(with_itself[i][t], rel=1e-5, abs=1e-5)


def test_equal_rewards_are_no_advantage_and_a_member_alone_has_none() -> None:
    assert [own.tolist() for own in optimal_token([0.1] * 3, [floats([0.3, 0.7])] * 3)] == [[0.0, 0.0]] * 3
    assert optimal_token([2.0], [floats([0.3, 0.7])])[0].tolist() == [0.0, 0.0]


def test_whatever_the_siblings_are_the_expected_gradient_is_exact_and_beside_many_its_variance_is_below_one_baselines() -> None:
    reward, logits = enumerable.rewards(), enumerable.initial()
    probability, jacobian = (
        enumerable.probabilities(logits),
        torch.autograd.functional.jacobian(enumerable.logprobs, logits).flatten(2),  # type: ignore[no-untyped-call]
    )
    p = torch.softmax(logits, -1)[enumerable.PREFIXES]
    one = torch.nn.functional.one_hot(enumerable.COMPLETIONS, enumerable.V)
    energy = (one - p).square().sum(-1).numpy()
    assert energy == pytest.approx(jacobian.square().sum(-1).numpy()), "the squared norm of the score in the logits"
    exact = enumerable.exact_gradient(logits, reward)

    def gradients(siblings: list[int], *, by_token: bool) -> torch.Tensor:
        """[Y, P]: what each completion gives beside these siblings."""
        of_siblings = [float(reward[j]) for j in siblings]
        found = []
        for y in range(enumerable.Y):
            rewards = [float(reward[y]), *of_siblings]
            own = optimal_token(rewards, [energy[j] for j in (y, *siblings)])[0] if by_token else None
            given_ = np.full(enumerable.T, leave_one_out(rewards)[0]) if own is None else own
            found.append((torch.from_numpy(np.asarray(given_, np.float64))[:, None] * jacobian[y]).sum(0))
        return torch.stack(found)

    drawn = torch.multinomial(probability, 64, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
    variances = []
    for siblings, by_token in product(([drawn[:1], drawn[:3], drawn]), (True, False)):
        each = gradients(siblings, by_token=by_token)
        expected = (probability[:, None] * each).sum(0)
        torch.testing.assert_close(expected, exact, rtol=0, atol=1e-6)
        variances.append(float((probability[:, None] * (each - expected).square()).sum()))
    assert variances[-2] < variances[-1]


def test_a_step_compares_tokens_by_what_the_policy_says_of_all_that_count() -> None:
    """Also of those that a budget cut and that leave the loss; each weighed by the square of its importance weight."""
    groups = [make_group(0, [2, 2]), make_group(1, [3, 1, 4, 2], truncated=[1])]
    rewards: list[list[float | None]] = [[None, None], [1.0, 0.0, 0.25, None]]
    loss, backend = LossConfig(mask_truncated=True, is_cap=1.5), make_backend(TINY_SPELLER)
    found, nothing = estimated(groups, rewards, backend, CONFIG, loss)
    assert not nothing and found.advantages[1][1] is None and sorted(found.targets) == [2, 4]
    seen = backend.evaluate(make_rows(groups, rewards), energies=True)
    energies = []
    for index, rollout in enumerate(groups[1].rollouts[:3], 2):
        energy, ratio = seen[index].energy, np.exp(seen[index].logp_proximal - rollout.logprobs)
        assert energy is not None and len(energy) == rollout.num_tokens and (energy > 0).all()
        energies.append(energy * np.minimum(1.5, ratio) ** 2)
    wanted = optimal_token([1.0, 0.0, 0.25], energies)
    for index in (2, 4):
        np.testing.assert_allclose(found.targets[index].advantage, wanted[index - 2], rtol=1e-5)
        assert "energy_N" not in found.targets[index].named()
    alone = PolicyEvaluation(seen[2].logp_proximal)
    with pytest.raises(ValueError, match="need an evaluation of all that count"):
        estimate_advantages(groups, rewards, rewards, {2: alone}, CONFIG, loss)
