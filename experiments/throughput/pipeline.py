"""How fast is the whole system next to TRL's GRPOTrainer? Same model, prompts, sizes and CPU threads, in turns.

Three loads, each 16 prompts x 8 completions a step of the tiny speller, at most 32 new tokens, float32, 2 threads in
all (TRL: 2 in its one process; ours: 1 in the actor, 1 in the learner):

- natural: completions end where the model ends them, after about 6 tokens.
- full:    the same weights with an end token that is never sampled, so that every completion has 32 tokens.
- slow:    natural, with an asynchronous reward that sleeps log-normally (mean 0.25 s, cut at 3 s).

A rate is completions trained on per second of wall time between the ends of two steps in the middle of a run, where
nothing starts and nothing runs out. Run as `python -m async_rlhf.experiments.throughput.pipeline [--json]`.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from async_rlhf.experiments.throughput.judges import BATCH_SIZE
from async_rlhf.experiments.throughput.sides import (
    LOADS,
    MODEL,
    OF_TRL,
    ROOT,
    Load,
    Recorded,
    Steps,
    make_endless,
    our_config,
    run_ours,
    run_trl,
    write_prompts,
)
from async_rlhf.experiments.throughput.trl_environment import SkippedError, trl_python

# Share of all cores' time that others may use: above it, the others are measured too.
QUIET = 0.05
_QUIET_LIMIT_S = 60.0


@dataclass(frozen=True)
class Comparison:
    """One load: completions per second (medians over the rounds), and the median of the rounds' ratios.

    foreign: largest share of the machine that processes of neither system used while one was measured.
    """

    load: str
    trl_samples_per_s: float
    ours_samples_per_s: float
    ratio: float
    goal: float
    ratios: tuple[float, ...]
    trl_mean_length: float
    ours_mean_length: float
    foreign: float
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    cores: int


def window_rate(ends: Sequence[float], steps: Steps, batch_size: int) -> float:
    """Completions per second from the end of step `first` to the end of step `first + measured`.

    ends: monotonic seconds at which each step ended. Raises ValueError when the run ended inside the window.
    """
    until = steps.first + steps.measured
    if len(ends) < until:
        raise ValueError(f"the measured window ends with step {until}, the run had {len(ends)} steps")
    return steps.measured * batch_size / (ends[until - 1] - ends[steps.first - 1])


def mean_length(tokens: Sequence[int], steps: Steps, batch_size: int) -> float:
    """Mean tokens of a completion in the measured window."""
    measured = tokens[steps.first : steps.first + steps.measured]
    return sum(measured) / (len(measured) * batch_size)


def await_quiet() -> None:
    """Wait until the machine does little else, a minute at most; what it does all the same is in the result."""
    deadline = time.monotonic() + _QUIET_LIMIT_S
    while psutil.cpu_percent(interval=1.0) > 100 * QUIET and time.monotonic() < deadline:
        pass


def watched(work: Callable[[], Recorded]) -> tuple[Recorded, float]:
    """Do it, and find out which share of all cores' time went to processes that are not this one's children."""
    began, busy, own = time.monotonic(), _busy_s(), _own_s()
    recorded = work()
    available = (psutil.cpu_count() or 1) * (time.monotonic() - began)
    return recorded, max(0.0, (_busy_s() - busy) - (_own_s() - own)) / available


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def compare(load: Load, rounds: int, python: Path, directory: Path, tell: Callable[[str], None]) -> Comparison:
    """Both in turns, so that a slow moment of the machine falls on both."""
    prompts = write_prompts(directory / "prompts.jsonl")
    model = make_endless(MODEL, directory / "endless") if load.never_ends else MODEL
    ours = Steps.of_ours(load.max_staleness)
    rates: dict[str, list[float]] = {"trl": [], "ours": []}
    lengths: dict[str, list[float]] = {"trl": [], "ours": []}
    foreign, versions = 0.0, dict[str, str]()
    sides: dict[str, tuple[Steps, Callable[[Path], Recorded]]] = {
        "trl": (OF_TRL, lambda place: run_trl(python, load, model, prompts, place)),
        "ours": (ours, lambda place: run_ours(load, model, prompts, place)),
    }
    for turn in range(rounds):
        for name, (steps, side) in sides.items():
            place = directory / f"{name}-{turn}"
            place.mkdir()
            await_quiet()
            recorded, others = watched(lambda side=side, place=place: side(place))  # type: ignore[misc]
            rates[name].append(window_rate(recorded.ends, steps, BATCH_SIZE))
            lengths[name].append(mean_length(recorded.tokens, steps, BATCH_SIZE))
            foreign = max(foreign, others)
            versions |= recorded.versions
            tell(f"{load.name} round {turn + 1} {name}: {rates[name][-1]:.0f} samples/s, others used {others:.0%}")
    ratios = [mine / theirs for mine, theirs in zip(rates["ours"], rates["trl"], strict=True)]
    chosen = our_config(load, model, prompts, directory)
    return Comparison(
        load=load.name,
        trl_samples_per_s=round(statistics.median(rates["trl"]), 1),
        ours_samples_per_s=round(statistics.median(rates["ours"]), 1),
        ratio=round(statistics.median(ratios), 2),
        goal=load.goal,
        ratios=tuple(round(ratio, 2) for ratio in ratios),
        trl_mean_length=round(statistics.median(lengths["trl"]), 2),
        ours_mean_length=round(statistics.median(lengths["ours"]), 2),
        foreign=round(foreign, 3),
        settings={
            "queue.max_staleness": chosen.queue.max_staleness,
            "scoring.max_concurrency": chosen.scoring.max_concurrency,
            "engine.slots": chosen.engine.slots,
            "ours measured steps": ours.measured,
            "trl measured steps": OF_TRL.measured,
        },
        versions=versions,
        cores=psutil.cpu_count() or 1,
    )


def show(result: Comparison) -> str:
    verdict = "reached" if result.ratio >= result.goal else "missed"
    loud = f"   not quiet: others used {result.foreign:.0%}, measure again" if result.foreign > QUIET else ""
    return (
        f"{result.load:<9}{result.trl_mean_length:>8.1f}{result.trl_samples_per_s:>15.1f}{result.ours_samples_per_s:>16.1f}"
        f"{result.ratio:>8.2f}{result.goal:>7.1f} {verdict}{loud}\n"
        f"{'':<9}with {', '.join(f'{name} = {value}' for name, value in result.settings.items())}"
    )


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per load instead of a table.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Times each is run, in turns.")] = 2,
    load: Annotated[list[str] | None, typer.Option(help="Only this load: natural, full or slow; may be repeated.")] = None,
    require_trl: Annotated[bool, typer.Option(help="Fail when TRL cannot be installed, rather than skip.")] = False,
) -> None:
    """Compare the whole system with TRL's GRPOTrainer (about five minutes)."""
    loads = [each for each in LOADS if load is None or each.name in load]
    if unknown := set(load or ()) - {each.name for each in LOADS}:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(each.name for each in LOADS)}")
    try:
        python = trl_python(ROOT)
    except SkippedError as reason:
        typer.echo(f"pipeline benchmark skipped: {reason}", err=True)
        raise typer.Exit(1 if require_trl else 0) from reason
    if not as_json:
        typer.echo(f"{'load':<9}{'tokens':>8}{'TRL samples/s':>15}{'ours samples/s':>16}{'ratio':>8}{'goal':>7}")
    for each in loads:
        with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
            result = compare(each, rounds, python, Path(directory), lambda line: typer.echo(line, err=True))
        typer.echo(json.dumps(asdict(result)) if as_json else show(result))


if __name__ == "__main__":
    typer.run(main)
