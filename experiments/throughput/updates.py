"""What does a weight update cost the engine, and what does sharing a prompt save? One process, no other program.

- update: 64 sequences (prompts of 64 tokens, completions of 20 to 300) decode and are replaced as they end; a new weight
  set is loaded again and again. The *gap* is the time from the last token before an update to the first one after it;
  `all on` the time until every slot puts out a token at every step again; `lost` the tokens that the slots would have
  put out until then at the pace of steps without an update, less those they did.
- first token: a prompt of 512 tokens, 8 members: time from submission until all members have their first token, when
  submitted together (the prompt is computed once) and each for itself.

Run as `python -m async_rlhf.experiments.throughput.updates [--json]`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, get_args

import numpy as np
import torch
import typer

from async_rlhf.actors.engine import OnUpdate, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.experiments.throughput.engine import make_model

SEQUENCES, PROMPT_TOKENS, STEPS_BETWEEN = 64, 64, 40
COMPLETION_TOKENS = 20, 300
LONG_PROMPT, MEMBERS = 512, 8


@dataclass(frozen=True)
class Gap:
    """Milliseconds; medians unless said otherwise. `step`: between two tokens without an update."""

    mode: str
    updates: int
    step_ms: float
    gap_p50_ms: float
    gap_p99_ms: float


@dataclass(frozen=True)
class Update(Gap):
    """Milliseconds, and tokens; medians unless said otherwise."""

    all_on_p50_ms: float
    all_on_p99_ms: float
    lost_tokens: int


@dataclass(frozen=True)
class FirstToken:
    """Milliseconds from submission until every member of a group has its first token; medians."""

    prompt_tokens: int
    members: int
    shared_ms: float
    apart_ms: float
    ratio: float


class Busy:
    """An engine whose slots are always taken."""

    def __init__(self, mode: OnUpdate) -> None:
        self.engine = TorchEngine(make_model(), slots=SEQUENCES, max_length=512, on_update=mode)
        self._line = line()

    def step(self) -> tuple[float, int]:
        """Seconds of one step, and tokens it put out."""
        while self.engine.num_unfinished < 2 * SEQUENCES:
            self.engine.submit([next(self._line)])
        began, sampled = time.perf_counter(), self.engine.num_sampled
        self.engine.step()
        return time.perf_counter() - began, self.engine.num_sampled - sampled


def measure_update(mode: OnUpdate, updates: int) -> Update:
    """The same sequences in every mode; the first round warms up."""
    busy, weights = Busy(mode), weights_of(make_model())
    steps, gaps, all_on, lost = list[float](), list[float](), list[float](), list[float]()
    for version in range(updates + 1):
        plain = [busy.step()[0] for _ in range(STEPS_BETWEEN)]
        began = time.perf_counter()
        busy.engine.load_weights(version, weights)
        seconds, tokens = time.perf_counter() - began, 0
        gap: float | None = None
        on = False
        while not on:
            took, put_out = busy.step()
            seconds, tokens = seconds + took, tokens + put_out
            gap = seconds if gap is None and put_out else gap
            on = busy.engine.version == version and put_out == SEQUENCES
        if version and gap is not None:
            steps.append(statistics.median(plain))
            gaps.append(gap)
            all_on.append(seconds)
            lost.append(SEQUENCES * seconds / statistics.median(plain) - tokens)
    return Update(
        mode,
        updates,
        step_ms=round(1000 * statistics.median(steps), 1),
        gap_p50_ms=in_ms(gaps, 50),
        gap_p99_ms=in_ms(gaps, 99),
        all_on_p50_ms=in_ms(all_on, 50),
        all_on_p99_ms=in_ms(all_on, 99),
        lost_tokens=round(statistics.median(lost)),
    )


def measure_first_token(repeats: int) -> FirstToken:
    """In turns, on one engine; the first turn warms up."""
    engine = TorchEngine(make_model(), slots=MEMBERS, max_length=LONG_PROMPT + 16, prefill_tokens=2048)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(repeats + 1):
        for shared in seconds:
            members = [request(n, LONG_PROMPT, 1, prompt=turn) for n in range(MEMBERS)]
            began = time.perf_counter()
            for submission in [members] if shared else [[member] for member in members]:
                engine.submit(submission)
            while engine.num_unfinished:
                engine.step()
            if turn:
                seconds[shared].append(time.perf_counter() - began)
    shared_s, apart_s = statistics.median(seconds[True]), statistics.median(seconds[False])
    return FirstToken(LONG_PROMPT, MEMBERS, round(1000 * shared_s, 1), round(1000 * apart_s, 1), round(apart_s / shared_s, 2))


def request(number: int, num_prompt: int, num_new: int, prompt: int | None = None) -> Request:
    """Number `number`, its prompt drawn by its number unless another is named."""
    ids = np.random.default_rng(number if prompt is None else prompt).integers(1, 100, num_prompt)
    return Request(RolloutKey(number, 0, 0), tuple(ids.tolist()), num_new, 1.0, number)


def line() -> Iterator[Request]:
    """More requests than any run takes, the same each time."""
    lengths = np.random.default_rng(0).integers(*COMPLETION_TOKENS, 100_000).tolist()
    for number, length in enumerate(lengths):
        yield request(number, PROMPT_TOKENS, length)


def weights_of(model: torch.nn.Module) -> dict[str, RawTensor]:
    return {
        name: RawTensor("float32", tuple(parameter.shape), parameter.detach().numpy().tobytes())
        for name, parameter in model.named_parameters()
    }


def in_ms(seconds: Sequence[float], percent: float) -> float:
    """A percentile, in milliseconds."""
    return round(1000 * float(np.percentile(seconds, percent)), 1)


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of tables.")] = False,
    updates: Annotated[int, typer.Option(min=1, help="Updates measured in each mode.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Timed turns of the first token.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Measure the gap at a weight update in each mode, and the first token with and without a shared prompt."""
    torch.set_num_threads(threads)
    for mode in get_args(OnUpdate):
        show(measure_update(mode, updates), as_json)
    show(measure_first_token(repeats), as_json)


def show(result: Gap | FirstToken, as_json: bool) -> None:
    values = asdict(result)
    typer.echo(json.dumps(values) if as_json else "  ".join(f"{name}={value}" for name, value in values.items()))


if __name__ == "__main__":
    typer.run(main)
