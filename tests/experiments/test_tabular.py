"""The tabular twin: laws of its gradients, the orderings that are robust over seeds, and its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from async_rlhf.experiments.tabular import world
from async_rlhf.experiments.tabular.__main__ import app
from async_rlhf.experiments.tabular.findings import Finding, findings, sentences
from async_rlhf.experiments.tabular.lengths import RULES, Lengths, Queue
from async_rlhf.experiments.tabular.questions import (
    CORRECTIONS,
    CRITICS,
    NAIVE,
    QUESTIONS,
    Cell,
    Row,
    corrections,
    exponents,
    values,
)
from async_rlhf.experiments.tabular.report import read_csv, render
from async_rlhf.experiments.tabular.training import MEMBERS, Recipe, outcome, sample, set_gradient, train
from async_rlhf.learner.config import GuardConfig, LossConfig
from async_rlhf.learner.objective import enumerable

QUESTION = {question.name: question for question in QUESTIONS}
SHORT = Recipe(num_updates=32)
UNTRUNCATED = LossConfig(is_cap=1e9, is_level="sequence", sequence_ratio="product")


def gradient(
    worlds: world.Worlds, loss: LossConfig, proximal: Tensor, behaviour: Tensor, num_groups: int = 8, luck: int = 0
) -> Tensor:
    """The ascent direction [S, K, C, V] of one update from sampled groups, as a mean over completions."""
    numbers = torch.rand(
        len(worlds.seeds), num_groups, MEMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(luck)
    )
    batch = sample(worlds, Recipe(loss), proximal, behaviour, numbers, [1] * len(worlds.seeds), None)
    leaf = proximal.clone().requires_grad_()
    set_gradient(leaf, batch, loss)
    assert leaf.grad is not None
    return -leaf.grad * enumerable.T


def test_what_a_seed_ends_at_does_not_depend_on_the_seeds_beside_it() -> None:
    alone, among = world.make_worlds([3]), world.make_worlds([0, 3, 7])
    for recipe in (SHORT, replace(SHORT, loss=LossConfig(kind="online_dpo"), staleness=2)):
        torch.testing.assert_close(train(alone, recipe).versions[-1][0], train(among, recipe).versions[-1][1])


def test_values_and_the_gradient_are_those_of_the_expected_reward() -> None:
    worlds = world.make_worlds([0])
    worth, often = world.state_values(worlds.initial, worlds.gold)
    torch.testing.assert_close(worth[..., 0].mean(-1), world.expected(worlds.initial, worlds.gold))
    torch.testing.assert_close(often.sum(-1), torch.ones_like(often[..., 0]))
    assert float(world.divergence(worlds.initial, worlds.initial)) == pytest.approx(0)
    up = worlds.initial + 1e-4 * world.gradient(worlds.initial, worlds.gold)
    rise = world.expected(up, worlds.gold) - world.expected(worlds.initial, worlds.gold)
    assert float(rise) == pytest.approx(1e-4 * float(world.gradient(worlds.initial, worlds.gold).square().sum()), rel=1e-3)


def test_with_fresh_data_and_one_update_every_correction_gives_the_same_gradient() -> None:
    worlds = world.make_worlds(range(3))
    found = {name: gradient(worlds, loss, worlds.initial, worlds.initial) for name, loss in CORRECTIONS.items()}
    for each in found.values():
        torch.testing.assert_close(each, found[NAIVE], rtol=0, atol=1e-6)
    assert float(found[NAIVE].abs().max()) > 1e-3


def test_with_the_whole_ratio_the_sampled_gradient_of_old_data_has_the_true_one_as_its_mean() -> None:
    """Projected on the true gradient, so that it is one number: its mean over many batches is within its standard error's
    reach of 1. Without any weight it is not."""
    worlds = world.make_worlds([0])
    now = train(worlds, replace(SHORT, updates=1)).versions[-1]
    true = world.gradient(now, worlds.gold)
    share = {}
    for name, loss in (("whole ratio", UNTRUNCATED), ("no weight", LossConfig(is_cap=None))):
        drawn = torch.stack([gradient(worlds, loss, now, worlds.initial, 400, luck) for luck in range(100)])
        along = (drawn * true).flatten(1).sum(1) / true.square().sum()
        share[name] = (float(along.mean()), float(along.std() / 10))
    (mean, error), (biased, of_biased) = share["whole ratio"], share["no weight"]
    assert abs(mean - 1) < 3 * error and error < 0.05
    assert abs(biased - 1) > 5 * of_biased


def test_data_are_exactly_as_old_as_the_recipe_says_and_the_guard_lowers_that_while_they_look_too_old() -> None:
    worlds = world.make_worlds(range(3))
    fixed = replace(Recipe(LossConfig(kind="ppo_clip"), staleness=8, learning_rate=0.2), num_updates=160)
    trained = train(worlds, fixed)
    assert trained.targets == [[min(step, 8)] * 3 for step in range(40)]
    guarded = replace(fixed, guard=GuardConfig(enabled=True))
    found = train(worlds, guarded)
    assert all(0 <= age <= 8 for ages in found.targets for age in ages)
    mean = [row["staleness_mean"] for row in outcome(worlds, found, guarded)]
    assert max(mean) < min(row["staleness_mean"] for row in outcome(worlds, trained, fixed))


@pytest.mark.parametrize("arm", CRITICS)
def test_a_critic_comes_to_know_the_value_of_a_policy_that_stands_still(arm: str) -> None:
    worlds = world.make_worlds(range(3))
    recipe = Recipe(advantage=CRITICS[arm].model_copy(update={"value_clip": None}), learning_rate=0.0, num_updates=64)
    errors = [row["critic_error"] for row in outcome(worlds, train(worlds, recipe), recipe)]
    worth, often = world.state_values(worlds.initial, worlds.gold)
    nothing_known = (often * worth.square()).sum(-1).mean(-1).sqrt()
    assert max(errors) < 0.75 * float(nothing_known.min())


@pytest.fixture(scope="module")
def stale() -> tuple[list[Row], list[Finding]]:
    rows = corrections(range(5), num_updates=128)
    return rows, findings(QUESTION["corrections"], rows)


def shown(found: Sequence[Finding], cell: Cell, base: Cell) -> Finding:
    (each,) = [each for each in found if (each.cell, each.base) == (cell, base)]
    return each


def test_naive_ppo_at_staleness_16_ends_below_the_synchronous_run_and_every_correction_above_it(
    stale: tuple[list[Row], list[Finding]],
) -> None:
    rows, found = stale
    old = Cell("gold", NAIVE, 16)
    lost = shown(found, old, Cell("gold", NAIVE, 0))
    assert lost.shown and lost.found.high < 0
    for arm in CORRECTIONS:
        if arm != NAIVE:
            gained = shown(found, Cell("gold", arm, 16), old)
            assert gained.shown and gained.found.low > 0, arm
    # with fresh data the clip region of behaviour is that of proximal, and the weight is 1
    for arm in ("recompute only", "decoupled PPO"):
        assert values(rows, Cell("gold", arm, 0)) == pytest.approx(values(rows, Cell("gold", NAIVE, 0)), abs=1e-9)
    assert min(values(rows, Cell("gold", NAIVE, 0))) > 0.5, "the synchronous run learns the task"


def test_sentences_are_worded_by_their_intervals(stale: tuple[list[Row], list[Finding]]) -> None:
    rows, found = stale
    said = sentences(QUESTION["corrections"], rows)
    assert len(said) == len(found) + len(CORRECTIONS) - 1
    for each, sentence in zip(found, said, strict=False):
        assert ("no difference shown" in sentence) == (each.found.low <= 0 <= each.found.high)
        assert (" lies below " in sentence and "alone" not in sentence) == (each.shown and each.found.mean < 0)
    assert sum(sentence.startswith("At staleness 16") for sentence in said) == len(CORRECTIONS) - 1


def test_the_exponent_of_a_law_is_found_again() -> None:
    best = {age: [c * (1 + age) ** -0.5 for c in (0.1, 0.2)] for age in (0, 2, 8, 32)}
    assert exponents(best) == pytest.approx([-0.5, -0.5])


def test_lengths_of_two_answers_to_a_prompt_are_alike_and_not_the_same() -> None:
    drawn = Lengths(0)
    one, other = (np.log([drawn.of(prompt, attempt) for prompt in range(2000)]) for attempt in (0, 1))
    # of equal variances of prompts and of answers one half of the whole is common
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(0.5, abs=0.05)
    assert np.exp(one).mean() == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("bound", [1, 4])
def test_credit_trains_on_every_answer_within_the_bound_and_dropping_favours_the_short(bound: int) -> None:
    drawn = Lengths(1)
    credit, dropped, redone = (Queue(rule, bound, drawn).run() for rule in RULES)
    assert credit.trained == [drawn.of(prompt, 0) for prompt in range(len(credit.trained))] and not credit.dropped
    assert all(each.oldest <= bound for each in (credit, dropped, redone))
    assert np.mean(dropped.trained) < np.mean(redone.trained) < 0.9 * np.mean(credit.trained)
    assert np.mean(dropped.dropped) > 1.5 * np.mean(dropped.trained)


def test_the_command_writes_rows_pictures_and_a_report(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--only", "gradients", "--seeds", "5", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "gradients.csv", "gradients.png", "gradients.svg", "report.md"]  # fmt: skip
    rows = read_csv(tmp_path / "out" / "gradients.csv")
    assert len(rows) == 6 * 3 * 5
    fresh = [row["cosine"] for row in rows if row["x"] == 0]
    assert fresh == pytest.approx([1.0] * 30), "on data of its own every correction is exact"
    page = (tmp_path / "out" / "report.md").read_text()
    assert "python -m async_rlhf.experiments.tabular --only gradients --seeds 5" in page and "](gradients.png)" in page


def test_a_question_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    result = CliRunner().invoke(app, ["--only", "colour"])
    assert result.exit_code == 2 and "corrections" in result.output


def test_the_committed_report_is_what_the_committed_rows_say() -> None:
    folder = Path(world.__file__).parent / "results"
    answered = [(question, read_csv(folder / f"{question.name}.csv")) for question in QUESTIONS]
    assert all(len(values(rows, question.compared[0][0])) >= 20 for question, rows in answered)
    assert (folder / "report.md").read_text() == render(answered)
