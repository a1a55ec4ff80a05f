"""The built-in engine against plain forward passes of the same model, for several architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.errors import EngineError
from async_rlhf.buffers.record import Float32Array, Int32Array, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.tensors import RawTensor

VOCABULARY = 24
MAX_LENGTH = 160
# Large initial weights, so that a wrong mask, position or row changes the logits by far more than the tolerance.
SHARED = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WIDE = SHARED | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
}
CONFIGS = {
    "llama": LlamaConfig(**WIDE),
    "llama-tied": LlamaConfig(**WIDE, tie_word_embeddings=True, head_dim=10),
    "llama-biased": LlamaConfig(**WIDE, attention_bias=True),
    "qwen3": Qwen3Config(**WIDE, head_dim=16),
    "gpt2": GPT2Config(**SHARED, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_LENGTH),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def make_engine(model: PreTrainedModel, slots: int = 4, stop_ids: Sequence[int] = (), version: int = 0) -> TorchEngine:
    return TorchEngine(model, slots=slots, stop_ids=stop_ids, version=version, max_length=MAX_LENGTH)


def make_request(
    number: int, num_prompt: int = 5, num_new: int = 10, temperature: float = 1.0, member: int = 0, seed: int | None = None
) -> Request:
    prompt = np.random.default_rng(number).integers(0, VOCABULARY, num_prompt)
    key = RolloutKey(number, 0, member)
    return Request(key, tuple(prompt.tolist()), num_new, Sampling(temperature=temperature), number if seed is None else seed)


def mixed_requests(count: int, temperature: float = 1.0) -> list[Request]:
    """Prompts of 1 to 9 tokens, completions of 1 to 30."""
    lengths = np.random.default_rng(99).integers((1, 1), (10, 31), (count, 2))
    return [make_request(n, int(p), int(t), temperature) for n, (p, t) in enumerate(lengths)]


def run(engine: TorchEngine) -> dict[RolloutKey, Completion]:
    done: dict[RolloutKey, Completion] = {}
    while engine.num_unfinished:
        for completion in engine.step():
            assert completion.key not in done, "returned twice"
            done[completion.key] = completion
    return done


@torch.no_grad()
def expected_logprobs(model: PreTrainedModel, request: Request, tokens: Int32Array) -> Float32Array:
    """The oracle: one plain forward pass over prompt and completion."""
    ids = torch.tensor([[*request.prompt_ids, *tokens.tolist()]])
    logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
    table = torch.log_softmax(logits / (request.sampling.temperature or 1.0), dim=-1)
    return table.gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0].numpy()


def assert_plain_logprobs(model: PreTrainedModel, requests: Sequence[Request], done: dict[RolloutKey, Completion]) -> None:
    for request in requests:
        completion = done[request.key]
        expected = expected_logprobs(model, request, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.logprobs.dtype == np.float32 and completion.token_ids.dtype == np.int32


def raw_weights(model: PreTrainedModel) -> dict[str, RawTensor]:
    return {
        name: RawTensor("float32", tuple(parameter.shape), parameter.detach().numpy().tobytes())
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_a_plain_forward_pass_though_slots_are_refilled(
    model: PreTrainedModel, temperature: float
) -> None:
    engine, requests = make_engine(model), mixed_requests(14, temperature)
    engine.submit(requests)
    done = run(engine)
    assert_plain_logprobs(model, requests, done)


def test_rows_of_different_temperatures_share_a_batch(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    requests = [make_request(n, temperature=temperature) for n, temperature in enumerate((0.0, 0.5, 1.0, 2.0))]
    engine.submit(requests)
    done = run(engine)
    assert_plain_logprobs(model, requests, done)


def test_passes_that_are_recorded_and_replayed_give_what_passes_computed_anew_give(model: PreTrainedModel) -> None:
    recorded: list[torch.Size] = []

    def record(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        recorded.append(run().shape)
        return run

    engine = TorchEngine(model, slots=6, version=0, max_length=MAX_LENGTH, recorder=record)
    requests = mixed_requests(14)
    engine.submit(requests)
    done = run(engine)
    assert_plain_logprobs(model, requests, done)
    assert 0 < len(recorded) <= 2 * len({1, 2, 4, 6}), "once per shape, and once more where buffers were replaced"


def test_greedy_is_what_transformers_generate_returns(model: PreTrainedModel) -> None:
    engine, requests = make_engine(model, slots=3), mixed_requests(8, temperature=0.0)
    engine.submit(requests)
    done = run(engine)
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        whole = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.max_new_tokens
        )
        assert done[request.key].token_ids.tolist() == whole[0, len(request.prompt_ids) :].tolist()


def test_samples_follow_the_models_distribution() -> None:
    model, count = make_model("llama"), 6000
    engine = make_engine(model, slots=500)
    prompt = make_request(0).prompt_ids
    engine.submit([Request(RolloutKey(0, 0, n), prompt, 1, Sampling(temperature=1.5), seed=n) for n in range(count)])
    seen = np.bincount([c.token_ids[0] for c in run(engine).values()], minlength=VOCABULARY)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = torch.softmax(logits / 1.5, dim=-1).numpy() * count
    assert expected.min() >= 5, "too few draws for the test to mean anything"
    chi_square, freedom = float(((seen - expected) ** 2 / expected).sum()), VOCABULARY - 1
    # Mean `freedom`, variance 2 * freedom; the draw is fixed by the seeds, so this cannot flicker.
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_a_seed_decides_the_tokens_whatever_else_is_in_the_batch(model: PreTrainedModel) -> None:
    requests = mixed_requests(12)
    together = make_engine(model, slots=5)
    together.submit(requests)
    done = run(together)
    for request in requests:
        alone = make_engine(model, slots=1)
        alone.submit([request])
        assert run(alone)[request.key].token_ids.tolist() == done[request.key].token_ids.tolist()


def test_two_runs_with_the_same_submissions_are_equal_to_the_last_bit(model: PreTrainedModel) -> None:
    runs = []
    for _ in range(2):
        engine = make_engine(model)
        engine.submit(mixed_requests(10))
        runs.append(run(engine))
    assert list(runs[0]) == list(runs[1])
    for key, completion in runs[0].items():
        assert completion.token_ids.tobytes() == runs[1][key].token_ids.tobytes()
        assert completion.logprobs.tobytes() == runs[1][key].logprobs.tobytes()


def test_members_of_a_group_that_share_their_prompt_are_as_if_they_did_not(model: PreTrainedModel) -> None:
    members = [make_request(n // 6, num_prompt=7, num_new=3 + n, member=n, seed=n) for n in range(18)]
    shared, apart = make_engine(model, slots=4), make_engine(model, slots=4)
    shared.submit(members)
    for member in members:
        apart.submit([member])
    together, unshared = run(shared), run(apart)
    for member in members:
        assert together[member.key].token_ids.tolist() == unshared[member.key].token_ids.tolist()
        np.testing.assert_allclose(together[member.key].logprobs, unshared[member.key].logprobs, atol=1e-4)


def test_new_weights_are_adopted_between_two_tokens_and_stamp_what_they_sample(model: PreTrainedModel) -> None:
    old = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = make_engine(model, version=3)
    request = make_request(1, num_new=9)
    engine.submit([request])
    for _ in range(4):
        assert engine.step() == []
    newer = {
        name: RawTensor("float32", raw.shape, (np.frombuffer(raw.data, np.float32) * 1.1).tobytes())
        for name, raw in raw_weights(model).items()
    }
    engine.load_weights(7, newer)
    assert engine.version == 7
    completion = run(engine)[request.key]
    assert completion.spans == (Span(3, 4), Span(7, 5, cache_version=3))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, old[name] * 1.1)
        parameter.data.copy_(old[name])
    before = expected_logprobs(model, request, completion.token_ids)[:4]
    np.testing.assert_allclose(completion.logprobs[:4], before, atol=1e-4)


def test_a_member_admitted_after_an_update_gets_its_prompt_computed_by_the_new_weights() -> None:
    model = make_model("llama")
    engine = make_engine(model, slots=2)
    members = [make_request(1, num_prompt=8, num_new=t, member=m, seed=m) for m, t in enumerate((2, 30, 5))]
    engine.submit(members)
    engine.step()
    engine.load_weights(1, raw_weights(make_model("llama", seed=1)))
    last = run(engine)[members[2].key]
    assert last.spans == (Span(1, 5),)
    np.testing.assert_allclose(last.logprobs, expected_logprobs(model, members[2], last.token_ids), atol=1e-4)


def test_abort_frees_the_slot_and_counts_the_tokens_thrown_away(model: PreTrainedModel) -> None:
    engine = make_engine(model, slots=2)
    requests = [make_request(n, num_new=20) for n in range(4)]
    engine.submit(requests)
    for _ in range(3):
        engine.step()
    assert engine.abort([requests[0].key, requests[3].key, RolloutKey(1000, 0, 0)]) == 3
    assert engine.num_unfinished == 2
    done = run(engine)
    assert set(done) == {requests[1].key, requests[2].key}
    assert_plain_logprobs(model, requests[1:3], done)
    engine.submit([requests[0]])
    assert set(run(engine)) == {requests[0].key}


def test_a_completion_ends_at_a_stop_token_which_it_includes_or_at_its_length() -> None:
    model, stop_ids = make_model("llama"), (3, 5, 17)
    engine, requests = make_engine(model, stop_ids=stop_ids), mixed_requests(30)
    engine.submit(requests)
    reasons = set()
    for request in requests:
        engine_free = make_engine(model)
        engine_free.submit([request])
        unstopped = run(engine_free)[request.key].token_ids.tolist()
        ends = [index for index, token in enumerate(unstopped) if token in stop_ids]
        expected = unstopped[: ends[0] + 1] if ends else unstopped
        reasons.add((request.key, tuple(expected), "stop" if ends else "length"))
    done = {(key, tuple(c.token_ids.tolist()), c.finish_reason) for key, c in run(engine).items()}
    assert done == reasons
    assert {reason for _, _, reason in done} == {"stop", "length"}


def test_an_engine_without_work_returns_nothing_and_names_its_version() -> None:
    engine = TorchEngine(make_model("llama"), slots=2)
    assert engine.step() == [] and engine.num_unfinished == 0 and engine.version == -1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(RolloutKey(1, 0, 0), (), 5, Sampling(), 0), "empty prompt"),
        (Request(RolloutKey(1, 0, 0), (1, 2), MAX_LENGTH - 1, Sampling(), 0), "2 prompt"),
        (Request(RolloutKey(1, 0, 0), (1, VOCABULARY), 5, Sampling(), 0), "token ids 1 to 24"),
        (Request(RolloutKey(1, 0, 0), (1,), 0, Sampling(), 0), "max_new_tokens = 0"),
        (Request(RolloutKey(1, 0, 0), (1,), 1, Sampling(), -1), "seed -1"),
        (Request(RolloutKey(0, 0, 0), (1,), 1, Sampling(), 0), "already submitted"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_all_submitted_beside_it(request_: Request, message: str) -> None:
    engine = make_engine(make_model("llama"))
    engine.submit([make_request(0)])
    with pytest.raises(EngineError, match=message):
        engine.submit([make_request(2), request_])
    assert engine.num_unfinished == 1


def test_the_longest_sequence_that_fits_is_served(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    requests = [make_request(n, num_prompt=p, num_new=MAX_LENGTH - p) for n, p in enumerate((1, 100, MAX_LENGTH - 1))]
    engine.submit(requests)
    done = run(engine)
    assert_plain_logprobs(model, requests, done)
