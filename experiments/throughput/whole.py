"""How long until a run's first step, and what does each of its processes hold? One run a load, as the command line starts it.

- start-up: `quick` as it ships, two steps.
- rows:     the same over a million rows of JSONL.
- weights:  the same with a Llama of 411 million random float32 parameters (1.6 GB).

The peer is a process that imports torch and transformers and loads the same model: no run is ready sooner. Memory is what ends
with a process (USS), its highest in a sample each 0.2 s; `system_share` is the share of processor time that the system took.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from async_rlhf.experiments.soak.sampling import Census, command
from async_rlhf.experiments.throughput.harness import MODEL, Bench, Row
from async_rlhf.run.config import dump, load
from async_rlhf.run.run_dir import RunDir

_SAMPLE_S = 0.2
_LIMIT_S = 900.0
_BARE = "import sys, torch, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True)"
_SMALL_STEPS: dict[str, Any] = {
    "evaluation.at_start": False, "evaluation.at_end": False, "learner.batch_size": 16, "generation.group_size": 4,
    "generation.max_completion_length": 8, "engine.slots": 16,
}  # fmt: skip
Name = Literal["start-up", "rows", "weights"]
NAMES: tuple[Name, ...] = ("start-up", "rows", "weights")


def whole(bench: Bench, only: Annotated[Name | None, typer.Option("--load", help="Only this load.")] = None) -> Iterator[Row]:
    """Seconds from the command to the first step, and the most memory of each role."""
    for name in (only,) if only else NAMES:
        with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
            folder, model, size, overrides = Path(directory), MODEL, "", dict[str, Any]()
            if name == "rows":
                count = bench.size(1_000_000, 2_000)
                source = str(write_rows(folder / "rows.jsonl", count))
                overrides = {"data.source": source, "data.options": {}, "data.held_out": 0, "rewards.functions": ["exact"]}
                size = f", {count:,}"
            if name == "weights":
                model = make_wide(folder / "model", *bench.size((1024, 32), (64, 2)))
                overrides = {"model": str(model), **_SMALL_STEPS}
                size = f", {sum(path.stat().st_size for path in model.glob('*.safetensors')) / 1e6:,.0f} MB"
            config = dump(load("quick", {"name": "run", "output_dir": str(folder), "max_steps": 2, **overrides}))
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds, peaks = watched(config, folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
            figures = {**{f"{role}_mib": peak for role, peak in peaks.items()}, "system_share": system / (user + system)}
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", _BARE, str(model)], check=True, timeout=_LIMIT_S, capture_output=True)
            yield Row.of(name + size, {"first step": [seconds], "bare": [time.perf_counter() - began]}, "s", figures=figures)


def watched(config: str, folder: Path) -> tuple[float, Mapping[str, float]]:
    """Seconds until the run of this configuration has made its first step, and MiB of each role at most until its end."""
    (folder / "run.toml").write_text(config)
    run, peaks, seconds = RunDir(folder / "run"), dict[str, float](), 0.0
    began = time.perf_counter()
    with (folder / "train.log").open("wb") as log, command(["train", str(folder / "run.toml")], log) as train:
        census = Census({"supervisor": train.pid})
        while train.poll() is None and time.perf_counter() - began < _LIMIT_S:
            time.sleep(_SAMPLE_S)
            if not seconds and run.metrics.exists() and run.metrics.stat().st_size:
                seconds = time.perf_counter() - began
            for role, _, held in census.measure():
                peaks[role] = max(peaks.get(role, 0.0), held["memory"])
    if train.returncode:
        raise RuntimeError(f"the run ended with {train.returncode}: {(folder / 'train.log').read_text()[-2000:]}")
    return seconds, {role: peak for role, peak in peaks.items() if not role.endswith("'s processes")}


def write_rows(path: Path, count: int) -> Path:
    """Numbered prompts and answers of some 30 characters each."""
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"prompt": f"spell {number:012d} backwards", "answer": f"{number:012d}"[::-1]}) + "\n")
    return path


def make_wide(directory: Path, width: int, layers: int) -> Path:
    """Random float32 weights with the tokenizer of the tiny model."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True, trust_remote_code=False)
    heads = max(1, width // 64)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, dtype="float32",
        )
    ).save_pretrained(directory)  # fmt: skip
    tokenizer.save_pretrained(directory)
    return directory
