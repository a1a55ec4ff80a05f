"""The tiny speller that ships, and the script that made it."""

from __future__ import annotations

import string
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.experiments.warm_start.make_model import accuracy, completion_loss
from async_rlhf.experiments.warm_start.make_player import PlayedPart, turn_loss
from async_rlhf.experiments.warm_start.make_player import demonstrate as demonstrate_episodes
from async_rlhf.experiments.warm_start.speller import (
    HABITS,
    INSTRUCTION,
    OPTIONS,
    TASK,
    Demonstration,
    demonstrate,
    load_words,
    make_model,
    make_tokenizer,
)
from tests.conftest import REPOSITORY

SHIPPED, PLAYER = (REPOSITORY / "configs" / "models" / name for name in ("tiny-speller", "tiny-player"))
TOKENIZER = AutoTokenizer.from_pretrained(SHIPPED, local_files_only=True)
PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n"


@given(st.text(PRINTABLE, max_size=80))
def test_the_tokenizer_gives_printable_text_back_one_token_per_character(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("directory", [SHIPPED, PLAYER])
def test_a_shipped_directory_is_small_and_loads_without_a_network(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert model.dtype == torch.float32 and 800_000 < model.num_parameters() < 900_000
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 4_000_000
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


def test_the_shipped_model_has_the_skill_but_not_yet_the_behaviour() -> None:
    _, held_out = load_rows(DataConfig(source=TASK, options=OPTIONS, size=1))
    words = [str(row.prompt).removeprefix(INSTRUCTION) for row in held_out]
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    assert len(words) == 200
    assert 0.15 <= accuracy(model, TOKENIZER, words, sample=False) <= 0.38


def test_demonstrations_have_the_stated_shares_and_never_a_held_out_word() -> None:
    words, held_out = load_words(2000)
    shown = demonstrate(words, held_out, 20_000, 0.5, Random(1))
    counted = Counter(demonstration.habit for demonstration in shown)
    assert sum(share for share, _ in HABITS.values()) == pytest.approx(1.0)
    for habit, (share, _) in HABITS.items():
        # Four standard deviations of a binomial count.
        assert counted[habit] == pytest.approx(20_000 * share, abs=4 * (20_000 * share * (1 - share)) ** 0.5)
    spoken = {word.lower() for word in held_out}
    assert len(held_out) == 200
    assert not spoken & {demonstration.word.lower() for demonstration in shown}
    assert {len(demonstration.word) for demonstration in shown} == {3, 4, 5, 6}


def test_the_shared_instruction_gives_the_loss_and_gradient_of_whole_sequences() -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=0)
    batch = [Demonstration("sun", "nus", "right"), Demonstration("pebble", "pebble", "copied")]
    losses = []
    for word, completion, _ in batch:
        ids = torch.tensor([[*tokenizer(INSTRUCTION + word + completion)["input_ids"], tokenizer.eos_token_id]])
        begin = len(INSTRUCTION + word)
        logits = model(ids).logits[0, begin - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, begin:], reduction="none"))
    whole, shared = torch.cat(losses).mean(), completion_loss(model, tokenizer, batch)
    torch.testing.assert_close(shared, whole)
    parameters = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(shared, parameters), torch.autograd.grad(whole, parameters))


def test_episodes_alternate_and_say_what_is_true() -> None:
    shown = demonstrate_episodes(3000, 0.5, Random(2))
    for episode in shown:
        assert [piece.is_turn for piece in episode] == [index % 2 == 1 for index in range(len(episode))]
    called = [episode for episode in shown if episode[0].text.endswith("=\n") and len(episode) > 2]
    assert len(called) == pytest.approx(1000, abs=100)
    assert all(episode[1].text == f"<{episode[0].text.removesuffix(' =' + chr(10))}>" for episode in called)
    assert sum(episode[3].text == episode[2].text.strip() for episode in called) / len(called) == pytest.approx(0.9, abs=0.04)
    for episode in (each for each in shown if each[0].text == "a-p?\n"):
        low, high = "a", "p"
        for turn, answer in zip(episode[1::2], episode[2::2], strict=False):
            low, high = (low, min(high, turn.text)) if answer.text == "<\n" else (max(low, turn.text), high)
        assert low <= high


def test_turns_alone_bear_the_loss_of_the_player() -> None:
    tokenizer, model = make_tokenizer(), make_model(make_tokenizer(), 0)
    episode = [PlayedPart("1 * 2 =\n", False), PlayedPart("<1 * 2>", True), PlayedPart("2\n", False), PlayedPart("2", True)]
    loss = turn_loss(model, tokenizer, [episode, episode[:2]])
    rows, total, count = [episode, episode[:2]], 0.0, 0
    for row in rows:
        ids, borne = [], []
        for text, is_turn in row:
            own = [*tokenizer(text)["input_ids"], *([tokenizer.eos_token_id] if is_turn else [])]
            ids, borne = ids + own, borne + [is_turn] * len(own)
        logps = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
        picked = [float(logps[at - 1, ids[at]].detach()) for at in range(1, len(ids)) if borne[at]]
        total, count = total - sum(picked), count + len(picked)
    assert loss.item() == pytest.approx(total / count, rel=1e-4)
