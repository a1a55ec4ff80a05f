"""A model directory as every engine reads it: the model, its tokenizer, the tokens that end a completion. Nothing is
downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.model_directory import from_pretrained


def read_model(model_dir: str, read: Callable[[Path], PreTrainedModel]) -> PreTrainedModel:
    """The model that `read` loads. Raises ConfigError for a directory without a causal language model."""
    if not (Path(model_dir) / "config.json").is_file():
        raise ConfigError(f"model {model_dir!r} is no model directory: it has no config.json; give a local directory")
    try:
        return read(Path(model_dir))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {model_dir!r} is no causal language model: {error}") from error


def find_tokenizer(model_dir: str) -> PreTrainedTokenizerBase | None:
    """The model's own, where it has one."""
    directory = Path(model_dir)
    return from_pretrained(AutoTokenizer, directory) if (directory / "tokenizer_config.json").is_file() else None


def find_stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """End tokens named by the generation config, the model config or the tokenizer; any of them ends a completion."""
    named = [model.config.get_text_config().eos_token_id]
    if model.generation_config is not None:
        named.append(model.generation_config.eos_token_id)
    if tokenizer is not None:
        named.append(tokenizer.eos_token_id)
    lists = [ids if isinstance(ids, list) else [ids] for ids in named]
    return {int(token) for ids in lists for token in ids if token is not None}
