"""Every family judges as its own plain passes do, as the reference and as a reward model, whatever shares a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from async_rlhf.actors.scoring.models import ReferenceModel, RewardModel
from async_rlhf.buffers.attention import FAMILIES
from async_rlhf.buffers.errors import RewardError
from async_rlhf.experiments.doctor import families

PROMPTS = ([5, 9, 11], list(range(3, 21)), [7])
COMPLETIONS = (list(range(20, 43)), [4, 8, 15, 16, 23], list(range(3, 14)))
# They scale or cap their logits, or are not built of body and head: the learner computes the reference.
FOLLOWED_BY_THE_LEARNER = {
    "cohere",
    "cohere2",
    "gemma2",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "llama4_text",
    "vaultgemma",
}
WITH_A_HEAD = sorted(FAMILIES & MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.keys())


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_log_probabilities_of_the_reference_are_those_of_plain_passes(kind: str, tmp_path: Path) -> None:
    model = families.model(kind)
    model.save_pretrained(tmp_path)
    try:
        reference = ReferenceModel(tmp_path)
    except RewardError as error:
        assert kind in FOLLOWED_BY_THE_LEARNER and 'placement = "learner"' in str(error)
        return
    for prompt, ids, hidden in zip(PROMPTS, COMPLETIONS, reference.read(PROMPTS, COMPLETIONS), strict=True):
        plain = families.plain_logprobs(model, prompt, ids).detach()
        np.testing.assert_allclose(reference.logprobs(hidden, ids, 1.0, None), plain.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", WITH_A_HEAD)
def test_scores_of_a_reward_model_are_those_of_plain_passes(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(families.config(kind, num_labels=1)).float().eval()
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.15)
    model.save_pretrained(tmp_path)
    letters = {chr(ord("0") + token): token for token in range(64)}
    tokenizer = Tokenizer(WordLevel(letters, unk_token="1"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0").save_pretrained(tmp_path)
    prompts, completions = (["".join(chr(ord("0") + i) for i in ids) for ids in texts] for texts in (PROMPTS, COMPLETIONS))
    found = RewardModel(tmp_path).score(prompts, completions, max_length=64)
    for prompt, ids, score in zip(PROMPTS, COMPLETIONS, found, strict=True):
        model.config.pad_token_id = None
        with torch.inference_mode():
            plain = model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, 0]
        assert score == pytest.approx(float(plain), abs=1e-4)
