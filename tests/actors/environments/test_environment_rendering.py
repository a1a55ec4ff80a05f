"""Turns become tokens: chat templates in the styles of several families, what they append, and those that rewrite history."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rlhf.actors.environments.rendering import Renderer, conversation
from async_rlhf.buffers.errors import ConfigError, EpisodeError

CHATML = """{%- if messages[0].role != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SHOWS_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CHATML.replace(
    "messages[0].role != 'system'", "false"
)

LLAMA3 = """{{- '<|begin|>' }}
{%- for m in messages %}<|start_header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header|>

{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>

{% endif %}"""

MISTRAL = """{{- '<s>' }}{%- if messages[0].role == 'system' %}{% set rule = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rule = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}[INST] {{ rule + '\n\n' if loop.first and rule else '' }}{{ m.content }}[/INST]
{%- else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}"""

# Old Mistral templates moved the rule to the last message of the user.
MOVES_RULE = MISTRAL.replace("loop.first", "loop.last")

# Reasoning stays only behind the last message of the user.
QWEN3 = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}
{%- elif m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SPECIAL = ["<|end|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>"]
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot|>", "mistral": "</s>"}


@cache
def tokenizer(template: str = "") -> Any:
    """A token for each byte, and the special ones. Most of them are marked so in the vocabulary alone, as in many models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=template or None)


def ids_of(text: str) -> list[int]:
    return list(tokenizer()(text)["input_ids"])


def walk(template: str, turns: Sequence[str], observed: Sequence[Any], prompt: Any = "2 + 2?") -> tuple[list[int], str]:
    """All tokens of an episode in which the model ends each turn as the template does, and the template's own text of it."""
    made = tokenizer(template)
    renderer = Renderer(made, chat=True)
    ids = list(renderer.prompt(prompt).ids)
    for text, content in zip(turns, observed, strict=True):
        sampled = ids_of(text)
        ids += sampled + renderer.observation(prompt, content, sampled).ids
    plain = [text.removesuffix("<|im_end|>").removesuffix("<|eot|>").removesuffix("</s>") for text in turns]
    whole = made.apply_chat_template(
        conversation(prompt, list(zip(plain, observed, strict=True))), add_generation_prompt=True, tokenize=False
    )
    return ids, whole


@pytest.mark.parametrize("family", TEMPLATES)
def test_tokens_appended_turn_by_turn_are_those_of_the_whole_conversation(family: str) -> None:
    renderer = Renderer(tokenizer(TEMPLATES[family]), chat=True)
    renderer.check()
    end, space = ENDS[family], " " * (family == "mistral")
    for prompt in ("2 + 2?", [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 2?"}]):
        ids, whole = walk(TEMPLATES[family], [f"{space}3{end}", f"{space}4{end}"], ["no", "yes"], prompt)
        assert tokenizer().decode(ids) == whole and ids == ids_of(whole)


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_turn_that_was_cut_off_gets_the_end_that_the_template_writes(family: str) -> None:
    renderer = Renderer(tokenizer(TEMPLATES[family]), chat=True)
    cut = renderer.observation("?", "no", ids_of("3"))
    ended = renderer.observation("?", "no", ids_of("3" + ENDS[family]))
    assert cut.ids == [*ids_of(ENDS[family]), *ended.ids] and cut.text == ENDS[family] + ended.text
    assert ended.ids == ids_of(ended.text)


def test_several_messages_and_tools_are_rendered_where_the_template_has_them() -> None:
    observed = [{"role": "tool", "content": "4", "name": "calc"}, {"role": "user", "content": "so?"}]
    ids, whole = walk(LLAMA3, ["calc<|eot|>"], [observed])
    assert tokenizer().decode(ids) == whole and "ipython<|end_header|>\n\n4<|eot|>" in whole
    with pytest.raises(EpisodeError, match="refuses an observation with the roles tool, user: roles must alternate"):
        Renderer(tokenizer(MISTRAL), chat=True).observation("?", observed, [])


@pytest.mark.parametrize(("template", "shown"), [(QWEN3, "user assistant user"), (MOVES_RULE, "system user assistant user")])
def test_a_template_that_rewrites_history_is_refused_and_the_choice_is_named(template: str, shown: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"rewrites what was said before \({shown}\).*environment.render = 'split'.*'by_message'"
    ):
        Renderer(tokenizer(template), chat=True).check()


def test_by_message_keeps_what_a_template_would_drop() -> None:
    renderer = Renderer(tokenizer(QWEN3), chat=True, render="by_message")
    renderer.check()
    shown = renderer.observation("?", "no", ids_of("<think>3</think>3<|im_end|>"))
    assert shown.text == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "appended", "whole"),
    [
        ("{{ messages[0].content }}", "writes the model's turn 0 times", "leaves out what a message of role 'user' says"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "writes the model's turn 2 times", None),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}", "0 times", "out the model's turn"),
        ("{{ raise_exception('no') }}", "refuses an observation with the roles user: no", "with the roles user: no"),
        (CHATML.replace("{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}"),
         r"0 times.*; set environment\.render = 'split'", None),
    ],
)  # fmt: skip
def test_a_template_that_does_not_write_the_conversation_is_refused(template: str, appended: str, whole: str | None) -> None:
    why = "episodes of several turns cannot be rendered: .*"
    with pytest.raises(ConfigError, match=why + appended):
        Renderer(tokenizer(template), chat=True).check()
    split = Renderer(tokenizer(template), chat=True, render="split")
    if whole is None:
        split.check()
        return
    with pytest.raises(ConfigError, match=why + whole):
        split.check()


def test_a_message_that_the_template_leaves_out_fails_and_a_text_is_no_conversation() -> None:
    template = tokenizer(CHATML.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'tool' %}"))
    tool, chat = [{"role": "tool", "content": "4"}], [{"role": "user", "content": "?"}]
    split = Renderer(template, chat=False, render="split")
    for rendered in (
        lambda: Renderer(template, chat=True).observation("?", tool, []),
        lambda: split.whole(chat, [("3", tool)], []),
    ):
        with pytest.raises(EpisodeError, match="leaves out what a message of role 'tool' says"):
            rendered()
    assert split.splits(chat) and not split.splits("2 + 2 = ") and not Renderer(template, chat=True).splits(chat)


def test_a_special_token_outside_of_its_content_is_refused() -> None:
    with pytest.raises(EpisodeError, match="text of a special token outside its content"):
        Renderer(tokenizer(CHATML), chat=True).observation("?", [{"role": "user", "content": "4", "name": "<|im_end|>"}], [])


PIECES = [*SPECIAL, "<|im_", "end|>", "<", "|>", "[INST]", "[/INST]", "page", " ", "\n"]


@given(st.sampled_from(sorted(TEMPLATES)), st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join))
def test_whatever_an_environment_says_the_structure_is_the_template_s_alone(family: str, content: str) -> None:
    renderer = Renderer(tokenizer(TEMPLATES[family]), chat=True)
    special = set(ids_of("".join(SPECIAL)))
    for render in (
        lambda said: renderer.observation("?", said, []),
        lambda said: renderer.prompt([{"role": "user", "content": said}], is_foreign=True),
    ):
        shown, harmless = render(content), render("x")
        assert [id for id in shown.ids if id in special] == [id for id in harmless.ids if id in special]
        assert tokenizer().decode(shown.ids) == shown.text and content.strip() in shown.text


def test_what_is_no_special_token_is_the_same_prompt_whoever_gives_it() -> None:
    renderer, said = Renderer(tokenizer(CHATML), chat=True), [{"role": "user", "content": "2 + 2?"}]
    assert renderer.prompt(said, is_foreign=True) == renderer.prompt(said)


def test_a_conversation_may_have_tools_of_its_own() -> None:
    renderer, said = Renderer(tokenizer(SHOWS_TOOLS), chat=False), [{"role": "user", "content": "?"}]
    one, other = ({"type": "function", "function": {"name": name}} for name in ("price", "stock"))
    shown = renderer.given((one,)).prompt(said).text
    assert '"price"' in shown and shown == Renderer(tokenizer(SHOWS_TOOLS), chat=True, tools=[one]).prompt(said).text
    assert '"stock"' in renderer.given([other]).prompt(said).text and "price" not in renderer.given(()).prompt(said).text
    assert renderer.given((one,)) is renderer.given((one,)) and renderer.given(()) is renderer
    for number in range(200):  # no more are kept than there is room for
        renderer.given(({"function": {"name": f"price {number}"}},))
    assert len(renderer._of_tools) <= 64
    with pytest.raises(EpisodeError, match="the schema of a tool has the text of a special token"):
        renderer.given(({"function": {"name": "<|im_end|>"}},))
    with pytest.raises(ConfigError, match="leaves out the tool 'price'"):
        Renderer(tokenizer(CHATML), chat=True).given((one,)).prompt(said)


def test_without_a_template_an_observation_is_the_tokens_of_its_text() -> None:
    renderer = Renderer(tokenizer(), chat=False)
    renderer.check()
    assert renderer.prompt("2 + 2 = ").ids == ids_of("2 + 2 = ")
    assert renderer.observation("2 + 2 = ", "no", ids_of("3<|end|>")) == ("no", ids_of("no"), False)
    hostile = renderer.observation("2 + 2 = ", "<|end|>", [])
    assert ids_of("<|end|>")[0] not in hostile.ids and tokenizer().decode(hostile.ids) == "<|end|>"
    with pytest.raises(EpisodeError, match="in an episode that began as text"):
        renderer.observation("2 + 2 = ", [{"role": "user", "content": "no"}], [])
    with pytest.raises(EpisodeError, match="the prompt has no tokens"):
        renderer.prompt("")


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        Renderer(tokenizer(), chat=True).check()
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        Renderer(tokenizer(), chat=False).prompt([{"role": "user", "content": "?"}])


def test_a_conversation_is_the_messages_of_all_turns() -> None:
    tool = {"role": "tool", "content": "4"}
    assert conversation("?", [("a", "no"), ("b", [tool]), ("c", None)]) == [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "b"},
        tool,
        {"role": "assistant", "content": "c"},
    ]


def test_variables_of_the_chat_template_reach_every_turn() -> None:
    written = tokenizer(CHATML.replace("You help.", "{{ rule or 'You help.' }}"))
    assert "Be brief." in Renderer(written, chat=True, variables={"rule": "Be brief."}).prompt("a").text
    assert "You help." in Renderer(written, chat=True).prompt("a").text
