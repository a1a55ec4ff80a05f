"""One run whose journal is kept: its rollouts are shown, drawn on a time line, and learned from again bit for bit. And the
picture of runs: what is drawn for which, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from async_rlhf import try_rewards
from async_rlhf.api import TrainResult, train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.inspect import plot
from async_rlhf.inspect.plot import Curves, _judged, draw, picture, points
from async_rlhf.inspect.trace import export
from async_rlhf.run import reading
from async_rlhf.run.loading import load
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, SMALL, output_of, python

JUDGES = """
import asyncio
from async_rlhf.actors.rewards import reward
async def slow(completion):
    await asyncio.sleep(0.02)
    return 1.0
@reward(scope="group", requests_per_minute=600, retries=2, timeout_s=3)
async def group(completions): return [1.0] * len(completions)
@reward(batch_size=4, batch_wait_s=0.05, workers=2)
def batch(completions): return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "judges.py").write_text(JUDGES)
    own = {"queue.keep_rollouts": True, "queue.segment_bytes": 4096, "queue.max_staleness": 1}
    rewards = ["reasoning_gym", f"{folder / 'judges.py'}:slow"]
    return train(load(QUICK, {**SMALL, **own, "rewards.functions": rewards, "output_dir": str(folder)}), quiet=True)


def test_what_was_trained_on_is_shown_and_says_what_was_taken_back(finished: TrainResult) -> None:
    exported = [json.loads(line) for line in output_of(0, "rollouts", "show", finished.run_dir, "--json").splitlines()]
    assert len(exported) == 16 and not any(record["sampled"] for record in exported)
    for record in finished.metrics:
        groups = [group for group in exported if group["step"] == record["step"]]
        assert [group["group"] for group in groups] == record["groups"]
        assert sum(len(each["completion_ids"]) for group in groups for each in group["rollouts"]) == record["num_tokens"]
    output = output_of(0, "rollouts", "show", finished.run_dir, "--group", "5")
    assert "group 5" in output and "reasoning_gym" in output
    quarantined = {"group": 5, "prompt": 5, "attempts": 1, "reasons": ["taken back by an operator"]}
    (finished.run_dir / "quarantine.jsonl").write_text(json.dumps(quarantined) + "\n")
    output = output_of(0, "rollouts", "show", finished.run_dir)
    assert output.count("prompt:") == 4 and "12 more groups: --limit 16 shows all" in output, output
    output = output_of(0, "rollouts", "show", finished.run_dir, "--limit", "16")
    assert output.count("QUARANTINED: taken back by an operator") == 1 and "more groups" not in output, output


def test_the_completions_of_a_run_are_data_for_a_trial(finished: TrainResult) -> None:
    trial = try_rewards(["reasoning_gym", "overlong"], finished.run_dir, options={"overlong": {"max_length": 12, "buffer": 4}})
    sampled = [json.loads(line) for line in (finished.run_dir / "rollouts.jsonl").read_text().splitlines()]
    known = [rollout["scores"]["reasoning_gym"] for group in sampled for rollout in group["rollouts"]]
    assert [each["reasoning_gym"].value for each in trial.scores] == known and trial.num_failed == 0
    first = finished.metrics[0]
    assert first["stages/generation/seconds"] > 0 and 0 <= first["stages/exposed_ratio"] <= 1


def test_a_learner_alone_learns_the_same_bit_for_bit_or_something_else_with_other_settings(finished: TrainResult) -> None:
    assert finished.checkpoint is not None
    first = (finished.checkpoint / "model.safetensors").read_bytes()
    other = ["--set", "advantage.scale_by_std=false", "--set", "learner.ranks=2"]
    for name, sets, is_same in (("again", [], True), ("other", other, False)):
        assert "4 steps learned again" in output_of(0, "rollouts", "replay", finished.run_dir, "--name", name, *sets)
        model = finished.run_dir.parent / name / "checkpoints" / "latest" / "model" / "model.safetensors"
        assert (model.read_bytes() == first) == is_same


def test_a_trace_shows_every_stage_of_every_rollout_in_its_order(finished: TrainResult) -> None:
    assert "open it in ui.perfetto.dev" in output_of(0, "rollouts", "trace", finished.run_dir)
    events = json.loads((finished.run_dir / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"learner", "steps", "actor-0", "engine", "weights", "rollouts"}
    assert all(isinstance(event["pid"], int) and isinstance(event["tid"], int) for event in events)
    rollouts: dict[str, dict[str, list[float]]] = {}
    for event in events:
        if event["ph"] in ("b", "e"):
            rollouts.setdefault(event["id"], {}).setdefault(event["name"], []).append(event["ts"])
    assert len(rollouts) == 4 * 16
    for key, found in rollouts.items():
        whole = found.pop(key.removeprefix("actor-0 "))
        assert set(found) == {"generation", "reasoning_gym", "slow", "queue"}
        assert all(whole[0] <= began <= ended <= whole[1] for began, ended in found.values())
        assert found["generation"][1] <= found["slow"][0] and found["slow"][1] <= found["queue"][0]
    trained = [event["name"] for event in events if event["name"].startswith("train step")]
    assert trained == [f"train step {step}" for step in range(1, 5)]
    assert any(event["name"] == "adopt 0" for event in events)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    for on_track in tracks.values():
        assert all(began + took <= then for (began, took), (then, _) in itertools.pairwise(sorted(on_track)))


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


def test_a_reward_and_a_source_of_one_name_are_two_lines() -> None:
    line = {"step": 10, "mean_reward": 3.0, "rewards": {"maths": 1.0, "code": 2.0}}
    line["by_source"] = {"maths": {"mean_reward": 5.0}, "code": {"mean_reward": 6.0}}
    panels = _judged(Curves("one", steps(), [line]))
    assert panels["Held-out rewards, each"] == {"maths": [(10, 1.0)], "code": [(10, 2.0)]}
    assert panels["Held-out reward, each source"] == {"maths": [(10, 5.0)], "code": [(10, 6.0)]}


def test_a_long_run_is_drawn_from_steps_at_even_distances(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(small())
    run.metrics.write_text("".join(json.dumps({"step": step, "reward": step / 1e5}) + "\n" for step in range(1, 100_001)))
    monkeypatch.setattr(reading, "_WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(reading, "_WINDOW", 1 << 8)
    drawn: list[Curves] = []
    monkeypatch.setattr(plot, "picture", lambda runs: (drawn.extend(runs), picture(runs))[1])
    draw([Reading(run)], tmp_path / "long.svg")
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
        draw([Reading(run)], tmp_path / "picture.pdf")
    with pytest.raises(ConfigError, match="has recorded no group"):
        export(Reading(run), tmp_path / "trace.json")
    with pytest.raises(ConfigError, match="no step is recorded"):
        draw([Reading(run)], tmp_path / "picture.png")
    run.metrics.write_text(json.dumps(steps()[0]) + "\n")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw([Reading(run)], tmp_path / "no" / "picture.png")
    code = (
        "import sys; sys.modules['matplotlib'] = None; from async_rlhf.cli.app import app; import async_rlhf.cli.commands; "
        f"app(['plot', {str(run.path)!r}])"
    )
    found = python("-c", code)
    assert found.returncode == 3 and "pip install 'async-rlhf[plot]'" in found.stderr, found.stderr
