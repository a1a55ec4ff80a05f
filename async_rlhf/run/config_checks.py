"""Rules about the settings of several sections, before anything is read. Each refusal names the setting, its value, the reason,
and the nearest choice that works. No torch."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from async_rlhf.buffers.attention import angle_limit
from async_rlhf.buffers.errors import ConfigError, check_all
from async_rlhf.buffers.model_directory import check_language_model, is_text_alone, reads_images
from async_rlhf.buffers.parsing import loads
from async_rlhf.learner.config import check_division
from async_rlhf.run import learner_checks
from async_rlhf.run.config import Config
from async_rlhf.run.shipped import FETCHED

# Ways of quantising whose weights have no gradient.
_PACKED = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq")


def check(config: Config) -> None:
    """Raises ConfigError with all that is found; what later rules build upon comes first."""
    _check_batch(config)
    _check_bound(config)
    rules = (
        _check_engine, _check_routing, learner_checks.check, _check_episodes, _check_security, _check_address,
        _check_device_channel, _check_curriculum,
    )  # fmt: skip
    check_all(*(partial(rule, config) for rule in rules))


def _check_batch(config: Config) -> None:
    size, group = config.learner.batch_size, config.generation.group_size
    if size % group:
        low = size - size % group
        near = f"{low} or {low + group}" if low else f"{group}"
        raise ConfigError(f"learner.batch_size = {size} is not a multiple of generation.group_size = {group}; nearest: {near}")
    if config.learner.updates_per_step > config.groups_per_batch:
        raise ConfigError(
            f"learner.updates_per_step = {config.learner.updates_per_step} needs as many groups in a batch, "
            f"there are {config.groups_per_batch}; highest: {config.groups_per_batch}"
        )


def _check_bound(config: Config) -> None:
    config.bound(num_prompts=config.data.size).check()
    if config.queue.exact and config.queue.fsync != "group":
        raise ConfigError(
            f'queue.exact = true with queue.fsync = "{config.queue.fsync}": a group that a power failure takes must be made '
            'again by weights that are gone by then. Set queue.fsync = "group", or queue.exact = false.'
        )


def _check_engine(config: Config) -> None:
    if refusals := [*config.engine.refusals(config.generation.max_prompt_length + config.generation.longest_completion)]:
        raise ConfigError("\n".join(refusals))


def _check_curriculum(config: Config) -> None:
    """Whether there is something to choose, and the promises of the other settings can be kept."""
    data = config.data
    data.curriculum.check()
    if not data.curriculum.is_on:
        return
    if data.epochs == 1 or (data.spool is not None and data.epochs is None):
        given = "none" if data.epochs is None else data.epochs
        raise ConfigError(
            f"data.curriculum.reward = {data.curriculum.reward!r} with data.epochs = {given}: each prompt is used once, and "
            "none is chosen by how it went before; lowest: data.epochs = 2"
        )
    if data.spool is not None and config.queue.exact:
        raise ConfigError(
            f"queue.exact = true with data.curriculum and data.source = {data.source!r}: which prompt comes next would "
            "depend on when rows come in. Set queue.exact = false, or name data that are all there"
        )


def _check_device_channel(config: Config) -> None:
    """Refuses a device channel that cannot serve the run, or whose wait would be taken for the end of the run."""
    weights = config.weights
    if weights.transport != "device":
        return
    if {config.engine.device, config.learner.device} not in ({"cpu"}, {"cuda"}):
        raise ConfigError(
            f"weights.transport = 'device' with engine.device = {config.engine.device!r} and learner.device = "
            f"{config.learner.device!r}: it serves those that are all on 'cpu', or all on 'cuda'. Set them so, or "
            "weights.transport = 'auto'"
        )
    served = {
        "launch.kind": (config.launch.kind, "local"),
        "placement.hosts": ([host.name for host in config.placement.hosts[1:]], []),
    }  # fmt: skip
    for key, (value, only) in served.items():
        if value != only:
            raise ConfigError(
                f"weights.transport = 'device' with {key} = {value!r}: it serves {only or 'one host'!r} only. Set that, or "
                "weights.transport = 'auto'"
            )
    if weights.device_timeout_s >= (limit := config.stall_timeout_s):
        raise ConfigError(
            f"weights.device_timeout_s = {weights.device_timeout_s:g} is not below stall_timeout_s = {limit:g}, after which a "
            f"run without a step ends; a tenth of that, {limit / 10:g}, will do"
        )


def _check_routing(config: Config) -> None:
    learner = config.learner
    if not config.engine.records_routing:
        return
    served = {
        "learner.compile": (learner.compile, False, "compiled layers choose by themselves"),
        "learner.sequence_parallel": (learner.sequence_parallel, 1, "no rank has the experts of whole rows"),
        "learner.tensor_parallel": (learner.tensor_parallel, 1, "experts of split layers are not replayed"),
    }
    for key, (value, only, reason) in served.items():
        if value != only:
            raise ConfigError(
                f"engine.replay_routing = true with {key} = {json.dumps(value)}: {reason}. Set {key} = {json.dumps(only)}, or "
                "engine.replay_routing = false"
            )


def _check_episodes(config: Config) -> None:
    length, turn = config.generation.max_episode_length, config.generation.max_completion_length
    if length is not None and not config.environment.all:
        raise ConfigError(
            f"generation.max_episode_length = {length} and no environment: completions have one turn. Name one in "
            "environment.function, or leave it out; generation.max_completion_length bounds a completion"
        )
    if length is not None and length < turn:
        raise ConfigError(
            f"generation.max_episode_length = {length} is below generation.max_completion_length = {turn}, which one turn may "
            f"have; lowest: {turn}"
        )


def _check_address(config: Config) -> None:
    address = config.address
    if not address:
        return
    if config.security.keys is None and not address.startswith(("ipc://", "tcp://127.0.0.1:", "tcp://localhost:")):
        raise ConfigError(
            f"address = {address!r}: without keys the hub listens only on this machine. Use tcp://127.0.0.1:PORT, an "
            "ipc:// path, leave it empty, or make keys (async-rlhf keys new DIR) and name them in security.keys."
        )
    found = re.fullmatch(r"ipc://.+|tcp://(\*|localhost|\d+\.\d+\.\d+\.\d+):([1-9]\d{0,4})", address)
    if found is None or int(found[2] or 0) > 65535:
        raise ConfigError(
            f"address = {address!r} is no tcp://IP:PORT; IP is an IPv4 address of this machine, or * for all, PORT 1 to 65535"
        )


def _check_security(config: Config) -> None:
    """The hub's machine needs its keys and its own processes' before anything starts. Raises ConfigError."""
    security = config.security
    if security.directory is not None:
        from async_rlhf.buffers.transport import keys, link  # needs zmq, which most runs of `check` do not

        link.check_curve()
        keys.load_hub(security.directory)
        keys.load_peer(security.directory)


def check_described(config: Config) -> None:
    """Whether the model is there, is of a family that is served, and fits the settings, by its config.json alone. Raises
    ConfigError."""
    directory = Path(config.model)
    if directory.suffix == ".gguf" and directory.is_file():
        return
    if not directory.is_dir() and (command := FETCHED.get(directory.name)) is not None:
        raise ConfigError(
            f"model = {config.model!r} is not there: in a clone of the repository `{command}` fetches it, and trains. With any "
            "other model: --set model=PATH"
        )
    if not directory.is_dir():
        raise ConfigError(f"model = {config.model!r} is no directory; give a local Hugging Face model directory or GGUF file")
    if not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise ConfigError(f"model = {config.model!r} is no Hugging Face model: it needs config.json and *.safetensors")
    try:
        model = loads((directory / "config.json").read_text())
        text: dict[str, Any] = {**model, **(model.get("text_config") or {})}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"model = {config.model!r}: config.json cannot be read: {error}") from error
    quantised = model.get("quantization_config")
    if isinstance(quantised, dict) and (kind := quantised.get("quant_method")) in _PACKED:
        raise ConfigError(f"model = {config.model!r} is packed by {kind}; give the model that was packed")
    check_language_model(directory, "model")
    obstacle = config.engine.images_obstacle(kind := str(model.get("model_type")))
    if obstacle and reads_images(directory) and not is_text_alone(directory):
        raise ConfigError(
            f"model = {config.model!r} is of model type {kind!r}, which is served together with what reads "
            f"images, with {obstacle}"
        )
    check_division(config.learner, text.get)
    for refusal in config.engine.model_refusals(text):
        raise ConfigError(refusal)
    longest = config.generation.max_prompt_length + config.generation.longest_completion
    if (limit := angle_limit(text)) is not None and longest > limit:
        raise ConfigError(
            f"generation.max_prompt_length + max_completion_length = {longest}: beyond {limit} tokens the positions of this "
            "model depend on how long the other texts of a batch are, and so would its log-probabilities. Highest: "
            f"{limit} together"
        )
