"""What hub and actors must share is compared by its content, by name, and not by where it lies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rlhf.buffers.sampling import Sampling
from async_rlhf.run.config import Config
from async_rlhf.run.loading import load, override
from async_rlhf.run.processes.agreement import schema, shared
from async_rlhf.run.run_data import RunData
from tests.conftest import SPELLER

CONFIG = """
model = "model"
max_steps = 2
[data]
source = "data.jsonl"
[rewards]
functions = ["own=judge.py:judge", "length"]
options.length.target = 3
[learner]
batch_size = 8
[generation]
max_prompt_length = 60
max_completion_length = 7
"""
REWARD = "import near\n\ndef judge(completion):\n    return 1.0\n"
NEAR = "ONE = 1.0\n"


def machine(folder: Path) -> Path:
    """A folder with everything an actor needs."""
    shutil.copytree(SPELLER, folder / "model")
    (folder / "data.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (folder / "judge.py").write_text(REWARD)
    (folder / "near.py").write_text(NEAR)
    (folder / "config.toml").write_text(CONFIG)
    return folder


def read(folder: Path) -> Config:
    return load(folder / "config.toml")


def agreed(folder: Path) -> dict[str, str]:
    config = read(folder)
    return shared(config, RunData(folder, config.data))


def rewrite(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new, 1))


def describe(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def test_the_same_files_elsewhere_are_the_same(tmp_path: Path) -> None:
    here, there = machine(tmp_path / "here"), machine(tmp_path / "far" / "there")
    describe(_name_or_path="/somewhere/else", transformers_version="0")(there)
    assert agreed(here) == agreed(there)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (describe(rms_norm_eps=0.5), "model"),
        (rewrite("model/tokenizer.json", "1.0", "1.1"), "tokenizer"),
        (rewrite("data.jsonl", '"a"', '"c"'), "data"),
        (rewrite("config.toml", "data.jsonl", 'data.jsonl"\ntemplate = "{prompt}!'), "data"),
        (rewrite("judge.py", "1.0", "0.5"), "rewards"),
        (rewrite("near.py", "1.0", "0.5"), "rewards"),
        (rewrite("config.toml", "target = 3", "target = 4"), "rewards"),
        (rewrite("config.toml", "max_completion_length = 7", "max_completion_length = 8"), "generation"),
        (rewrite("config.toml", "max_steps = 2", "max_steps = 2\nseed = 5"), "generation"),
        (rewrite("config.toml", "batch_size = 8", "batch_size = 16\nlearning_rate = 0.5"), None),
    ],
)
def test_another_content_is_another_digest_under_its_own_name(
    tmp_path: Path, change: Callable[[Path], object], name: str | None
) -> None:
    folder = machine(tmp_path / "here")
    before = agreed(folder)
    change(folder)
    after = agreed(folder)
    assert {each for each in before if before[each] != after[each]} == ({name} if name else set())


def test_the_schema_is_what_the_configuration_and_the_model_say(tmp_path: Path) -> None:
    staged = {"loss.kl_coef": 0.1, "scoring.stages": {"reference": {"placement": "actor"}}}
    config = override(read(machine(tmp_path / "here")), staged)
    wanted = schema(config)
    vocabulary = json.loads((Path(config.model) / "config.json").read_text())["vocab_size"]
    assert (wanted.group_size, wanted.vocabulary) == (8, vocabulary)
    assert (wanted.max_prompt_length, wanted.max_completion_length) == (60, 7)
    assert wanted.rewards == {"own", "length", "reference"} and wanted.sampling == Sampling()


def test_a_vocabulary_that_the_model_leaves_to_its_family_is_found(tmp_path: Path) -> None:
    folder = machine(tmp_path / "here")
    family = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 1}}
    (folder / "model" / "config.json").write_text(json.dumps(family))
    assert schema(read(folder)).vocabulary > 200_000
