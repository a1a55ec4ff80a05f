"""The shipped environments: a model learns to call a tool because the tool helps, and a game is scored as it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rlhf import Score
from async_rlhf.actors.environments import load as load_environment
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.config import load
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import environment_spec

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("name", ["tools", "game"])
def test_a_shipped_configuration_passes_the_check_before_a_run(name: str) -> None:
    assert preflight(load(CONFIGS / f"{name}.toml")).num_prompts > 0


@pytest.mark.parametrize(
    ("turns", "score"),
    [
        (("I say 9.", "2, then", "5"), 1.0),
        (("none", "9", "12", "3"), 0.25),  # 12 is not below 9
        (("0", "6", "20", "7"), 0.125),
    ],
)
def test_the_game_for_a_chat_model_scores_a_hit_or_what_agrees_with_its_answers(turns: tuple[str, ...], score: float) -> None:
    config = load(CONFIGS / "chat_game.toml", {"model": "tiny-speller"})
    spec = environment_spec(config, {"prompt", "answer"})
    assert spec is not None and config.data.chat
    game = load_environment(spec)(prompt="Guess.", answer=5)
    said = [game.send(text) for text in (None, *turns)]
    assert said[0] == "Guess." and said[-1] == Score(score)


@pytest.mark.rest
def test_the_model_learns_to_call_the_calculator(command: Callable[..., Any], tmp_path: Path) -> None:
    """From no held-out product to nearly all, in 60 steps; it cannot multiply."""
    code, output = command("train", str(CONFIGS / "tools.toml"), "--set", f"output_dir={tmp_path}").finish()
    assert code == 0, output
    assert "held-out accuracy at the start: 0.0" in output
    (line,) = [line for line in output.splitlines() if line.startswith("held-out accuracy at the end")]
    assert float(line.split(": ")[1].split(",")[0]) >= 0.8, output
    records = RunDir(tmp_path / "tools").read_metrics()
    assert records[-1]["episodes/mean_turns"] > 1.6 > 1.4 > records[0]["episodes/mean_turns"]
    assert records[-1]["rewards/calculator/calls"] > 0.6 > 0.4 > records[0]["rewards/calculator/calls"]
