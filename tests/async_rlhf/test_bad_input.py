"""Bad input ends before any process starts: one message that says what was asked, the value, the limit, the way out."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.loading import load
from tests.conftest import QUICK, invoke

FILE = {"data.options": {}, "data.held_out": 0, "rewards.functions": ["exact"]}
# Settings, and what is said of them; {tmp} is a folder with an empty file and a reward.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown section": ({"que.max_staleness": 1}, "unknown key 'que': did you mean 'queue'"),
    "wrong type": ({"learner.batch_size": "many"}, "learner.batch_size = 'many': Input should be a valid integer"),
    "out of range": ({"generation.temperature": 0}, "generation.temperature = 0: Input should be greater than 0"),
    "no number": ({"learner.learning_rate": float("nan")}, "learner.learning_rate = nan: Input should be a finite number"),
    "does not divide": (
        {"learner.batch_size": 100},
        "learner.batch_size = 100 is not a multiple of .* = 8; nearest: 96 or 104",
    ),
    "would hang": ({"learner.publish_every": 4}, "max_staleness = 1 would hang.*Lowest that can run: queue.max_staleness = 3"),
    "exact and not durable": ({"queue.exact": True, "queue.fsync": "off"}, 'queue.fsync = "off".*Set queue.fsync = "group"'),
    "window would hang": ({"queue.window": 33}, "would hang.*Lowest that can run: queue.max_staleness = 2"),
    "exact with a window": ({"queue.exact": True, "queue.window": 2, "queue.max_staleness": 4}, "queue.exact = true needs"),
    "too many updates": ({"learner.updates_per_step": 17}, "updates_per_step = 17 needs .* highest: 16"),
    "open to the world": ({"address": "tcp://0.0.0.0:5555"}, "without keys the hub listens only on this machine"),
    "no such reward": ({"rewards.functions": ["reasoning_gim"]}, "did you mean 'reasoning_gym'"),
    "unknown sampling masks": (
        {"engine.kind": "vllm", "generation.top_p": 0.9},
        "generation.top_p = 0.9 cuts off.*vLLM does not report what is left unless top_k is set too",
    ),
    "episodes without an environment": ({"generation.max_episode_length": 64}, "and no environment.*environment.function"),
    "episodes shorter than a turn": (
        {"environment": "configs/environments/guessing.py:guessing", "generation.max_episode_length": 8},
        "max_episode_length = 8 is below generation.max_completion_length = 12.*lowest: 12",
    ),
    "no such environment": ({"environment": "nowhere.py:f"}, "environment.function.*nowhere.py"),
    "no such environment of a source": (
        {"environment": {"by_source": {"maths": "nowhere.py:f"}}},
        "environment.by_source.maths.function.*nowhere.py",
    ),
    "an environment slower than what is waited for": (
        {"environment": "configs/environments/guessing.py:guessing", "environment.timeout_s": 400.0},
        "'guessing' may take 400 s a step.*without progress for 300 s.*progress_timeout_s above it",
    ),
    "no model": ({"model": "{tmp}/nowhere"}, "is no directory"),
    "a directory that is no model": ({"model": "{tmp}"}, "is no Hugging Face model: it needs config.json and .*safetensors"),
    "empty data": (FILE | {"data.source": "{tmp}/empty.jsonl"}, "empty.jsonl"),
    "no data": (FILE | {"data.source": "{tmp}/none.jsonl"}, "none.jsonl"),
    "a column that is not there": ({"rewards.functions": ["{tmp}/mine.py:mine"]}, "solution.*answer"),
    "a file for a directory": ({"output_dir": "{tmp}/empty.jsonl"}, "cannot be written"),
    "options without a source": (
        {"evaluation.options": {"min_word_len": 3}},
        "options is about evaluation.source, and there is",
    ),
    "nothing to evaluate on": ({"evaluation.every": 5, "data.held_out": 0}, "evaluation.every = 5 with data.held_out = 0"),
    "the device channel on another device": (
        {"weights.transport": "device", "learner.device": "cuda"},
        "'device' with engine.device = 'cpu' and learner.device = 'cuda'.*all on 'cpu', or .*or weights.transport = 'auto'",
    ),
    "a broadcast longer than a stall": (
        {"weights.transport": "device", "weights.device_timeout_s": 20.0, "stall_timeout_s": 10.0},
        "weights.device_timeout_s = 20 is not below stall_timeout_s = 10",
    ),
    "processes without number": ({"scoring.workers": 10**6}, "scoring.workers = 1000000: .* less than or equal to 1024"),
    "prompts without number": ({"data.held_out": 10**9}, "held_out = 1000000000: .* less than or equal to 16777216"),
    "a truth value for a number": ({"max_steps": True}, "max_steps = True: it cannot be true or false"),
    "a truth value for a weight": ({"rewards.weights": {"exact": True}}, "rewards.weights: it cannot be true or false"),
    "patience that counts nothing": ({"evaluation.patience": 2}, "patience = 2 counts evaluations .* set every"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_setting_is_refused_with_the_nearest_valid_one(
    case: str, small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "mine.py").write_text("def mine(completion, solution):\n    return 1.0\n")
    overrides, message = CASES[case]
    base = {"learner.batch_size": 128, "generation.group_size": 8}
    given = [each.replace("{tmp}", str(tmp_path)) for each in small_arguments(**{**base, **overrides})]
    code, output = invoke(*given)
    assert code == 3, output
    assert output.startswith("error: ") and len(output.strip().splitlines()) == 1, output
    assert re.search(message, output), output
    assert not (tmp_path / "runs").exists(), "nothing may be left behind"


def test_an_uncorrected_asynchronous_run_is_refused_unless_asked_for(tmp_path: Path) -> None:
    from async_rlhf.buffers.errors import ConfigError
    from async_rlhf.run.loading import load

    with pytest.raises(ConfigError, match=r"max_staleness = 1 without an importance weight.*allow_uncorrected = true"):
        load(QUICK, {"loss.is_cap": None})
    assert load(QUICK, {"loss.is_cap": None, "queue.max_staleness": 0}).loss.is_cap is None
    assert load(QUICK, {"loss.is_cap": "none", "loss.allow_uncorrected": True}).queue.max_staleness == 1


def test_a_configuration_that_is_not_there_or_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("name = [")
    for name, message in (
        (
            tmp_path / "nowhere.toml",
            "nowhere.toml' does not exist; shipped ones go by their names, .*: ablation, agent, chaos",
        ),
        ("qick", "'qick' is neither a file nor a shipped configuration; did you mean 'quick'?"),
        (tmp_path / "broken.toml", "cannot be read"),
    ):
        code, output = invoke("train", str(name))
        assert code == 3 and re.search(message, output), output


def test_a_port_in_use_is_refused(small_arguments: Callable[..., list[str]]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, output = invoke(*small_arguments(address=address))
    assert code == 3 and address in output and "Choose a free port" in output, output


def test_a_run_directory_is_neither_overwritten_nor_continued_under_another_configuration(
    small: Any, small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    from async_rlhf.run.run_dir import RunDir

    RunDir.create(small()).retire()
    code, output = invoke(*small_arguments())
    assert code == 3 and "exists. Continue it with --resume" in output
    code, output = invoke(*small_arguments(**{"learner.learning_rate": 0.5}), "--resume")
    assert code == 3 and "belongs to another configuration: learner.learning_rate: 0.0002 -> 0.5" in output, output
    code, output = invoke(*small_arguments(name="never-begun"), "--resume")
    assert code == 3 and "is no run directory" in output


def test_usage_errors_have_their_own_code(tmp_path: Path) -> None:
    assert invoke("train")[0] == 2
    assert invoke("trian", "x.toml")[0] == 2
    code, output = invoke("train", str(QUICK), "--set", "max_steps")
    assert code == 3 and "is not key=value" in output
    code, output = invoke("status", str(tmp_path))
    assert code == 3 and "is no run directory" in output
    code, output = invoke("stop", str(tmp_path))
    assert code == 3 and "is no run directory" in output


def test_what_the_operating_system_refuses_of_a_file_is_one_message_that_names_it() -> None:
    assert invoke("status", "a" * 300) == (1, f"error: [Errno 36] File name too long: '{'a' * 300}/config.toml'\n")


def test_every_preset_loads_and_is_complete_or_says_what_fetches_its_model(tmp_path: Path) -> None:
    import tomllib

    from async_rlhf.buffers.errors import ConfigError
    from async_rlhf.run.loading import load

    presets = sorted((QUICK.parent).glob("*.toml"))
    assert presets
    for preset in presets:
        model = tomllib.loads(preset.read_text())["model"]
        fetched = ".cache" in Path(model).parts
        if fetched:
            with pytest.raises(ConfigError, match=r"is not there: .*`make train-chat` fetches it.*--set model=PATH"):
                load(preset, {"model": str(tmp_path / Path(model).name)})
        # A model from elsewhere need not be there: all else of the preset is checked.
        shipped = (preset.parent / model).is_dir()
        load(preset, {} if shipped else {"model": str(QUICK.parent / "models" / "tiny-speller")})


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_model_that_only_its_own_code_could_load_is_refused_and_the_code_is_not_run(tmp_path: Path, file: str) -> None:
    model, ran = shutil.copytree(QUICK.parent / "models" / "tiny-speller", tmp_path / "model"), tmp_path / "ran"
    (model / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    fields = json.loads((model / file).read_text())
    # What transformers knows by itself is loaded without the code that comes along.
    fields["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.T", None]}
    (model / file).write_text(json.dumps(fields))
    given = ["check", str(QUICK), "--set", f"model={json.dumps(str(model))}"]
    if file == "config.json":
        assert invoke(*given)[0] == 0
    (model / file).write_text(json.dumps({**fields, "model_type": "own", "tokenizer_class": "own"}))
    code, output = invoke(*given)
    assert (code, ran.exists()) == (3, False)
    assert "needs its own code (auto_map), which is never run" in output


def test_the_resolved_configuration_is_the_whole_of_it(small: Any) -> None:
    import tomllib

    from async_rlhf.run.loading import dump, validated

    for config in (small(), small(**{"loss.is_cap": "none", "loss.allow_uncorrected": True})):
        assert validated(tomllib.loads(dump(config))) == config
    assert json.dumps(config.model_dump(mode="json"))


def test_all_that_is_wrong_is_said_at_once_a_line_each() -> None:
    wrong = {
        "generation.max_episode_length": 64,
        "engine.batch_invariant": True,
        "engine.threads": 2,
        "address": "tcp://10.0.0.1:5000",
        "advantage.kind": "gae",
        "loss.kind": "oapl",
    }
    with pytest.raises(ConfigError) as caught:
        load(QUICK, wrong)
    lines = str(caught.value).splitlines()
    assert len(lines) >= 5 and len({*lines}) == len(lines)
    for words in (
        "max_episode_length = 64 and no environment",
        "engine.threads = 2",
        "without keys",
        "needs a critic's values",
    ):
        assert sum(words in line for line in lines) == 1, words
    with pytest.raises(ConfigError) as caught:
        preflight(load(QUICK, {"hooks.command": ["no-such-program-here"], "tracking.kind": ["trackio"]}))
    assert len(str(caught.value).splitlines()) == 2
