"""One run whose journal is kept: its rollouts are shown, drawn on a time line, and learned from again bit for bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_rlhf.actors.config import EngineConfig, GenerationConfig, ScoringConfig
from async_rlhf.actors.rewards import resolve
from async_rlhf.actors.scoring.graph import drawing, stages
from async_rlhf.api import TrainResult
from async_rlhf.api import run as train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.stages import StageTime, pack
from async_rlhf.cli.commands import app
from async_rlhf.inspect.trace import export
from async_rlhf.run.config import load
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, SMALL

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


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "judges.py").write_text(JUDGES)
    own = {"queue.keep_rollouts": True, "queue.segment_bytes": 4096, "queue.max_staleness": 1}
    rewards = ["reasoning_gym", f"{folder / 'judges.py'}:slow"]
    return train(load(QUICK, {**SMALL, **own, "rewards.functions": rewards, "output_dir": str(folder)}), quiet=True)


def test_what_was_trained_on_is_shown_and_says_what_was_taken_back(finished: TrainResult) -> None:
    code, output = invoke("rollouts", "show", finished.run_dir, "--json")
    exported = [json.loads(line) for line in output.splitlines()]
    assert code == 0 and len(exported) == 16 and not any(record["sampled"] for record in exported)
    for record in finished.metrics:
        groups = [group for group in exported if group["step"] == record["step"]]
        assert [group["group"] for group in groups] == record["groups"]
        assert sum(len(each["completion_ids"]) for group in groups for each in group["rollouts"]) == record["num_tokens"]
    code, output = invoke("rollouts", "show", finished.run_dir, "--group", "5")
    assert code == 0 and "group 5" in output and "reasoning_gym" in output, output
    quarantined = {"group": 5, "prompt": 5, "attempts": 1, "reasons": ["taken back by an operator"]}
    (finished.run_dir / "quarantine.jsonl").write_text(json.dumps(quarantined) + "\n")
    code, output = invoke("rollouts", "show", finished.run_dir)
    assert output.count("prompt:") == 4 and "12 more groups: --limit 16 shows all" in output, output
    code, output = invoke("rollouts", "show", finished.run_dir, "--limit", "16")
    assert output.count("QUARANTINED: taken back by an operator") == 1 and "more groups" not in output, output


def test_a_learner_alone_learns_the_same_bit_for_bit_or_something_else_with_other_settings(finished: TrainResult) -> None:
    assert finished.checkpoint is not None
    first = (finished.checkpoint / "model.safetensors").read_bytes()
    other = ["--set", "advantage.scale_by_std=false", "--set", "learner.ranks=2"]
    for name, sets, is_same in (("again", [], True), ("other", other, False)):
        code, output = invoke("rollouts", "replay", finished.run_dir, "--name", name, *sets)
        assert code == 0 and "4 steps learned again" in output, output
        model = finished.run_dir.parent / name / "checkpoints" / "latest" / "model" / "model.safetensors"
        assert (model.read_bytes() == first) == is_same


def test_a_trace_shows_every_stage_of_every_rollout_in_its_order(finished: TrainResult) -> None:
    code, output = invoke("rollouts", "trace", finished.run_dir)
    assert code == 0 and "slow: " in output and "hidden behind decoding and training" in output
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


def test_a_score_is_exposed_only_while_nobody_decodes_and_nobody_trains(small: Callable[..., Any]) -> None:
    run = RunDir.create(small(name="made"))
    timings = pack({"generation": StageTime(0, 10), "judge": StageTime(10, 20)})
    told = {"text": "", "tokens": [1], "spans": [[0, 1]], "timings": timings, "scores": {}}
    group = {"step": 1, "group": 0, "attempt": 0, "actor": "actor-0", "prompt": "", "rollouts": [told]}
    (run.path / "rollouts.jsonl").write_text(json.dumps(group) + "\n")
    # Idle before 0 and from 12 to 15 and after 16; trained from 17 to 19. Another actor was never idle.
    (run.path / "spans").mkdir()
    idle = [{"name": "idle", "began": began, "ended": ended} for began, ended in ((-5, 0), (12, 15), (16, 30))]
    for name, spans in (("actor-0", idle), ("actor-1", [{"name": "adopt 0", "began": 0, "ended": 1}])):
        (run.path / "spans" / f"{name}.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    run.metrics.write_text(json.dumps({"step": 1, "time": 19.0, "step_time": 19.0, "idle/learner": 17 / 19}) + "\n")
    count, waits = export(run, run.path / "trace.json")
    assert count > 0 and waits["judge"] == (10.0, pytest.approx(3 + 1 + 1))
    with pytest.raises(ConfigError, match="has recorded no group"):
        export(RunDir.create(small(name="empty")), run.path / "trace.json")


def test_the_graph_says_what_waits_for_what_and_where_it_runs(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    specs = resolve(["judges.py:slow", "judges.py:group", "judges.py:batch", "exact"], tmp_path)
    graph = stages(specs, ScoringConfig(workers=3), GenerationConfig(group_size=8), EngineConfig(slots=64))
    assert graph[-1].after == ("slow", "group", "batch", "exact")
    assert drawing(graph) == [
        "generation  [completion; engine torch on cpu, 64 at once]",
        "-> slow  [completion; event loop, 256 at once, 10 s]",
        "-> group  [group of 8; event loop, 256 at once, 3 s, 600 requests/min, 2 retries]",
        "-> batch  [up to 4 completions within 0.05 s; 2 own worker processes, 2 at once, 10 s]",
        "-> exact  [completion; shared worker processes, 3 at once, 10 s]",
        "   -> put  [group of 8; actor]",
    ]
    (along,) = resolve(["reward_model"], tmp_path, None, None, {"reward_model": {"stream_tokens": 64}})
    assert drawing(stages([along], ScoringConfig(), GenerationConfig(), EngineConfig()))[1] == (
        "-> reward_model  [up to 16 completions within 0.02 s; 1 own worker processes, 1 at once, 60 s; "
        "incremental, every 64 tokens]"
    )
    code, output = invoke("check", QUICK, "--graph")
    assert code == 0 and "-> reasoning_gym  [completion; shared worker processes" in output
