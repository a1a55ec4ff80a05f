"""How many tokens prompts have: as transformers counts them, without torch, and what the vocabulary lacks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from async_rlhf.actors.data.tokens import PromptLengths, PromptTokenizer
from async_rlhf.actors.prompts import Row, Template, encode
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.warm_start.speller import make_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}bot: "
)
MESSAGES = [{"role": "user", "content": "<b>Hello</b>"}]


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Characters only; what it lacks is <unk>."""
    directory = tmp_path_factory.mktemp("speller")
    make_tokenizer().save_pretrained(directory)
    return directory


def saved(folder: Path, single: str, words: str = "hello you", template: str | None = None, **declared: str) -> Path:
    """A tokenizer of merged bytes whose post-processor makes `single` of one text, and whose normalizer makes one character
    into many."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special, alphabet = ["<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([words], trainer)
    used = [(token, special.index(token)) for token in special if token in single.split()]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **declared).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a beginning-of-text token and a chat template."""
    words = "hello hello you and you and me" * 9
    return saved(tmp_path_factory.mktemp("chat"), "<s> $A", words, TEMPLATE, bos_token="<s>")


def lengths(directory: Path, texts: list[str], limit: int) -> PromptLengths:
    return PromptTokenizer(directory).lengths(texts, [False] * len(texts), limit)


@given(st.lists(st.text(st.sampled_from("hello you\nAé漢🙂ﷺ"), max_size=12), max_size=6), st.integers(1, 30))
def test_what_is_too_long_is_what_transformers_counts_too_long(chat: Path, texts: list[str], limit: int) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(chat)
    counts = {number: len(encode(Row(text, {}), tokenizer, Template())[1]) for number, text in enumerate(texts)}
    assert lengths(chat, texts, limit).too_long == {number: count for number, count in counts.items() if count > limit}


def test_messages_are_rendered_as_transformers_renders_them(chat: Path) -> None:
    ours, theirs = PromptTokenizer(chat), PreTrainedTokenizerFast.from_pretrained(chat)
    text, ids = encode(Row(MESSAGES, {}), theirs, Template())
    assert ours.text(Row(MESSAGES, {}), Template()) == text == "<s>user: <b>Hello</b>\nbot: "
    assert ours.lengths([text], [True], len(ids)).too_long == {}
    assert ours.lengths([text], [True], len(ids) - 1).too_long == {0: len(ids)}
    with pytest.raises(ConfigError, match=r"chat template refuses .*no tools"):
        ours.text(Row([{"role": "tool", "content": ""}], {}), Template())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (b"{{ 1 // 0 }}", "chat template refuses .*zero"),
        (b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template refuses .*recursion"),
        (b"\xff", "the chat template of model = .* cannot be read: UnicodeDecodeError"),
    ],
)
def test_a_chat_template_with_an_error_in_it_is_refused(chat: Path, tmp_path: Path, template: bytes, message: str) -> None:
    copied = Path(shutil.copytree(chat, tmp_path / "copied"))
    (copied / "chat_template.jinja").write_bytes(template)
    with pytest.raises(ConfigError, match=message):
        PromptTokenizer(copied).text(Row(MESSAGES, {}), Template())


def test_characters_that_the_vocabulary_lacks_are_named_and_the_prompts_with_them_counted(speller: Path, chat: Path) -> None:
    texts = ["abc", "a漢", "漢é", "b c"]
    found = lengths(speller, texts, 10)
    assert (found.unknown, found.num_unknown, found.empty) == (["é", "漢"], 2, [])
    assert lengths(chat, texts, 100).unknown == [], "every byte has a token"


def test_a_prompt_without_a_token_is_found(tmp_path: Path, speller: Path) -> None:
    assert lengths(speller, ["", "a"], 10).empty == [0]
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    found = lengths(tmp_path, ["a", "zz", "za"], 10)
    assert (found.empty, found.unknown, found.num_unknown) == ([1], ["z"], 2)


def test_half_a_surrogate_pair_is_no_text(speller: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompt 1 is no text: it has the half of a surrogate pair '\\ud83d'"):
        lengths(speller, ["fine", json.loads('"\\ud83d"')], 10)


def test_a_model_without_a_tokenizer_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: copy it .*AutoTokenizer\.from_pretrained"):
        PromptTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json' cannot be used: .*Copy it again"):
        PromptTokenizer(tmp_path)


def test_counting_imports_no_torch(chat: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom async_rlhf.actors.prompts import Row, Template\n"
        "from async_rlhf.actors.data.tokens import PromptTokenizer\n"
        f"tokenizer = PromptTokenizer(Path({str(chat)!r}))\n"
        f"text = tokenizer.text(Row({MESSAGES!r}, {{}}), Template())\n"
        "assert tokenizer.lengths([text], [True], 3).too_long and 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


# Special tokens, once each


def test_tokens_that_the_model_would_read_in_a_wrong_place_are_remarked_on(tmp_path: Path) -> None:
    both = PromptTokenizer(saved(tmp_path / "both", "<s> $A </s>"))
    end, begin = both.remarks(["hello", "<s>you", "<s>hello"], [False] * 3)
    assert end.startswith("the tokenizer appends '</s>' to every prompt")
    assert begin.startswith("2 prompts begin with '<s>', and it is added to them once more")
    assert both.remarks(["<s>hello"], [True]) == [] and len(both.remarks(["<s><s>hello"], [True])) == 1
    assert PromptTokenizer(saved(tmp_path / "begin", "<s> $A")).remarks(["hello"], [False]) == []
    assert PromptTokenizer(saved(tmp_path / "plain", "$A")).remarks(["<s>hello", ""], [False, False]) == []


@pytest.mark.parametrize("place", ["tokenizer_config.json", "special_tokens_map.json", "the class"])
def test_a_begin_token_is_rendered_wherever_the_checkpoint_declares_it(tmp_path: Path, place: str) -> None:
    saved(tmp_path, "$A", template="{{ bos_token }}{{ messages[0].content }}", bos_token="<s>")
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if place != "tokenizer_config.json":
        del described["bos_token"]
    if place == "special_tokens_map.json":
        (tmp_path / place).write_text(json.dumps({"bos_token": {"content": "<s>", "lstrip": False}}))
    if place == "the class":
        described["tokenizer_class"] = "LlamaTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    row = Row([{"role": "user", "content": "you"}], {})
    wanted, _ = encode(row, AutoTokenizer.from_pretrained(tmp_path), Template())
    assert PromptTokenizer(tmp_path).text(row, Template()) == wanted == "<s>you"


def test_variables_of_a_chat_template_are_given_to_it_and_others_are_refused(tmp_path: Path) -> None:
    written = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} at once{% endif %}"
    ours, row = PromptTokenizer(saved(tmp_path, "$A", template=written)), Row([{"role": "user", "content": "you"}], {})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for variables, text in (({}, "you"), ({"enable_thinking": False}, "you at once")):
        template = Template(variables=variables)
        assert ours.text(row, template) == encode(row, theirs, template)[0] == text
    for name, message in (("enable_thinkin", "did you mean 'enable_thinking'"), ("messages", "leave it out")):
        with pytest.raises(ConfigError, match=rf"chat_template_kwargs: '{name}' is no variable .*{message}"):
            ours.text(row, Template(variables={name: False}))
