"""What every engine must do, whatever it is made of: `actors/engine.py`, held against plain forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from async_rlhf.actors.engine import Completion, Engine, Request, RolloutKey
from async_rlhf.buffers.errors import EngineError, WeightsError
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model.logprobs import token_logprobs
from async_rlhf.learner.step.controller import make_backend
from tests.actors.conformance.conftest import Subject
from tests.actors.torch_models import finished
from tests.actors.vllm_model import END, SHIPPED, expected_logprobs, make_model, plain_logprobs

FIRST, SECOND = make_model(0), make_model(1)
PROMPT = tuple(range(10, 40))


def requests(count: int, num_new: int = 40, prompt: tuple[int, ...] = PROMPT, first: int = 0, **asked: Any) -> list[Request]:
    """Of different groups, seeded by their numbers."""
    named = {name: asked.pop(name) for name in asked.keys() & Sampling.model_fields.keys()}
    sampling = Sampling(**named)
    return [Request(RolloutKey(n, 0, 0), prompt, num_new, sampling, seed=n, **asked) for n in range(first, first + count)]


def run(engine: Engine, before: Sequence[Completion] = ()) -> list[Completion]:
    return sorted(finished(engine, before=before).values(), key=lambda completion: completion.key)


def serve(engine: Engine, asked: Sequence[Request]) -> list[Completion]:
    engine.submit(asked)
    done = run(engine)
    assert [completion.key for completion in done] == [request.key for request in asked]
    return done


def assert_plain(subject: Subject, model: PreTrainedModel, asked: Sequence[Request], done: Sequence[Completion]) -> None:
    for request, completion in zip(asked, done, strict=True):
        expected = expected_logprobs(model, request, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=subject.tolerance)


# What is sampled


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_of_a_plain_forward_pass(subject: Subject, temperature: float) -> None:
    engine = subject.start("keep")
    asked = [
        request
        for n, length in enumerate((1, 2, 17, 60))
        for request in requests(5, 30, PROMPT[:1] + tuple(range(5, 4 + length)), first=5 * n, temperature=temperature)
    ]
    done = serve(engine, asked)
    assert_plain(subject, FIRST, asked, done)
    for completion in done:
        assert completion.logprobs.dtype == np.float32 and completion.token_ids.dtype == np.int32
        assert [(span.version, span.cache_version) for span in completion.spans] == [(0, None)]
        assert completion.sampling_mask is None


def test_the_learner_finds_the_same_logprobs_and_the_same_canary(subject: Subject, torch_directory: str) -> None:
    engine = subject.start("keep")
    backend = make_backend(Path(torch_directory), LearnerConfig(), LossConfig())
    canary = backend.canary()
    np.testing.assert_allclose(engine.probe(canary.ids), canary.logprobs, atol=subject.tolerance)
    asked = [Request(RolloutKey(0, 0, member), PROMPT, 30, Sampling(temperature=0.7), member) for member in range(4)]
    model: Any = backend.machine.policy.model
    for completion in serve(engine, asked):
        ids = torch.tensor([*PROMPT, *completion.token_ids.tolist()])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(PROMPT) - 1 : -1]
        found = token_logprobs(logits, ids[len(PROMPT) :], torch.full((len(logits),), 0.7))
        np.testing.assert_allclose(completion.logprobs, found.numpy(), atol=subject.tolerance)


@pytest.mark.parametrize("cut", [{}, {"top_k": 9, "min_p": 0.01}, {"top_p": 0.7}], ids=str)
def test_samples_follow_the_distribution(exact_subject: Subject, cut: dict[str, Any]) -> None:
    engine, count, temperature = exact_subject.start("keep"), 600, 0.5
    done = serve(engine, requests(count, 1, temperature=temperature, **cut))
    expected = truncated(first_logits(FIRST) / temperature, **cut).exp().numpy() * count
    seen = np.bincount([completion.token_ids[0] for completion in done], minlength=len(expected))
    assert seen[expected == 0].sum() == 0, "what is cut off never comes"
    common = expected >= 5
    pairs = [*zip(seen[common], expected[common], strict=True), (seen[~common].sum(), expected[~common].sum())]
    chi_square = sum((s - e) ** 2 / e for s, e in pairs if e > 0)
    freedom = len(pairs) - 1
    assert freedom >= 4, "too few bins for the test to mean anything"
    # Mean `freedom`, variance 2 * freedom; the draw is fixed by the seeds, so this cannot flicker.
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@torch.no_grad()
def first_logits(model: PreTrainedModel) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    return logits


def truncated(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The oracle, one token at a time: log-probabilities [V], -inf for what is cut off."""
    probabilities = torch.softmax(logits.double(), -1)
    likeliest = sorted(range(len(logits)), key=lambda token: -float(probabilities[token]))
    left = [token for token in likeliest if probabilities[token] >= min_p * probabilities[likeliest[0]]]
    left = left[: top_k or None]
    total, kept, so_far = float(probabilities[left].sum()), list[int](), 0.0
    for token in left:
        if so_far >= top_p * total and top_p < 1:
            break
        kept.append(token)
        so_far += float(probabilities[token])
    mask = torch.full_like(probabilities, -torch.inf)
    mask[kept] = 0
    return torch.log_softmax(logits.double() + mask, -1).float()


@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}], ids=str
)
def test_logprobs_are_of_the_truncated_distribution_and_its_support_is_recorded(
    exact_subject: Subject, cut: dict[str, Any]
) -> None:
    engine = exact_subject.start("keep")
    asked = [*requests(4, temperature=0.8, **cut), *requests(2, first=4)]
    done = serve(engine, asked)
    for request, completion in zip(asked[:4], done[:4], strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = FIRST(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
        tables = torch.stack([truncated(row / 0.8, **cut) for row in logits])
        expected = tables.gather(1, torch.from_numpy(completion.token_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=exact_subject.tolerance)
        if completion.sampling_mask is None:
            assert exact_subject.name == "vllm" and request.sampling.top_k == 0, (
                "only vLLM may not know, and only without top-k"
            )
            continue
        parts = np.split(completion.sampling_mask.ids, np.cumsum(completion.sampling_mask.sizes)[:-1])
        assert [sorted(part.tolist()) for part in parts] == [torch.isfinite(row).nonzero()[:, 0].tolist() for row in tables]
    assert_plain(exact_subject, FIRST, asked[4:], done[4:])


def test_a_seed_alone_decides_the_tokens_also_of_many_that_share_their_prompt(exact_subject: Subject) -> None:
    engine = exact_subject.start("keep")
    among = [*requests(12, top_k=7), *requests(12, first=12)]
    crowd = serve(engine, among)
    for number in (3, 17):
        (single,) = serve(engine, [among[number]])
        assert single.token_ids.tolist() == crowd[number].token_ids.tolist()
    assert len({tuple(completion.token_ids.tolist()) for completion in crowd}) == len(crowd)


# Updates


@pytest.mark.parametrize("mode", ["keep", "interrupt"])
def test_an_update_in_mid_sequence_is_written_into_the_spans(subject: Subject, mode: Any) -> None:
    engine = subject.start(mode)
    asked = requests(subject.many(16, 160), num_new=80)
    engine.submit(asked)
    before = subject.begin(engine)
    engine.load_weights(1, subject.weights(SECOND))
    assert engine.version == 1, "the next token is the new version's"
    done = run(engine, before)
    crossed = 0
    for request, completion in zip(asked, done, strict=True):
        versions = [span.version for span in completion.spans]
        assert versions == sorted(versions) and set(versions) <= {0, 1}
        old = sum(span.num_tokens for span in completion.spans if span.version == 0)
        by_first = expected_logprobs(FIRST, request, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs[:old], by_first[:old], atol=subject.tolerance)
        if mode == "interrupt":
            assert all(span.cache_version is None for span in completion.spans)
        fresh = completion.spans[-1]  # a prefix that was computed again by the version that goes on
        if fresh.version == 1 and fresh.cache_version is None:
            by_second = expected_logprobs(SECOND, request, completion.token_ids)
            np.testing.assert_allclose(
                completion.logprobs[-fresh.num_tokens :], by_second[-fresh.num_tokens :], atol=subject.tolerance
            )
        crossed += len(set(versions)) == 2
        if mode == "keep" and len(set(versions)) == 2 and subject.name != "torch-scarce":
            assert completion.spans[1].cache_version == 0, "its prefix was computed by the older weights"
    assert crossed >= 4, "the update came when nothing was running"


def test_with_finish_running_sequences_end_with_the_weights_they_began_with(subject: Subject) -> None:
    engine = subject.start("finish")
    asked = requests(subject.many(48, 320), num_new=60)  # more than there are slots
    engine.submit(asked)
    before = subject.begin(engine)
    engine.load_weights(1, subject.weights(SECOND))
    assert engine.version == 0, "sequences are still running"
    done = run(engine, before)
    assert engine.version == 1
    assert {completion.spans[0].version for completion in done} == {0, 1}
    for request, completion in zip(asked, done, strict=True):
        (span,) = completion.spans
        assert span.cache_version is None
        model = (FIRST, SECOND)[span.version]
        np.testing.assert_allclose(
            completion.logprobs, expected_logprobs(model, request, completion.token_ids), atol=subject.tolerance
        )


def test_with_finish_a_newer_set_replaces_the_one_that_waits_and_an_idle_engine_adopts_at_once(subject: Subject) -> None:
    engine = subject.start("finish")
    engine.submit(requests(4, num_new=60))
    subject.begin(engine)
    engine.load_weights(1, subject.weights(FIRST))
    engine.load_weights(2, subject.weights(SECOND))
    run(engine)
    engine.step()
    assert engine.version == 2
    engine.load_weights(3, subject.weights(FIRST))
    assert engine.version == 3
    asked = requests(2)
    assert_plain(subject, FIRST, asked, serve(engine, asked))


def test_weights_of_another_model_are_refused_and_change_nothing(subject: Subject) -> None:
    engine = subject.start("keep")
    weights = subject.weights(SECOND)
    weights["more.weight"] = weights.pop("lm_head.weight")
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*more\.weight"):
        engine.load_weights(1, weights)
    assert engine.version == 0
    asked = requests(2)
    assert_plain(subject, FIRST, asked, serve(engine, asked))


def test_the_probe_speaks_of_the_weights_that_are_served_while_others_decode_and_disturbs_none(subject: Subject) -> None:
    engine = subject.start("keep")
    for version, model in enumerate((FIRST, SECOND)):
        asked = requests(4, num_new=60)
        engine.submit(asked)
        before = subject.begin(engine)
        if version:
            engine.load_weights(version, subject.weights(model))
        expected = plain_logprobs(model, PROMPT[:1], np.array(PROMPT[1:], np.int32))
        np.testing.assert_allclose(engine.probe(PROMPT), expected, atol=subject.tolerance)
        done = run(engine, before)
        if version == 0:
            assert_plain(subject, model, asked, done)


# Ends


def test_a_completion_ends_with_its_end_token_or_at_its_length(subject: Subject) -> None:
    engine = subject.start("keep")
    done = serve(engine, requests(24, num_new=70))
    for completion in done:
        ended = completion.token_ids[-1] == END
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == 70
        assert END not in completion.token_ids[:-1]
    assert {completion.finish_reason for completion in done} == {"stop", "length"}


def test_a_completion_ends_with_the_token_that_completes_a_stop_string(subject: Subject) -> None:
    engine, tokenizer = subject.start("keep"), AutoTokenizer.from_pretrained(SHIPPED)
    whole = serve(engine, requests(12))
    texts = [tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True) for completion in whole]
    stop = texts[0][4:6]
    for completion, unstopped in zip(serve(engine, requests(12, stop=(stop, "never comes"))), whole, strict=True):
        text = tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        assert completion.token_ids.tolist() == unstopped.token_ids[: len(completion.token_ids)].tolist()
        if stop in text:
            assert completion.finish_reason == "stop" and text.index(stop) == len(text) - len(stop)
        else:
            assert len(completion.token_ids) == len(unstopped.token_ids), "a stop string that never comes ends nothing"


def test_what_is_aborted_comes_no_more_and_its_tokens_are_counted(subject: Subject) -> None:
    engine = subject.start("keep")
    asked = requests(40, num_new=60)
    engine.submit(asked)
    before = subject.begin(engine)
    kept = [request for request in asked[5:7] if request.key not in {completion.key for completion in before}]
    dropped = [request.key for request in asked if request not in kept]
    assert engine.abort([*dropped, RolloutKey(99, 9, 9)]) > 0
    assert engine.abort(dropped) == 0
    assert engine.num_unfinished == len(kept)
    assert_plain(subject, FIRST, kept, run(engine))
    again = requests(1)
    assert_plain(subject, FIRST, again, serve(engine, again))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt_ids": (5,) * 510}, "510 prompt . 5 new tokens"),
        ({"prompt_ids": (99,)}, "knows 0 to 98"),
        ({"seed": -1}, "seed -1"),
        ({"context": (5,) * 500}, "30 prompt . 500 context . 5 new tokens"),
        ({"context": (4, 99)}, "token ids 4 to 99, the model knows 0 to 98"),
    ],
)  # further ones in `test_bookkeeping`
def test_a_request_that_the_model_cannot_serve_is_refused_with_all_submitted_beside_it(
    subject: Subject, changed: dict[str, Any], said: str
) -> None:
    engine = subject.start("keep")
    good, beside, bad = requests(3, num_new=5)
    engine.submit([good])
    with pytest.raises(EngineError, match=said):
        engine.submit([beside, replace(bad, **changed)])
    assert engine.num_unfinished == 1
    assert_plain(subject, FIRST, [good], run(engine))
