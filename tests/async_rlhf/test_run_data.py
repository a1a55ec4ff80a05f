"""A run keeps its rows: every process reads the same, and so does a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.prompts import Row, prompt_number
from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.inspect.rollouts import records
from async_rlhf.preparation import prepare
from async_rlhf.run.loading import load
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_data import RunData
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, SMALL

WORDS = [{"prompt": f"word {number}", "answer": number} for number in range(11)]
LONG = {"prompt": "x" * 97, "answer": 0}


def test_rows_of_python_are_trained_on_by_a_run_that_goes_on_without_them_until_they_end(tmp_path: Path) -> None:
    """11 rows, 4 groups a batch: two full steps and one of three groups; then the run has ended, not hung."""
    overrides = {
        **SMALL, "output_dir": str(tmp_path / "runs"), "data.held_out": 0, "data.on_overlong": "drop", "data.epochs": 1,
        "rewards.functions": ["exact"], "evaluation.at_start": True, "evaluation.at_end": True, "queue.keep_rollouts": True,
        "max_steps": 2,
    }  # fmt: skip
    first = train(QUICK, data=iter([WORDS[0], LONG, *WORDS[1:]]), overrides=overrides, quiet=True)
    assert first.finished and first.evaluations == [], "nothing is held out, so nothing is evaluated"
    logs = {path.stem for path in (first.run_dir / "logs").iterdir()}
    assert logs == {"hub", "learner", "actor-0"}
    assert "1 prompts are left out: too long" in (first.run_dir / "logs" / "actor-0.log").read_text()
    with pytest.raises(ConfigError, match="began with other rows"):
        train(QUICK, data=WORDS[1:], overrides={**overrides, "max_steps": 3}, resume=True, quiet=True)
    config = first.run_dir / "config.toml"
    second = train(config, overrides={"max_steps": 100}, resume=True, quiet=True)
    assert [len(record["groups"]) for record in second.metrics] == [4, 4, 3] and second.finished
    trained = {record["group"]: (record["prompt"], record["columns"]) for record in records(Reading(RunDir(second.run_dir)))}
    assert sorted(trained) == list(range(11))
    for group, (prompt, columns) in trained.items():
        row = WORDS[prompt_number(0, group, len(WORDS))]
        assert (prompt, columns) == (row["prompt"], {"answer": row["answer"]})


def test_a_source_that_changes_after_the_start_changes_no_run(tmp_path: Path, small: Any) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*WORDS, LONG]))
    data = {"data.source": str(source), "data.options": {}, "data.held_out": 5, "rewards.functions": ["exact"]}
    config = small(**data, **{"data.on_overlong": "drop"})
    _, run = prepare(config)
    run.retire()
    kept = RunData(run.path, run.config().data)
    digest = kept.digest
    assert digest != RunData(tmp_path, config.data).digest, "the source has the long one too"
    source.write_text('{"prompt": "other", "answer": 1}\n')
    assert tuple(map(list, kept.rows)) == (
        [Row(row["prompt"], {"answer": row["answer"]}) for row in WORDS[:7]],
        [Row(row["prompt"], {"answer": row["answer"]}) for row in WORDS[7:]],
    )
    _, again = prepare(config, resume=True)
    again.retire()
    assert RunData(run.path, config.data).digest == digest
    (run.path / "data" / "training.jsonl").write_text('{"prompt": "a"}\n["cut')
    with pytest.raises(DamagedError, match=r"training\.jsonl is damaged"):
        _ = RunData(run.path, config.data).rows


def test_a_copy_of_the_rows_and_the_source_they_came_from_agree(tmp_path: Path) -> None:
    source = tmp_path / "rows.json"
    source.write_text(json.dumps(WORDS))
    config = DataConfig(source=str(source))
    (tmp_path / "copy").mkdir()
    RunData(tmp_path / "copy", config).keep(RunData(tmp_path, config).rows, 0)
    assert RunData(tmp_path / "copy", config).digest == RunData(tmp_path, config).digest


def test_paths_of_several_sources_are_seen_from_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        f'model = "{QUICK.parent / "models" / "tiny-speller"}"\nmax_steps = 1\n[learner]\nbatch_size = 8\n'
        '[[data.sources]]\nsource = "a.csv"\nweight = 2\n'
        '[[data.sources]]\nsource = "reasoning_gym:spell_backward"\nweight = 1.0\n'
    )
    config = load(tmp_path / "own.toml")
    assert [source.source for source in config.data.sources] == [str(tmp_path / "a.csv"), "reasoning_gym:spell_backward"]
    run = RunDir.create(config.model_copy(update={"output_dir": str(tmp_path)}))
    run.retire()
    assert run.config().data == config.data


def test_rows_that_are_given_again_are_those_of_the_run_also_where_some_were_left_out(tmp_path: Path) -> None:
    data, one, two = RunData(tmp_path, DataConfig(source="caller")), Row("1", {}), Row("2", {})
    data.keep(([one, two], [one]), 1)
    assert data.is_from(([one, Row("long", {}), two], [one])) and not data.is_from(([one, two], [one]))
    assert not data.is_from(([two, one, two], [Row("other", {})])) and not data.is_from(([two, one, one], [one]))
