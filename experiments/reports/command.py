"""`async-rlhf report DIR`: the pages of a sweep or of one run, made again from what is on disk alone.

Of a run, live ones too: its numbers, its curves, the ages that really occurred, and where its time went, as report.md and
report.html with the picture inside, plot.png and plot.svg in the run directory. Without matplotlib everything but the picture.

Called by the command line, through the entry point in pyproject.toml.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.page import plain, table, write_page
from async_rlhf.experiments.staleness import report as of_sweep
from async_rlhf.experiments.staleness.archive import holds_cells, read_sweep
from async_rlhf.experiments.staleness.cells import CellResult, read_run
from async_rlhf.experiments.staleness.checks import checks_of_each, listed
from async_rlhf.experiments.staleness.table import Table
from async_rlhf.inspect.plot import Curves, picture
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir, no_run

# Rows of the table of curves; a longer one is no table.
_PARTS = 10
_LEDGER = ("credited", "trained", "queued", "in_flight", "leased", "stale", "filtered", "failed", "quarantined")


def report(directory: Path, say: Callable[[str], None]) -> list[Path]:
    """The files that were written: tables and pictures, then report.md and report.html.

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
    """The files that were written, the pages last. Raises ConfigError for a run without a step, OSError."""
    table = Table([read_run(run)])
    command, end = shlex.join(["async-rlhf", "report", str(run.path)]), run.end()
    how = "it lives" if run.is_alive() else "it was killed, or its end is not recorded" if end is None else end.reason

    def draw() -> dict[str, Any]:
        name = table.results[0].cell
        curves = Curves(name, run.read_metrics(), run.read_evaluations(), Reading(run).changed())
        return {"plot": picture([curves], f"Run {name}. {_made(table)}\n{command}")}

    return write_page(run.path, lambda drawn: render(table, command, how, drawn.get("plot")), draw, say)


def render(run: Table, command: str, how: str, drawn: str | None) -> str:
    """The page. run: alone in its table; how: how it ended; drawn: the picture beside it."""
    result = run.results[0]
    parts = [
        f"# Run {result.cell}",
        f"    {command}",
        f"{_made(run)} Settings {result.whole}; {', '.join(result.code)}. How it ended: {plain(how)}.",
        *(
            [f"![Reward, evaluations, staleness, lengths, divergences, ratios and idle time over steps]({drawn})"]
            if drawn
            else []
        ),
        "## Numbers",
        table([["number", "value"], *([name, value] for name, value in _numbers(run) if value)]),
        "## Curves",
        f"Means over {min(_PARTS, len(run.steps))} parts of the run; samples, tokens and seconds are those at a part's end.",
        table(_curves(run)),
        "## Realised staleness",
        "Age of the trained tokens in learner steps.",
        table([["age", "tokens", "share"], *_ages(run)]),
        *_groups(result),
        "## Checks",
        listed(checks_of_each([result])),
    ]
    return "\n\n".join(parts) + "\n"


def _made(run: Table) -> str:
    cell = run.cells.loc[0]
    spent = f"{cell['trained_samples']:,} samples and {cell['trained_tokens']:,} tokens trained on"
    return f"Seed {cell['seed']}; {cell['steps']} steps; {spent}."


def _numbers(run: Table) -> Iterator[tuple[str, str]]:
    result, cell = run.results[0], run.cells.loc[0]
    yield "held-out reward, start", _shown(cell["held_out_reward_start"])
    yield "held-out reward, end", _shown(cell["held_out_reward_end"])
    for when, evaluation in (("start", result.held_out_start), ("end", result.held_out_end)):
        if evaluation.accuracy is not None:
            yield f"held-out accuracy, {when}", _shown(evaluation.accuracy)
        for name, score in evaluation.scores.items() if len(evaluation.scores) > 1 else ():
            yield f"held-out {name}, {when}", _shown(score)
    yield "reward, last quarter", _shown(cell["reward_last_quarter"])
    yield "area under the reward, as a mean height", _shown(cell["reward_area"])
    ages = f"{cell['staleness_mean']:.2f} ({cell['staleness_max']}, {result.bound})"
    yield "staleness, mean (max, bound) [steps]", ages
    yield "effective sample size, share of tokens", _shown(cell["is_ess_mean"])
    yield "largest ratio learner / sampler", _shown(cell["is_ratio_max"])
    yield "clipped, share of tokens", _shown(cell["clip_ratio_mean"])
    yield "KL to the sampling policy [nats a token]", _shown(cell["kl_behaviour_mean"])
    yield "KL to the reference, last quarter [nats a token]", _shown(cell["kl_reference_end"])
    yield "idle share of the learner", _shown(run.mean_of("idle/learner")[0])
    yield "idle share of the actors", _shown(run.mean_of("idle/actor")[0])
    yield "seconds, sum of the steps' times", f"{cell['wall_s']:.1f}"
    yield "samples/s after the first step", _shown(cell["samples_per_s"])
    yield "tokens generated", f"{result.ledger['tokens_put']:,}" if "tokens_put" in result.ledger else ""


def _shown(value: float | None) -> str:
    """Nothing for what was not measured."""
    return "" if value is None or math.isnan(value) else f"{value:,.3f}"


def _curves(run: Table) -> Iterator[Sequence[str]]:
    steps = run.steps.loc[0]
    kept = ("staleness/mean", "is/ess", "kl/behaviour", "kl/reference", "completions/mean_length")
    names = [name for name in kept if name in steps]
    yield ["steps", "samples", "tokens", "seconds", "reward", *(f"`{name}`" for name in names)]
    count = min(_PARTS, len(steps))
    for part in range(count):
        begin, end = part * len(steps) // count, (part + 1) * len(steps) // count
        means, last = steps[["reward", *names]][begin:end].mean(), steps.iloc[end - 1]
        places = f"{begin + 1} to {end}" if end > begin + 1 else f"{end}"
        spent = (f"{last['samples']:,.0f}", f"{last['tokens']:,.0f}", f"{last['seconds']:,.1f}")
        yield [places, *spent, *("-" if math.isnan(each) else f"{each:.3f}" for each in means)]


def _ages(run: Table) -> Iterator[Sequence[str]]:
    for age, tokens in run.results[0].staleness_tokens:
        yield [str(age), f"{tokens:,}", f"{tokens / run.cells['trained_tokens'][0]:.1%}".replace("%", " %")]


def _groups(result: CellResult) -> Iterator[str]:
    if result.ledger:
        yield "## What became of the groups"
        yield "Attempts to make a group, by where they are or how they ended."
        known = [word for word in _LEDGER if word in result.ledger]
        yield table([[word.replace("_", " ") for word in known], [f"{result.ledger[word]:,}" for word in known]])
