"""The two systems of the pipeline benchmark, set to the same work: what a load is, and one run of either.

Measures nothing: a run comes back as the times at which its steps ended, and `pipeline` decides what they are worth.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.api import run
from async_rlhf.experiments.throughput.judges import BATCH_SIZE
from async_rlhf.run.config import Config, validated
from async_rlhf.run.config_checks import check
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import Tail

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "tiny-speller"
PROMPTS = DataConfig(source="reasoning_gym:spell_backward", options={"min_word_len": 3, "max_word_len": 6}, held_out=0)

GROUP_SIZE, MAX_NEW_TOKENS, THREADS = 8, 32, 2
# So small that lengths stay what they are; the arithmetic of an update is the same at any rate.
LEARNING_RATE = 1e-6
_RUN_LIMIT_S = 600.0


@dataclass(frozen=True)
class Load:
    """What both are given, and how far ours may run ahead (steps)."""

    name: str
    never_ends: bool
    slow_reward: bool
    max_staleness: int
    goal: float


LOADS = (
    Load("natural", never_ends=False, slow_reward=False, max_staleness=2, goal=1.2),
    Load("full", never_ends=True, slow_reward=False, max_staleness=2, goal=1.2),
    Load("slow", never_ends=False, slow_reward=True, max_staleness=8, goal=5.0),
)


@dataclass(frozen=True)
class Steps:
    """How many steps a run makes, and which of them are measured.

    first: before the window: start-up, compilation, and what was generated while nothing else ran. last: after it.
    """

    first: int
    measured: int
    last: int = 0

    @classmethod
    def of_ours(cls, max_staleness: int) -> Steps:
        """Leaves out the beginning, and the end in which the actor has no more to do and the learner the machine."""
        return cls(first=max_staleness + 4, measured=max(20, 3 * (max_staleness + 1)), last=max_staleness + 2)

    @property
    def total(self) -> int:
        return self.first + self.measured + self.last


OF_TRL = Steps(first=3, measured=10)


@dataclass(frozen=True)
class Recorded:
    """One run: monotonic seconds at which steps ended, tokens trained on in each, and versions of what ran."""

    ends: Sequence[float]
    tokens: Sequence[int]
    versions: Mapping[str, str]


def make_endless(model: Path, directory: Path) -> Path:
    """A copy of a model whose end token is `<unk>`, which it never samples: every completion has its full length."""
    shutil.copytree(model, directory)
    unknown = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]["<unk>"]
    ends = {"config.json": unknown, "generation_config.json": unknown, "tokenizer_config.json": "<unk>"}
    for name, end in ends.items():
        key = "eos_token" if isinstance(end, str) else "eos_token_id"
        (directory / name).write_text(json.dumps({**json.loads((model / name).read_text()), key: end}))
    return directory


def write_prompts(path: Path) -> Path:
    """The prompts and answers both are given, one JSON object a line."""
    rows = load_rows(PROMPTS)[0]
    path.write_text("".join(json.dumps({"prompt": row.prompt, "answer": row.columns["answer"]}) + "\n" for row in rows))
    return path


def our_config(load: Load, model: Path, prompts: Path, output_dir: Path) -> Config:
    """Everything that is not a default."""
    judge = "slow_similarity" if load.slow_reward else "similarity"
    config = validated(
        {
            "name": "ours",
            "output_dir": str(output_dir),
            "model": str(model),
            "max_steps": Steps.of_ours(load.max_staleness).total,
            "data": {"source": str(prompts), "held_out": 0},
            "generation": {"group_size": GROUP_SIZE, "max_completion_length": MAX_NEW_TOKENS},
            "engine": {"slots": BATCH_SIZE, "threads": 1},
            "rewards": {"functions": [f"async_rlhf.experiments.throughput.judges:{judge}"]},
            "scoring": {"max_concurrency": 1024},
            "queue": {"max_staleness": load.max_staleness},
            "learner": {"batch_size": BATCH_SIZE, "learning_rate": LEARNING_RATE, "threads": 1},
            "checkpoint": {"save_every": 1_000_000},  # TRL saves nothing; ours saves after its last step
            "evaluation": {"at_start": False, "at_end": False},
        }
    )
    check(config)
    return config


def run_ours(load: Load, model: Path, prompts: Path, directory: Path) -> Recorded:
    """One run of ours, watched from outside: a step ends when its metrics are written (seen within 10 ms)."""
    config = our_config(load, model, prompts, directory)
    tail, ends, tokens = Tail(RunDir(config.run_dir).metrics), list[float](), list[int]()
    with ThreadPoolExecutor(max_workers=1) as executor:
        running = executor.submit(run, config, quiet=True)
        while not running.done():
            for record in tail.read():
                ends.append(time.monotonic())
                tokens.append(record["num_tokens"])
            time.sleep(0.01)
        running.result()
    return Recorded(ends, tokens, {})


def trl_process_environment(threads: int) -> dict[str, str]:
    """Variables of a process of TRL's: no network, and as many threads as ours has."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}


def run_trl(python: Path, load: Load, model: Path, prompts: Path, directory: Path) -> Recorded:
    """One run of TRL's in a process of its own. Raises RuntimeError with the end of what it wrote when it fails."""
    spec, result, log = (directory / name for name in ("spec.json", "result.json", "trl.log"))
    asked = {
        "model": str(model),
        "prompts": str(prompts),
        "output_dir": str(directory / "trl"),
        "steps": OF_TRL.total,
        "group_size": GROUP_SIZE,
        "batch_size": BATCH_SIZE,
        "max_completion_length": MAX_NEW_TOKENS,
        "learning_rate": LEARNING_RATE,
        "threads": THREADS,
        "slow_reward": load.slow_reward,
    }
    spec.write_text(json.dumps(asked))
    command = [str(python), "-m", "async_rlhf.experiments.throughput.trl_side", "pipeline", str(spec), str(result)]
    with log.open("wb") as file:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=trl_process_environment(THREADS),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=_RUN_LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"TRL's run ended with code {done.returncode}: {log.read_text(errors='replace')[-2000:]}")
    return Recorded(**json.loads(result.read_text()))
