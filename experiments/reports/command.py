"""`async-rlhf report DIR`: the pages of a sweep or of one run, made again from what is on disk alone.

Of a run, live ones too: its numbers, its curves, the ages that really occurred, and where its time went, as report.md and
report.html with the picture inside, plot.png and plot.svg in the run directory. Without matplotlib everything but the picture.

Called by the command line, through the entry point in pyproject.toml.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.page import plain, table, write_page
from async_rlhf.experiments.staleness import report as of_sweep
from async_rlhf.experiments.staleness.archive import holds_cells, read_sweep
from async_rlhf.experiments.staleness.cells import CellResult, mean, read_run
from async_rlhf.experiments.staleness.checks import checks_of_each, listed
from async_rlhf.inspect.plot import Curves, picture
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir, no_run

# Rows of the table of curves; a longer one is no table.
_PARTS = 10
_LEDGER = ("credited", "trained", "queued", "in_flight", "leased", "stale", "filtered", "failed", "quarantined")


def report(directory: Path, say: Callable[[str], None]) -> list[Path]:
    """What was written: tables and pictures, then report.md and report.html.

    directory: of a sweep's results (with cells/*.json), or of one run, which may live. Raises ConfigError for any other, for a
    run without a step, and where nothing can be written; DamagedError.
    """
    try:
        if holds_cells(directory):
            return of_sweep.write(read_sweep(directory), directory, say)
        if (directory / "config.toml").exists():
            return _write_run(RunDir.existing(directory), say)
    except OSError as error:
        raise ConfigError(f"the report of {str(directory)!r} cannot be written: {error}") from error
    raise ConfigError(f"{no_run(directory)}, and no directory of a sweep (it has no cells/*.json)")


def _write_run(run: RunDir, say: Callable[[str], None]) -> list[Path]:
    """What was written, the pages last. Raises ConfigError for a run without a step, OSError."""
    result = read_run(run)
    command, end = shlex.join(["async-rlhf", "report", str(run.path)]), run.end()
    how = "it lives" if run.is_alive() else "it was killed, or its end is not recorded" if end is None else end.reason

    def draw() -> dict[str, Any]:
        curves = Curves(result.cell, run.read_metrics(), run.read_evaluations(), Reading(run).changed())
        return {"plot": picture([curves], f"Run {result.cell}. {_made(result)}\n{command}")}

    return write_page(run.path, lambda drawn: render(result, command, how, drawn.get("plot")), draw, say)


def render(result: CellResult, command: str, how: str, drawn: str | None) -> str:
    """The page. how: how the run ended; drawn: the picture beside it."""
    parts = [
        f"# Run {result.cell}",
        f"    {command}",
        f"{_made(result)} Settings {result.whole}; {', '.join(result.code)}. How it ended: {plain(how)}.",
        *(
            [f"![Reward, evaluations, staleness, lengths, divergences, ratios and idle time over steps]({drawn})"]
            if drawn
            else []
        ),
        "## Numbers",
        table([["number", "value"], *([name, value] for name, value in _numbers(result) if value)]),
        "## Curves",
        f"Means over {min(_PARTS, result.steps)} parts of the run; samples, tokens and seconds are those at the end of a part.",
        table(_curves(result)),
        "## Realised staleness",
        "Age of the trained tokens in learner steps.",
        table([["age", "tokens", "share"], *_ages(result)]),
        *_groups(result),
        "## Checks",
        listed(checks_of_each([result])),
    ]
    return "\n\n".join(parts) + "\n"


def _made(result: CellResult) -> str:
    tokens = f"{result.trained_tokens:,}"
    return f"Seed {result.seed}; {result.steps} steps; {result.trained_samples:,} samples and {tokens} tokens trained on."


def _numbers(result: CellResult) -> Iterator[tuple[str, str]]:
    yield "held-out reward, start", _shown(result.held_out_start.reward)
    yield "held-out reward, end", _shown(result.held_out_end.reward)
    for when, evaluation in (("start", result.held_out_start), ("end", result.held_out_end)):
        if evaluation.accuracy is not None:
            yield f"held-out accuracy, {when}", _shown(evaluation.accuracy)
        for name, score in evaluation.scores.items() if len(evaluation.scores) > 1 else ():
            yield f"held-out {name}, {when}", _shown(score)
    yield "reward, last quarter", _shown(result.reward_last_quarter)
    yield "area under the reward, as a mean height", _shown(result.reward_area)
    yield "staleness, mean (max, bound) [steps]", f"{result.staleness_mean:.2f} ({result.staleness_max}, {result.bound})"
    yield "effective sample size, share of tokens", _shown(result.is_ess_mean)
    yield "largest ratio learner / sampler", _shown(result.is_ratio_max)
    yield "clipped, share of tokens", _shown(result.clip_ratio_mean)
    yield "KL to the sampling policy [nats a token]", _shown(result.kl_behaviour_mean)
    yield "KL to the reference, last quarter [nats a token]", _shown(result.kl_reference_end)
    yield "idle share of the learner", _shown(result.mean_of("idle/learner"))
    yield "idle share of the actors", _shown(result.mean_of("idle/actor"))
    yield "seconds, sum of the steps' times", f"{result.wall_s:.1f}"
    yield "samples/s after the first step", _shown(result.samples_per_s)
    yield "tokens generated", "" if result.generated_tokens is None else f"{result.generated_tokens:,}"


def _shown(value: float | None) -> str:
    """Nothing for what was not measured."""
    return "" if value is None else f"{value:,.3f}"


def _curves(result: CellResult) -> Iterator[Sequence[str]]:
    names = [name for name in ("staleness/mean", "is/ess", "kl/behaviour", "kl/reference", "completions/mean_length")
             if name in result.curves]  # fmt: skip
    yield ["steps", "samples", "tokens", "seconds", "reward", *(f"`{name}`" for name in names)]
    tokens = result.tokens or (0.0,) * result.steps
    count = min(_PARTS, result.steps)
    for part in range(count):
        begin, end = part * result.steps // count, (part + 1) * result.steps // count
        means = [mean(values[begin:end]) for values in (result.rewards, *(result.curves[name] for name in names))]
        steps = f"{begin + 1} to {end}" if end > begin + 1 else f"{end}"
        last = (f"{result.samples[end - 1]:,.0f}", f"{tokens[end - 1]:,.0f}", f"{result.seconds[end - 1]:,.1f}")
        yield [steps, *last, *("-" if each is None else f"{each:.3f}" for each in means)]


def _ages(result: CellResult) -> Iterator[Sequence[str]]:
    for age, tokens in result.staleness_tokens:
        yield [str(age), f"{tokens:,}", f"{tokens / result.trained_tokens:.1%}".replace("%", " %")]


def _groups(result: CellResult) -> Iterator[str]:
    if result.ledger:
        yield "## What became of the groups"
        yield "Attempts to make a group, by where they are or how they ended."
        known = [word for word in _LEDGER if word in result.ledger]
        yield table([[word.replace("_", " ") for word in known], [f"{result.ledger[word]:,}" for word in known]])
