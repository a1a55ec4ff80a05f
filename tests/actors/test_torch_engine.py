"""What is particular to the built-in engine behind the seam; what every engine must do is in `conformance`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.record import Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from tests.actors.torch_models import finished, own_model
from tests.actors.vllm_model import raw_weights

MAX_LENGTH = 160


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Served by the pass written for it, and by its own code."""
    return own_model(request.param, 0)


def make_request(number: int, num_prompt: int = 5, num_new: int = 10) -> Request:
    prompt = np.random.default_rng(number).integers(3, 64, num_prompt)
    return Request(RolloutKey(number, 0, 0), tuple(prompt.tolist()), num_new, Sampling(), number)


def mixed_requests(count: int) -> list[Request]:
    """Prompts of 1 to 9 tokens, completions of 1 to 30."""
    lengths = np.random.default_rng(99).integers((1, 1), (10, 31), (count, 2))
    return [make_request(n, int(p), int(t)) for n, (p, t) in enumerate(lengths)]


def assert_plain(model: PreTrainedModel, requests: list[Request], done: dict[RolloutKey, Completion]) -> None:
    for request in requests:
        completion = done[request.key]
        plain = families.plain_logprobs(model, list(request.prompt_ids), completion.token_ids.tolist()).detach()
        np.testing.assert_allclose(completion.logprobs, plain.numpy(), rtol=0, atol=1e-4)


def test_passes_that_are_recorded_and_replayed_give_what_passes_computed_anew_give(model: PreTrainedModel) -> None:
    recorded: list[torch.Size] = []

    def record(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        recorded.append(run().shape)
        return run

    engine, requests = TorchEngine(model, slots=6, max_length=MAX_LENGTH, recorder=record), mixed_requests(14)
    assert_plain(model, requests, finished(engine, requests))
    assert 0 < len(recorded) <= 2 * len({1, 2, 4, 6}), "once per shape, and once more where buffers were replaced"


def test_two_runs_with_the_same_submissions_are_equal_to_the_last_bit(model: PreTrainedModel) -> None:
    one, other = (finished(TorchEngine(model, slots=4), mixed_requests(10)) for _ in range(2))
    assert list(one) == list(other)
    for key, completion in one.items():
        assert completion.token_ids.tobytes() == other[key].token_ids.tobytes()
        assert completion.logprobs.tobytes() == other[key].logprobs.tobytes()


def test_new_weights_are_adopted_between_two_tokens_and_stamp_what_they_sample(model: PreTrainedModel) -> None:
    engine, request = TorchEngine(model, slots=4, version=3), make_request(1, num_new=9)
    engine.submit([request])
    for _ in range(4):
        assert engine.step() == []
    engine.load_weights(7, raw_weights(own_model(model.config.model_type, 1)))
    assert finished(engine)[request.key].spans == (Span(3, 4), Span(7, 5, cache_version=3))


def test_an_engine_that_was_given_no_weights_says_so() -> None:
    assert TorchEngine(families.model("llama"), slots=2).version == -1


def test_the_longest_sequence_that_fits_is_served(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, slots=4, max_length=MAX_LENGTH)
    requests = [make_request(n, num_prompt=p, num_new=MAX_LENGTH - p) for n, p in enumerate((1, 100, MAX_LENGTH - 1))]
    assert_plain(model, requests, finished(engine, requests))
