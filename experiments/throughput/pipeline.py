"""How fast is the whole system next to TRL's GRPOTrainer and AsyncGRPOTrainer? Same model, prompts, sizes and CPU threads, in
turns.

Three loads, each 16 prompts x 8 completions a step of the tiny speller, at most 32 new tokens, float32, 2 threads in
all (GRPOTrainer: 2 in its one process; AsyncGRPOTrainer: 1, and 1 in its vLLM server; ours: 1 in the actor, 1 in the learner):

- natural: completions end where the model ends them, after about 6 tokens.
- full:    the same weights with an end token that is never sampled, so that every completion has 32 tokens.
- slow:    natural, with an asynchronous reward that sleeps log-normally (mean 0.25 s, cut at 3 s).

Against AsyncGRPOTrainer both have the same bound on staleness, and ours runs twice: with its own engine and with vLLM. On a
GPU (`--device cuda`) all processes of a side share it.
A rate is completions trained on per second of wall time between the ends of two steps in the middle of a run, where
nothing starts and nothing runs out.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.api import train as run
from async_rlhf.experiments.throughput.harness import MODEL, Bench, BenchmarkRow, Device, alternate, await_quiet
from async_rlhf.experiments.throughput.judges import BATCH_SIZE
from async_rlhf.experiments.throughput.trl_async import check_server, vllm_server
from async_rlhf.experiments.throughput.trl_side import check_trl, trl_process
from async_rlhf.run.config import Config
from async_rlhf.run.config_checks import check, check_described
from async_rlhf.run.loading import validated
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import Tail

PROMPTS = DataConfig(source="reasoning_gym:spell_backward", options={"min_word_len": 3, "max_word_len": 6}, held_out=0)
GROUP_SIZE, MAX_NEW_TOKENS, THREADS = 8, 32, 2
# So small that lengths stay what they are; the arithmetic of an update is the same at any rate.
LEARNING_RATE = 1e-6
_QUIET_LIMIT_S = 60.0
Name = Literal["natural", "full", "slow"]
Engine = Literal["torch", "vllm"]


@dataclass(frozen=True)
class PipelineLoad:
    """The load of both sides, how far an asynchronous system may run ahead (steps), and the least ratio wanted."""

    name: Name
    max_staleness: int
    goal: float
    against: Literal["GRPOTrainer", "AsyncGRPOTrainer"] = "GRPOTrainer"


LOADS = (PipelineLoad("natural", max_staleness=2, goal=1.2), PipelineLoad("full", max_staleness=2, goal=1.2),
         PipelineLoad("slow", max_staleness=8, goal=5.0))  # fmt: skip
ASYNCHRONOUS = tuple(replace(load, goal=1.2, against="AsyncGRPOTrainer") for load in LOADS)


def pipeline(bench: Bench) -> Iterator[BenchmarkRow]:
    """Compare the whole system with TRL's GRPOTrainer, in completions a second."""
    check_trl()
    yield from _compared(LOADS, bench)


def asynchronous(bench: Bench) -> Iterator[BenchmarkRow]:
    """Compare the whole system with TRL's AsyncGRPOTrainer, in completions a second."""
    check_trl()
    check_server()
    yield from _compared(ASYNCHRONOUS, bench)


def _compared(loads: Sequence[PipelineLoad], bench: Bench) -> Iterator[BenchmarkRow]:
    for each in loads:
        if bench.load in each.name and (bench.load or each is loads[0] or not bench.small):
            with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
                yield compare(each, bench, Path(directory))


def compare(load: PipelineLoad, bench: Bench, directory: Path) -> BenchmarkRow:
    """In turns without one to warm up: a run starts anew, and its first steps are not in the window."""
    prompts = write_prompts(directory / "prompts.jsonl")
    model = make_endless(MODEL, directory / "endless") if load.name == "full" else MODEL
    figures = defaultdict[str, list[float]](list)

    def side(name: str, steps: MeasuredSteps, run: Callable[[Path], Recorded]) -> Callable[[], float]:
        def one() -> float:
            place = directory / f"{name}-{len(figures[f'{name}_mean_length'])}"
            place.mkdir()
            await_quiet(0.0 if bench.small else _QUIET_LIMIT_S)
            recorded = run(place)
            rate, length = in_window(recorded, steps)
            figures[f"{name}_mean_length"].append(length)
            if recorded.attention:
                figures["trl_attention_forward_share"].append(share_of_attention(recorded, steps))
            return rate

        return one

    def ours(engine: Engine) -> Callable[[Path], Recorded]:
        return lambda place: run_ours(our_config(load, model, prompts, place, engine, bench.device))

    is_asynchronous, steps = load.against == "AsyncGRPOTrainer", MeasuredSteps.of_asynchronous(load.max_staleness)
    sides = {
        "ours": side("ours", steps, ours("torch")),
        "trl": side("trl", steps_of_trl(load), lambda place: run_trl(load, model, prompts, place, bench.device)),
    }
    if is_asynchronous:
        sides["ours_vllm"] = side("ours_vllm", steps, ours("vllm"))
    rates = alternate(sides, bench.num_turns(2), warm_up=0)
    settings = our_config(load, model, prompts, directory)
    shown = {name: statistics.median(values) for name, values in figures.items()}
    if is_asynchronous:
        shown["ours_vllm_over_trl"] = statistics.median(a / b for a, b in zip(rates["ours_vllm"], rates["trl"], strict=True))
    shown |= {"max_staleness": settings.queue.max_staleness, "max_concurrency": settings.scoring.max_concurrency}
    return BenchmarkRow.of(load.name, rates, "samples/s", at_least=load.goal, figures=shown)


class MeasuredSteps(NamedTuple):
    """How many steps a run makes, and which of them are measured.

    first: before the window: start-up, compilation, and what was generated while nothing else ran. last: after it.
    """

    first: int
    measured: int
    last: int = 0

    @classmethod
    def of_asynchronous(cls, max_staleness: int) -> MeasuredSteps:
        """Leaves out the beginning, and the end in which the actor has no more to do and the learner the machine."""
        return cls(first=max_staleness + 4, measured=max(20, 3 * (max_staleness + 1)), last=max_staleness + 2)


OF_TRL = MeasuredSteps(first=3, measured=10)


def steps_of_trl(load: PipelineLoad) -> MeasuredSteps:
    """AsyncGRPOTrainer scores one group after another: with a slow reward as many steps as ours would take half an hour."""
    is_long = load.against == "AsyncGRPOTrainer" and load.name != "slow"
    return MeasuredSteps.of_asynchronous(load.max_staleness) if is_long else OF_TRL


class Recorded(NamedTuple):
    """One run: monotonic seconds at which steps ended, and tokens trained on in each. attention: seconds of attention's forward
    pass until then, of a trainer that does not bring its own."""

    ends: Sequence[float]
    tokens: Sequence[float]
    attention: Sequence[float] = ()


def in_window(run: Recorded, steps: MeasuredSteps) -> tuple[float, float]:
    """Completions per second from the end of step `first` to the end of step `first + measured`, and their mean length in
    tokens. Raises ValueError when the run ended inside the window."""
    until, completions = steps.first + steps.measured, steps.measured * BATCH_SIZE
    if len(run.ends) < until:
        raise ValueError(f"the measured window ends with step {until}, the run had {len(run.ends)} steps")
    return completions / (run.ends[until - 1] - run.ends[steps.first - 1]), sum(run.tokens[steps.first : until]) / completions


def share_of_attention(run: Recorded, steps: MeasuredSteps) -> float:
    """Attention's share of the window's seconds."""
    first, last = steps.first - 1, steps.first + steps.measured - 1
    return (run.attention[last] - run.attention[first]) / (run.ends[last] - run.ends[first])


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


def our_config(
    load: PipelineLoad, model: Path, prompts: Path, output_dir: Path, engine: Engine = "torch", device: Device = "cpu"
) -> Config:
    """Everything that is not a default."""
    judge = "slow_similarity" if load.name == "slow" else "similarity"
    config = validated(
        {
            "name": "ours",
            "output_dir": str(output_dir),
            "model": str(model),
            "max_steps": sum(MeasuredSteps.of_asynchronous(load.max_staleness)),
            "data": {"source": str(prompts), "held_out": 0},
            "generation": {"group_size": GROUP_SIZE, "max_completion_length": MAX_NEW_TOKENS},
            "engine": {"kind": engine, "device": device, "slots": BATCH_SIZE, "threads": 1},
            "rewards": {"functions": [f"async_rlhf.experiments.throughput.judges:{judge}"]},
            "scoring": {"max_concurrency": 1024},
            "queue": {"max_staleness": load.max_staleness},
            "learner": {"device": device, "batch_size": BATCH_SIZE, "learning_rate": LEARNING_RATE, "threads": 1},
            "placement": {"colocate": device == "cuda"},
            "checkpoint": {"save_every": 1_000_000},  # TRL saves nothing; ours saves after its last step
            "evaluation": {"at_start": False, "at_end": False},
        }
    )
    check(config)
    check_described(config)
    return config


def run_ours(config: Config) -> Recorded:
    """One run of ours, watched from outside: a step ends when its metrics are written (seen within 10 ms)."""
    tail, ends, tokens = Tail(RunDir(config.run_dir).metrics), list[float](), list[int]()
    with ThreadPoolExecutor(max_workers=1) as executor:
        running = executor.submit(run, config, quiet=True)
        while not running.done():
            for record in tail.read():
                ends.append(time.monotonic())
                tokens.append(record["num_tokens"])
            time.sleep(0.01)
        running.result()
    return Recorded(ends, tokens)


def run_trl(load: PipelineLoad, model: Path, prompts: Path, directory: Path, device: Device = "cpu") -> Recorded:
    """One run of TRL's in a process of its own; the asynchronous one beside a vLLM server of its own."""
    spec = {
        "model": str(model),
        "prompts": str(prompts),
        "output_dir": str(directory / "trl"),
        "steps": sum(steps_of_trl(load)),
        "group_size": GROUP_SIZE,
        "batch_size": BATCH_SIZE,
        "max_completion_length": MAX_NEW_TOKENS,
        "learning_rate": LEARNING_RATE,
        "threads": THREADS,
        "device": device,
        "slow_reward": load.name == "slow",
    }
    if load.against == "GRPOTrainer":
        with trl_process("pipeline", spec) as step:
            return Recorded(**step())
    half = THREADS // 2
    with vllm_server(str(model), half, device, directory / "server.log") as server:
        spec |= {"server": server, "threads": half, "max_staleness": load.max_staleness}
        with trl_process("asynchronous", spec) as step:
            return Recorded(**step())
