"""Reports from what is on disk alone: of a sweep whose cells are kept, of a run, and of a directory that is neither."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.cli.app import experiment
from async_rlhf.experiments.reports.command import report
from async_rlhf.experiments.staleness.archive import keep_sweep, measured, read_sweep
from async_rlhf.experiments.staleness.cells import CellResult, HeldOut, keep, read_run
from async_rlhf.experiments.staleness.config import SweepConfig
from async_rlhf.experiments.staleness.report import render, write_csv
from async_rlhf.run.run_dir import RunDir
from tests.conftest import REPOSITORY
from tests.experiments.written import ended_run

COMMAND = "async-rlhf sweep s.toml --set max_steps=12"


@pytest.fixture
def run(small: Any) -> RunDir:
    """A run of 12 steps with 4 groups of 4 each; of the first no ratio is known, as where nothing was to be learned."""
    lines = [
        {
            "step": i, "reward": min(1.0, i / 10), "groups": [0, 1, 2, 3], "num_tokens": 100 + i, "step_time": 2.0,
            "staleness/histogram": {"0": 30, "1": 70 + i}, "staleness/violations": 0, "staleness/mean": 0.7,
            "is/ess": 0.9, "is/ratio_max": 2.0 if i > 1 else None,
            "clip_ratio/region_mean": 0.2, "kl/behaviour": 0.1, "kl/reference": 0.1 * i,
        }
        for i in range(1, 13)
    ]  # fmt: skip
    means = [("start", 0, 0.2), ("step", 6, 0.5), ("end", 12, 0.8)]
    evaluations = [{"label": label, "step": step, "mean_reward": mean, "accuracy": mean} for label, step, mean in means]
    ledger = {"credited": 50, "trained": 48, "stale": 2, "tokens_stale": 31, "tokens_put": 1300, "closes": True}
    return ended_run(small(), lines, evaluations, ledger)


@pytest.fixture
def result(run: RunDir) -> CellResult:
    found = read_run(run)
    return replace(found, curves={**found.curves, "samples": (128.0,) * 12})


@pytest.fixture
def sweep(result: CellResult, tmp_path: Path) -> Path:
    """The directory of a sweep of two bounds with three seeds, its runs removed."""
    directory = tmp_path / "swept"
    config = SweepConfig(
        name="s", base="../b.toml", seeds=(0, 1, 2), values={"queue.max_staleness": [1, 0]}, overrides={"max_steps": 12},
        results=str(directory),
    )  # fmt: skip
    keep_sweep(config, COMMAND, 1)
    for bound in (0, 1):
        for seed in config.seeds:
            end = HeldOut(0.8 - 0.1 * bound + 0.01 * seed * (1 + bound), None)
            cell = replace(
                result, cell=f"b{bound}_{seed}", setting=(("queue.max_staleness", bound),), seed=seed, bound=1,
                held_out_end=end, rewards=tuple((each or 0.0) - 0.05 * bound * seed for each in result.rewards),
            )  # fmt: skip
            keep(cell, config.kept(cell.cell))
    return directory


def test_a_sweep_is_reported_from_its_directory_wherever_that_was_moved(sweep: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.move(sweep, moved)
    written = report(moved, [].append)
    assert {path.name for path in written} == {
        "results.csv", "results.png", "results.svg", "trade_offs.png", "trade_offs.svg", "report.md", "report.html",
    }  # fmt: skip
    page = (moved / "report.md").read_text()
    assert f"    {COMMAND}\n" in page and "Base: `b.toml`, with `max_steps = 12`." in page
    first, second, *_ = re.findall(r"(?m)^\| queue.max_staleness = (\d) \|", page)
    assert (first, second) == ("1", "0"), "in the order of the sweep"
    assert "have no result" not in page
    assert (moved / "report.html").read_text().count("<svg ") == 2
    for name in ("results", "trade_offs"):
        drawn = (moved / f"{name}.svg").read_text()
        for words in ("What does queue.max_staleness do to learning?", COMMAND, "3 seeds, 1,536 samples trained on per run"):
            assert words in drawn, "a figure says of what it is"


def page_of(directory: Path) -> str:
    return render(read_sweep(directory), {})


PUBLISHED = [path.parent for path in sorted((REPOSITORY / "experiments").rglob("sweep.json"))]


@pytest.mark.parametrize("directory", PUBLISHED, ids=lambda path: path.name)
def test_a_published_page_and_its_table_are_what_the_kept_results_give(directory: Path, tmp_path: Path) -> None:
    archive = read_sweep(directory)
    pictures = {name: f"{name}.png" for name in ("results", "trade_offs")}
    assert render(archive, pictures) == (directory / "report.md").read_text()
    write_csv(archive.table, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == (directory / "results.csv").read_text()


def test_of_several_rewards_none_says_what_a_run_has_solved(run: RunDir) -> None:
    lines = run.read_evaluations()
    run.evaluations.write_text("".join(json.dumps({**line, "rewards": {"exact": 0.0, "brief": 0.8}}) + "\n" for line in lines))
    report(run.path, [].append)
    page = (run.path / "report.md").read_text()
    assert "accuracy" not in page and "| held-out exact, end | 0.000 |" in page and "| held-out brief, end | 0.800 |" in page


def test_seconds_are_compared_only_where_no_cell_ever_shared_the_machine(sweep: Path) -> None:
    heading = "## Time, against queue.max_staleness = 1"
    assert heading in page_of(sweep)
    config = read_sweep(sweep).sweep.model_copy(update={"results": str(sweep)})
    assert not keep_sweep(config, COMMAND, 2)
    assert not keep_sweep(config, COMMAND, 1), "some of its cells shared it"
    assert heading not in page_of(sweep)


def test_cells_without_a_result_are_named(sweep: Path) -> None:
    (sweep / "cells" / "b1_2.json").unlink()
    assert "over 3 seeds, and of differences the 95 % interval; of fewer than 3 seeds (lowest to highest)." in page_of(sweep)
    (sweep / "cells" / "b0_1.json").unlink()
    lacking = "queue.max_staleness = 0, seed = 1; queue.max_staleness = 1, seed = 2"
    page = page_of(sweep)
    assert f"**2 of 6 cells have no result: {lacking}.**" in page and "| queue.max_staleness = 1 | 2 |" in page
    assert page.count("with 2 seeds no interval is trustworthy") == 1


def test_a_run_is_reported_with_its_numbers_curves_and_ages(run: RunDir) -> None:
    written = report(run.path, [].append)
    assert [path.name for path in written] == ["plot.png", "plot.svg", "report.md", "report.html"]
    page = (run.path / "report.md").read_text()
    assert f"    async-rlhf report {run.path}\n" in page
    assert "12 steps; 192 samples and 1,278 tokens trained on." in page and "its end is not recorded" in page
    assert "| held-out reward, end | 0.800 |" in page and "| held-out accuracy, end | 0.800 |" in page
    assert "| KL to the reference, last quarter [nats a token] | 1.100 |" in page
    assert "| 11 to 12 | 192 | 1,278 | 24.0 | 1.000 |" in page, "the last of ten parts"
    assert "| 0 | 360 | 28.2 % |" in page
    drawn = (run.path / "plot.svg").read_text()
    assert "seed 0" in drawn.lower() and f"async-rlhf report {run.path}" in drawn
    assert (run.path / "report.html").read_text().count("<svg ") == 1


def test_without_matplotlib_the_pages_are_there_and_say_how_to_get_pictures(
    sweep: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "async_rlhf.experiments.staleness.plot", raising=False)
    for directory in (sweep, run.path):
        said = list[str]()
        *_, shown = report(directory, said.append)
        assert "pip install 'async-rlhf[experiments]'" in said[0]
        assert "<svg" not in shown.read_text() and "![" not in (directory / "report.md").read_text()


def test_a_directory_that_is_neither_and_a_file_that_is_damaged_are_refused(small: Any, sweep: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run directory .*, and no directory of a sweep \(it has no cells/\*\.json\)"):
        report(tmp_path, [].append)
    with pytest.raises(ConfigError, match="has no finished step"):
        report(RunDir.create(small(name="stepless")).path, [].append)
    config = read_sweep(sweep).sweep.model_copy(update={"results": str(sweep)})
    (sweep / "sweep.json").unlink()
    with pytest.raises(ConfigError, match=r"sweep\.json' is missing, which says what was swept"):
        report(sweep, [].append)
    (sweep / "sweep.json").write_text('{"command": 1, "sweep": {}}')
    with pytest.raises(DamagedError, match=r"sweep\.json describes no sweep"):
        report(sweep, [].append)
    keep_sweep(config, COMMAND, 1)  # as the same sweep command does
    report(sweep, [].append)
    assert "## Time, against" not in (sweep / "report.md").read_text(), "what ran beside what is not known"
    (sweep / "cells" / "b1_2.json").write_text("{")
    with pytest.raises(DamagedError, match="is no result of a cell"):
        report(sweep, [].append)


def test_data_frames_have_a_row_a_run_and_a_row_a_step(sweep: Path, run: RunDir) -> None:
    table = measured(sweep)
    assert list(table.cells["queue.max_staleness"]) == [1, 0] * 3 and list(table.cells["seed"]) == [0, 0, 1, 1, 2, 2]
    assert table.cells["held_out_reward_end"].dtype == "float64" and table.cells["held_out_accuracy_end"].isna().all()
    steps = table.curves
    assert len(steps) == 6 * 12 and steps["samples"].max() == 1536 and steps["tokens"].max() == 1278
    means = steps.groupby(["queue.max_staleness", "step"])["reward"].mean().unstack(0)
    assert list(means[0]) == pytest.approx([min(1.0, i / 10) for i in range(1, 13)]) and len(means) == 12
    assert list(measured(run.path).curves["kl/reference"])[:2] == [0.1, 0.2] and len(measured(run.path).cells) == 1


@pytest.mark.parametrize(("package", "room"), [("pandas", "staleness.table"), ("scipy.special", "statistics")])
def test_without_a_package_a_sweep_says_how_to_get_it_before_anything_runs(
    package: str, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"async_rlhf.experiments.{room}")
    with pytest.raises(ConfigError, match=r"pip install 'async-rlhf\[experiments\]'"):
        import_module(f"async_rlhf.experiments.{room}")


def test_an_installation_that_is_older_than_its_code_is_told_of() -> None:
    with pytest.raises(ConfigError, match=r"has no 'telescope': .* install it again"):
        experiment("telescope")
