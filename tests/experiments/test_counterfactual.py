"""Gradients on a stale batch against fresh ones: the laws of the measures, the exact part at bound 0, the pages, the errors."""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.counterfactual.__main__ import app, batches_for, check_memory
from async_rlhf.experiments.counterfactual.gradients import Gradients, rewards_of
from async_rlhf.experiments.counterfactual.measures import Array, FreshGradients, ceiling
from async_rlhf.experiments.counterfactual.page import (
    FRESH,
    CorrectionInterval,
    EstimateRow,
    over_seeds,
    render,
    sentences,
)
from async_rlhf.experiments.counterfactual.recorded import SHIPPED, corrections, plain, recorded, several
from async_rlhf.learner.config import LossConfig
from async_rlhf.run.config import Config
from async_rlhf.run.loading import load
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, SMALL
from tests.experiments.written import ended_run

PARAMETERS, BATCHES = 800, 32
Parts = tuple[npt.NDArray[np.float32], Array]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a synchronous run of four steps that keeps its batches and every second checkpoint."""
    changed = {"queue.max_staleness": 0, "queue.keep_rollouts": True, "checkpoint.keep_every": 2}
    config = load(QUICK, {**SMALL, **changed, "output_dir": str(tmp_path_factory.mktemp("runs"))})
    return Path(train(config, quiet=True).run_dir)


def noisy(gradient_P: Array, parts: int, noise: float, random: np.random.Generator) -> Parts:
    """Independent estimates of a gradient, each with noise of this expected norm; counts differ, as those of tokens do."""
    counts_K = random.integers(90, 110, parts).astype(np.float64)
    errors_KP = random.normal(size=(parts, len(gradient_P))) * noise / np.sqrt(len(gradient_P))
    return ((gradient_P + errors_KP) * counts_K[:, None]).astype(np.float32), counts_K


def whole(parts: Parts) -> Array:
    return np.asarray(parts[0].sum(0, dtype=np.float64) / parts[1].sum())


def world(noise: float, seed: int, scale: float = 1.0) -> tuple[Array, FreshGradients, Array]:
    """A true gradient of norm 1, its reference, and an estimate of `scale` times it from other samples."""
    random = np.random.default_rng(seed)
    gradient_P = random.normal(size=PARAMETERS)
    gradient_P /= np.linalg.norm(gradient_P)
    reference = FreshGradients(*noisy(gradient_P, BATCHES, noise, random))
    return gradient_P, reference, whole(noisy(scale * gradient_P, 16, noise, random))


@pytest.mark.parametrize("noise", [0.5, 2.0, 10.0])
def test_the_true_gradient_has_the_cosine_with_the_reference_that_its_halves_foretell(noise: float) -> None:
    worlds = [world(noise, seed) for seed in range(20)]
    reached = np.mean([reference.measure(gradient_P).cosine for gradient_P, reference, _ in worlds])
    assert reached == pytest.approx(np.mean([ceiling(reference.halves[0]) for _, reference, _ in worlds]), abs=0.025)
    assert reached == pytest.approx(1 / np.sqrt(1 + noise**2 / BATCHES), abs=0.02)


def test_a_ceiling_is_none_where_the_halves_disagree_and_a_gradient_that_is_nothing_points_nowhere() -> None:
    assert [ceiling(r) for r in (-0.5, 0.0, 0.5, 1.0)] == pytest.approx([0.0, 0.0, np.sqrt(2 / 3), 1.0])
    assert world(1.0, 0)[1].measure(np.zeros(PARAMETERS))[:2] == (0.0, 0.0)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0])
def test_the_share_is_on_average_what_an_estimate_keeps_of_the_gradient_however_noisy(scale: float) -> None:
    shares = [
        reference.measure(estimate_P).share for _, reference, estimate_P in (world(4.0, seed, scale) for seed in range(100))
    ]
    assert np.mean(shares) == pytest.approx(scale, abs=0.05)


def test_fresh_batches_are_the_yardstick_their_share_is_one_and_their_noise_is_that_of_their_size() -> None:
    noise = 4.0
    values = np.mean([world(noise, seed)[1].fresh_batches() for seed in range(20)], axis=0)
    assert values.shape == (BATCHES, 3) and values[:, 2].mean() == pytest.approx(1.0, abs=0.1)
    # |batch| / |rest|, whose squares are 1 + noise^2 and 1 + noise^2 / 31
    assert values[:, 1].mean() == pytest.approx(np.sqrt((1 + noise**2) / (1 + noise**2 / 31)), rel=0.05)


@pytest.mark.rest
def test_at_bound_0_every_correction_gives_the_plain_gradient_of_its_batch(directory: Path) -> None:
    _, config, (moment,) = recorded(directory, [2])
    assert moment.staleness == (0.0, 0)
    gradients = Gradients(config, moment.checkpoint, moment.step, plain(config.loss))
    rewards = rewards_of(config, moment.groups, moment.statistics)
    others = {"gspo": LossConfig(kind="gspo"), "proximal_rloo": LossConfig(kind="proximal_rloo")}
    for name, loss in {**corrections(SHIPPED, config.loss), **others}.items():
        found_P, plain_P = (whole(gradients.sums(moment.groups, rewards, each, 4)) for each in (loss, plain(loss)))
        norm, of_plain = np.linalg.norm(found_P), np.linalg.norm(plain_P)
        assert of_plain > 0, name
        assert (found_P @ plain_P / norm / of_plain, norm / of_plain) == pytest.approx((1.0, 1.0), abs=1e-5), name


def test_the_parts_of_a_gradient_add_up_to_it_however_it_is_cut(directory: Path) -> None:
    _, config, (moment,) = recorded(directory, [2])
    gradients = Gradients(config, moment.checkpoint, moment.step, plain(config.loss))
    rewards, loss = rewards_of(config, moment.groups, moment.statistics), config.loss
    by_one, by_three, at_once = (gradients.sums(moment.groups, rewards, loss, size) for size in (1, 3, 4))
    assert [len(counts_K) for _, counts_K in (by_one, by_three, at_once)] == [4, 2, 1]
    for cut in (by_one, by_three):
        assert cut[1].sum() == at_once[1].sum()
        assert np.linalg.norm(whole(cut) - whole(at_once)) < 1e-4 * np.linalg.norm(whole(at_once)), "rounding makes some 1e-6"


def test_the_command_leaves_rows_and_a_page_and_says_when_the_reference_is_small(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "found"
    done = CliRunner().invoke(app, [str(directory), "--completions", "60", "--out", str(out)])
    assert done.exit_code == 0, done.output
    warning = "only 64 fresh completions, 4096 are advised"
    assert f"warning: {warning}" in done.output and "step 2: fresh completions: " in done.output
    page = (out / "report.md").read_text()
    assert f"**Warning: {warning}" in page and "## Step 2: mean staleness 0.00" in page
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    names = list(corrections(SHIPPED, LossConfig()))
    assert [row["estimate"] for row in rows] == [FRESH, *names]
    # of one batch that is not stale all corrections are one estimate, however rough the reference
    for measure in ("cosine", "norm_ratio"):
        found = [float(row[measure]) for row in rows[1:]]
        assert max(found) - min(found) < 1e-4, measure


def rows_at(seed: int, shares: tuple[float, ...], cosines: tuple[float, ...], staleness: float = 7.5) -> list[EstimateRow]:
    """Of one run: a fresh batch, and corrections with these shares and cosines."""
    near = CorrectionInterval(0.5, 0.4, 0.6)
    fresh = EstimateRow(seed, 10, FRESH, staleness, 8, 16, 4096, 0.6, 0.87, near, near, near)
    found = zip(("uncorrected", "ppo_clip", "naive"), shares, cosines, strict=False)
    stale = replace(fresh, fresh_below=0.5, norm_ratio=CorrectionInterval(1.0))
    shown = ((name, CorrectionInterval(share), CorrectionInterval(cosine)) for name, share, cosine in found)
    return [fresh, *(replace(stale, estimate=name, share=share, cosine=cosine) for name, share, cosine in shown)]


def test_several_runs_are_a_mean_whose_interval_is_over_seeds_and_sentences_are_worded_by_it_after_holm() -> None:
    runs = [rows_at(seed, (1 + step, 0.5 + step, 0.5 + step), (0.5, 0.3 + step, 0.3 + step))
            for seed, step in enumerate((-0.1, 0.0, 0.1))]  # fmt: skip
    fresh, base, clip, naive = pooled = over_seeds([row for run in runs for row in run])
    assert (fresh.runs, fresh.cosine) == (3, pytest.approx((0.5, 0.4, 0.6))) and base.difference is None
    half = 4.303 * 0.1 / 3**0.5  # 4.303 is the 0.975 quantile of t with two degrees of freedom
    assert clip.share == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-3) and naive.share == clip.share
    said = sentences(pooled)
    assert said[0] == "Step 10: naive gave the gradient of ppo_clip."
    assert said[1].startswith(
        "Step 10, ppo_clip: its cosine against uncorrected: -0.200 (-0.448 to +0.048), no difference shown"
    )
    assert "uncorrected: its share against 1, that of an unbiased estimate: +0.000" in said[2]
    assert said[3] == "Step 10, ppo_clip: its share lies below 1, that of an unbiased estimate: -0.500 (-0.748 to -0.252)."
    assert "Warning" not in render(pooled)


def test_one_run_stays_as_it_is_two_have_no_interval_and_what_is_unknown_in_one_is_unknown_over_all() -> None:
    one = rows_at(0, (1.0, 0.5), (0.5, 0.5))
    assert over_seeds(one) == one and sentences(one) == [] and "| ppo_clip | 0.500 | 1.000 | 0.500 |" in render(one)
    with pytest.raises(ValueError, match="2 runs have no interval"):
        over_seeds([*one, *rows_at(1, (1.0, 0.5), (0.5, 0.5))])
    clip = over_seeds([row for seed, share in enumerate((0.4, math.nan, 0.6)) for row in rows_at(seed, (share,), (0.3,))])[-1]
    assert math.isnan(clip.share.value) and "its share" not in "".join(sentences([clip]))


def test_what_cannot_be_asked_is_refused_before_any_work(directory: Path, tmp_path: Path, small: Callable[..., Config]) -> None:
    def refused(message: str, ask: Callable[..., object], *given: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            ask(*given)

    forgetful = ended_run(small(name="forgetful")).path
    refused("has no checkpoint; a run with checkpoint.keep_every", recorded, forgetful, [])
    (forgetful / "checkpoints" / "step_000002").mkdir(parents=True)
    refused("no archive of batches; a run with queue.keep_rollouts = true", recorded, forgetful, [])
    critic = {"advantage.kind": "traced", "learner.critic.kind": "head"}
    refused("needs a critic", recorded, ended_run(small(name="critic", **critic)).path, [])
    refused("--step 3: .*has no checkpoint of it", recorded, directory, [3])
    missing = r"no batch that was trained on from it .*the nearest with both is 2\. Steps with both: 2$"
    refused(missing, recorded, directory, [4])
    alive = RunDir.create(small(name="alive"))
    refused("is still being trained", recorded, alive.path, [])
    alive.retire()
    refused("fewer than 4 batches of 16 .*at least 64 are needed, 4096 are advised", batches_for, small(), 48)
    large = r"32 gradients of 100,000,000 parameters need 11\.9 GiB at once, 8\.0 GiB are free"
    refused(large, check_memory, 100_000_000, 32, 8 << 30)
    check_memory(1_000_000, 32, 8 << 30)
    refused("2 runs have no interval over seeds; give one, or at least 3", several, [directory] * 2, [2])
    refused("the runs have the seeds 0, 0, 0; one run a seed", several, [directory] * 3, [2])
    done = CliRunner().invoke(app, [str(tmp_path)])
    assert done.exit_code == 3 and "error: " in done.output and "is no run directory" in done.output


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
        ("[one]\nis_kap = 2\n[two]", r"\[one\]: unknown key 'loss.is_kap' = 2: .* did you mean 'loss.is_cap'"),
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
