"""A real sequence-classification model as a reward: batched dynamically, the same whoever it is batched with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from async_rlhf.actors.prompts import Row, Template
from async_rlhf.actors.rewards import check_columns, resolve
from async_rlhf.actors.scoring.models import RewardModel
from async_rlhf.actors.scoring.pool import fields_of
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.record import Rollout, Span
from tests.actors.scored import Bench
from tests.actors.vllm_model import SHIPPED

TEXTS = ["a", "backward", "nus", "x" * 40, "sun sun"]


def test_a_score_is_the_models_logit_alone_or_in_a_batch(judge_directory: Path) -> None:
    model = RewardModel(judge_directory)
    together = model.score(["Spell: "] * 5, TEXTS, 64)
    alone = [model.score(["Spell: "], [text], 64)[0] for text in TEXTS]
    assert together == pytest.approx(alone, abs=1e-5) and len(set(together)) == 5
    plain = AutoModelForSequenceClassification.from_pretrained(judge_directory)
    ids = AutoTokenizer.from_pretrained(judge_directory)("Spell: nus", return_tensors="pt")["input_ids"]
    assert together[2] == pytest.approx(plain(input_ids=ids).logits[0, 0].item(), abs=1e-5)


def test_a_text_that_is_too_long_keeps_its_end(judge_directory: Path) -> None:
    model = RewardModel(judge_directory)
    tokenizer = AutoTokenizer.from_pretrained(judge_directory)
    assert len(tokenizer("abcdef")["input_ids"]) == 6  # one token a letter
    assert model.score(["ab" * 50], ["sun"], 10) == pytest.approx(model.score([("ab" * 50)[-7:]], ["sun"], 64), abs=1e-5)


@pytest.mark.rest
def test_the_pool_gathers_completions_into_batches_for_the_model(judge_directory: Path) -> None:
    settings = {"reward_model": {"batch_size": 3, "batch_wait_s": 0.05}}
    specs = resolve(["reward_model"], Path.cwd(), {"reward_model": {"path": str(judge_directory)}}, settings)
    with Bench(specs) as bench:
        for key, text in enumerate(TEXTS):
            bench.submit(key, text, prompt="Spell: ")
        found = bench.wait()
    wanted = RewardModel(judge_directory).score(["Spell: "] * 5, TEXTS, 64)
    assert [found[key].scores["reward_model"].value for key in range(5)] == pytest.approx(wanted, abs=1e-5)
    # Those of one batch were in one call.
    calls = [found[key].stages["reward_model"] for key in range(5)]
    assert [call == calls[0] for call in calls] == [True, True, True, False, False]


def test_a_directory_that_is_no_reward_model_is_refused_before_the_run(judge_directory: Path, tmp_path: Path) -> None:
    def refuse(path: Path, message: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            check_columns(*resolve(["reward_model"], tmp_path, {"reward_model": {"path": str(path), **options}}), set())

    refuse(tmp_path / "nowhere", "is no Hugging Face model")
    refuse(SHIPPED, "holds LlamaForCausalLM, not a model with a sequence-classification head")
    refuse(judge_directory, "label = 1, the model has 1; highest: 0", label=1)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((judge_directory / name).read_bytes())
    refuse(tmp_path, "has no tokenizer")
    config = json.loads((judge_directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for name in judge_directory.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse(tmp_path, r"max_length = 2048: beyond \d+ tokens the positions of this model depend on how long the other texts")
    save_file({"score.weight": torch.zeros(1, 8, dtype=torch.int8)}, weights := tmp_path / "model.safetensors")
    refuse(tmp_path, "'score.weight' is of type I8")
    weights.write_bytes(weights.read_bytes()[:-1])
    refuse(tmp_path, r"model file '.*model.safetensors' cannot be used: .*Copy it again")


def test_a_chat_is_read_with_one_begin_token_as_its_template_writes_it(judge_directory: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(judge_directory)
    begin = tokenizer.convert_ids_to_tokens(3)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 3)])
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    shutil.copytree(judge_directory, tmp_path, dirs_exist_ok=True)
    named = {name: getattr(tokenizer, name) for name in ("pad_token", "eos_token")}
    own = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, chat_template=template, **named)
    own.save_pretrained(tmp_path)
    model, chat = RewardModel(tmp_path), [{"role": "user", "content": "sun"}]
    ids = own.apply_chat_template([*chat, {"role": "assistant", "content": "nus"}], return_dict=True)["input_ids"]
    assert model.read([chat, "sun"], ["nus", "nus"]) == [ids, ids] and ids.count(3) == 1
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    wanted = float(plain(input_ids=torch.tensor([ids])).logits[0, 0].detach())
    assert model.score([chat, "sun", chat], ["nus", "nus", "n"], 64)[:2] == pytest.approx([wanted] * 2, abs=1e-5)


def test_a_reward_model_reads_what_the_policy_read_and_other_rewards_the_column(judge_directory: Path) -> None:
    row, template = Row("nus", {"answer": "sun"}), Template("Spell {prompt}: ")
    rollout = Rollout(np.array([5], np.int32), np.zeros(1, np.float32), (Span(0, 1),), "stop")
    fields = fields_of(row, [1], rollout, "sun", template)
    assert (fields["prompt"], fields["model_prompt"]) == ("nus", "Spell nus: ")
    assert fields_of(row, [1], rollout, "sun", Template("{prompt}", chat=True))["model_prompt"] == [
        {"role": "user", "content": "nus"}
    ]
    specs = resolve(["reward_model"], Path.cwd(), {"reward_model": {"path": str(judge_directory)}})
    with Bench(specs) as bench:
        bench.submit(0, "sun", **{name: fields[name] for name in ("prompt", "model_prompt")})
        (found,) = bench.wait().values()
    (wanted,) = RewardModel(judge_directory).score(["Spell nus: "], ["sun"], 64)
    assert found.scores["reward_model"].value == pytest.approx(wanted, abs=1e-5)
