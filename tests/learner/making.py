"""Groups and tiny models made up for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from async_rlhf.buffers.record import Group, Rollout, Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.batch.rows import BatchRow, make_rows, split_updates
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.objective.estimation import TokenTargets
from async_rlhf.learner.step import controller
from async_rlhf.learner.step.controller import Controller

TINY_SPELLER = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-speller"
VOCABULARY = 24
# Large initial weights, so that a wrong mask, position or shift changes log-probabilities by far more than the tolerance.
_SHARED = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_WIDE = _SHARED | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**_WIDE),
    "llama-tied": LlamaConfig(**_WIDE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_WIDE, head_dim=16),
    "gpt2": GPT2Config(**_SHARED, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def weights(backend: Controller) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in backend.tensors().items()}


def make_rollout(
    length: int = 3,
    *,
    seed: int = 0,
    spans: Sequence[tuple[int | None, int]] | None = None,
    scores: dict[str, Score] | None = None,
    finish_reason: str = "stop",
    vocabulary: int = VOCABULARY,
) -> Rollout:
    random = np.random.default_rng(seed)
    spans = spans or [(0, length)]
    num_sampled = sum(count for version, count in spans if version is not None)
    return Rollout(
        completion_ids=random.integers(0, vocabulary, length).astype(np.int32),
        logprobs=random.uniform(-4.0, -0.1, num_sampled).astype(np.float32),
        spans=tuple(Span(version, count) for version, count in spans),
        finish_reason="length" if finish_reason == "length" else "stop",
        scores=scores if scores is not None else {"judge": Score(float(random.integers(0, 2)))},
    )


def make_group(
    number: int,
    lengths: Sequence[int],
    *,
    prompt_length: int = 5,
    version: int = 0,
    temperature: float = 1.0,
    rewards: Sequence[float | None] | None = None,
    truncated: Sequence[int] = (),
    source: str | None = None,
    vocabulary: int = VOCABULARY,
    observed: Sequence[tuple[int, int]] = (),
    anew: Sequence[int] = (),
) -> Group:
    """A group of completions of these lengths, all of one version; a reward of None is a failed score, and `truncated` members
    were cut. observed: (from, to) of tokens that an environment gave, in every member that is longer; anew: with which of these
    the row begins anew, by number."""
    random = np.random.default_rng(1000 + number)
    prompt = random.integers(0, vocabulary, prompt_length).astype(np.int32)
    rollouts = []
    for member, length in enumerate(lengths):
        value = float(random.integers(0, 2)) if rewards is None else rewards[member]
        score = Score(value) if value is not None else Score(failure="the judge fell asleep")
        seed = 7919 * number + member
        finish = "length" if member in truncated else "stop"
        spans, scores = _spans(version, length, observed), {"judge": score}
        made = make_rollout(length, seed=seed, spans=spans, scores=scores, finish_reason=finish, vocabulary=vocabulary)
        rollouts.append(begun_anew(made, anew))
    columns = {} if source is None else {"source": source}
    return Group(number, 0, prompt, tuple(rollouts), Sampling(temperature=temperature), columns=columns)


def begun_anew(rollout: Rollout, anew: Sequence[int]) -> Rollout:
    """The same, whose row begins anew with these of its observations, by number."""
    between = [at for at, span in enumerate(rollout.spans) if span.version is None]
    chosen = {between[number] for number in anew if number < len(between)}
    return replace(rollout, spans=tuple(replace(span, restarts=at in chosen) for at, span in enumerate(rollout.spans)))


def _spans(version: int, length: int, observed: Sequence[tuple[int, int]]) -> list[tuple[int | None, int]]:
    spans: list[tuple[int | None, int]] = []
    at = 0
    for start, end in observed:
        if end < length:
            spans += [(version, start - at)] * (start > at) + [(None, end - start)]
            at = end
    return [*spans, (version, length - at)]


GROUPS = [make_group(n, [3, 1, 6], version=0) for n in range(4)]
ADVANTAGES = [[1.0, -1.5, 0.5]] * 4
ROWS = make_rows(GROUPS, ADVANTAGES)


def make_updates(num_updates: int = 1, groups: Sequence[Group] = GROUPS, advantages: Any = ADVANTAGES) -> list[list[BatchRow]]:
    return split_updates(make_rows(groups, advantages), num_updates)


def make_backend(
    path: Path,
    loss: LossConfig | None = None,
    publish_dtype: str = "float32",
    *,
    reference: Path | None = None,
    **settings: Any,
) -> Controller:
    """A lone rank; settings: of `[learner]`."""
    learner = LearnerConfig(**{"learning_rate": 1e-3, **settings})
    return controller.make_backend(path, learner, loss or LossConfig(), publish_dtype, reference=reference)


def assert_same_gradients(one: dict[str, Tensor], other: dict[str, Tensor], within: float = 1e-4, case: object = "") -> None:
    """within: of the norm of each parameter's; rounding makes some 1e-6 of it. Single elements may be sums that cancel."""
    assert one.keys() == other.keys()
    for name in one:
        apart = float((one[name] - other[name]).norm())
        assert apart <= within * float(other[name].norm()) + 1e-5, f"the gradient of {name} differs by {apart} {case}"


def save(backend: Controller, directory: Path) -> Path:
    """The directory, which is new and has the backend's checkpoint."""
    directory.mkdir()
    backend.snapshot()(directory)
    return directory


def with_returns(backend: Controller, value: float) -> list[BatchRow]:
    """`ROWS` with what the critic sees of them now, and a return for every token to fit."""
    seen = backend.evaluate(ROWS)

    def targets(index: int) -> TokenTargets:
        returns = np.full_like(seen[index].logp_proximal, value)
        return TokenTargets(seen[index], advantage=returns, returns=returns)

    return [replace(row, members=tuple(replace(m, targets=targets(m.index)) for m in row.members)) for row in ROWS]
