"""Whether the processes of a run fit into the memory of what they share: a line for each device or host, or a refusal.

Reads the headers of model files; what it finds out from them is in `memory`. No torch, nothing is started.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.actors.config import REFERENCE, EngineConfig
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.model_directory import tensor_shapes
from async_rlhf.launch.placement import Host, Inventory, Placement
from async_rlhf.run.checks import memory
from async_rlhf.run.checks.memory import Parts, Shape, written
from async_rlhf.run.config import Config
from async_rlhf.run.hosts.placement import model_devices

_LASTING = ("weights", "gradients", "optimizer")
_ENGINES = ("actor", "evaluation")
_CACHES = ("keys and values", "held between turns")
_OF_ENGINE = ("weights", *_CACHES, "activations")


@dataclass(frozen=True)
class Load:
    """What one process takes of one device, or of its host's memory. most: bytes to which it is limited, where it is."""

    process: str
    parts: Parts
    most: int | None = None

    @property
    def role(self) -> str:
        return self.process.partition("-")[0]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        return (
            f"{self.role} {written(self.total)} ({', '.join(f'{name} {written(size)}' for name, size in self.parts.items())})"
        )


def check_memory(config: Config, inventory: Inventory, placement: Placement, shape: Shape | None = None) -> list[str]:
    """What each device holds, estimated; those that hold the same share a line. Raises ConfigError for what cannot fit.

    shape: of a model whose files are not here.
    """
    shape = shape or _shape(Path(config.model))
    if shape is None:
        return ["memory: not estimated, for the model's files do not say how large it is"]
    found: dict[tuple[Any, ...], list[str]] = {}
    for number, host in enumerate(inventory):
        loads = _loads(config, shape, placement, host, "" if number == 0 else host.name)
        for device, held in sorted(loads.items(), key=lambda item: -1 if item[0] is None else item[0]):
            if device is None:
                _check_host(host, held)
            elif host.device_memory is not None:
                _check_device(config, shape, host, device, held)
            size = host.memory if device is None else host.device_memory
            same = (device is None, size, *((load.role, tuple(load.parts.items())) for load in held))
            found.setdefault(same, []).append(_line(host, device, size, held))
    return [lines[0] + (f"; {len(lines) - 1} more alike" if len(lines) > 1 else "") for lines in found.values()]


def _line(host: Host, device: int | None, size: int | None, held: Sequence[Load]) -> str:
    where = f"{host}" if device is None else f"{host}, device {device}"
    total, known = sum(load.total for load in held), "" if size is None else f" of {written(size)}"
    if device is not None:
        return f"memory of {where}: about {written(total)}{known}: {'; '.join(map(str, held))}"
    by_role: dict[str, list[Load]] = {}
    for load in held:
        by_role.setdefault(load.role, []).append(load)
    each = (
        f"{role} {f'{len(all_)} x ' if len(all_) > 1 else ''}{written(all_[0].total)}"
        f"{'' if all_[0].most is None else f' (each at most {written(all_[0].most)})'}"
        for role, all_ in by_role.items()
    )
    return f"memory of {where}: about {written(total)}{known}, beside the libraries: {', '.join(each)}"


def _loads(config: Config, shape: Shape, placement: Placement, host: Host, name: str) -> dict[int | None, list[Load]]:
    """By device of one host; under None what its own memory holds."""
    found: dict[int | None, list[Load]] = {}
    for process, slot in placement.slots.items():
        if slot.host != name or slot.devices is None or (process == "evaluation" and _is_rare(config, placement)):
            continue
        role = process.partition("-")[0]
        held: dict[int | None, Counter[str]] = {}
        for parts, device in _parts(config, shape, role, host, slot.devices):
            held.setdefault(device, Counter({"context": memory.CONTEXT} if device is not None else {})).update(parts)
        for device, sums in held.items():
            found.setdefault(device, []).append(Load(process, dict(sums)))
        if role in _ENGINES and config.environment.function:
            limit = config.environment.worker_memory_mb
            one = Load(f"environment-of-{process}", {"process": memory.EPISODES}, None if limit is None else limit << 20)
            found.setdefault(None, []).extend([one] * config.environment.workers)
    return found


def _is_rare(config: Config, placement: Placement) -> bool:
    """Evaluations that are not beside training for most of its time."""
    return placement.evaluation_waits or not config.evaluation.every


def _parts(config: Config, shape: Shape, role: str, host: Host, devices: Sequence[int]) -> Iterator[tuple[Parts, int | None]]:
    """What a process of this role, which has these devices, holds on each; on None in its host's memory."""
    if role == "learner":
        reference = config.loss.needs_reference and not config.scoring.reference_is_stage
        parts = memory.learner(config.learner, shape, config.generation, reference=reference)
        yield from ((parts, device) for device in (devices if config.learner.device != "cpu" else (None,)))
    if role in _ENGINES:
        parts = _engine(config, config.served_engine, shape, _engine_limit(config, host))
        yield from ((parts, device) for device in (devices if config.engine.device != "cpu" else (None,)))
    for name, device in model_devices(config) if role in (*_ENGINES, "scorer") else ():
        judges = name != REFERENCE if role == "evaluation" else config.scoring.in_process(name) == (role == "scorer")
        if judges:
            yield from ((_judge(config, name), each) for each in (devices[:1] if device != "cpu" else (None,)))


def _engine(config: Config, engine: EngineConfig, shape: Shape, most: int | None) -> Parts:
    return memory.engine(engine, shape, config.generation, most, holds=bool(config.environment.function))


def _judge(config: Config, name: str) -> Parts:
    """Of a stage's model; nothing where it is no directory of ours to look into."""
    if name == REFERENCE:
        options: Mapping[str, Any] = {"path": config.model, **config.scoring.reference.model_dump()}
    else:
        options = config.rewards.options[name]
    path, streams = options.get("path"), config.scoring.stages.get(name)
    size = parameters(Path(path)) if isinstance(path, str) else 0
    cache = int(options.get("cache_bytes", 1 << 30)) if streams is not None and streams.stream_tokens else 0
    return {
        f"{name} {part}": bytes_
        for part, bytes_ in memory.judge(size, str(options.get("dtype", "float32")), cache).items()
        if bytes_
    }


def _engine_limit(config: Config, host: Host) -> int | None:
    """Bytes of a device that an engine may take; None where nothing is known."""
    if host.device_memory is None:
        return None
    own, share = config.engine, config.placement.actor_share if config.placement.colocates else 1.0
    if own.kind == "vllm" and own.kv_bytes is None:
        given = float(
            own.vllm.arguments.get("gpu_memory_utilization", share if config.placement.colocates else memory.VLLM_SHARE)
        )
        if given > share:
            raise ConfigError(
                f"engine.vllm.arguments.gpu_memory_utilization = {given:g} is more than placement.actor_share = {share:g}; "
                "leave it out, and it is that"
            )
        share = given
    return int(share * host.device_memory)


def _check_device(config: Config, shape: Shape, host: Host, device: int, held: Sequence[Load]) -> None:
    size, where = host.device_memory, f"device {device} of {host} ({written(host.device_memory or 0)})"
    assert size is not None
    engines = [load for load in held if load.role in _ENGINES]
    others = [load for load in held if load.role not in _ENGINES]
    most = int(config.placement.actor_share * size) if config.placement.colocates else size
    for load in engines:
        own = sum(load.parts[name] for name in _OF_ENGINE if name in load.parts)
        if load.total > most or own > (_engine_limit(config, host) or size):
            raise ConfigError(
                f"{load.process} needs about {load} of {where}, of which it may take {written(most)}; "
                f"{_nearest_engine(config, shape, host, most - (load.total - own))}"
            )
    left = size - sum(most if config.placement.colocates else load.total for load in engines)
    if others and sum(load.total for load in others) > left:
        way = "use a smaller model, or dtype = 'bfloat16'"
        if others[0].role == "learner":
            way = _nearest_learner(config, shape, left - memory.CONTEXT - sum(load.total for load in others[1:]))
        raise ConfigError(
            f"{others[0].process} needs about {' and '.join(map(str, others))} of {where}, where {written(left)} are left; "
            f"{way}"
        )


def _check_host(host: Host, held: Sequence[Load]) -> None:
    """Only what no swapping or luck makes possible is refused: main memory is shared with everything else."""
    lasting = sum(size for load in held for name, size in load.parts.items() if name in _LASTING)
    if host.memory is not None and lasting > host.memory:
        most = max(held, key=lambda load: load.total)
        raise ConfigError(
            f"the weights, gradients and optimizers on {host} need {written(lasting)}, it has {written(host.memory)}; most "
            f"is of {most}. Use a smaller model, fewer actors (actors.count), or learner.lora.rank = 16"
        )


def _nearest_learner(config: Config, shape: Shape, left: int) -> str:
    """The first change, from small to large, after which the learner fits."""
    own, generation = config.learner, config.generation
    longest = generation.max_prompt_length + generation.longest_completion
    shorter = {"gradient_checkpointing": True, "micro_batch_tokens": min(own.micro_batch_tokens, longest)}
    tried: list[dict[str, Any]] = [{"gradient_checkpointing": True}, shorter]
    tried += [
        {**shorter, "backend": "deepspeed", "zero_stage": 3, "ranks": ranks}
        for ranks in (2, 4, 8, 16, 32, 64)
        if own.ranks <= ranks <= config.groups_per_batch // own.updates_per_step
    ]
    reference = config.loss.needs_reference and not config.scoring.reference_is_stage
    for change in tried:
        parts = memory.learner(own.model_copy(update=change), shape, generation, reference=reference)
        if sum(parts.values()) <= left:
            settings = ", ".join(f"learner.{name} = {json.dumps(value)}" for name, value in change.items())
            return f"nearest that fits: {settings} ({written(sum(parts.values()))})"
    return "no number of ranks changes that: use adapters (learner.lora.rank = 16), a smaller model, or larger devices"


def _nearest_engine(config: Config, shape: Shape, host: Host, left: int) -> str:
    """left: bytes of a device for the engine itself."""
    engine = config.served_engine
    if engine.kind == "vllm":
        limit = min(left, _engine_limit(config, host) or left)
        for size in range(engine.vllm.tensor_parallel_size, 9):
            spread = engine.vllm.model_copy(update={"tensor_parallel_size": size})
            changed = engine.model_copy(update={"vllm": spread})
            if sum(_engine(config, changed, shape, limit).values()) <= limit and shape.heads % size == 0:
                if size > engine.vllm.tensor_parallel_size:
                    return f"nearest that fits: engine.vllm.tensor_parallel_size = {size}"
                share = math.floor(100 * left / (host.device_memory or left)) / 100
                return f"nearest that fits: engine.vllm.arguments.gpu_memory_utilization = {share:g}"
        return "use a smaller model, or larger devices"
    parts = _engine(config, engine, shape, left)
    rest = sum(size for name, size in parts.items() if name not in _CACHES)
    room = (left - rest) // sum(name in _CACHES for name in parts)
    if room > 0:
        return f"nearest that fits: engine.kv_bytes = {room}"
    return (
        f"without keys and values it takes {written(rest)}: use engine.dtype = 'bfloat16', vLLM over several "
        "devices, or a smaller model"
    )


def parameters(directory: Path) -> int:
    """Numbers in the safetensors files of a directory; 0 where there are none."""
    return sum(math.prod(shape) for path in directory.glob("*.safetensors") for shape in tensor_shapes(path).values())


def _shape(directory: Path) -> Shape | None:
    """None for a file that is converted later, and for a configuration that leaves its sizes to its family."""
    if not directory.is_dir():
        return None
    try:
        return Shape.of(json.loads((directory / "config.json").read_text()), parameters(directory))
    except KeyError:
        return None
