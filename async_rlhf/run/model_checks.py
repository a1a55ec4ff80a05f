"""A model directory before a run: its files by headers, sizes and names (no torch), and with `check --deep` its numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.run.config import Config
from async_rlhf.run.run_files import read_small

_INDEX = "model.safetensors.index.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_MAX_BYTES = 256 << 20  # a tokenizer's vocabulary


def check_model_files(directory: Path) -> None:
    """Raises ConfigError naming the file and what is wrong with it."""
    tensors = {path.name: _tensors(path) for path in sorted(directory.glob("*.safetensors"))}
    index = directory / _INDEX
    if index.exists():
        shards = _json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise _wrong(index, "it has no weight_map")
        for tensor, file in shards.items():
            if tensor not in tensors.get(str(file), ()):
                raise _wrong(index, f"tensor {tensor!r} should be in {file!r}, and is not there")
    found = {name: _json(directory / name) for name in _TOKENIZER if (directory / name).exists()}
    _check_vocabulary(directory, found.get("tokenizer.json", {}))


def _check_vocabulary(directory: Path, tokenizer: dict[str, Any]) -> None:
    """No token may have an id that the model has no embedding for."""
    config = directory / "config.json"
    described = _json(config) if config.exists() else {}
    text = described.get("text_config")
    size = (text if isinstance(text, dict) else described).get("vocab_size")
    inner, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = inner.get("vocab") if isinstance(inner, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary or ())))
    ids += [each.get("id") for each in added or () if isinstance(each, dict)]
    largest = max((number for number in ids if isinstance(number, int)), default=0)
    if isinstance(size, int) and largest >= size:
        raise _wrong(
            directory / "tokenizer.json", f"it has tokens up to {largest}, and the model has those from 0 to {size - 1}"
        )


def _tensors(path: Path) -> set[str]:
    """Names in a safetensors file; that their bytes lie within it, and fill it, is checked by the library."""
    try:
        with safe_open(path, framework="numpy") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise _wrong(path, str(error)) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_small(path, _MAX_BYTES))
    except (OSError, DamagedError, ValueError, RecursionError) as error:
        raise _wrong(path, str(error)) from error
    if not isinstance(found, dict):
        raise _wrong(path, "it is no JSON object")
    return found


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"model file {str(path)!r} cannot be used: {what}. Copy it again from where it came")


def deep_check(config: Config) -> Iterator[str]:
    """A line for each part that holds. Raises ConfigError for the first that does not."""
    # Torch takes seconds to import, and nothing else of `check` needs it.
    from transformers.utils import logging

    from async_rlhf.actors.torch_engine.loading import load_engine
    from async_rlhf.learner.model.files import load_model
    from async_rlhf.learner.model.policy import Policy
    from async_rlhf.learner.model.verification import check_policy
    from async_rlhf.learner.objective.estimation import check_estimator
    from async_rlhf.learner.objective.trial import check_loss
    from async_rlhf.learner.step.machine import find_device

    logging.disable_progress_bar()
    check_estimator(config.advantage)
    check_loss(config.loss)
    yield f"loss {config.loss.kind} and advantages {config.advantage.kind}: usable on made-up completions."
    began = time.monotonic()
    policy = Policy(load_model(Path(config.model), find_device(config.learner.device)), config.learner)
    check_policy(policy)
    rows = "completions of a prompt share its computation" if policy.packs else "each completion has a row of its own"
    yield f"learner: log-probabilities are those of plain passes ({rows}; {time.monotonic() - began:.1f} s)."
    del policy
    if config.engine.kind != "torch":
        yield f"engine: {config.engine.kind} is held to the learner while the run goes on (engine.mismatch_limit)."
        return
    began = time.monotonic()
    engine = load_engine(config.model, config.served_engine)
    bits = ", the same bits alone and in a batch" if engine.is_batch_invariant else ""
    yield f"engine: sampled log-probabilities are those of plain passes{bits} ({time.monotonic() - began:.1f} s)."
