"""The digests that the hub and every actor of a run must share, by name, and the schema of its groups. No torch.

Digests are of contents and never of paths, so an actor on another machine may keep its files elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import content_digest
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.buffers.model_directory import from_pretrained
from async_rlhf.buffers.protocol.packing import GroupSchema
from async_rlhf.buffers.protocol.wire import PROTOCOL
from async_rlhf.buffers.routing import read_routing
from async_rlhf.run.config import Config
from async_rlhf.run.own_code import own_file, with_neighbours
from async_rlhf.run.run_data import RunData
from async_rlhf.run.scoring import environment_specs, score_names, stage_specs

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
# Of a model's config.json: where it came from.
_ORIGIN = ("_name_or_path", "transformers_version")


def shared(config: Config, data: RunData) -> dict[str, str]:
    """Digests by name. data: the rows of the run. Raises ConfigError when a file cannot be read."""
    model = Path(config.model)
    try:
        described = {key: value for key, value in _model(config).items() if key not in _ORIGIN}
        return {
            "record": _digest(PROTOCOL),
            "model": _digest(described),
            "tokenizer": _digest(*((name, content_digest(model / name)) for name in _TOKENIZER if (model / name).is_file())),
            "data": _digest(data.digest, vars(config.data.row_template), [source.weight for source in config.data.sources]),
            "rewards": _digest(portable(config.rewards.model_dump()), *_own(config.rewards.functions)),
            "environment": _digest(
                portable(config.environment.model_dump()), *_own(each.function for each in config.environment.all.values())
            ),
            "generation": _digest(config.seed, config.generation.model_dump()),
        }
    except OSError as error:
        raise ConfigError(f"a file that all of a run must share cannot be read: {error}") from error


def schema(config: Config, images: ImageStore | None = None) -> GroupSchema:
    """The schema of the groups that this run's learner can use. images: of the run."""
    has_images = config.data.images or any(True for _ in images or ())
    generation, environments = config.generation, environment_specs(config).values()
    return GroupSchema(
        group_size=generation.group_size,
        vocabulary=_vocabulary(config),
        max_prompt_length=generation.max_prompt_length,
        max_completion_length=generation.longest_completion,
        rewards=frozenset(spec.name for spec in stage_specs(config)).union(score_names(config, environments)),
        environment=bool(environments),
        splits=has_images or any(environment.render == "split" for environment in config.environment.all.values()),
        images=images,
        calls=any(spec.calls for spec in environments),
        sampling=generation.sampling,
        routing=read_routing(
            Path(config.model), str((described := _model(config)).get("text_config", described).get("model_type"))
        ),
    )


def _vocabulary(config: Config) -> int:
    """Rows of the embedding. transformers knows the family's default for a config.json without the number."""
    described = _model(config)
    size = described.get("text_config", described).get("vocab_size")
    if isinstance(size, int):
        return size
    from transformers import AutoConfig

    model = from_pretrained(AutoConfig, Path(config.model))
    return int(model.get_text_config().vocab_size)


def _model(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(config.model) / "config.json").read_text())
    return found


def portable(value: Any) -> Any:
    """The value without the folders of absolute paths."""
    if isinstance(value, dict):
        return {key: portable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [portable(each) for each in value]
    if isinstance(value, str) and "/" in value:
        return value.rstrip("/").rpartition("/")[2]
    return value


def _own(targets: Iterable[str]) -> Iterator[str]:
    """Digests of users' files and of the neighbours that they import. Raises OSError."""
    for file in filter(None, map(own_file, targets)):
        yield from map(content_digest, with_neighbours(file))


def _digest(*values: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())
