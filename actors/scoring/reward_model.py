"""The reward `reward_model`, by name and options. No torch here: the supervisor looks at it before a run, workers load it.

It runs in a worker process of its own, beside the engine and never in the actor's loop: one forward of the model there would
stop the decoding of every sequence. Several actors share one model through a reward server (`async-rlhf serve-reward
reward_model`) and the reward `remote`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rlhf.actors.own_code import check_own_code
from async_rlhf.actors.rewards.settings import Stream, reward
from async_rlhf.actors.scoring.incremental_check import check_reads_along
from async_rlhf.buffers.attention import angle_limit
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.score import Score

if TYPE_CHECKING:
    from async_rlhf.actors.scoring.incremental import Streams
    from async_rlhf.actors.scoring.models import RewardModel

# Files any of which holds a tokenizer.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_CACHE_BYTES, _MAX_LENGTH = 1 << 30, 2048


def check(path: str = "", label: int = 0, max_length: int = _MAX_LENGTH, **others: Any) -> None:
    """Raises ConfigError for a directory that holds no sequence-classification model with its tokenizer, or one whose scores
    would depend on the texts beside."""
    directory = Path(path)
    if not path or not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise ConfigError(f"reward_model: path = {path!r} is no Hugging Face model: it needs config.json and *.safetensors")
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"reward_model: path = {path!r} has no tokenizer; save one there (tokenizer.save_pretrained)")
    check_own_code(directory, "reward_model: path")
    config = json.loads((directory / "config.json").read_text())
    _check_head(config, path, label)
    if (limit := angle_limit(config)) is not None and limit < max_length:
        raise ConfigError(
            f"reward_model: max_length = {max_length}: beyond {limit} tokens the positions of this model depend on how long "
            f"the other texts of a batch are, and so would its scores. Highest: {limit}"
        )


def _check_head(config: Mapping[str, Any], path: str, label: int) -> None:
    architectures = config.get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ConfigError(
            f"reward_model: path = {path!r} holds {', '.join(architectures) or 'nothing known'}, not a model with a "
            "sequence-classification head; train one with async_rlhf.experiments.reward_model"
        )
    num_labels = len(config.get("id2label") or "12")
    if not 0 <= label < num_labels:
        raise ConfigError(f"reward_model: label = {label}, the model has {num_labels}; highest: {num_labels - 1}")


def check_stream(path: str = "", cache_bytes: int = _CACHE_BYTES, **others: Any) -> None:
    """Raises ConfigError for a model that cannot read a completion while it is being written."""
    check_reads_along(path, "reward_model: path")
    if cache_bytes < 1:
        raise ConfigError(f"reward_model: cache_bytes = {cache_bytes}; lowest: 1. To read nothing along set stream_tokens = 0")


def prepare(path: str, label: int = 0, device: str = "cpu", dtype: str = "float32", threads: int = 1, **others: Any) -> None:
    """Load the model; once in each process."""
    _model(path, label, device, dtype, threads)


def prefetch(
    prompts: list[Any], completions: list[str], stream_ids: list[int], max_length: int = _MAX_LENGTH, **options: Any
) -> None:
    """Read what there is of these completions."""
    _streams(**options).prefetch(stream_ids, prompts, completions, max_length)


def forget(stream_ids: list[int], **options: Any) -> None:
    """Let go of what was read of these."""
    _streams(**options).forget(stream_ids)


@reward(
    batch_size=16,
    batch_wait_s=0.02,
    workers=1,
    timeout_s=60.0,
    check=check,
    prepare=prepare,
    stream=Stream(prefetch, forget, check_stream),
)
def reward_model(
    prompts: list[Any],
    completions: list[str],
    path: str,
    label: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    max_length: int = _MAX_LENGTH,
    cache_bytes: int = _CACHE_BYTES,
    stream_ids: list[int | None] | None = None,
) -> list[float] | list[Score]:
    """The model's logit for each completion behind its prompt.

    path: the directory. label: which logit, of a model with several. max_length: tokens; what is longer loses its beginning,
    so that the end, where the score is read, stays. cache_bytes: most memory for what was read of completions that are still
    being written; what finds no room is scored at its end (metric `given_up`).
    """
    if stream_ids is not None:
        streams = _made_streams(path, label, device, dtype, threads, cache_bytes)
        return streams.score(stream_ids, prompts, completions, max_length)
    return _model(path, label, device, dtype, threads).score(prompts, completions, max_length)


@functools.cache
def _model(path: str, label: int, device: str, dtype: str, threads: int) -> RewardModel:
    from async_rlhf.actors.scoring.models import RewardModel

    return RewardModel(Path(path), label=label, device=device, dtype=dtype, threads=threads)


def _streams(
    path: str,
    label: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    cache_bytes: int = _CACHE_BYTES,
    **others: Any,
) -> Streams:
    return _made_streams(path, label, device, dtype, threads, cache_bytes)


@functools.cache
def _made_streams(path: str, label: int, device: str, dtype: str, threads: int, cache_bytes: int) -> Streams:
    from async_rlhf.actors.scoring.incremental import Streams

    return Streams(_model(path, label, device, dtype, threads), cache_bytes)
