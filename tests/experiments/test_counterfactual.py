"""Gradients on a stale batch against fresh ones: the laws of the measures, the exact part at bound 0, the pages, the errors."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from async_rlhf.api import run
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.counterfactual.__main__ import app, batches_for, check_memory
from async_rlhf.experiments.counterfactual.gradients import Gradients, rewards_of
from async_rlhf.experiments.counterfactual.measures import (
    Array,
    Estimate,
    Reference,
    Sums,
    between,
    ceiling,
    fresh_batches,
    jackknife,
)
from async_rlhf.experiments.counterfactual.page import (
    FRESH,
    Interval,
    Row,
    over_seeds,
    render,
    sentences,
    write_rows,
)
from async_rlhf.experiments.counterfactual.picture import draw
from async_rlhf.experiments.counterfactual.recorded import SHIPPED, corrections, plain, recorded, several
from async_rlhf.experiments.statistics import Difference
from async_rlhf.learner.config import LossConfig
from async_rlhf.run.config import Config, load
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, SMALL
from tests.experiments.written import ended_run

PARAMETERS, BLOCKS, GROUPS = 800, 32, 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a synchronous run of four steps that keeps its batches and every second checkpoint."""
    changed = {"queue.max_staleness": 0, "queue.keep_rollouts": True, "checkpoint.keep_every": 2}
    config = load(QUICK, {**SMALL, **changed, "output_dir": str(tmp_path_factory.mktemp("runs"))})
    return Path(run(config).run_dir)


def noisy(gradient_P: Array, parts: int, noise: float, random: np.random.Generator) -> Sums:
    """Independent estimates of a gradient, each with noise of this expected norm; counts differ, as those of tokens do."""
    counts_K = random.integers(90, 110, parts).astype(np.float64)
    errors_KP = random.normal(size=(parts, len(gradient_P))) * noise / np.sqrt(len(gradient_P))
    return Sums(((gradient_P + errors_KP) * counts_K[:, None]).astype(np.float32), counts_K)


def world(noise: float, seed: int, scale: float = 1.0) -> tuple[Array, Sums, Reference, Estimate]:
    """A true gradient of norm 1, its reference, and an estimate of `scale` times it from other samples."""
    random = np.random.default_rng(seed)
    gradient_P = random.normal(size=PARAMETERS)
    gradient_P /= np.linalg.norm(gradient_P)
    fresh = noisy(gradient_P, BLOCKS, noise, random)
    reference = Reference.of(fresh)
    return gradient_P, fresh, reference, Estimate.of(noisy(scale * gradient_P, GROUPS, noise, random), reference, fresh.sums_KP)


@pytest.mark.parametrize("noise", [0.5, 2.0, 5.0, 10.0])
def test_the_true_gradient_has_the_cosine_with_the_reference_that_its_halves_foretell(noise: float) -> None:
    reached, foretold = [], []
    for seed in range(20):
        gradient_P, fresh, reference, _ = world(noise, seed)
        truth = Estimate.of(Sums(gradient_P[None].astype(np.float32), np.ones(1)), reference, fresh.sums_KP)
        reached.append(truth.cosine(np.ones(1), np.ones(BLOCKS)))
        foretold.append(reference.ceiling(np.ones(BLOCKS)))
    assert np.mean(reached) == pytest.approx(np.mean(foretold), abs=0.025)
    assert np.mean(reached) == pytest.approx(1 / np.sqrt(1 + noise**2 / BLOCKS), abs=0.02)


def test_a_ceiling_is_none_where_the_halves_disagree_and_an_estimate_that_is_nothing_points_nowhere() -> None:
    assert [ceiling(r) for r in (-0.5, 0.0, 0.5, 1.0)] == pytest.approx([0.0, 0.0, np.sqrt(2 / 3), 1.0])
    _, fresh, reference, _ = world(1.0, 0)
    nothing = Estimate.of(Sums(np.zeros((GROUPS, PARAMETERS), np.float32), np.ones(GROUPS)), reference, fresh.sums_KP)
    assert nothing.cosine(np.ones(GROUPS), np.ones(BLOCKS)) == 0.0


def test_measures_from_inner_products_are_those_of_the_gradients_themselves() -> None:
    random = np.random.default_rng(0)
    fresh, stale = (noisy(random.normal(size=PARAMETERS), parts, 1.0, random) for parts in (BLOCKS, GROUPS))
    found = Estimate.of(stale, Reference.of(fresh), fresh.sums_KP)
    mean_P, reference_P = (each.sums_KP.astype(np.float64).sum(0) / each.counts_K.sum() for each in (stale, fresh))
    norm, of_reference = np.linalg.norm(mean_P), np.linalg.norm(reference_P)
    ones = np.ones(GROUPS), np.ones(BLOCKS)
    assert found.cosine(*ones) == pytest.approx(mean_P @ reference_P / norm / of_reference)
    assert found.norm_ratio(*ones) == pytest.approx(norm / of_reference)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0])
def test_the_share_is_what_an_estimate_keeps_of_the_gradient_however_noisy_and_its_interval_holds_it(scale: float) -> None:
    found = [jackknife(world(4.0, seed, scale)[3].share, GROUPS, BLOCKS) for seed in range(100)]
    assert np.mean([each.mean for each in found]) == pytest.approx(scale, abs=0.05)
    assert np.mean([each.low <= scale <= each.high for each in found]) >= 0.88
    assert np.mean([each.high - each.low for each in found]) < 0.4


def test_what_two_estimates_of_one_batch_have_in_common_falls_out_of_their_difference() -> None:
    _, fresh, reference, _ = world(4.0, 0)
    stale = noisy(np.ones(PARAMETERS) / np.sqrt(PARAMETERS), GROUPS, 4.0, np.random.default_rng(1))
    one = Estimate.of(stale, reference, fresh.sums_KP)
    doubled = Estimate.of(Sums(2 * stale.sums_KP, stale.counts_K), reference, fresh.sums_KP)
    found = between(Estimate.cosine, one, doubled)
    assert abs(found.mean) < 1e-9 and found.high - found.low < 1e-9
    assert between(Estimate.norm_ratio, doubled, one).mean == pytest.approx(one.norm_ratio(np.ones(GROUPS), np.ones(BLOCKS)))


def test_fresh_batches_are_the_yardstick_their_share_is_one_and_their_noise_is_that_of_their_size() -> None:
    noise, of_each = 4.0, BLOCKS // 4
    values = np.mean([fresh_batches(world(noise, seed)[2], 4) for seed in range(20)], axis=0)
    assert values.shape == (of_each, 3)
    assert values[:, 2].mean() == pytest.approx(1.0, abs=0.1)
    # |batch| / |rest|, whose squares are 1 + noise^2 / 4 and 1 + noise^2 / 28
    assert values[:, 1].mean() == pytest.approx(np.sqrt((1 + noise**2 / 4) / (1 + noise**2 / 28)), rel=0.05)


@pytest.mark.rest
def test_at_bound_0_every_correction_gives_the_plain_gradient_of_its_batch(directory: Path) -> None:
    _, config, (moment,) = recorded(directory, [2])
    assert moment.staleness == (0.0, 0)
    gradients = Gradients(config, moment.checkpoint, moment.step, plain(config.loss))
    rewards = rewards_of(config, moment.groups, moment.statistics)
    others = {"gspo": LossConfig(kind="gspo"), "proximal_rloo": LossConfig(kind="proximal_rloo")}
    for name, loss in {**corrections(SHIPPED, config.loss), **others}.items():
        found_P, plain_P = (gradients.sums(moment.groups, rewards, each).whole() for each in (loss, plain(loss)))
        norm, of_plain = np.linalg.norm(found_P), np.linalg.norm(plain_P)
        assert of_plain > 0, name
        assert found_P @ plain_P / norm / of_plain == pytest.approx(1.0, abs=1e-5), name
        assert norm / of_plain == pytest.approx(1.0, abs=1e-5), name


def test_the_parts_of_a_gradient_add_up_to_it_however_it_is_cut(directory: Path) -> None:
    _, config, (moment,) = recorded(directory, [2])
    gradients = Gradients(config, moment.checkpoint, moment.step, plain(config.loss))
    rewards, loss = rewards_of(config, moment.groups, moment.statistics), config.loss
    by_one, by_three, at_once = (gradients.sums(moment.groups, rewards, loss, size) for size in (1, 3, 4))
    assert [len(each.counts_K) for each in (by_one, by_three, at_once)] == [4, 2, 1]
    for cut in (by_one, by_three):
        assert cut.counts_K.sum() == at_once.counts_K.sum()
        np.testing.assert_allclose(cut.whole(), at_once.whole(), atol=1e-6 * float(np.abs(at_once.whole()).max()))


def test_the_command_leaves_rows_a_picture_and_a_page_and_says_when_the_reference_is_small(
    directory: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found"
    done = CliRunner().invoke(app, [str(directory), "--completions", "60", "--out", str(out)])
    assert done.exit_code == 0, done.output
    warning = "only 64 fresh completions, 4096 are advised"
    assert f"warning: {warning}" in done.output and "step 2: fresh completions: " in done.output
    assert f"WARNING: {warning}" in (out / "picture.svg").read_text() and (out / "picture.png").stat().st_size > 10_000
    page = (out / "report.md").read_text()
    assert f"**Warning: {warning}" in page and "## Step 2: mean staleness 0.00" in page
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    names = list(corrections(SHIPPED, LossConfig()))
    assert [row["estimate"] for row in rows] == [FRESH, *names]
    # of one batch that is not stale all corrections are one estimate, however rough the reference
    for measure in ("cosine", "norm_ratio"):
        found = [float(row[measure]) for row in rows[1:]]
        assert max(found) - min(found) < 1e-4, measure
    assert all(abs(float(row["difference_mean"])) < 1e-4 for row in rows[2:]) and rows[1]["difference_mean"] == ""


def rows_of(completions: int) -> list[Row]:
    near = Interval(0.5, 0.4, 0.6)
    fresh = Row(0, 10, FRESH, 7.5, 8, 16, completions, 0.6, 0.87, near, near, near)
    below, none = Difference(-0.2, -0.3, -0.1, 16, 0.001, 0.2), Difference(0.01, -0.1, 0.12, 16, 0.8, 0.2)
    base = replace(fresh, estimate="uncorrected", fresh_below=0.5, bias=none)
    clip = replace(base, estimate="ppo_clip", cosine=Interval(0.51, 0.4, 0.6), bias=below, base="uncorrected", difference=none)
    return [fresh, base, clip, replace(clip, estimate="naive")]


def test_sentences_are_worded_by_their_intervals_after_holm_over_all_of_them() -> None:
    undecided = (
        "+0.010 (-0.100 to +0.120), no difference shown; differences outside -0.100 to +0.120 are unlikely; 16 groups show one "
        "of 0.150 four times in five."
    )
    assert sentences(rows_of(4096)) == [
        "Step 10: naive gave the gradient of ppo_clip.",
        f"Step 10, ppo_clip: its cosine against uncorrected: {undecided}",
        f"Step 10, uncorrected: its share against 1, that of an unbiased estimate: {undecided}",
        "Step 10, ppo_clip: its share lies below 1, that of an unbiased estimate: -0.200 (-0.300 to -0.100).",
    ]


def test_pages_are_drawn_twice_the_same_and_corrections_with_one_gradient_share_a_line(tmp_path: Path) -> None:
    drawn = []
    for staleness in (7.5, 7.5, 10.0):
        draw([replace(row, staleness=staleness) for row in rows_of(4096)], tmp_path)
        drawn.append((tmp_path / "picture.svg").read_text())
    one, other, on_one_axis = drawn
    assert "python -m async_rlhf.experiments.counterfactual RUN --step 10 --completions 4096" in one
    assert one == other and "WARNING" not in one and "Warning" not in render(rows_of(4096))
    assert one.count(">ppo_clip, naive<") == 1 and ">naive<" not in one and ">mean staleness<" in one
    assert "learner step and staleness" in on_one_axis and ">mean staleness<" not in on_one_axis


def test_an_interval_is_three_columns_a_difference_five_and_what_was_not_measured_is_empty(tmp_path: Path) -> None:
    write_rows(rows_of(4096), tmp_path / "rows.csv")
    fresh, _, clip, _ = csv.DictReader((tmp_path / "rows.csv").read_text().splitlines())
    expected = {"cosine": "0.51", "cosine_low": "0.4", "cosine_high": "0.6", "bias_mean": "-0.2", "bias_low": "-0.3",
                "bias_high": "-0.1", "bias_p": "0.001", "bias_deviation": "0.2"}  # fmt: skip
    assert {name: clip[name] for name in expected} == expected
    assert fresh["bias_mean"] == fresh["fresh_below"] == fresh["difference_p"] == ""


def of_seed(seed: int, share: float, cosine: float) -> list[Row]:
    """Rows of one run: a fresh batch, the base, and a correction with this share and this cosine."""
    fresh, base, clip, _ = rows_of(4096)
    changed = replace(
        clip,
        cosine=Interval(cosine, -9.0, 9.0),
        share=Interval(share, -9.0, 9.0),
        bias=Difference(share - 1, -9.0, 9.0, 16, 0.9, 9.0),
        difference=Difference(cosine - 0.5, -9.0, 9.0, 16, 0.9, 9.0),
    )
    return [replace(row, seed=seed) for row in (fresh, base, changed)]


def test_several_runs_are_a_mean_whose_interval_is_over_seeds_and_not_that_of_their_batches() -> None:
    rows = [row for seed, share in enumerate((0.4, 0.5, 0.6)) for row in of_seed(seed, share, 0.3 + share / 10)]
    fresh, base, clip = over_seeds(rows)
    assert (fresh.runs, fresh.cosine) == (3, pytest.approx((0.5, 0.4, 0.6))) and base.runs == 3
    # 4.303 is the 0.975 quantile of t with two degrees of freedom
    half = 4.303 * 0.1 / 3**0.5
    assert clip.share == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-3)
    assert clip.bias is not None and clip.bias.high == pytest.approx(half - 0.5, abs=1e-3) and clip.bias.count == 3
    assert clip.difference is not None and clip.difference.mean == pytest.approx(0.35 - 0.5)
    said = sentences([fresh, base, clip])
    assert said[-1] == "Step 10, ppo_clip: its share lies below 1, that of an unbiased estimate: -0.500 (-0.748 to -0.252)."
    page = render([fresh, base, clip])
    assert "means over 3 runs, which differ in their seed" in page and "jackknife" not in page


def test_one_run_stays_as_it_is_two_have_no_interval_and_what_is_unknown_in_one_is_unknown_over_all() -> None:
    assert over_seeds(of_seed(0, 0.5, 0.5)) == of_seed(0, 0.5, 0.5)
    with pytest.raises(ValueError, match="2 runs have no interval"):
        over_seeds([*of_seed(0, 0.5, 0.5), *of_seed(1, 0.5, 0.5)])
    clip = over_seeds([row for seed, share in enumerate((0.4, float("nan"), 0.6)) for row in of_seed(seed, share, 0.3)])[-1]
    assert np.isnan(clip.share.value) and "its share" not in "".join(sentences([clip]))


@pytest.fixture
def ended(small: Callable[..., Config]) -> Callable[..., Path]:
    """The directory of a run that has ended, with empty checkpoints of these steps."""

    def make(*checkpoints: int, **overrides: Any) -> Path:
        made = ended_run(small(**overrides))
        for step in checkpoints:
            (made.path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        return made.path

    return make


def test_what_cannot_be_asked_is_refused_before_any_work(
    ended: Callable[..., Path], directory: Path, tmp_path: Path, small: Callable[..., Config]
) -> None:
    def refused(run_dir: Path, *steps: int) -> str:
        with pytest.raises(ConfigError) as error:
            recorded(run_dir, steps)
        return str(error.value)

    assert "is no run directory" in refused(tmp_path)
    assert "has no checkpoint; a run with checkpoint.keep_every" in refused(ended(name="bare"))
    assert "no archive of batches; a run with queue.keep_rollouts = true" in refused(ended(2, name="forgetful"))
    critic = {"advantage.kind": "traced", "learner.critic.kind": "head"}
    assert "needs a critic" in refused(ended(name="critic", **critic))
    assert "has 2 groups, too few for an interval" in refused(ended(name="few", **{"learner.batch_size": 8}))
    assert "--step 3: " in refused(directory, 3) and "has no checkpoint of it" in refused(directory, 3)
    assert "no batch that was trained on from it" in refused(directory, 4)
    assert refused(directory, 4).endswith("the nearest with both is 2. Steps with both: 2")
    alive = RunDir.create(small(name="alive"))
    assert "is still being trained" in refused(alive.path)
    alive.retire()
    with pytest.raises(ConfigError, match=r"fewer than 4 batches of 16 .*at least 64 are needed, 4096 are advised"):
        batches_for(small(), 48)
    with pytest.raises(ConfigError, match=r"32 gradients of 100,000,000 parameters need 11\.9 GiB at once, 8\.0 GiB are free"):
        check_memory(100_000_000, 32, 8 << 30)
    check_memory(1_000_000, 32, 8 << 30)
    with pytest.raises(ConfigError, match="2 runs have no interval over seeds; give one, or at least 3"):
        several([directory] * 2, [2])
    with pytest.raises(ConfigError, match=r"the runs have the seeds 0, 0, 0; one run a seed"):
        several([directory] * 3, [2])
    done = CliRunner().invoke(app, [str(tmp_path)])
    assert done.exit_code == 3 and "error: " in done.output


def test_runs_that_differ_in_their_seed_alone_are_asked_together_at_the_steps_that_all_have(
    directory: Path, tmp_path: Path
) -> None:
    def like(name: str, old: str, new: str) -> Path:
        made = Path(shutil.copytree(directory, tmp_path / name, symlinks=True))
        text = (made / "config.toml").read_text()
        assert text.count(old) == 1
        (made / "config.toml").write_text(text.replace(old, new))
        return made

    one, two = (like(name, "\nseed = 0\n", f"\nseed = {seed}\n") for seed, name in enumerate(("one", "two"), 1))
    found = several([directory, one, two], [])
    assert [config.seed for _, config, _ in found] == [0, 1, 2]
    assert all([moment.step for moment in moments] == [2] for *_, moments in found)
    other = like("other", "\nclip_low = 0.2\n", "\nclip_low = 0.1\n")
    with pytest.raises(ConfigError, match=r"differs from .* in more than its seed: loss.clip_low: 0.2 -> 0.1"):
        several([directory, one, other], [2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[one]\nkind = 'cispo'", "names 1 corrections: at least 2 are needed"),
        ("[one]\nis_kap = 2\n[two]", r"\[one\]: unknown key 'is_kap': did you mean 'is_cap'"),
        ("[one]\nkl_coef = 0.1\n[two]", r"\[one\]: kl_coef is what is optimised"),
        ("[one]\nclip_low = 2.0\n[two]", r"\[one\]: .*clip_low"),
        ("[one]\nkind = 'online_dpo'\n[two]", "'online_dpo' does not estimate the policy gradient"),
        ("one = 1\ntwo = 2", r"\[one\] is no table"),
    ],
)
def test_a_file_of_corrections_that_cannot_be_asked_is_refused_by_name(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        corrections(tmp_path / "mine.toml", LossConfig())


def test_corrections_keep_what_the_run_optimises_and_share_a_reference_where_they_estimate_the_same() -> None:
    own = LossConfig(kl_coef=0.01, reduction="sequence", sequence_mask=(0.5, 2.0))
    found = corrections(SHIPPED, own)
    assert all((each.kl_coef, each.reduction) == (0.01, "sequence") for each in found.values())
    assert found["uncorrected"].sequence_mask is None and found["sequence_mask"].sequence_mask == (0.8, 1.25)
    assert len({plain(each).model_dump_json() for each in found.values()}) == 1
    assert plain(LossConfig(kind="gspo")) != plain(LossConfig(kind="cispo"))
