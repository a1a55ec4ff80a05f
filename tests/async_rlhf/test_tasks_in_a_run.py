"""One run of several tasks: rows of each source have their own environment or none, their share, and their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.loading import load
from tests.conftest import QUICK, SMALL

TASKS = """
from async_rlhf import Score, environment

@environment(max_turns=2)
def repeats(prompt, answer):
    first = yield prompt
    again = yield "Again: "
    yield Score(float(again == answer) + 0.01 * len(set(first)))

@environment(max_turns=1)
async def says(prompt, word):
    text = yield f"Say {word}: "
    yield Score(0.5 + 0.01 * len(set(text)))
"""
ROWS = {
    "plain": [{"prompt": f"Spell {n}: ", "answer": str(n)} for n in range(30)],
    "repeats": [{"prompt": f"Once {n}: ", "answer": str(n)} for n in range(20)],
    "says": [{"prompt": "unused", "word": f"w{n}"} for n in range(20)],
}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "judge.py").write_text("def length(completion):\n    return len(completion) / 100\n")
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shares = {"plain": 2, "repeats": 1, "says": 1}
    sources = [{"source": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in shares.items()]
    tasks = tmp_path / "tasks.py"
    return SMALL | {
        "output_dir": str(tmp_path / "runs"),
        "name": "tasks",
        "data.source": "",
        "data.sources": sources,
        "data.options": {},
        "data.held_out": 2,
        "environment.by_source": {
            "repeats": f"played={tasks}:repeats",
            "says": {"function": f"played={tasks}:says", "max_turns": 3},
        },
        "rewards.functions": [f"{tmp_path / 'judge.py'}:length"],
        "rewards.by_source": {"plain": ["length"], "repeats": ["length"], "says": []},
        "generation.max_episode_length": 60,
        "generation.max_completion_length": 8,
    }


@pytest.mark.rest
def test_rows_of_each_source_are_played_by_their_own_environment_and_measured_apart(settings: dict[str, Any]) -> None:
    more = {
        "evaluation.at_end": True,
        "evaluation.solved_by": "played",
        "evaluation.solved_at": 0.5,
        "queue.keep_rollouts": True,
    }
    result = train(QUICK, overrides=settings | more, quiet=True)
    groups = [group for batch in read_batches(result.run_dir / "queue") for group in batch.groups]
    of = {name: [group for group in groups if group.columns["source"] == name] for name in ROWS}
    assert len(groups) == 16 and all(of.values()), {name: len(own) for name, own in of.items()}
    rollouts = {name: [rollout for group in own for rollout in group.rollouts] for name, own in of.items()}
    scores = {name: [rollout.scores for rollout in own] for name, own in rollouts.items()}
    assert all(each["played"].state == "not_applicable" and each["length"].value is not None for each in scores["plain"])
    assert all(each["played"].value is not None and each["length"].value is not None for each in scores["repeats"])
    assert all(each["played"].value >= 0.5 and each["length"].state == "not_applicable" for each in scores["says"])
    turns = {name: {sum(span.version is None for span in each.spans) for each in own} for name, own in rollouts.items()}
    assert turns == {"plain": {0}, "repeats": {1}, "says": {0}}, "observations between the turns"
    assert {f"reward/{name}" for name in ROWS} <= {key for record in result.metrics for key in record}
    assert all(record["mismatch/abs_log_ratio"] < 1e-5 for record in result.metrics[:1])
    found = result.evaluations[-1]["by_source"]
    assert {name: own["num_prompts"] for name, own in found.items()} == dict.fromkeys(ROWS, 2)
    assert (found["plain"]["accuracy"], found["says"]["accuracy"]) == (None, 1.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"environment.by_source": {"sings": "tasks.py:says"}},
            "by_source names 'sings', which is the source of no row; choose one of: plain, repeats, says",
        ),
        ({"environment.by_source": {"says": {"max_turns": 2}}}, r"by_source.says has no function; name one"),
        ({"environment.by_source.plain": "tasks.py:says"}, "environment 'says' .*'word'"),
        (
            {"rewards.functions": [], "rewards.by_source": {}},
            "'plain' have no environment, and no reward judges them",
        ),
    ],
)
def test_a_task_that_cannot_be_played_or_judged_is_refused(
    settings: dict[str, Any], changed: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        preflight(load(QUICK, settings | changed))
