"""A model directory before a run: its files by headers, sizes and names (no torch), and with `check --deep` its numbers."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors import SafetensorError

from async_rlhf.actors.reference import is_address
from async_rlhf.buffers.attention import max_length
from async_rlhf.buffers.config import MAX_FRAME_BYTES
from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.store import scratch
from async_rlhf.buffers.model_directory import (
    INDEX,
    check_language_model,
    check_numbers,
    from_pretrained,
    prepares_images,
    tensor_shapes,
)
from async_rlhf.buffers.parsing import loads
from async_rlhf.buffers.routing import read_routing
from async_rlhf.learner.registry import loss_spec
from async_rlhf.run.config import Config
from async_rlhf.run.run_files import read_small

# Where an engine finds the tokens that end a completion.
_ENDS = {"generation_config.json": "eos_token_id", "config.json": "eos_token_id", "tokenizer_config.json": "eos_token"}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_WRITES = "CausalLM|LMHead|ConditionalGeneration"
_MERGING_ERROR = 1e-3  # nats; rounding makes a hundredth of it in float32, in which adapters are merged
_MAX_BYTES = 256 << 20  # a tokenizer's vocabulary


def check_model_files(directory: Path, of: str = "model") -> None:
    """Raises ConfigError naming the file and what is wrong with it. of: the setting."""
    tensors = {path.name: _tensors(path) for path in sorted(directory.glob("*.safetensors"))}
    index = directory / INDEX
    if index.exists():
        shards = _json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise _wrong(index, "it has no weight_map")
        for tensor, file in shards.items():
            if tensor not in tensors.get(str(file), ()):
                raise _wrong(index, f"tensor {tensor!r} should be in {file!r}, and is not there")
    found = {name: _json(directory / name) for name in _TOKENIZER if (directory / name).exists()}
    _check_architecture(directory, of)
    check_numbers(directory)
    _check_vocabulary(directory, found.get("tokenizer.json", {}))


def check_teachers(config: Config) -> None:
    """Raises ConfigError for a teacher that is not there, is no whole language model, or cannot say what is asked of it."""
    own, generation = config.scoring.reference, config.generation
    if loss_spec(config.loss.kind).learns_from == "teacher" and not own.teachers:
        raise ConfigError(
            f"loss.kind = {config.loss.kind!r} learns from a teacher, and none is named: set scoring.reference.path to a model "
            "directory or a server's URL"
        )
    for path in own.teachers:
        where = "scoring.reference.path" if path == own.path else "scoring.reference.by_source"
        if not is_address(path):
            _check_teacher(config, Path(path), where)
        elif not urlsplit(path).hostname:
            raise ConfigError(f"{where} = {path!r} names no host; http://HOST:PORT/v1")
        elif (generation.temperature, generation.truncation) != (1.0, ""):
            asked = generation.truncation or f"temperature = {generation.temperature:g}"
            raise ConfigError(
                f"{where} = {path!r} with generation.{asked}: a server gives probabilities at temperature 1 over all tokens. "
                "Sample so, or give the teacher's directory"
            )
    if own.api_key_env and not os.environ.get(own.api_key_env):
        raise ConfigError(f"scoring.reference.api_key_env = {own.api_key_env!r}: there is no such environment variable; set it")


def _check_teacher(config: Config, directory: Path, where: str) -> None:
    if not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise ConfigError(
            f"{where} = {str(directory)!r} is no Hugging Face model (config.json and *.safetensors), and no URL: "
            "http://host:8000/v1"
        )
    check_language_model(directory, where)
    check_model_files(directory, where)
    policy = Path(config.model)
    own, other = _tokens(policy), _tokens(directory)
    if own is not None and other is not None and not own.items() <= other.items():
        raise ConfigError(
            f"{where} = {str(directory)!r} has other tokens than model = {config.model!r}, and a teacher is asked about the "
            "policy's: choose one of its family, with the same tokenizer.json"
        )
    sizes = [int(_described(each).get("vocab_size") or 0) if each.is_dir() else 0 for each in (policy, directory)]
    if "top_k" in loss_spec(config.loss.kind).needs and sizes[0] > sizes[1]:
        raise ConfigError(
            f"{where} = {str(directory)!r} has an output for {sizes[1]} tokens and model = {config.model!r} for {sizes[0]}, "
            f"which loss.kind = {config.loss.kind!r} compares; choose a teacher with as many"
        )
    generation, limit = config.generation, max_length(_described(directory))
    ours = max_length(_described(policy)) if policy.is_dir() else None  # a file is converted when the run starts
    longest = min(filter(None, (generation.max_prompt_length + generation.longest_completion, ours)))
    if limit is not None and limit < longest:
        raise ConfigError(
            f"{where} = {str(directory)!r} reads {limit} tokens, and generation.max_prompt_length with "
            f"generation.{_longest(config)} allow {longest}; lower them, or choose another teacher"
        )


def check_adapters(config: Config) -> None:
    """Whether the layers that are to get adapters are there and have weights of their own, by the last part of their names: a
    model's classes may call the parts before it otherwise than its files, and only `check --deep` makes them. Raises
    ConfigError."""
    lora = config.learner.lora
    if not lora.rank:
        return
    described = _described(Path(config.model))
    alone = lora.publish == "adapter" and prepares_images(Path(config.model))
    if alone or any("expert" in key for key in described):  # which peft looks for by names of its own
        from async_rlhf.learner.model.lora import check_targets

        places = check_targets(Path(config.model), lora)
        if alone:
            _check_base(config, places)
        return
    if lora.targets == ("all-linear",):
        return
    vocabulary = described.get("vocab_size")
    layers: dict[str, int] = {}
    of_tokens = set[str]()  # embeddings and output layers: those of all tokens that stand in no numbered layer
    for path in sorted(Path(config.model).glob("*.safetensors")):
        for name, shape in tensor_shapes(path).items():
            if name.endswith(".weight") and len(shape) == 2:
                place = name.removesuffix(".weight").split(".")
                layers[place[-1]] = shape[0]
                of_tokens |= {place[-1]} if shape[0] == vocabulary and not any(map(str.isdecimal, place)) else set()
    usual = sorted(layers.keys() - of_tokens)
    for target in lora.targets:
        if target.rpartition(".")[2] in of_tokens and _is_tied(config, described):
            raise ConfigError(
                f"learner.lora.targets names {target!r}, whose weight is that of embeddings and output layer together "
                f"(tie_word_embeddings): an adapter of one would be lost; choose among {', '.join(usual)}"
            )
        if target.rpartition(".")[2] not in layers:
            raise ConfigError(
                f"learner.lora.targets names {target!r}, which is no layer of the model; choose among {', '.join(usual)}, or "
                "'all-linear' alone"
            )


def _check_base(config: Config, places: Sequence[str]) -> None:
    """Raises ConfigError where files name a layer otherwise than the model's classes do: adapters would find nothing."""
    names = {name for path in Path(config.model).glob("*.safetensors") for name in tensor_shapes(path)}
    if missing := next((place for place in places if f"{place}.weight" not in names), None):
        raise ConfigError(
            f"learner.lora.publish = 'adapter': the files of model = {config.model!r} have no tensor '{missing}.weight', to "
            "which engines would add its adapter; set learner.lora.publish = 'merged'"
        )


def _is_tied(config: Config, described: dict[str, Any]) -> bool:
    """Whether embeddings are tied; a missing key of config.json has its family's default, from transformers."""
    from transformers import AutoConfig

    found = described if "tie_word_embeddings" in described else vars(from_pretrained(AutoConfig, Path(config.model)))
    return bool(found.get("tie_word_embeddings"))


def check_routing(config: Config) -> Iterator[str]:
    """A remark where engine and learner of a model with experts choose them apart. Raises ConfigError where a group with its
    experts can be larger than what the hub takes at once."""
    described, generation = _described(Path(config.model)), config.generation
    routing = read_routing(Path(config.model), kind := str(described.get("model_type")))
    position_bytes = 0 if routing is None else routing.layers * routing.choices * (1 if routing.experts <= 256 else 2)
    differ = "engine and learner choose apart, and log-probabilities differ where rounding or an update changes the choice"
    if routing is None:
        if described.get("num_experts_per_tok"):
            yield f"model type {kind!r} has experts, which are not recorded: {differ}."
    elif not config.engine.records_routing:
        yield (
            f"{routing.choices} of {routing.experts} experts in each of {routing.layers} layers are not recorded: {differ}. "
            f"engine.replay_routing = true (engine.kind = 'torch') takes {position_bytes} bytes a token in the journal."
        )
    else:
        most = (MAX_FRAME_BYTES // position_bytes - generation.max_prompt_length) // generation.group_size
        if generation.longest_completion > most:
            raise ConfigError(
                f"engine.replay_routing = true with generation.{_longest(config)} = {generation.longest_completion}: at "
                f"{position_bytes} bytes a token a group of {generation.group_size} can have more than "
                f"{MAX_FRAME_BYTES >> 20} MiB, which the hub takes at once; highest: {max(0, most)}, or set it to false"
            )


def names_end(directory: Path) -> bool:
    """Whether a file of the model names a token that ends a completion."""
    found = {file: _json(directory / file) for file in _ENDS if (directory / file).exists()}
    text = found["config.json"].get("text_config")
    own = text.get("eos_token_id") if isinstance(text, dict) else None
    return any(named not in (None, []) for named in (own, *(found[file].get(_ENDS[file]) for file in found)))


def longest_prompt(config: Config) -> tuple[int, str]:
    """Tokens a prompt may have, and what limits them: the setting, or what the model holds beside the longest completion."""
    holds = max_length(_described(Path(config.model)))
    allowed, completion = config.generation.max_prompt_length, config.generation.longest_completion
    if holds is None or allowed + completion <= holds:
        return allowed, f"generation.max_prompt_length = {allowed}"
    return holds - completion, (
        f"{holds - completion}: the model holds {holds} tokens, of which generation.{_longest(config)} = {completion}"
    )


def _longest(config: Config) -> str:
    return "max_completion_length" if config.generation.max_episode_length is None else "max_episode_length"


def no_room(config: Config, left: int, longest: int) -> ConfigError:
    """The error for a longest completion that fills the model. left: tokens beside it, 0 or fewer; longest: of all prompts."""
    completion = config.generation.longest_completion
    holds = completion + left
    way = f"highest: {holds - longest}" if holds > longest else "use shorter prompts and a lower value"
    return ConfigError(
        f"generation.{_longest(config)} = {completion} leaves no room for a prompt: the model holds {holds} tokens "
        f"together, the longest prompt has {longest}; {way}"
    )


def _tokens(directory: Path) -> dict[str, int] | None:
    """By their ids, added ones too, where a tokenizer.json has them."""
    path = directory / "tokenizer.json"
    described = _json(path) if path.exists() else {}
    try:
        known = described["model"]["vocab"]
        if isinstance(known, list):  # a list holds (token, score)
            known = {token: number for number, (token, _) in enumerate(known)}
        added: dict[str, int] = {each["content"]: each["id"] for each in described.get("added_tokens") or ()}
        return {**known, **added}
    except (ValueError, KeyError, TypeError):
        return None


def _check_vocabulary(directory: Path, tokenizer: dict[str, Any]) -> None:
    """No token may have an id that the model has no embedding for."""
    size = _described(directory).get("vocab_size")
    inner, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = inner.get("vocab") if isinstance(inner, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary or ())))
    ids += [each.get("id") for each in added or () if isinstance(each, dict)]
    largest = max((number for number in ids if isinstance(number, int)), default=0)
    if isinstance(size, int) and largest >= size:
        raise _wrong(
            directory / "tokenizer.json", f"it has tokens up to {largest}, and the model has those from 0 to {size - 1}"
        )


def _check_architecture(directory: Path, of: str) -> None:
    """Weights of another task have no head that writes text: it would begin with random numbers."""
    names = _json(directory / "config.json").get("architectures")
    if isinstance(names, list) and names and not any(re.search(_WRITES, str(name)) for name in names):
        raise ConfigError(
            f"{of} = {str(directory)!r} is a {names[0]}, which does not write text; give a causal language model "
            "(...ForCausalLM)"
        )


def _described(directory: Path) -> dict[str, Any]:
    """A model's config.json, with what is about its text on top."""
    found = _json(directory / "config.json")
    text = found.get("text_config")
    return {**found, **text} if isinstance(text, dict) else found


def _tensors(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        return tensor_shapes(path)
    except (OSError, SafetensorError) as error:
        raise _wrong(path, str(error)) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = loads(read_small(path, _MAX_BYTES))  # of any size: a tokenizer without a limit has a model_max_length of 1e30
    except (OSError, DamagedError, ValueError, RecursionError) as error:
        raise _wrong(path, str(error)) from error
    if not isinstance(found, dict):
        raise _wrong(path, "it is no JSON object")
    return found


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"model file {str(path)!r} cannot be used: {what}. Copy it again from its source")


def _check_merging(model: Any, lora: Any) -> str:
    """How many layers get adapters. Raises ConfigError where what would be published is not the policy with its adapters."""
    from async_rlhf.learner.model.lora import adapters, add_adapters, merging_error

    add_adapters(model, lora)
    if not (error := merging_error(model)) <= _MERGING_ERROR:
        raise ConfigError(
            f"learner.lora.targets = {list(lora.targets)}: merged into the weights random adapters differ from themselves by "
            f"{error:.3g} nats on average (at most {_MERGING_ERROR:g}). Choose other targets"
        )
    without = "" if all(each.ndim < 3 for each in model.parameters()) else "; experts that share a parameter have none"
    return f"adapters: {len(adapters(model)) // 2} layers, the same merged and apart{without}."


def deep_check(config: Config) -> Iterator[str]:
    """A line for each part that holds. Raises ConfigError for the first that does not."""
    # Torch takes seconds to import, and nothing else of `check` needs it.
    from transformers.utils import logging

    from async_rlhf.buffers.images.tower import ImageTower
    from async_rlhf.learner.model.check import check_policy
    from async_rlhf.learner.model.files import load_model
    from async_rlhf.learner.model.policy import Policy
    from async_rlhf.learner.objective.estimation import check_estimator
    from async_rlhf.learner.objective.trial import check_loss
    from async_rlhf.learner.step.ranks import take_device

    logging.disable_progress_bar()
    check_estimator(config.advantage)
    check_loss(config.loss)
    yield f"loss {config.loss.kind} and advantages {config.advantage.kind}: usable on made-up completions."
    began = time.monotonic()
    model: Any = load_model(Path(config.model), take_device(config.learner.device))
    images = ImageProcessor(Path(config.model), scratch()) if prepares_images(Path(config.model)) else None
    policy = Policy(model, config.learner, images=None if images is None else ImageTower(model, images))
    check_policy(policy)
    if config.learner.lora.rank:
        yield _check_merging(policy.model, config.learner.lora)
    rows = "completions of a prompt share its computation" if policy.packs else "each completion has a row of its own"
    yield f"learner: log-probabilities are those of plain passes ({rows}; {time.monotonic() - began:.1f} s)."
    del policy
    began = time.monotonic()
    obstacle = config.served_engine.images_obstacle(str(model.config.model_type))
    read = {} if images is None or obstacle else {"images": images}
    yield f"engine: {config.served_engine.compared(config.model, **read)} ({time.monotonic() - began:.1f} s)."
    if images is not None:
        yield f"images: {obstacle or 'engine and learner give the log-probabilities of plain passes behind two made-up ones'}."
