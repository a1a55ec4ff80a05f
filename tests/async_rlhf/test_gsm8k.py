"""The recipe for a GPU, as far as a machine without one can hold it: what `check` says of it, and its parts on a processor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from async_rlhf.run.run_dir import RunDir
from tests.conftest import SPELLER, Start, output_of, sets

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A random model of Qwen2.5's shape with a chat template, and rows as GSM8K has them."""
    model = tmp_path / "model"
    shutil.copytree(SPELLER, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "chat_template": TEMPLATE}))
    sizes = {"hidden_size": 56, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 14}
    vocabulary = json.loads((SPELLER / "config.json").read_text())["vocab_size"]
    config = Qwen2Config(vocab_size=vocabulary, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(model)
    for name, count in (("train", 16), ("test", 2)):
        rows = [
            {"question": f"Ann has {i} nuts and finds {i}. How many?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"}
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = {"data.source": str(tmp_path / "train.jsonl"), "evaluation.source": str(tmp_path / "test.jsonl")}
    return sets({"model": str(model)} | rows)


def test_on_one_gpu_everything_shares_it_and_on_eight_the_others_generate(given: list[str]) -> None:
    def hosts(devices: int) -> str:
        return f"placement.hosts=[{{devices={devices}, device_memory={24 << 30}, cpus=16}}]"

    output = output_of(0, "check", "gsm8k", *given, "--set", hosts(1))
    assert "16 training prompts" in output and "memory of this machine, device 0: about" in output
    wide = ["--set", hosts(8), "--set", "placement.colocate=false", "--set", "actors.count=fill"]
    output = output_of(0, "check", "gsm8k", *given, *wide)
    devices = dict(line.rsplit("this machine", 1) for line in output.splitlines() if "this machine  " in line)
    found = {process.strip(): device.strip() for process, device in devices.items()}
    assert found == {"hub": "none", "learner": "0", "evaluation": "1", **{f"actor-{i}": str(i + 2) for i in range(6)}}


@pytest.mark.rest
def test_its_parts_train_and_evaluate_on_a_processor(given: list[str], command: Start, tmp_path: Path) -> None:
    smaller = {
        "engine.kind": "torch", "engine.device": "cpu", "learner.device": "cpu", "placement.colocate": False,
        "engine.slots": 16, "learner.batch_size": 16, "generation.max_completion_length": 16, "max_steps": 2,
        "evaluation.every": 2, "checkpoint.save_every": 2, "output_dir": str(tmp_path / "runs"),
    }  # fmt: skip
    command("train", "gsm8k", *given, *sets(smaller)).ends_with(0)
    run = RunDir(tmp_path / "runs" / "gsm8k")
    scored = [(record["step"], record["reward"], record["rewards/failed_ratio"]) for record in run.read_metrics()]
    assert scored == [(1, 0.0, 0), (2, 0.0, 0)], "random letters are no number, and no failure of the verifier"
    assert [record["num_prompts"] for record in run.read_evaluations()] == [2, 2]
    prompt = json.loads(run.samples.read_text().splitlines()[0])["prompt"]
    assert prompt.startswith("user: Ann has ") and prompt.endswith("within \\boxed{}.\nassistant: ")
