"""Checks that must hold on a device before a run there means anything: each compares with something that is known to be right.

A check takes the device and a folder of its own, and returns what it found, in words. It raises `Skipped` where something that
it needs is not there, and fails by raising anything else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from async_rlhf.actors.engine import Completion, Engine, Request, RolloutKey, completed
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.api import train
from async_rlhf.buffers.errors import AsyncRLHFError
from async_rlhf.buffers.record import Group, Rollout
from async_rlhf.buffers.routing import routers
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from async_rlhf.experiments.throughput.engine import requests_of
from async_rlhf.experiments.throughput.learner import advantages_of, make_groups
from async_rlhf.learner.batch.packing import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model.files import load_model
from async_rlhf.learner.model.policy import Policy
from async_rlhf.learner.step.controller import make_backend
from async_rlhf.run.shipped import model_directory

Check = Callable[[str, Path], str]

_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "gemma2", "mistral", "phi3", "olmo2", "gpt2", "qwen3_moe")
_STEPS = 4
# Of the loss and of the gradient's norm after rounding to bfloat16; float32 on another device differs by 1e-6 or so.
_BFLOAT16, _FLOAT32 = 0.05, 1e-3
MIXTURES = ("qwen3_moe", "olmoe", "deepseek_v3")
# The learner's type, and how far its weights have moved, in standard deviations of each tensor.
_BETWEEN: Mapping[str, tuple[Literal["float32", "bfloat16"], float]] = {
    "nothing": ("float32", 0.0), "bfloat16": ("bfloat16", 0.0), "an update": ("float32", 0.003),
}  # fmt: skip
_SAME = 1e-4  # nats a token, with the same weights and experts


class Skipped(Exception):
    """Why a check cannot be made on this machine."""


class CheckFailedError(AsyncRLHFError):
    """A check found a number that is not what it must be."""


def check_families(device: str, directory: Path) -> str:
    """Log-probabilities of engine and learner are those of plain passes, for small random models of many families."""
    for kind in _FAMILIES:
        families.model(kind).save_pretrained(model := directory / kind)
        load_engine(str(model), TorchEngineConfig(device=device, slots=4, prefill_tokens=32))
        make_backend(model, LearnerConfig(device=device), LossConfig())
    return f"{len(_FAMILIES)} families, engine and learner: {', '.join(_FAMILIES)}"


def check_experts(device: str, directory: Path) -> str:
    """A learner that replays the experts which sampled is nearer to the engine than one that chooses its own."""
    found = []
    for kind in MIXTURES:
        for case, (own, replayed, differ) in mismatches(kind, directory / kind, device).items():
            if not (replayed < _SAME if case == "nothing" else replayed < own):
                raise CheckFailedError(f"{kind}, {case} between: {replayed:.3g} nats a token replayed, {own:.3g} with its own")
            found.append(f"{kind}, {case}: {own:.2g} -> {replayed:.2g} nats a token, {differ:.2%} of the experts differ")
    return "; ".join(found)


def mismatches(kind: str, directory: Path, device: str = "cpu") -> dict[str, list[float]]:
    """Mismatches of a model with 4 of 16 experts, by the difference between learner and engine: nats a token with the learner's
    own experts, with replayed ones; and in which share of predicting positions x layers its own are others."""
    families.model(kind, **families.experts(kind, 16, 4)).save_pretrained(directory)
    engine = load_engine(str(directory), TorchEngineConfig(device=device, slots=6, prefill_tokens=16, replay_routing=True))
    groups, found = [_sampled(engine, number) for number in range(4)], {}
    for case, (dtype, moved) in _BETWEEN.items():
        policy = Policy(load_model(directory, torch.device(device)), LearnerConfig(device=device, dtype=dtype))
        drawn = torch.Generator().manual_seed(1)
        for each in policy.parameters():
            each.data += moved * each.std(correction=0) * torch.randn(each.shape, generator=drawn).to(each.device)
        found[case] = _mismatch(policy, groups)
    return found


def _sampled(engine: Engine, number: int) -> Group:
    prompt = tuple(range(number, 12 + 5 * number))
    asked = [Request(RolloutKey(number, 0, member), prompt, 32, Sampling(), 8 * number + member) for member in range(4)]
    ended = completed(engine, asked).values()
    rollouts = (Rollout(each.token_ids, each.logprobs, each.spans, "length", routing=each.routing) for each in ended)
    return Group(number, 0, np.array(prompt, np.int32), tuple(rollouts), Sampling())


@torch.no_grad()
def _mismatch(policy: Policy, groups: list[Group]) -> list[float]:
    own, replayed, differ, chosen = [], [], [], list[torch.Tensor]()
    for router in routers(policy.model):
        router.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[2]))
    for packed in make_micro_batches(make_rows(groups, [[0.0] * 4] * len(groups)), Packing(1 << 12, policy.sharing)):
        batch = packed.to(policy.device)
        replayed.append((policy(batch)[0] - batch.logp_behaviour_N).abs())
        chosen.clear()
        own.append((policy(replace(batch, experts_PMk=None))[0] - batch.logp_behaviour_N).abs())
        assert batch.experts_PMk is not None
        pair = (each[batch.source_N].long().sort(-1)[0] for each in (torch.stack(chosen, 1), batch.experts_PMk))
        differ.append(torch.ne(*pair).any(-1).flatten().float())
    return [float(torch.cat(each).mean()) for each in (own, replayed, differ)]


def check_types(device: str, directory: Path) -> str:
    """The engine in 16 bits stays near the plain passes of the same model."""
    types = ("bfloat16",) if device == "cpu" else ("bfloat16", "float16")
    for name in types:
        load_engine(_speller(), TorchEngineConfig(device=device, slots=4, dtype=name))
    return ", ".join(types)


def check_graphs(device: str, directory: Path) -> str:
    """A recorded decode pass samples what the pass itself samples."""
    if device == "cpu":
        raise Skipped("CUDA graphs are recorded on a CUDA device only")
    plain, recorded = (
        _greedy(TorchEngineConfig(device=device, slots=8, cuda_graphs=graphs, batch_invariant=False))
        for graphs in (False, True)
    )
    for key, completion in plain.items():
        if completion.token_ids.tolist() != recorded[key].token_ids.tolist():
            raise CheckFailedError(f"completion {key} has other tokens when the decode pass is replayed")
    return f"{len(plain)} completions token for token"


def check_learner(device: str, directory: Path) -> str:
    """Loss and gradient of one batch: on the device against the CPU, and in bfloat16 against float32."""
    expected = _step("cpu", "float32")
    found = []
    for dtype, limit in (("float32", _FLOAT32), ("bfloat16", _BFLOAT16)):
        measured = _step(device, dtype)
        for name, value in expected.items():
            if not abs(measured[name] - value) <= limit * max(abs(value), 1e-2):
                raise CheckFailedError(f"{name} in {dtype} on {device} is {measured[name]:.6g}, on the CPU {value:.6g}")
        found.append(f"{dtype} gradient norm {measured['grad_norm']:.4g}")
    return f"{', '.join(found)}; CPU {expected['grad_norm']:.4g}"


def check_run(device: str, directory: Path, package: str = "", overrides: Mapping[str, Any] | None = None) -> str:
    """A run: weights are published, adopted in flight and verified by their canary.

    package: that it needs, as the extra is called. Two ranks: gloo on CPUs, nccl on two CUDA devices.
    """
    if package and importlib.util.find_spec(package) is None:
        raise Skipped(f"{package} is not installed: pip install 'async-rlhf[{package}]'")
    there = torch.cuda.device_count()
    overrides = overrides or {}
    if overrides.get("learner.ranks") and device != "cpu" and there < 2:
        raise Skipped(f"two ranks need two CUDA devices, this machine has {there}")
    result = train(
        "quick",
        quiet=True,
        overrides={
            "output_dir": str(directory), "name": "run", "max_steps": _STEPS, "data.held_out": 0, "data.size": 256,
            "learner.batch_size": 32, "engine.slots": 16, "engine.device": device, "learner.device": device,
            "placement.colocate": device != "cpu" and there < 2, **overrides,
        },
    )  # fmt: skip
    last = result.metrics[-1]
    if not all(record["applied"] for record in result.metrics):
        raise CheckFailedError(f"of {len(result.metrics)} steps some were refused: their gradient was not finite")
    drift = max(record["canary/drift"] or 0.0 for record in result.metrics)
    fastest = max(record["tokens_per_second"] for record in result.metrics)
    return f"{len(result.metrics)} steps, canary within {drift:.2g} nats, {fastest:,.0f} tok/s, step {last['step_time']:.2f} s"


CHECKS: Mapping[str, Check] = {
    "model families": check_families,
    "experts": check_experts,
    "16-bit engine": check_types,
    "CUDA graphs": check_graphs,
    "learner": check_learner,
    "run": check_run,
    "run with vLLM": partial(check_run, package="vllm", overrides={"engine.kind": "vllm"}),
    "run with two ranks": partial(check_run, overrides={"learner.ranks": 2}),
    "run with ZeRO-3": partial(
        check_run,
        package="deepspeed",
        overrides={"learner.ranks": 2, "learner.backend": "deepspeed", "learner.zero_stage": 3},
    ),
}


def _speller() -> str:
    return str(model_directory("tiny-speller"))


def _greedy(config: TorchEngineConfig) -> dict[RolloutKey, Completion]:
    """Eight completions of prompts of different lengths."""
    prompts = (range(5, 9 + 4 * number) for number in range(8))
    return completed(load_engine(_speller(), config), requests_of(prompts, repeat(16), Sampling(temperature=0.0)))


def _step(device: str, dtype: str) -> dict[str, float]:
    """Loss and gradient norm of one step on a batch that is always the same."""
    config = LearnerConfig(device=device, dtype=dtype)
    groups = make_groups(np.array([[5, 9, 17, 30], [12, 3, 8, 21]]), vocabulary=90)
    backend = make_backend(Path(_speller()), config, LossConfig())
    report = backend.step([make_rows(groups, advantages_of(groups))], 0)
    return {name: float(report.metrics[name]) for name in ("loss", "grad_norm")}
