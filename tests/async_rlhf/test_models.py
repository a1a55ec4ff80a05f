"""Whatever model a run is given: it is computed right by engine and learner, or refused by name before anything is trained; by
its name on the Hugging Face Hub from the cache of huggingface_hub, whose layout is made here, or from nowhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_tensors
from safetensors.torch import save_file as save_torch_tensors
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from async_rlhf.actors.engine import Request, RolloutKey, completed
from async_rlhf.actors.scoring.models import ReferenceModel
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.attention import FAMILIES, angle_limit, attention, max_length
from async_rlhf.buffers.errors import ConfigError, RewardError
from async_rlhf.buffers.record import Group, Rollout
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from async_rlhf.launch.exit_codes import CONFIGURATION, REFUSED_TO_TRAIN
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model.files import load_model
from async_rlhf.learner.step.controller import make_backend
from async_rlhf.run.loading import load
from async_rlhf.run.shipped import is_name
from tests.conftest import QUICK, SPELLER, Train, output_of, python, sets

GROUP_SIZE, STEPS, MISMATCH = 3, 3, 1e-5
SAMPLING = Sampling(temperature=0.8)
# Each has a part that no other of them has: plain, learned positions, sliding windows and soft caps, experts, sinks, latents.
SLICE = (
    "llama", "gpt2", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "minimax_m2", "falcon", "cohere2",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", [kind if kind in SLICE else pytest.param(kind, marks=pytest.mark.rest) for kind in sorted(FAMILIES)]
)
def test_three_steps_keep_engine_and_learner_one_policy(kind: str, tmp_path: Path) -> None:
    families.model(kind).save_pretrained(tmp_path)
    engine = load_engine(str(tmp_path), TorchEngineConfig(slots=4, prefill_tokens=16))
    backend = make_backend(tmp_path, LearnerConfig(learning_rate=1e-2, warmup_steps=0), LossConfig())
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        engine.load_weights(step, backend.tensors())
        groups = []
        for number in range(2):
            prompt = rng.integers(3, 64, 6 + 5 * number).astype(np.int32)
            keys = [RolloutKey(number, step, member) for member in range(GROUP_SIZE)]
            requests = [Request(key, tuple(prompt.tolist()), 12 + 3 * key.member, SAMPLING, seed=key.member) for key in keys]
            ended = completed(engine, requests)
            made = [ended[key] for key in keys]
            rollouts = tuple(Rollout(c.token_ids, c.logprobs, c.spans, c.finish_reason) for c in made)
            groups.append(Group(number, 0, prompt, rollouts, SAMPLING))
        report = backend.step([make_rows(groups, [[1.0, -1.0, 0.5]] * 2)], step)
        assert report.applied and report.metrics["mismatch/abs_log_ratio"] < MISMATCH
        assert report.metrics["is/ess"] == pytest.approx(1.0, abs=1e-6), "at staleness 0 the importance weight is 1"
        assert report.metrics["is/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert report.metrics["kl/behaviour"] == pytest.approx(0.0, abs=1e-5)


def told_by_check(path: Path, kind: str, **own: Any) -> str:
    """What `check` says when it refuses this family, beside the speller's tokenizer."""
    for file in SPELLER.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    model: PreTrainedModel = families.model(kind)
    model.save_pretrained(path)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | own))
    return output_of(CONFIGURATION, "check", QUICK, *sets({"model": str(path)}))


SCALING = {"rope_type": "longrope", "original_max_position_embeddings": 32}
REFUSED = {
    **dict.fromkeys(("gpt_neo", "mamba", "rwkv"), ({}, "Set engine.kind = 'vllm', or use one of afmoe,")),
    "llama": ({"quantization_config": {"quant_method": "awq"}}, "is packed by awq; give the model that was packed"),
    "phi3": ({"rope_parameters": SCALING}, "beyond 32 tokens the positions of this model depend on how long the other texts"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_check_refuses_what_the_built_in_engine_cannot_serve(kind: str, tmp_path: Path) -> None:
    own, message = REFUSED[kind]
    assert message in told_by_check(tmp_path, kind, **own)


def test_episodes_of_a_hybrid_model_are_refused_before_the_run_by_the_same_message(tmp_path: Path) -> None:
    """Some of its layers keep a state instead of keys and values, which cannot be held between turns."""
    (tmp_path / "say.py").write_text("def say(prompt):\n    yield prompt\n")
    (model := tmp_path / "model").mkdir()
    told = told_by_check(model, "qwen3_next")
    own = {"model": str(model), "environment": f"{tmp_path / 'say.py'}:say", "output_dir": str(tmp_path / "runs")}
    assert output_of(CONFIGURATION, "train", QUICK, *sets(own)) == told and "model type 'qwen3_next'" in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_model_of_which_files_lack_a_part_is_not_begun_with_random_numbers(is_cut: bool, tmp_path: Path) -> None:
    model = shutil.copytree(SPELLER, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file({**tensors, **({"model.norm.weight": norm[:1]} if is_cut else {})}, model / "model.safetensors")
    for load_it in (lambda: load_model(model, torch.device("cpu")), lambda: load_engine(str(model), TorchEngineConfig())):
        with pytest.raises(ConfigError, match=r"no tensor 'model.norm.weight' of the shape .* \(1 such tensors\)"):
            load_it()


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_weights_of_eight_bits_are_never_taken_for_their_values(kind: torch.dtype, tmp_path: Path) -> None:
    model = shutil.copytree(SPELLER, tmp_path / "model")
    tensors = torch_tensors(model / "model.safetensors")
    save_torch_tensors({**tensors, (name := "model.norm.weight"): tensors[name].to(kind)}, model / "model.safetensors")
    engine, learner = lambda: load_engine(str(model), TorchEngineConfig()), lambda: load_model(model, torch.device("cpu"))
    for load_it in (engine, learner, lambda: ReferenceModel(model)):
        said = r"'model.norm.weight' is of type (I8|F8_E4M3), and config.json"
        with pytest.raises((ConfigError, RewardError), match=said):
            load_it()
    for command in (["check", QUICK, *sets({"model": str(model)})], ["evaluate", model, QUICK]):
        output = output_of(CONFIGURATION, *command)
        assert "give the model in float32" in output and "train" not in output


def refused_by_check(model: Path, **further: str) -> str:
    """What `check` says; and `evaluate` is refused, and nothing made."""
    output_of(CONFIGURATION, "evaluate", model, QUICK)
    assert not (model.parent / "runs").exists()
    return output_of(CONFIGURATION, "check", QUICK, *sets({"model": str(model), **further}))


@pytest.mark.parametrize("limit", [10**30, 1e30, float("inf"), 2**70, None], ids=str)
def test_a_tokenizer_without_a_limit_is_one(limit: float | None, tmp_path: Path) -> None:
    """transformers writes int(1e30), and others what JSON has for it."""
    model = shutil.copytree(SPELLER, tmp_path / "model")
    described = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**described, "model_max_length": limit}))
    output_of(0, "check", QUICK, *sets({"model": str(model)}))


FAMILIES_OF_FILES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi"),
    *("phi3", "gpt2", "gpt_neox", "olmo2", "olmoe", "granite", "cohere", "stablelm", "starcoder2", "deepseek_v3", "gpt_oss"),
    *("falcon", "opt"),
)  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES_OF_FILES)
def test_what_transformers_writes_of_a_family_is_read(kind: str, tmp_path: Path) -> None:
    own = CONFIG_MAPPING[kind]()
    own.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert attention(described) is not None
    longest = getattr(own, "max_position_embeddings", getattr(own, "n_positions", None))
    assert max_length(described) in (longest, angle_limit(described))
    for nothing in (None, float("inf"), 10**400, "none"):
        assert max_length({"max_position_embeddings": nothing}) in (None, 10**400)


def test_an_adapter_beside_a_model_is_named_with_the_line_that_merges_it(tmp_path: Path) -> None:
    model = shutil.copytree(SPELLER, tmp_path / "model")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(SPELLER), LoraConfig(r=2, target_modules="all-linear"))
    adapted.peft_config["default"].task_type = "CAUSAL_LM"
    adapted.save_pretrained(model)
    output = refused_by_check(model)
    assert "has an adapter (adapter_config.json)" in output
    line = re.search(r"python -c \"(.+?)\"", output)
    assert line is not None
    subprocess.run([sys.executable, "-c", line[1]], cwd=tmp_path, check=True, timeout=300)
    for file in SPELLER.glob("token*"):
        shutil.copy(file, tmp_path / "merged")
    output_of(0, "check", QUICK, *sets({"model": str(tmp_path / "merged")}))


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_model_without_a_language_model_of_its_own_is_refused_before_a_start(engine: str, tmp_path: Path) -> None:
    model = shutil.copytree(SPELLER, tmp_path / "model")
    CONFIG_MAPPING["clip"]().save_pretrained(model)
    told = refused_by_check(model, **{"engine.kind": engine})
    assert "is of model type 'clip', which reads more than text and images" in told


@pytest.mark.parametrize("kind", ["llava", "mistral3"])
def test_a_model_that_reads_images_is_refused_by_an_engine_that_does_not(kind: str, tmp_path: Path) -> None:
    model = shutil.copytree(SPELLER, tmp_path / "model")
    CONFIG_MAPPING[kind]().save_pretrained(model)
    told = output_of(CONFIGURATION, "check", QUICK, *sets({"model": str(model), "engine.kind": "vllm"}))
    assert f"is of model type '{kind}', which is served together with what reads images, with engine.kind = 'vllm'" in told


def test_a_deep_check_loads_the_model_and_says_that_learner_and_engine_are_right() -> None:
    deep = ("check", QUICK, "--deep", *sets({"queue.max_staleness": 0, "learner.lora.rank": 4}))
    assert "Layers here: down_proj" in output_of(3, *deep, *sets({"learner.lora.targets": ["0.mlp.q_proj"]}))
    output = output_of(0, *deep, *sets({"learner.lora.targets": ["0.self_attn.q_proj"]}))
    assert "adapters: 1 layers, the same merged and apart." in output
    assert "learner: log-probabilities are those of plain passes (completions of a prompt share its computation;" in output
    assert "engine: sampled log-probabilities are those of plain passes, the same bits alone and in a batch" in output


def test_a_run_whose_engine_and_learner_disagree_ends_by_name_and_is_not_tried_again(training: Train) -> None:
    started = training(**{"queue.max_staleness": 0, "engine.mismatch_limit": 1e-12, "max_steps": 3})
    differ = "log-probabilities of learner and engine differ by"
    assert "starting it again" not in started.ends_with(REFUSED_TO_TRAIN, differ, "raise engine.mismatch_limit")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """`owner/speller` in a cache, as huggingface_hub keeps it."""
    repository = tmp_path / "cache" / "models--owner--speller"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(SPELLER, repository / "snapshots" / COMMIT))


def check(tmp_path: Path, model: str) -> tuple[int, str]:
    """`check` of the quick configuration with this model, where no network leads anywhere."""
    own = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = python("-m", "async_rlhf", "check", QUICK, "--set", f"model={model}", cwd=tmp_path, env=own)
    return done.returncode, done.stdout + done.stderr


def test_a_model_in_the_cache_is_used_without_a_network(tmp_path: Path, snapshot: Path) -> None:
    for name in ("owner/speller", f"owner/speller@{COMMIT}"):
        code, output = check(tmp_path, name)
        assert code == 0 and "good." in output and "fetching" not in output, output


def test_a_part_of_a_model_is_fetched_again_and_what_cannot_be_fetched_is_refused(tmp_path: Path, snapshot: Path) -> None:
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(shards))
    code, output = check(tmp_path, "owner/speller")
    assert code == 3 and "fetching owner/speller from the Hugging Face Hub" in output, output
    assert "or the download was incomplete" in output
    code, output = check(tmp_path, "owner/other")
    assert code == 3 and "model = 'owner/other' is not in the cache of the Hugging Face Hub" in output, output
    assert "cannot be fetched: the Hub does not answer ([Errno 111]" in output and "or give a path" in output


def test_a_path_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert is_name("Qwen/Qwen3-0.6B", tmp_path) and is_name("owner/name@v1.0", tmp_path)
    for path in ("models/mistyped", "./models/x", "../x/y", "/x/y", "~/x", "x", "a/b/c", "Qwen/", "owner/na me"):
        assert not is_name(path, tmp_path), path


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scoring.reference.path", "owner/other", "cannot be fetched: HF_HUB_OFFLINE is set"),
        ("scoring.reference.by_source.maths", "owner/other", "cannot be fetched: HF_HUB_OFFLINE is set"),
        ("evaluation.source", "hub:owner/other/rows.jsonl", "cannot be fetched: HF_HUB_OFFLINE is set"),
        ("data.source", "hub:owner/other/../rows.jsonl", "names no file of a data set"),
    ],
)
def test_what_cannot_be_fetched_is_refused_by_its_key_and_a_wrong_key_before(
    key: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"{key} = '{value}'.*{message}"):
        load(QUICK, {key: value})
    with pytest.raises(ConfigError, match=r"unknown key 'learner\.lr'"):
        load(QUICK, {key: value, "learner.lr": 1})


def test_a_name_that_is_overridden_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    values = tomllib.loads(QUICK.read_text()) | {"model": "owner/other"}
    assert load(values, {"model": "tiny-speller"}).model == load(QUICK).model
