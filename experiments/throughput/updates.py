"""What does a weight update cost the engine, and what does sharing a prompt save? One process, no other program.

- update: 64 sequences (prompts of 64 tokens, completions of 20 to 300) decode and are replaced as they end; a new weight
  set is loaded again and again. The *gap* is the time from the last token before an update to the first one after it;
  `all_on` the time until every slot puts out a token at every step again; `lost` the tokens that the slots would have
  put out until then at the pace of steps without an update, less those they did.
- first token: a prompt of 512 tokens, 8 members: time from submission until all members have their first token, when
  submitted together (the prompt is computed once) and each for itself.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, get_args

import numpy as np
import torch
import typer

from async_rlhf.actors.engine import OnUpdate, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.experiments.throughput.engine import ThreadsOption, make_model
from async_rlhf.experiments.throughput.harness import Bench, Row, alternate, timed

SEQUENCES, PROMPT_TOKENS, STEPS_BETWEEN = 64, 64, 40
COMPLETION_TOKENS = 20, 300
LONG_PROMPT, MEMBERS = 512, 8

UpdatesOption = Annotated[int | None, typer.Option("--updates", min=1, help="Updates measured in each mode.")]


def updates(bench: Bench, updates: UpdatesOption = None, threads: ThreadsOption = 1) -> Iterator[Row]:
    """Measure the gap at a weight update in each mode, and the first token with and without a shared prompt, in ms."""
    torch.set_num_threads(threads)
    for mode in get_args(OnUpdate):
        yield measure_update(mode, updates or bench.num_turns(40)).row()
    yield measure_first_token(bench.num_turns(5))


class Update:
    """Updates in one mode, in seconds each: the step without an update, the gap, and further times or counts by name."""

    def __init__(self, mode: OnUpdate) -> None:
        self.mode = mode
        self.step_s, self.gap_s = list[float](), list[float]()
        self.further: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, step_s: float, gap_s: float, lost_tokens: float | None = None, **seconds: float) -> None:
        """One update."""
        self.step_s.append(step_s)
        self.gap_s.append(gap_s)
        for name, value in seconds.items():
            self.further[name].append(value)
        if lost_tokens is not None:
            self.further["lost_tokens"].append(lost_tokens)

    def row(self) -> Row:
        """Milliseconds and tokens: medians, and 99th percentiles of times."""
        sides = {"gap": [1000 * each for each in self.gap_s], "step": [1000 * each for each in self.step_s]}
        figures = {"gap_p99_ms": 1000 * float(np.percentile(self.gap_s, 99))}
        for name, values in self.further.items():
            if name == "lost_tokens":
                figures[name] = round(statistics.median(values))
            else:
                figures |= {f"{name}_p{p}_ms": 1000 * float(np.percentile(values, p)) for p in (50, 99)}
        return Row.of(self.mode, sides, "ms", figures=figures)


class Busy:
    """An engine whose slots are always taken."""

    def __init__(self, mode: OnUpdate) -> None:
        self.engine = TorchEngine(make_model(), slots=SEQUENCES, max_length=512, on_update=mode)
        self._requests = endless_requests()

    def step(self) -> tuple[float, int]:
        """Seconds of one step, and tokens it put out."""
        while self.engine.num_unfinished < 2 * SEQUENCES:
            self.engine.submit([next(self._requests)])
        began, sampled = time.perf_counter(), self.engine.num_sampled
        self.engine.step()
        return time.perf_counter() - began, self.engine.num_sampled - sampled


def measure_update(mode: OnUpdate, updates: int) -> Update:
    """The same sequences in every mode; the first round warms up."""
    busy, weights, found = Busy(mode), weights_of(make_model()), Update(mode)
    for version in range(updates + 1):
        plain = statistics.median(busy.step()[0] for _ in range(STEPS_BETWEEN))
        began = time.perf_counter()
        busy.engine.load_weights(version, weights)
        seconds, tokens = time.perf_counter() - began, 0
        gap, on = 0.0, False
        while not on:
            took, put_out = busy.step()
            seconds, tokens = seconds + took, tokens + put_out
            gap = seconds if not gap and put_out else gap
            on = busy.engine.version == version and put_out == SEQUENCES
        if version:
            found.add(plain, gap, SEQUENCES * seconds / plain - tokens, all_on=seconds)
    return found


def measure_first_token(turns: int) -> Row:
    """Both in turns on one engine, each turn with a prompt of its own."""
    engine = TorchEngine(make_model(), slots=MEMBERS, max_length=LONG_PROMPT + 16, prefill_tokens=2048)
    prompt = 0

    def submit(together: bool) -> None:
        nonlocal prompt
        prompt += 1
        members = [request(n, LONG_PROMPT, 1, prompt) for n in range(MEMBERS)]
        for submission in [members] if together else [[member] for member in members]:
            engine.submit(submission)
        while engine.num_unfinished:
            engine.step()

    seconds = alternate({"apart": timed(lambda: submit(False)), "shared": timed(lambda: submit(True))}, turns)
    sides = {name: [1000 * each for each in values] for name, values in seconds.items()}
    return Row.of(f"first token of {MEMBERS}, prompt of {LONG_PROMPT}", sides, "ms")


def request(number: int, num_prompt: int, num_new: int, prompt: int | None = None) -> Request:
    """Number `number`, its prompt drawn by its number unless another is named."""
    ids = np.random.default_rng(number if prompt is None else prompt).integers(1, 100, num_prompt)
    return Request(RolloutKey(number, 0, 0), tuple(ids.tolist()), num_new, Sampling(), number)


def endless_requests() -> Iterator[Request]:
    """More requests than any run takes, the same each time."""
    lengths = np.random.default_rng(0).integers(*COMPLETION_TOKENS, 100_000).tolist()
    for number, length in enumerate(lengths):
        yield request(number, PROMPT_TOKENS, length)


def weights_of(model: torch.nn.Module) -> dict[str, RawTensor]:
    """The parameters in float32."""
    return {
        name: RawTensor("float32", tuple(parameter.shape), parameter.detach().numpy().tobytes())
        for name, parameter in model.named_parameters()
    }
