"""Conversations rendered as a whole before each turn: what stays of a row, and where it begins anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.actors.environments.rendering import Renderer, conversation
from tests.actors.environments.test_environment_rendering import (
    CHATML,
    ENDS,
    MOVES_RULE,
    PIECES,
    QWEN3,
    SPECIAL,
    TEMPLATES,
    ids_of,
    tokenizer,
)

Turn = tuple[list[int], Any]
"""What the model samples, and what it is answered."""
TOOL = [{"role": "tool", "content": "4"}]
RULE = [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 2?"}]


def plain(text: str) -> list[int]:
    """Nothing in it is special."""
    return list(tokenizer()(text, split_special_tokens=True)["input_ids"])


def whole_text(template: str, prompt: Any, turns: Sequence[tuple[str, Any]]) -> str:
    """The template's own text of a conversation, with the model's turn begun."""
    made = tokenizer(template)
    return str(made.apply_chat_template(conversation(prompt, turns), add_generation_prompt=True, tokenize=False))


def rows(template: str, prompt: Any, turns: Sequence[Turn]) -> list[tuple[bool, list[int]]]:
    """After each answer whether the row began anew, and what the model then reads on from."""
    made = tokenizer(template)
    renderer = Renderer(made, chat=True, render="split")
    row, said, found = list(renderer.prompt(prompt).ids), list[tuple[str, Any]](), list[tuple[bool, list[int]]]()
    for sampled, answer in turns:
        row = [*row, *sampled]
        said.append((made.decode(sampled, skip_special_tokens=True), answer))
        rendered = renderer.whole(prompt, said, row)
        row = rendered.ids if rendered.restarts else row + rendered.ids
        found.append((rendered.restarts, row))
    return found


def test_reasoning_that_the_template_drops_begins_the_row_anew_and_an_answer_of_a_tool_does_not() -> None:
    Renderer(tokenizer(QWEN3), chat=True, render="split").check()
    turns = [("<think>x</think>call", TOOL), ("<think>y</think>3", "no"), ("4", "sure?")]
    found = rows(QWEN3, "2 + 2?", [(ids_of(f"{text}<|im_end|>"), answer) for text, answer in turns])
    assert [restarts for restarts, _ in found] == [False, True, False]
    texts = [tokenizer().decode(row) for _, row in found]
    assert texts == [whole_text(QWEN3, "2 + 2?", turns[: n + 1]) for n in range(3)]
    assert "<think>x</think>call" in texts[0] and "<think>" not in texts[1] and "call" in texts[1]


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("cut_off", [True, False])
def test_where_a_template_only_appends_no_row_begins_anew_and_the_tokens_are_the_same(family: str, cut_off: bool) -> None:
    space, end = " " * (family == "mistral"), "" if cut_off else ENDS[family]
    turns = [(ids_of(f"{space}3{end}"), "no"), (ids_of(f"{space}4{end}"), "yes")]
    found = rows(TEMPLATES[family], "2 + 2?", turns)
    renderer = Renderer(tokenizer(TEMPLATES[family]), chat=True)
    row = renderer.prompt("2 + 2?").ids
    for (sampled, answer), (restarts, grown) in zip(turns, found, strict=True):
        row = [*row, *sampled, *renderer.observation("2 + 2?", answer, sampled).ids]
        assert not restarts and grown == row


def test_a_rule_that_moves_to_the_newest_message_begins_each_row_anew() -> None:
    turns = [(ids_of(" 3</s>"), "no"), (ids_of(" 4</s>"), "yes")]
    found = rows(MOVES_RULE, RULE, turns)
    assert [restarts for restarts, _ in found] == [True, True]
    assert found[1][1] == ids_of(whole_text(MOVES_RULE, RULE, [("3", "no"), ("4", "yes")]))


def test_tokens_that_were_sampled_stay_though_the_tokenizer_would_choose_others() -> None:
    made = tokenizer.__wrapped__(CHATML)
    made.add_tokens(["ab"])
    spelled = ids_of("ab")
    assert made("ab")["input_ids"] != spelled
    renderer = Renderer(made, chat=True, render="split")
    rendered = renderer.whole("?", [("ab", "no")], [*renderer.prompt("?").ids, *spelled, *ids_of("<|im_end|>")])
    assert not rendered.restarts and rendered.text == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


WORDS = [*PIECES, "<think>", "</think>", "é"]
SAID = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*TEMPLATES, "qwen3"]), st.lists(st.tuples(SAID, st.booleans(), SAID), min_size=1, max_size=3))
def test_whatever_is_said_the_model_reads_the_template_s_text_and_the_template_s_structure(
    family: str, said: list[tuple[str, bool, str]]
) -> None:
    template = QWEN3 if family == "qwen3" else TEMPLATES[family]
    end = ids_of(ENDS.get(family, "<|im_end|>"))
    found = rows(template, "?", [(plain(text) + end * ended, answer) for text, ended, answer in said])
    special = set(ids_of("".join(SPECIAL)))
    for number, (_, row) in enumerate(found, 1):
        turns = [(text, answer) for text, _, answer in said[:number]]
        assert tokenizer().decode(row) == whole_text(template, "?", turns)
        harmless = ids_of(whole_text(template, "?", [("x", "x")] * number))
        assert [id for id in row if id in special] == [id for id in harmless if id in special]
