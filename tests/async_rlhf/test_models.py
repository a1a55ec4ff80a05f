"""Whatever model a run is given: it is computed right by engine and learner, or refused by name before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.buffers.attention import FAMILIES
from async_rlhf.buffers.record import Group, Rollout
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from async_rlhf.launch.exit_codes import CONFIGURATION, REFUSED_TO_TRAIN
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.step.controller import make_backend
from tests.async_rlhf.test_bad_input import invoke
from tests.conftest import QUICK

GROUP_SIZE, STEPS, MISMATCH = 3, 3, 0.01
SAMPLING = Sampling(temperature=0.8)
# Each has a part that no other of them has: plain, learned positions, sliding windows and soft caps, experts, sinks, latents.
SLICE = (
    "llama",
    "gpt2",
    "gemma3_text",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "llama4_text",
    "minimax_m2",
    "falcon",
    "cohere2",
)


@pytest.mark.parametrize(
    "kind", [kind if kind in SLICE else pytest.param(kind, marks=pytest.mark.rest) for kind in sorted(FAMILIES)]
)
def test_three_steps_keep_engine_and_learner_one_policy(kind: str, tmp_path: Path) -> None:
    families.model(kind).save_pretrained(tmp_path)
    engine = load_engine(str(tmp_path), EngineConfig(slots=4, prefill_tokens=16))
    backend = make_backend(tmp_path, LearnerConfig(learning_rate=1e-2, warmup_steps=0), LossConfig())
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        engine.load_weights(step, backend.tensors())
        groups = []
        for number in range(2):
            prompt = rng.integers(3, 64, 6 + 5 * number).astype(np.int32)
            keys = [RolloutKey(number, step, member) for member in range(GROUP_SIZE)]
            engine.submit(
                [Request(key, tuple(prompt.tolist()), 12 + 3 * key.member, SAMPLING, seed=key.member) for key in keys]
            )
            ended = {}
            while engine.num_unfinished:
                ended |= {completion.key: completion for completion in engine.step()}
            made = [ended[key] for key in keys]
            rollouts = tuple(Rollout(c.token_ids, c.logprobs, c.spans, c.finish_reason) for c in made)
            groups.append(Group(number, 0, prompt, rollouts, SAMPLING))
        report = backend.step([make_rows(groups, [[1.0, -1.0, 0.5]] * 2, backend.row_tokens)], step)
        assert report.applied and report.metrics["mismatch/abs_log_ratio"] < MISMATCH
        assert report.metrics["is/ess"] == pytest.approx(1.0, abs=1e-3), "at staleness 0 the importance weight is 1"


def told_by_check(path: Path, kind: str, **own: Any) -> str:
    """What `check` says when it refuses this family, beside the speller's tokenizer."""
    for file in (QUICK.parent / "models" / "tiny-speller").glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    model: PreTrainedModel = families.model(kind)
    model.save_pretrained(path)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | own))
    code, output = invoke("check", str(QUICK), "--set", f"model={json.dumps(str(path))}")
    assert code == CONFIGURATION, output
    return output


SCALING = {"rope_type": "longrope", "original_max_position_embeddings": 32}
REFUSED = {
    **dict.fromkeys(("gpt_neo", "mamba", "rwkv"), ({}, "Set engine.kind = 'vllm', or use one of afmoe,")),
    "phi3": (
        {"rope_parameters": SCALING},
        "beyond 32 tokens the positions of this model depend on how long the other texts of a batch are",
    ),
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
    environment = json.dumps(f"{tmp_path / 'say.py'}:say")
    own = {"model": json.dumps(str(model)), "environment": environment, "output_dir": json.dumps(str(tmp_path / "runs"))}
    code, output = invoke("train", str(QUICK), *(word for key, value in own.items() for word in ("--set", f"{key}={value}")))
    assert code == CONFIGURATION and output == told and "model type 'qwen3_next'" in told
    assert not (tmp_path / "runs").exists()


def test_a_deep_check_loads_the_model_and_says_that_learner_and_engine_are_right() -> None:
    quick, lora = ("check", str(QUICK), "--deep", "--set", "queue.max_staleness=0"), ("--set", "learner.lora.rank=4")
    code, output = invoke(*quick, *lora, "--set", 'learner.lora.targets=["0.mlp.q_proj"]')
    assert code == 3 and "Layers here: down_proj" in output, output
    code, output = invoke(*quick, *lora, "--set", 'learner.lora.targets=["0.self_attn.q_proj"]')
    assert code == 0, output
    assert "learner: log-probabilities are those of plain passes (completions of a prompt share its computation;" in output
    assert "engine: sampled log-probabilities are those of plain passes, the same bits alone and in a batch" in output


def test_a_run_whose_engine_and_learner_disagree_ends_by_name_and_is_not_tried_again(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]]
) -> None:
    overrides = {"queue.max_staleness": 0, "engine.mismatch_limit": 1e-12, "max_steps": 3}
    code, output = command(*small_arguments(**overrides)).finish()
    assert code == REFUSED_TO_TRAIN, output
    assert "log-probabilities of learner and engine differ by" in output and "raise engine.mismatch_limit" in output
    assert "starting it again" not in output
