"""Models that read completions while they are being written: the same answers, bounded memory, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from async_rlhf.actors.rewards import check_columns, resolve
from async_rlhf.actors.scoring.incremental import IncrementalJudge, ReferenceHead, RewardHead, TextSample
from async_rlhf.actors.scoring.models import ReferenceModel, RewardModel
from async_rlhf.buffers.errors import ConfigError, RewardError
from async_rlhf.buffers.score import Score
from tests.learner.making import make_model

PLENTY = 1 << 30
LONG = 512


class Streams:
    """Incremental scoring by a reward model; arguments in lists."""

    def __init__(self, model: RewardModel, cache_bytes: int, max_length: int = LONG) -> None:
        self.judge = IncrementalJudge(RewardHead(model, max_length), cache_bytes)
        self.cache, self.forget = self.judge.cache, self.judge.forget

    def prefetch(self, streams: Sequence[int], prompts: Sequence[Any], texts: Sequence[str]) -> None:
        self.judge.prefetch(streams, list(map(TextSample, prompts, texts)))

    def score(self, streams: Sequence[int | None], prompts: Sequence[Any], texts: Sequence[str]) -> list[Score]:
        return self.judge.score(streams, list(map(TextSample, prompts, texts)))


CHAT = [{"role": "user", "content": "abc"}]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Its tokens change when a text grows: "ab" is one, "abc" another, "abcd" two."""
    words = ["<pad>", *"abcd ", "ab", "abc", "cd", "abcab"]
    vocabulary = {word: index for index, word in enumerate(words)}
    merges = [("a", "b"), ("ab", "c"), ("c", "d"), ("abc", "ab")]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)), pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}a{{ m['content'] }} d{% endfor %}"
    return tokenizer


@pytest.fixture(scope="module")
def speller(judge_directory: Path) -> RewardModel:
    return RewardModel(judge_directory)


class Law(NamedTuple):
    """A judge, what it reads, and what it says of it whole."""

    head: Any
    prompts: Sequence[Any]
    texts: st.SearchStrategy[Any]
    whole: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def reward_law(directory: Path) -> Law:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=10, num_key_value_heads=2, num_labels=2, pad_token_id=0, **shape)
    LlamaForSequenceClassification(config).save_pretrained(directory)
    merging_tokenizer().save_pretrained(directory)
    model = RewardModel(directory, label=1)
    texts = st.text("abcd ", min_size=1, max_size=30)
    return Law(RewardHead(model, LONG), ["ab", "abc d", CHAT], texts, lambda *read: model.score(*read, LONG))


def reference_law(directory: Path) -> Law:
    make_model("llama").save_pretrained(directory)
    model = ReferenceModel(directory)
    texts = st.lists(st.integers(0, 5), min_size=1, max_size=12)

    def whole(prompts: Sequence[Any], texts: Sequence[Any]) -> Sequence[Any]:
        return [model.logprobs(hidden, text, 0.7, None) for hidden, text in zip(model.read(prompts, texts), texts, strict=True)]

    return Law(ReferenceHead(model, 0.7), [[3], [3, 4, 5], [3, 4, 6, 7]], texts, whole)


@pytest.fixture(scope="module", params=[reward_law, reference_law])
def law(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Law:
    made: Law = request.param(tmp_path_factory.mktemp("judge"))
    return made


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_however_completions_are_cut_they_come_to_what_the_whole_comes_to(law: Law, data: st.DataObject) -> None:
    texts = data.draw(st.lists(law.texts, min_size=1, max_size=5))
    prompts = [data.draw(st.sampled_from(law.prompts)) for _ in texts]
    judge = IncrementalJudge(law.head, data.draw(st.sampled_from([1, 5_000, 20_000, PLENTY])))
    lengths = [1] * len(texts)
    for _ in range(data.draw(st.integers(0, 6))):
        shown = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, unique=True))
        for i in shown:
            lengths[i] = data.draw(st.integers(lengths[i], len(texts[i])))
        judge.prefetch(shown, [TextSample(prompts[i], texts[i][: lengths[i]]) for i in shown])
        assert judge.cache.num_bytes <= judge.cache._cache_bytes
    found = judge.score(range(len(texts)), list(map(TextSample, prompts, texts)))
    for each, wanted in zip(found, law.whole(prompts, texts), strict=True):
        assert (each.value if isinstance(each, Score) else each.values) == pytest.approx(wanted, abs=1e-4)
    assert judge.cache.num_bytes == 0 and not judge.streams


@contextmanager
def computed(model: RewardModel) -> Iterator[list[int]]:
    """Tokens of each pass meanwhile, padding included."""
    passes: list[int] = []

    def note(module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        passes.append(kwargs["input_ids"].numel())

    handle = model.body.register_forward_pre_hook(note, with_kwargs=True)
    yield passes
    handle.remove()


def test_at_the_end_only_what_came_last_is_computed(speller: RewardModel) -> None:
    streams, text = Streams(speller, PLENTY), "spell backwards and forwards "
    for end in range(10, 100, 10):
        streams.prefetch([7], ["word: "], [(text * 4)[:end]])
    with computed(speller) as passes:
        (score,) = streams.score([7], ["word: "], [(text * 4)[:96]])
    assert passes == [6] and score.metrics["prefetched"] > 0.9
    assert score.value == pytest.approx(speller.score(["word: "], [(text * 4)[:96]], LONG)[0], abs=1e-4)


def test_the_members_of_a_group_share_what_was_read_of_their_prompt(speller: RewardModel) -> None:
    streams, prompt = Streams(speller, PLENTY), "a long prompt " * 8
    with computed(speller) as passes:
        streams.prefetch([0, 1, 2, 3], [prompt] * 4, ["ab", "cd", "ef", "ac"])
        assert sum(passes) == len(prompt) + 2 + 2 + 2 + 1, "one reads the prompt, the others what is their own"
        passes.clear()
        streams.prefetch([4, 5], [prompt, "another "], ["xy", "xy"])
    assert sorted(passes) == [2, 10]


def test_where_memory_runs_out_the_shortest_are_given_up_for_good_and_say_so(speller: RewardModel) -> None:
    streams = Streams(speller, PLENTY)
    streams.prefetch([0], [""], ["abcdefgh"])
    a_token = streams.cache.num_bytes // 8
    streams = Streams(speller, 20 * a_token)
    texts = ["a" * 12, "b" * 6, "c" * 9]
    streams.prefetch([0, 1], ["", ""], texts[:2])
    streams.prefetch([2], [""], texts[2:])
    assert streams.cache.num_bytes == 18 * a_token, "who comes last finds no room"
    streams.prefetch([0, 2], ["", ""], [texts[0] + "aaa", texts[2]])
    assert streams.cache.num_bytes == 15 * a_token, "the shorter one makes room, and the one given up did not come back"
    scores = streams.score([0, 1, 2, None], [""] * 4, [texts[0] + "aaa", *texts[1:], "d"])
    assert [score.metrics["given_up"] for score in scores] == [0.0, 1.0, 1.0, 0.0]
    assert [score.metrics["prefetched"] > 0 for score in scores] == [True, False, False, False]
    wanted = speller.score([""] * 4, [texts[0] + "aaa", *texts[1:], "d"], LONG)
    assert [score.value for score in scores] == pytest.approx(wanted, abs=1e-4)


def test_what_nobody_waits_for_is_let_go(speller: RewardModel) -> None:
    streams = Streams(speller, PLENTY)
    streams.prefetch([0, 1], ["ab", "ab"], ["abc", "abd"])
    before = streams.cache.num_bytes
    streams.forget([1, 99])
    assert 0 < streams.cache.num_bytes < before
    streams.forget([0])
    assert streams.cache.num_bytes == 0


def test_a_text_that_outgrows_the_limit_is_scored_by_its_end_as_if_nobody_had_read_along(speller: RewardModel) -> None:
    streams = Streams(speller, PLENTY, 10)
    streams.prefetch([0, 1], ["", ""], ["abcdefgh", "abcd"])
    streams.prefetch([0], [""], ["abcdefghijkl"])
    texts = ["abcdefghijklm", "abcd" * 4]
    scores = streams.score([0, 1], ["", ""], texts)
    assert [score.value for score in scores] == pytest.approx(speller.score(["", ""], texts, 10), abs=1e-4)
    assert [score.metrics["given_up"] for score in scores] == [1.0, 0.0]


def test_a_model_that_looks_ahead_is_refused_by_its_type_and_by_a_probe(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(vocab_size=16, num_labels=1, **shape)).save_pretrained(tmp_path)
    merging_tokenizer().save_pretrained(tmp_path)
    asked = {"reward_model": {"stream_tokens": 8}}
    with pytest.raises(ConfigError, match=r"is of type 'bert', which is not known to read from left to right.*llama"):
        check_columns(*resolve(["reward_model"], tmp_path, {"reward_model": {"path": str(tmp_path)}}, asked), set())
    with pytest.raises(RewardError, match=r"has no incremental scoring.*set stream_tokens = 0"):
        Streams(RewardModel(tmp_path), PLENTY)
