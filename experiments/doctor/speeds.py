"""How fast a device does what a run does, beside what its memory allows. The model is random, so that nothing is fetched.

Each measurement is a generator function of `MeasuredPlace` and yields `Speed`s; what it allocates on the device it frees.
"""

from __future__ import annotations

import gc
import importlib.util
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from async_rlhf.actors.engine import Completion, Engine, completed, load_engine
from async_rlhf.actors.engine_config import EngineConfig
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.actors.vllm_engine.settings import VLLMEngineConfig
from async_rlhf.api import train
from async_rlhf.experiments.doctor import families
from async_rlhf.experiments.throughput.engine import requests_of
from async_rlhf.experiments.throughput.harness import Bench
from async_rlhf.experiments.throughput.weights import beside_generation, weights
from async_rlhf.run.shipped import model_directory

_GIB, _MIB = 1 << 30, 1 << 20
_PROMPT = 64
_VLLM_SHARE = 0.6  # of the device: this process holds some of it
# Qwen2.5-0.5B's.
_SHAPE = {
    "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip
_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 128, "vocab_size": 2048, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """One measurement. detail: beside what, and with which settings."""

    name: str
    value: float
    unit: str
    detail: str = ""


@dataclass(frozen=True)
class MeasuredPlace:
    """Where is measured. small: loads that only show that it works, as on a processor."""

    device: str
    directory: Path
    small: bool

    @property
    def is_cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def model(self) -> Path:
        """A random model in bfloat16 with the shipped model's tokenizer; made once."""
        path = self.directory / "model"
        if not path.exists():
            torch.manual_seed(0)
            config = Qwen2Config(**(_SMALL if self.small else _SHAPE), max_position_embeddings=4096, eos_token_id=2)
            shutil.copytree(
                str(model_directory("tiny-speller")), path, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
            )
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).save_pretrained(path)
        return path

    def seconds(self, work: Callable[[], object], times: int = 5) -> float:
        """Median of one call, after one that is not counted; with what the device still has to do of it."""
        taken = []
        for _ in range(times + 1):
            self._wait()
            began = time.perf_counter()
            work()
            self._wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def copies(place: MeasuredPlace) -> Iterator[Speed]:
    """A GiB on the device (bytes read and written), and to and from pinned memory of the host."""
    size = _MIB if place.small else _GIB
    source = torch.ones(size, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    yield Speed("copy on the device", 2 * size / place.seconds(lambda: target.copy_(source)) / 1e9, "GB/s", "read and written")
    if place.is_cuda:
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for name, to, of in (("to the host", pinned, source), ("from the host", target, pinned)):
            yield Speed(f"copy {name}", size / place.seconds(partial(to.copy_, of, non_blocking=True)) / 1e9, "GB/s", "pinned")


def decoding(place: MeasuredPlace) -> Iterator[Speed]:
    """The built-in engine in bfloat16; with one row each step reads all weights once, which is set beside the copy's speed."""
    num_bytes = (place.model / "model.safetensors").stat().st_size
    copied = next(copies(place)).value
    for rows in (1, 8) if place.small else (1, 128, 256):
        for graphs in (False, True) if place.is_cuda else (False,):
            config = TorchEngineConfig(
                device=place.device, dtype="bfloat16", slots=rows, cuda_graphs=graphs, batch_invariant=False
            )  # fmt: skip
            speed, detail = _decoded(place, config, rows)
            share = f"; reads weights at {speed * num_bytes / 1e9 / copied:.0%} of the copy" if rows == 1 else ""
            yield Speed(f"decoding, {rows} rows" + (", recorded" if graphs else ""), speed, "tokens/s", detail + share)


def decoding_with_vllm(place: MeasuredPlace) -> Iterator[Speed]:
    """The same with vLLM, where it is installed."""
    for rows in (1, 8) if place.small else (1, 128, 256):
        if importlib.util.find_spec("vllm") is not None:
            config = VLLMEngineConfig(kind="vllm", device=place.device, dtype="bfloat16", slots=rows)
            speed, detail = _decoded(place, config.served(asks_for_bits=False, share=_VLLM_SHARE), rows)
            yield Speed(f"decoding with vLLM, {rows} rows", speed, "tokens/s", detail)


def _decoded(place: MeasuredPlace, config: EngineConfig, rows: int) -> tuple[float, str]:
    """Tokens a second, the second time; and of what."""
    engine, new = load_engine(str(place.model), config), 16 if place.small else 128
    try:
        _sampled(engine, rows, new)
        began = time.perf_counter()
        speed = sum(len(completion.token_ids) for completion in _sampled(engine, rows, new)) / (time.perf_counter() - began)
    finally:
        engine.close()
    del engine
    _free()
    num_bytes = (place.model / "model.safetensors").stat().st_size
    return speed, f"{num_bytes / 2e9:.2f} B parameters, prompts of {_PROMPT}, {new} new"


def types(place: MeasuredPlace) -> Iterator[Speed]:
    """The error of bfloat16: log-probabilities that the engine gave its own samples, beside a pass in float32."""
    config = TorchEngineConfig(device=place.device, dtype="bfloat16", slots=8, batch_invariant=False)
    engine = load_engine(str(place.model), config)
    ended = _sampled(engine, 8, 64)
    del engine
    model = (
        AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.float32, trust_remote_code=False).to(place.device).eval()
    )
    differences = []
    for completion in ended:
        sampled = completion.token_ids.tolist()
        with torch.inference_mode():
            plain = families.plain_logprobs(model, _prompt(completion.key.group), sampled).cpu()
        differences.append(torch.tensor(completion.logprobs.tolist()) - plain)
    errors = torch.cat(differences)
    del model
    _free()
    detail = f"{errors.numel()} sampled tokens; largest {errors.abs().max():.2g}, mean {errors.mean():+.2g}"
    yield Speed("bfloat16 against float32", float(errors.abs().mean()), "nats a token", detail)


def publication(place: MeasuredPlace) -> Iterator[Speed]:
    """The host channel: from the learner's `publish` to adopted, with all digests, beside copies of the same bytes."""
    bench = Bench(None, place.small)
    for row in islice(weights(bench), 3):
        yield Speed(f"weights, {row.load}", row.sides["ours"] or 0.0, "GB/s", f"{row.ratio:.2f} of memcpy")
    row = beside_generation(bench.num_turns(3), bench.size(1024, 16) << 20)
    stands = f"{row.ratio:.1f} times two copies; learner stands still {row.figures['learner_blocked_s']:.3f} s"
    yield Speed(
        "publish to adopted, beside decoding", row.sides["ours"] or 0.0, "s", f"{row.figures['set_mb']:.0f} MB, {stands}"
    )


def whole_run(place: MeasuredPlace) -> Iterator[Speed]:
    """A run on the random model: learner, actor and hub share the device."""
    loads = {"generation.max_completion_length": 16, "learner.batch_size": 16, "engine.slots": 16}
    if not place.small:
        loads = {"generation.max_completion_length": 256, "learner.batch_size": 128, "engine.slots": 128}
    overrides: Mapping[str, Any] = {
        "output_dir": str(place.directory), "name": "whole", "model": str(place.model), "max_steps": 6, "data.held_out": 0,
        "data.size": 256, "engine.device": place.device, "learner.device": place.device, "engine.dtype": "bfloat16",
        "engine.cuda_graphs": place.is_cuda, "learner.dtype": "bfloat16", "learner.micro_batch_tokens": 16_384,
        "learner.gradient_checkpointing": True, "placement.colocate": place.is_cuda, "checkpoint.save_every": 100, **loads,
    }  # fmt: skip
    records = train("quick", quiet=True, overrides=overrides).metrics
    settled = records[2:]
    names = ("tokens_per_second", "step_time", "idle/learner")
    of = {name: statistics.median(record[name] for record in settled) for name in names}
    held_s = records[-1]["broadcast/seconds"]
    completions = f"{loads['learner.batch_size']} completions of {loads['generation.max_completion_length']} a step"
    detail = f"{completions} of {of['step_time']:.2f} s; learner idle {of['idle/learner']:.0%}, held {held_s:.3f} s to publish"
    yield Speed("a whole run", of["tokens_per_second"], "tokens/s", detail)


# What takes least comes first.
MEASUREMENTS: Mapping[str, Callable[[MeasuredPlace], Iterator[Speed]]] = {
    "copies": copies, "decoding": decoding, "types": types, "publication": publication, "a whole run": whole_run,
    "decoding with vLLM": decoding_with_vllm,
}  # fmt: skip


def _prompt(number: int) -> list[int]:
    return [5 + (number + place) % 40 for place in range(_PROMPT)]


def _sampled(engine: Engine, rows: int, new: int) -> list[Completion]:
    return list(completed(engine, requests_of(map(_prompt, range(rows)), repeat(new))).values())


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
