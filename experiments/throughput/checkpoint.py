"""How long does a checkpoint hold up training? A model of about 100 million parameters, saved while steps go on.

The pause is what a step with a checkpoint takes longer than one without: freezing, the copy that the update waits for, and
what writing takes from the machine meanwhile. Run as `python -m experiments.throughput.checkpoint`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

from buffers.record import Group, Rollout, Span
from learner.batch import make_rows
from learner.checkpoint import Checkpoints
from learner.config import LearnerConfig, LossConfig
from learner.saving import Saver
from learner.torch_backend import TorchBackend

_WIDE = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12}


def main(
    steps: Annotated[int, typer.Option(min=2, help="Steps timed without a checkpoint.")] = 5,
    saves: Annotated[int, typer.Option(min=1, help="Checkpoints timed after one that warms up.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of 4 completions.")] = 64,
) -> None:
    """Print one JSON object."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        AutoModelForCausalLM.from_config(LlamaConfig(**_WIDE)).save_pretrained(directory / "model")
        backend = TorchBackend(directory / "model", LearnerConfig(learning_rate=1e-9), LossConfig())
        random = np.random.default_rng(0)
        ids = random.integers(_WIDE["vocab_size"], size=(5, tokens)).astype(np.int32)
        logprobs = np.full(tokens, -9.0, np.float32)
        group = Group(0, 0, ids[0], tuple(Rollout(each, logprobs, (Span(0, tokens),), "stop") for each in ids[1:]), 1.0)
        rows = make_rows([group], [[1.0, -1.0, 0.5, -0.5]], 4096)

        def step() -> float:
            began = time.perf_counter()
            backend.step([rows], 0)
            return time.perf_counter() - began

        saver = Saver(Checkpoints(directory / "checkpoints", keep_last=1), background=True)
        step()
        plain = [step() for _ in range(steps)]
        frozen, slowed, written = [], [], []
        for number in range(saves + 1):
            began = time.perf_counter()
            saver.begin(number, backend.freeze(), {})
            paused = time.perf_counter() - began
            during = step()
            saver.wait()
            if number:
                frozen.append(paused)
                slowed.append(during)
                written.append(saver.seconds)
        usual, save_s = statistics.median(plain), statistics.median(written)
        result = {
            "parameters": sum(p.numel() for p in backend._policy.parameters()),
            "step_s": round(usual, 3),
            "save_s": round(save_s, 3),
            "freeze_s": round(statistics.median(frozen), 4),
            "step_while_saving_s": round(statistics.median(slowed), 3),
            "freeze_share_of_save": round(statistics.median(frozen) / save_s, 4),
            "slowdown_share_of_save": round((statistics.median(slowed) - usual) / save_s, 4),
        }
        typer.echo(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
