"""A held-out evaluation: what it counts, and what it shows a person."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.run.roles import run_evaluation
from async_rlhf.run.run_dir import RunDir


def test_a_model_is_judged_by_its_likeliest_answers_and_some_can_be_read(small: Callable[..., Any]) -> None:
    config = small(**{"data.held_out": 10})
    run = RunDir.create(config)
    run_evaluation(run, config, config.model, "start")
    [record] = run.read_evaluations()
    assert (record["label"], record["num_prompts"], record["failed"], len(record["samples"])) == ("start", 10, 0, 8)
    shown = sum(sample["reward"] for sample in record["samples"])
    assert shown - 1e-6 <= 10 * record["mean_reward"] <= shown + 2 + 1e-6, "the two that are not shown have 0 to 1 each"
    solved = sum(sample["reward"] == 1 for sample in record["samples"])
    assert solved <= 10 * record["accuracy"] + 1e-6 <= solved + 2 + 2e-6
    tokenizer, model = AutoTokenizer.from_pretrained(config.model), AutoModelForCausalLM.from_pretrained(config.model)
    for sample in record["samples"]:
        asked = tokenizer(sample["prompt"], return_tensors="pt", add_special_tokens=False)
        answer = model.generate(**asked, max_new_tokens=config.generation.max_completion_length, do_sample=False)
        told = tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        assert sample["completion"] == told
    assert record["rewards"]["reasoning_gym"] == pytest.approx(record["mean_reward"])
