"""What does it cost a run that it is watched? Its steps a second with ten viewers of its page, and without, in turns.

One quick run, without evaluations, and one page beside it, which reads nothing while nothing asks. A viewer asks every two
seconds in turn for what an open page asks for, and for what Prometheus does. Viewers are threads of the benchmark: on a machine
without a core to spare they take from the run too, which browsers elsewhere do not, so their processor time is told apart.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from async_rlhf.experiments.soak.soak import command, open_page, viewers
from async_rlhf.experiments.throughput.harness import Bench, Row, alternate
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import Tail, is_step

GOAL = 0.99
_VIEWERS = 10
_START_LIMIT_S = _END_LIMIT_S = 120.0
_SETTINGS = {
    "max_steps": 1_000_000,
    "evaluation.every": "none",
    "evaluation.at_start": "false",
    "evaluation.at_end": "false",
    "generation.max_completion_length": 4,
}


def watching(bench: Bench) -> Iterator[Row]:
    """Steps a second of a run with ten viewers of its page, and without."""
    seconds = bench.size(20.0, 2.0)
    with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as folder, ExitStack() as held:
        run, output = RunDir(Path(folder) / "quick"), held.enter_context((Path(folder) / "output").open("wb"))
        sets = [word for key, value in {"output_dir": folder, **_SETTINGS}.items() for word in ("--set", f"{key}={value}")]
        train = held.enter_context(command(["train", "quick", *sets], output))
        steps = _Steps(run)
        by = time.monotonic() + _START_LIMIT_S
        while steps.added() == 0:
            if train.poll() is not None or time.monotonic() > by:
                raise RuntimeError(f"the run makes no steps: {(Path(folder) / 'output').read_text()[-2000:]}")
            time.sleep(0.1)
        page, address = held.enter_context(open_page(run.path))
        window = partial(_window, steps, (psutil.Process(page.pid), psutil.Process()), address, seconds)
        found = alternate(
            {"watched": partial(window, _VIEWERS), "alone": partial(window, 0)}, bench.num_turns(9), bench.size(1, 0)
        )
    rates = {name: [rate for rate, _ in values] for name, values in found.items()}
    page_cores, viewers_cores = (median(each) for each in zip(*(cores for _, cores in found["watched"]), strict=True))
    figures = {"page_cores": page_cores, "viewers_cores": viewers_cores}
    yield Row.of("ten viewers", rates, "steps/s", at_least=GOAL, figures=figures)


class _Steps:
    def __init__(self, run: RunDir) -> None:
        self._tail = Tail(run.metrics)

    def added(self) -> int:
        """Steps since the last call."""
        return sum(map(is_step, self._tail.rest()))


def _window(
    steps: _Steps, processes: Sequence[psutil.Process], address: str, seconds: float, count: int
) -> tuple[float, list[float]]:
    """Steps a second, and the processor time a second of each of the processes."""
    with viewers(address, count, Counter()):
        steps.added()
        began, busy = time.monotonic(), [sum(each.cpu_times()[:2]) for each in processes]
        time.sleep(seconds)
        added, took = steps.added(), time.monotonic() - began
        spent = [sum(each.cpu_times()[:2]) - before for each, before in zip(processes, busy, strict=True)]
        return added / took, [each / took for each in spent]
