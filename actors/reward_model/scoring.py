"""The reward `reward_model`, by name and options. No torch here: the supervisor looks at it before a run, workers load it.

It runs in a worker process of its own, beside the engine and never in the actor's loop: one forward of the model there would
stop the decoding of every sequence. Several actors share one model through a reward server (`async-rlhf serve-reward
reward_model`) and the reward `remote`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.rewards.settings import reward
from buffers.errors import ConfigError

if TYPE_CHECKING:
    from actors.reward_model.model import RewardModel

# Files any of which holds a tokenizer.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check(path: str = "", label: int = 0, **others: Any) -> None:
    """Raises ConfigError for a directory that holds no sequence-classification model with its tokenizer."""
    directory = Path(path)
    if not path or not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise ConfigError(f"reward_model: path = {path!r} is no Hugging Face model: it needs config.json and *.safetensors")
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"reward_model: path = {path!r} has no tokenizer; save one there (tokenizer.save_pretrained)")
    config = json.loads((directory / "config.json").read_text())
    architectures = config.get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ConfigError(
            f"reward_model: path = {path!r} holds {', '.join(architectures) or 'nothing known'}, not a model with a "
            "sequence-classification head; train one with experiments.reward_model"
        )
    num_labels = len(config.get("id2label") or "12")
    if not 0 <= label < num_labels:
        raise ConfigError(f"reward_model: label = {label}, the model has {num_labels}; highest: {num_labels - 1}")


def prepare(path: str, label: int = 0, device: str = "cpu", dtype: str = "float32", threads: int = 1, **others: Any) -> None:
    """Load the model; once in each process."""
    _model(path, label, device, dtype, threads)


@reward(batch_size=16, batch_wait_s=0.02, workers=1, timeout_s=60.0, check=check, prepare=prepare)
def reward_model(
    prompts: list[Any],
    completions: list[str],
    path: str,
    label: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    max_length: int = 2048,
) -> list[float]:
    """The model's logit for each completion behind its prompt.

    path: the directory. label: which logit, of a model with several. max_length: tokens; what is longer loses its beginning,
    so that the end, where the score is read, stays.
    """
    return _model(path, label, device, dtype, threads).score(prompts, completions, max_length)


@functools.cache
def _model(path: str, label: int, device: str, dtype: str, threads: int) -> RewardModel:
    from actors.reward_model.model import RewardModel

    return RewardModel(Path(path), label=label, device=device, dtype=dtype, threads=threads)
