"""Every family is served as its own plain passes say: tokens and log-probabilities, whatever runs beside a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.scoring.prefix_cache import CachedPrefix, extend
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.model_check import check_engine
from async_rlhf.buffers.attention import FAMILIES
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from tests.actors.torch_models import finished

NOT_SERVED = ("bloom", "gpt_neo", "jamba", "mamba", "minimax", "mpt", "olmo_hybrid", "qwen3_next", "recurrent_gemma", "rwkv")
# Settings that choose another pass, or other weights.
VARIANTS = {
    "llama with tied embeddings": {"kind": "llama", "tie_word_embeddings": True},
    "llama with biases": {"kind": "llama", "attention_bias": True},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def rows_of_different_lengths_attend_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows do that differ by hundreds of tokens."""
    monkeypatch.setattr("async_rlhf.actors.torch_engine.segments.COST", 0)


def requests() -> list[Request]:
    """Two siblings, and prompts shorter and longer than a window; some greedy, some held when they end."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, 64, n).tolist()) for n in (13, 3, 21)]
    return [
        Request(
            RolloutKey(group, 0, member),
            prompts[group],
            num_new,
            Sampling(temperature=temperature),
            seed=group,
            hold=(group, member) != (0, 1),
        )
        for group, member, num_new, temperature in ((0, 0, 20, 1.0), (0, 1, 6, 1.0), (1, 0, 24, 1.0), (2, 0, 11, 0.0))
    ]


@pytest.mark.parametrize("name", [*sorted(FAMILIES), *VARIANTS])
def test_sampled_log_probabilities_are_those_of_plain_passes(name: str) -> None:
    model = families.model(**VARIANTS.get(name, {"kind": name}))
    # Fewer slots than requests, and prompts that are computed in several pieces beside running rows.
    engine = TorchEngine(model, slots=3, stop_ids=set(), max_length=64, prefill_tokens=10)
    asked = requests()
    for observation in ((3, 4, 5, 6, 7), ()):  # a turn, and one that continues it behind an observation
        ended = finished(engine, asked)
        assert_plain(model, asked, ended)
        asked = [
            replace(request, context=(*ended[request.key].token_ids.tolist(), *observation), max_new_tokens=6)
            for request in asked
        ]


def assert_plain(model: PreTrainedModel, asked: Sequence[Request], ended: Mapping[RolloutKey, Completion]) -> None:
    for request in asked:
        completion = ended[request.key]
        plain = families.plain_logprobs(model, list(request.prefix_ids), completion.token_ids.tolist()).detach()
        np.testing.assert_allclose(completion.logprobs, plain.numpy(), rtol=0, atol=1e-4)
        if request.sampling.temperature == 0:
            ids = torch.tensor([[*request.prefix_ids, *completion.token_ids.tolist()]])
            with torch.inference_mode():
                logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prefix_ids) - 1 : -1]
            chosen = logits.gather(-1, torch.from_numpy(completion.token_ids).long()[:, None])[:, 0]
            torch.testing.assert_close(chosen, logits.amax(-1), rtol=0, atol=1e-4)  # of two alike rounding chooses


@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in NOT_SERVED), ("falcon", {"alibi": True})])
def test_a_family_that_needs_more_than_keys_and_values_by_position_is_refused(kind: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"model type '{kind}': the torch engine .* Set engine.kind = 'vllm', or use one of"):
        TorchEngine(families.model(kind, **settings), slots=2, stop_ids=set())


def test_an_engine_that_would_sample_from_another_distribution_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rlhf.buffers.attention.FAMILIES", FAMILIES | {"gpt_neo"})
    model = families.model("gpt_neo")
    with pytest.raises(ConfigError, match=r"'gpt_neo' cannot be served by the torch engine: log-probabilities of"):
        check_engine(TorchEngine(model, slots=4, stop_ids=set(), max_length=256), model)


class Reading:
    """A policy as the decoder of incremental scoring."""

    def __init__(self, kind: str) -> None:
        self.model = families.model(kind)
        self.device, self.dtype, self.body = self.model.device, self.model.dtype, self.model.base_model

    def some_tokens(self, count: int) -> list[int]:
        return list(range(3, 3 + count))


@pytest.mark.parametrize("kind", sorted(FAMILIES - {"llama4_text"}))
def test_a_text_read_in_pieces_is_what_it_is_as_a_whole(kind: str) -> None:
    reader = Reading(kind)
    texts = [(CachedPrefix(), list(range(3, 33))), (CachedPrefix(), list(range(20, 40)))]
    for end in (4, 15, 17):
        extend(reader, [(kept, ids[:end]) for kept, ids in texts])
    read = extend(reader, texts)
    for (_, ids), hidden in zip(texts, read, strict=True):
        with torch.inference_mode():
            whole = reader.body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(hidden, whole[-len(hidden) :], rtol=1e-4, atol=1e-4)
