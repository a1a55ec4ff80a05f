"""The picture of runs: what is drawn for which, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.inspect import plot
from async_rlhf.inspect.plot import Curves, draw, picture, points
from async_rlhf.run import run_files
from async_rlhf.run.run_dir import RunDir
from tests.conftest import REPOSITORY


def steps(**more: float) -> list[dict[str, Any]]:
    return [{"step": i, "reward": i / 10, "staleness/mean": 0.5, "staleness/max": 1, **more} for i in range(1, 60)]


def test_runs_have_colours_and_measures_have_line_styles() -> None:
    evaluations = [
        {"label": "step", "step": 10, "mean_reward": 0.5, "accuracy": 0.4, "sampled": {"pass_at": {"1": 0.4, "8": 0.7}}}
    ]
    figure = picture([Curves("one", steps(), evaluations), Curves("other", steps(), [])])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "other"]
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == ["Held-out prompts", "Training reward", "Staleness [steps]"], "panels without numbers are left out"
    judged = panels["Held-out prompts"]
    assert [text.get_text() for text in judged.get_legend().get_texts()] == ["accuracy", "reward", "pass@8"]
    colours = {line.get_color() for line in panels["Staleness [steps]"].get_lines()}
    assert len(colours) == 2
    assert len({axes.get_xlim() for axes in figure.axes}) == 1, "all panels have the same steps"
    few = picture([Curves(name, steps()[:3], []) for name in ("one", "same")]).axes
    assert all(len(axes.get_xticks()) > 2 and all(tick == int(tick) for tick in axes.get_xticks()) for axes in few)
    below, above = next(axes for axes in few if axes.get_title() == "Training reward").get_lines()
    assert below.get_linewidth() > above.get_linewidth() > 1, "runs that coincide both show"


def test_of_several_rewards_each_is_drawn_and_what_is_solved_only_where_one_says_so() -> None:
    names = [f"reward_{i}" for i in range(8)]
    line = {"label": "step", "step": 10, "mean_reward": 3.0, "accuracy": 1.0, "rewards": dict.fromkeys(names, 0.5)}
    figure = picture([Curves("one", steps(), [line]), Curves("other", steps(), [{**line, "solved_by": "reward_0"}])])
    panels = {axes.get_title(): axes for axes in figure.axes}
    first, each = panels["Held-out prompts"], panels["Held-out rewards, each"]
    assert [len(curve.get_xdata()) for curve in first.get_lines()] == [1, 1, 1], "two rewards, one accuracy"
    assert [text.get_text() for text in each.get_legend().get_texts()] == names and len(each.get_lines()) == 16
    alone = {axes.get_title() for axes in picture([Curves("one", steps(), [line])]).axes}
    assert {"Held-out prompts, reward", "Held-out rewards, each"} <= alone


def test_a_long_run_is_drawn_from_steps_at_even_distances(
    small: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(small())
    run.metrics.write_text("".join(json.dumps({"step": step, "reward": step / 1e5}) + "\n" for step in range(1, 100_001)))
    monkeypatch.setattr(run_files, "_WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(run_files, "_WINDOW", 1 << 8)
    drawn: list[Curves] = []
    monkeypatch.setattr(plot, "picture", lambda runs: (drawn.extend(runs), picture(runs))[1])
    draw([run], tmp_path / "long.svg")
    found = [record["step"] for record in drawn[0].steps]
    assert found == sorted(set(found)) and found[0] == 1 and found[-1] == 100_000
    assert max(later - step for step, later in pairwise(found)) < 200 and len(found) < 50_000
    assert (tmp_path / "long.svg").exists()


def test_a_panel_with_one_of_its_measures_names_it_and_a_title_stands_in_the_place_of_the_names() -> None:
    figure = picture([Curves("one", steps(**{"kl/behaviour": 0.1}), [])], "Run one")
    assert "KL divergence, to the sampling policy" in [axes.get_title() for axes in figure.axes]
    assert figure.get_suptitle() == "Run one" and not figure.legends
    records = [{"step": 1, "x": 2}, {"step": 2, "x": None}, {"step": 3, "x": float("inf")}, {"x": 1}, {"step": 5}]
    assert list(points(records, "x")) == [(1, 2.0)]


def test_what_cannot_be_drawn_is_refused_with_the_way_out(small: Callable[..., Any], tmp_path: Path) -> None:
    run = RunDir.create(small())
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        draw([run], tmp_path / "picture.pdf")
    with pytest.raises(ConfigError, match="no step is recorded"):
        draw([run], tmp_path / "picture.png")
    run.metrics.write_text(json.dumps(steps()[0]) + "\n")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw([run], tmp_path / "no" / "picture.png")
    code = (
        "import sys; sys.modules['matplotlib'] = None; from async_rlhf.cli.app import app; import async_rlhf.cli.commands; "
        f"app(['plot', {str(run.path)!r}])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert found.returncode == 3 and "pip install 'async-rlhf[plot]'" in found.stderr, found.stderr
