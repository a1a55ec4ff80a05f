"""A run's time line: what a viewer is given, and how much scoring was hidden."""

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
from async_rlhf.actors.scoring.graph import drawing
from async_rlhf.api import run
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.stages import StageTime, pack
from async_rlhf.cli.commands import app
from async_rlhf.inspect.trace import export, overlap
from async_rlhf.run.run_dir import RunDir

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


def test_the_trace_of_a_real_run_shows_every_stage_of_every_rollout_in_its_order(
    small: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    functions = ["reasoning_gym", f"{tmp_path / 'judges.py'}:slow"]
    result = run(small(max_steps=2, **{"rewards.functions": functions, "queue.keep_rollouts": True}), quiet=True)
    invoked = CliRunner().invoke(app, ["rollouts", "trace", str(result.run_dir)])
    assert invoked.exit_code == 0 and "slow: " in invoked.output and "hidden behind decoding and training" in invoked.output
    events = json.loads((result.run_dir / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"learner", "steps", "actor-0", "engine", "weights", "rollouts"}
    assert all(isinstance(event["pid"], int) and isinstance(event["tid"], int) for event in events)
    rollouts: dict[str, dict[str, list[float]]] = {}
    for event in events:
        if event["ph"] in ("b", "e"):
            rollouts.setdefault(event["id"], {}).setdefault(event["name"], []).append(event["ts"])
    assert len(rollouts) == 2 * 16
    for key, found in rollouts.items():
        whole = found[key.removeprefix("actor-0 ")]
        assert set(found) - {key.removeprefix("actor-0 ")} == {"generation", "reasoning_gym", "slow", "queue"}
        assert all(whole[0] <= began <= ended <= whole[1] for began, ended in found.values())
        assert found["generation"][1] <= found["slow"][0] and found["slow"][1] <= found["queue"][0]
    trained = [event for event in events if event["name"].startswith("train step")]
    assert [event["name"] for event in trained] == ["train step 1", "train step 2"]
    assert any(event["name"] == "adopt 0" for event in events)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    for found_on_track in tracks.values():
        following = sorted(found_on_track)
        assert all(began + took <= then for (began, took), (then, _) in itertools.pairwise(following))


def test_a_score_is_exposed_only_while_nobody_decodes_and_nobody_trains(small: Callable[..., Any]) -> None:
    run_dir = RunDir.create(small(name="made"))
    slow = pack({"generation": StageTime(0, 10), "judge": StageTime(10, 20)})
    told = {"text": "", "tokens": [1], "spans": [[0, 1]], "timings": slow}
    (run_dir.path / "rollouts.jsonl").write_text(
        json.dumps({"step": 1, "group": 0, "actor": "actor-0", "rollouts": [told]}) + "\n"
    )
    # Idle before 0 and from 12 to 15 and after 16; trained from 17 to 19.
    idle = [(-5, 0), (12, 15), (16, 30)]
    (run_dir.path / "spans").mkdir()
    (run_dir.path / "spans" / "actor-0.jsonl").write_text(
        "".join(json.dumps({"name": "idle", "began": began, "ended": ended}) + "\n" for began, ended in idle)
    )
    record = {"step": 1, "time": 19.0, "step_time": 19.0, "idle/learner": 17 / 19}
    run_dir.metrics.write_text(json.dumps(record) + "\n")
    assert overlap(run_dir)["judge"].seconds == 10.0
    assert overlap(run_dir)["judge"].exposed_s == pytest.approx(3 + 1 + 1)
    assert export(run_dir, run_dir.path / "trace.json") > 0


def test_a_run_that_left_nothing_has_no_trace(small: Callable[..., Any]) -> None:
    run_dir = RunDir.create(small(name="empty"))
    with pytest.raises(ConfigError, match="holds no rollouts with timings"):
        export(run_dir, run_dir.path / "trace.json")


def test_the_graph_says_what_waits_for_what_and_where_it_runs(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    specs = resolve(["judges.py:slow", "judges.py:group", "judges.py:batch", "exact"], tmp_path)
    assert drawing(specs, ScoringConfig(workers=3), GenerationConfig(group_size=8), EngineConfig(slots=64)) == [
        "generation  [completion; engine torch on cpu, 64 at once]",
        "-> slow  [completion; event loop, 256 at once, 10 s]",
        "-> group  [group of 8; event loop, 256 at once, 3 s, 600 requests/min, 2 retries]",
        "-> batch  [up to 4 completions within 0.05 s; 2 own worker processes, 2 at once, 10 s]",
        "-> exact  [completion; shared worker processes, 3 at once, 10 s]",
        "   -> put  [group of 8; actor]",
    ]
    (along,) = resolve(["reward_model"], tmp_path, None, None, {"reward_model": {"stream_tokens": 64}})
    assert drawing([along], ScoringConfig(), GenerationConfig(), EngineConfig())[1] == (
        "-> reward_model  [up to 16 completions within 0.02 s; 1 own worker processes, 1 at once, 60 s; "
        "incremental, every 64 tokens]"
    )
    quick = Path(__file__).resolve().parents[2] / "configs" / "quick.toml"
    invoked = CliRunner().invoke(app, ["check", str(quick), "--graph"])
    assert invoked.exit_code == 0 and "-> reasoning_gym  [completion; shared worker processes" in invoked.output
