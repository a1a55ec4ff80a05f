"""How much memory each process of a run takes on what it shares with others, and whether it fits: a line for each device or
host, or a refusal. From the configuration and the headers of model files; no torch, nothing is started.

A learner's is counted at its peak: in the backward pass of a micro-batch, while gradients of those before it are held. It is
what tests measure of `Policy` on made-up tensors, within 15 %; of ZeRO, engines and scorers it is arithmetic. A process of an
environment is counted as one that imports nothing heavy. Not counted: what an allocator keeps in pieces that are too small.

Axes of the sums: T padded tokens of a micro-batch, D width, I width within an MLP, H all query heads, K all key heads,
V vocabulary, P parameters.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.actors.config import REFERENCE, GenerationConfig
from async_rlhf.actors.engine_config import Demand
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import written
from async_rlhf.buffers.images.processor import ARRAYS_BYTES, FEATURES_BYTES
from async_rlhf.buffers.images.store import RECENT
from async_rlhf.buffers.model_directory import TYPE_BYTES, ModelShape, TowerShape, parameters, shape_of
from async_rlhf.launch.placement import Host, Inventory, Placement
from async_rlhf.learner.config import FLOAT32_BYTES, LOGITS_MIB, LearnerConfig, chunk_tokens, room_beside, token_cost
from async_rlhf.run.checks.images import ImageLoad
from async_rlhf.run.config import Config
from async_rlhf.run.hosts.placement import model_devices

_MIB = 1 << 20
# A CUDA process before its first tensor: the driver's context, and kernels that are loaded.
CONTEXT = 512 * _MIB
# A process of an environment and its guard before the environment's own imports: what they share with no other process.
EPISODES = 27 * _MIB
# Elements that DeepSpeed reduces at once, twice (`learner.step.deepspeed_machine`).
_REDUCED = 2 * 50_000_000
_LASTING = ("weights", "gradients", "optimizer")
_ENGINES = ("actor", "evaluation")

Parts = Mapping[str, int]
"""Bytes by what they hold."""


def learner(
    config: LearnerConfig, shape: ModelShape, generation: GenerationConfig, *, reference: int, images: ImageLoad | None = None
) -> Parts:
    """The memory of one rank. reference: parameters of a frozen model beside the trained one."""
    deepspeed, ranks = config.backend == "deepspeed", config.ranks // config.tensor_parallel
    learning = _adapters(config, shape) if config.lora.rank else shape.decoder
    if shape.tower and config.train_vision:
        learning += shape.tower.parameters
    held = TYPE_BYTES[config.dtype] if deepspeed else 4

    def share(stage: int) -> int:
        return ranks if deepspeed and config.zero_stage >= stage else 1

    parts = {
        "weights": held * shape.parameters // share(3),
        "gradients": held * learning // share(2) + (4 * _REDUCED if deepspeed else 0),
        "optimizer": 12 * learning // ranks if deepspeed else 8 * learning,  # DeepSpeed's has a float32 copy of the weights
    }
    parts = {name: size // config.tensor_parallel for name, size in parts.items()}
    tokens = _tokens(config, generation) // config.sequence_parallel
    parts["activations"] = _passing(config, shape, generation, tokens)
    parts["logits"] = LOGITS_MIB * _MIB + 4 * FLOAT32_BYTES * shape.vocabulary * chunk_tokens(shape.vocabulary, config.device)
    if config.critic.kind == "model":
        trunk = shape.decoder - (0 if shape.tied else shape.output)
        parts["critic"] = 16 * trunk // share(1) + shape.layers * _layer(config, shape, tokens)
    if reference:  # over all ranks, also those of a tensor-parallel group
        parts["reference"] = TYPE_BYTES[config.reference_dtype] * reference // (config.ranks if share(3) > 1 else 1)
    if images and shape.tower:
        parts["images"] = _reading(images, shape, 4) * (2 if reference else 1)
        if config.train_vision:
            parts["images"] += _tower(config, shape.tower, max(images.patches, config.micro_batch_tokens))
    return parts


def _reading(images: ImageLoad, shape: ModelShape, size: int) -> int:
    """Bytes of what a frozen tower has made of images, and of its pass over those of a prompt. size: bytes of a number."""
    assert shape.tower is not None
    one = size * images.places * shape.width * (1 + shape.tower.deeper)
    of_pass = size * images.patches * (4 * shape.tower.width + 3 * shape.tower.mlp)
    return max(one, min(FEATURES_BYTES, images.prompts * one)) + of_pass


def _tower(config: LearnerConfig, tower: TowerShape, patches: int) -> int:
    """Peak bytes of the forward and backward pass of a tower that learns, float32: of each layer two norms, attention, an MLP
    with two products, and gradients of one layer's states."""
    one = 9 * tower.width + 2 * tower.mlp
    kept = one + tower.layers * tower.width if config.gradient_checkpointing else tower.layers * one
    return 4 * patches * (kept + 2 * tower.mlp)


def _files(images: ImageLoad) -> int:
    """Bytes of main memory: the arrays that images were prepared to, and the last ones decoded, four bytes a pixel."""
    arrays = FLOAT32_BYTES * images.numbers
    return max(arrays, min(ARRAYS_BYTES, images.prompts * arrays)) + 4 * RECENT * images.pixels


def _tokens(config: LearnerConfig, generation: GenerationConfig) -> int:
    """Tokens of the largest micro-batch: a completion is never cut, and the prompt of several is added."""
    return max(config.micro_batch_tokens, _widest(config, generation, config.micro_batch_tokens))


def _widest(config: LearnerConfig, generation: GenerationConfig, room: float) -> int:
    """Tokens of the longest row: `room` for several completions beside a prompt."""
    prompt, longest = generation.max_prompt_length, generation.longest_completion
    return max(prompt + longest, int(min(prompt + min(room, generation.group_size * longest), config.row_tokens or math.inf)))


def _passing(config: LearnerConfig, shape: ModelShape, generation: GenerationConfig, tokens: int) -> int:
    """Peak bytes of a forward and backward pass, without weights, gradients and logits."""
    half = config.dtype == "bfloat16"
    room = min(config.micro_batch_tokens, room_beside(generation.max_prompt_length, token_cost(shape.layer, shape.heads)))
    masks = 4 * tokens * min(tokens, _widest(config, generation, room))
    layer, inputs = _layer(config, shape, tokens), 4 * tokens * shape.width
    # autocast keeps its copies of the weights to the end of the forward pass, and products keep them for the backward
    copied = 2 if half and config.backend == "torch" else 0
    copies = copied * (shape.decoder - shape.output * (1 if shape.tied else 2))
    # gradients of one layer's states, and beside them that of a tied output layer, which waits for the embedding's
    learns_output = not config.lora.rank
    tied = 4 * shape.output if shape.tied and learns_output else 0
    through = 3 * TYPE_BYTES[config.dtype] * tokens * shape.mlp + tied
    output = (4 * shape.output if learns_output else 0) + 2 * copied * shape.output
    if config.gradient_checkpointing:
        kept = masks + shape.layers * inputs
        one = layer + copied * shape.layer
        return max(kept + copies, kept + output, kept + one + through, 3 * tied)
    kept = masks + shape.layers * layer + copies
    return max(kept + output, kept + through, 3 * tied)  # at its end two gradients of one embedding, and their sum


def _layer(config: LearnerConfig, shape: ModelShape, tokens: int) -> int:
    """Bytes that one layer saves for the backward pass: two norms, attention with keys repeated to all heads, a gated MLP with
    three products. Residuals and norms are float32, what products take has the type they are computed in."""
    d, h, k, i = shape.width, shape.heads, shape.key_heads, shape.mlp
    if config.dtype == "bfloat16":
        return tokens * (26 * d + 14 * h + 6 * k + 8 * i)
    return tokens * (24 * d + 24 * h + 8 * k + 16 * i)


def _adapters(config: LearnerConfig, shape: ModelShape) -> int:
    """Parameters of adapters on every linear layer."""
    d, h, k, i = shape.width, shape.heads, shape.key_heads, shape.mlp
    return config.lora.rank * shape.layers * (7 * d + 2 * h + 2 * k + 3 * i)


@dataclass(frozen=True)
class DeviceLoad:
    """The load of one process on one device, or on its host's memory."""

    process: str
    parts: Parts
    most: int | None = None
    """Its limit in bytes, None for none."""

    @property
    def role(self) -> str:
        return self.process.partition("-")[0]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {written(size)}" for name, size in self.parts.items())
        return f"{self.role} {written(self.total)} ({parts})"


def check_memory(
    config: Config,
    inventory: Inventory,
    placement: Placement,
    shape: ModelShape | None = None,
    images: ImageLoad | None = None,
) -> list[str]:
    """Estimates the load of each device; equal ones share a line. Raises ConfigError for a load that does not fit.

    shape: of a model whose files are not here. images: of the prompts.
    """
    shape = shape or shape_of(Path(config.model))
    if shape is None:
        return ["memory: not estimated, for the model's files do not say how large it is"]
    found: dict[tuple[Any, ...], list[str]] = {}
    for number, host in enumerate(inventory):
        loads = _loads(config, shape, images, placement, host, "" if number == 0 else host.name)
        for device, held in sorted(loads.items(), key=lambda item: -1 if item[0] is None else item[0]):
            if device is None:
                _check_host(host, held)
            elif host.device_memory is not None:
                _check_device(config, shape, images, host, device, held)
            size = host.memory if device is None else host.device_memory
            same = (device is None, size, *((load.role, tuple(load.parts.items())) for load in held))
            found.setdefault(same, []).append(_line(host, device, size, held))
    return [lines[0] + (f"; {len(lines) - 1} more alike" if len(lines) > 1 else "") for lines in found.values()]


def _line(host: Host, device: int | None, size: int | None, held: Sequence[DeviceLoad]) -> str:
    where = f"{host}" if device is None else f"{host}, device {device}"
    total, known = sum(load.total for load in held), "" if size is None else f" of {written(size)}"
    if device is not None:
        return f"memory of {where}: about {written(total)}{known}: {'; '.join(map(str, held))}"
    times, each = Counter(load.role for load in held), list[str]()
    for role, load in {load.role: load for load in held}.items():
        limit = "" if load.most is None else f" (each at most {written(load.most)})"
        each.append(f"{role} {f'{times[role]} x ' if times[role] > 1 else ''}{written(load.total)}{limit}")
    return f"memory of {where}: about {written(total)}{known}, beside the libraries: {', '.join(each)}"


def _loads(
    config: Config, shape: ModelShape, images: ImageLoad | None, placement: Placement, host: Host, name: str
) -> dict[int | None, list[DeviceLoad]]:
    """By device of one host; under None what its own memory holds."""
    found: dict[int | None, list[DeviceLoad]] = {}
    is_rare = placement.evaluation_waits or not config.evaluation.every  # evaluations are not beside most of the training
    for process, slot in placement.slots.items():
        if slot.host != name or slot.devices is None or (process == "evaluation" and is_rare):
            continue
        role = process.partition("-")[0]
        held: dict[int | None, Counter[str]] = {}
        for parts, device in _parts(config, shape, images, role, host, slot.devices):
            held.setdefault(device, Counter({"context": CONTEXT} if device is not None else {})).update(parts)
        for device, sums in held.items():
            found.setdefault(device, []).append(DeviceLoad(process, dict(sums)))
        for own in config.environment.all.values() if role in _ENGINES else ():
            limit = own.worker_memory_mb
            one = DeviceLoad(f"environment-of-{process}", {"process": EPISODES}, None if limit is None else limit << 20)
            found.setdefault(None, []).extend([one] * own.workers)
    return found


def _parts(
    config: Config, shape: ModelShape, images: ImageLoad | None, role: str, host: Host, devices: Sequence[int]
) -> Iterator[tuple[Parts, int | None]]:
    """The parts that a process of this role holds on each of its devices, or on None, its host's memory."""
    if role == "learner":
        parts = learner(config.learner, shape, config.generation, reference=_held(config), images=images)
        yield from ((parts, device) for device in (devices if config.learner.device != "cpu" else (None,)))
    if role in _ENGINES:
        parts = _engine(config, shape, images, host)
        yield from ((parts, device) for device in (devices if config.engine.device != "cpu" else (None,)))
    if images and role in (*_ENGINES, "learner"):
        yield {"images": _files(images)}, None
    for name, device in model_devices(config) if role in (*_ENGINES, "scorer") else ():
        judges = name != REFERENCE if role == "evaluation" else config.scoring.in_process(name) == (role == "scorer")
        if judges:
            yield from ((_judge(config, name), each) for each in (devices[:1] if device != "cpu" else (None,)))


def _held(config: Config) -> int:
    return parameters(Path(config.held_reference)) if config.held_reference else 0


def _engine(config: Config, shape: ModelShape, images: ImageLoad | None, host: Host) -> Parts:
    limit = _engine_limit(config, host)
    return config.served_engine.memory(_demand(config, shape, images), None if limit is None else limit - CONTEXT)


def _demand(config: Config, shape: ModelShape, images: ImageLoad | None) -> Demand:
    longest = config.generation.max_prompt_length + config.generation.longest_completion
    reading = _reading(images, shape, TYPE_BYTES[config.engine.dtype]) if images and shape.tower else 0
    return Demand(shape, -(-longest // 16) * 16, holds=bool(config.environment.all), reading=reading)


def _judge(config: Config, name: str) -> Parts:
    """The memory of a stage's model; empty where its directory is not readable here."""
    options, streams = config.rewards.options.get(name, {}), config.scoring.stages.get(name)
    paths = [options.get("path")]
    if name == REFERENCE:
        options = config.scoring.reference.model_dump()
        paths = [*(config.scoring.reference.directories if config.scoring.reference.teachers else (config.model,))]
    size = sum(parameters(Path(path)) for path in paths if isinstance(path, str))
    cache = int(options.get("cache_bytes", 1 << 30)) if streams is not None and streams.stream_tokens else 0
    parts = {"weights": TYPE_BYTES[str(options.get("dtype", "float32"))] * size, "keys and values": cache}
    return {f"{name} {part}": bytes_ for part, bytes_ in parts.items() if bytes_}


def _engine_limit(config: Config, host: Host) -> int | None:
    """Bytes of a device that an engine may take; None where nothing is known."""
    if host.device_memory is None:
        return None
    share = config.placement.actor_share if config.placement.colocates else 1.0
    return int(config.served_engine.device_share(share) * host.device_memory)


def _check_device(
    config: Config, shape: ModelShape, images: ImageLoad | None, host: Host, device: int, held: Sequence[DeviceLoad]
) -> None:
    size, where = host.device_memory, f"device {device} of {host} ({written(host.device_memory or 0)})"
    assert size is not None
    engines = [load for load in held if load.role in _ENGINES]
    others = [load for load in held if load.role not in _ENGINES]
    most = int(config.placement.actor_share * size) if config.placement.colocates else size
    for load in engines:
        own = sum(_engine(config, shape, images, host).values())
        if load.total > most or own > (_engine_limit(config, host) or size):
            raise ConfigError(
                f"{load.process} needs about {load} of {where}, of which it may take {written(most)}; "
                f"{config.served_engine.nearest(_demand(config, shape, images), most - (load.total - own), size)}"
            )
    left = size - sum(most if config.placement.colocates else load.total for load in engines)
    if others and sum(load.total for load in others) > left:
        way = "use a smaller model, or dtype = 'bfloat16'"
        if others[0].role == "learner":
            way = _nearest_learner(config, shape, images, left - CONTEXT - sum(load.total for load in others[1:]))
        needed = f"{others[0].process} needs about {' and '.join(map(str, others))}"
        raise ConfigError(f"{needed} of {where}, where {written(left)} are left; {way}")


def _check_host(host: Host, held: Sequence[DeviceLoad]) -> None:
    """Only what no swapping or luck makes possible is refused: main memory is shared with everything else."""
    lasting = sum(size for load in held for name, size in load.parts.items() if name in _LASTING)
    if host.memory is not None and lasting > host.memory:
        most = max(held, key=lambda load: load.total)
        raise ConfigError(
            f"the weights, gradients and optimizers on {host} need {written(lasting)}, it has {written(host.memory)}; most "
            f"is of {most}. Use a smaller model, fewer actors (actors.count), or learner.lora.rank = 16"
        )


def _nearest_learner(config: Config, shape: ModelShape, images: ImageLoad | None, left: int) -> str:
    """The first change, from small to large, after which the learner fits."""
    own, longest = config.learner, config.generation.max_prompt_length + config.generation.longest_completion
    shorter = {"gradient_checkpointing": True, "micro_batch_tokens": min(own.micro_batch_tokens, longest)}
    tried: list[dict[str, Any]] = [{"gradient_checkpointing": True}, shorter]
    tried += [
        {**shorter, "backend": "deepspeed", "zero_stage": 3, "ranks": ranks}
        for ranks in (2, 4, 8, 16, 32, 64)
        if own.ranks <= ranks <= config.groups_per_batch // own.updates_per_step
    ]
    reference = _held(config)
    for change in tried:
        parts = learner(own.model_copy(update=change), shape, config.generation, reference=reference, images=images)
        if sum(parts.values()) <= left:
            settings = ", ".join(f"learner.{name} = {json.dumps(value)}" for name, value in change.items())
            return f"nearest that fits: {settings} ({written(sum(parts.values()))})"
    return "no number of ranks changes that: use adapters (learner.lora.rank = 16), a smaller model, or larger devices"
