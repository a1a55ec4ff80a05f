"""The pages of the twin: a CSV of rows for every question, and one report, made from those files alone, whose sentences are
worded by intervals."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from async_rlhf.experiments.statistics import paired
from async_rlhf.experiments.tabular.findings import findings, sentences
from async_rlhf.experiments.tabular.questions import Cell, Question, Row, values
from async_rlhf.experiments.tabular.training import GROUPS, LEARNING_RATE, MEMBERS, NUM_UPDATES
from async_rlhf.experiments.tabular.world import BONUS, NUM_PROMPTS, OVERRATED


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One row a cell and seed, numbers to 6 digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )


def read_csv(path: Path) -> list[Row]:
    """The rows again; what reads as a number is one."""
    with path.open(newline="") as file:
        return [{key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def command(question: Question, rows: Sequence[Row]) -> str:
    """What makes these rows."""
    return f"python -m async_rlhf.experiments.tabular --only {question.name} --seeds {len({row['seed'] for row in rows})}"


def render(answered: Sequence[tuple[Question, Sequence[Row]]]) -> str:
    """The whole page; pictures lie beside it."""
    return "\n\n".join([_HEAD, *(_section(question, rows) for question, rows in answered)]) + "\n"


def table(question: Question, rows: Sequence[Row]) -> str:
    """A line for every arm and x: the mean over seeds of every quantity shown, and its 95 % interval."""
    lines = [["arm", question.x, *(f"`{quantity}`" for quantity in question.shown)], ["---"] * (2 + len(question.shown))]
    for arm, x in dict.fromkeys((row["arm"], row["x"]) for row in rows):
        cells = [_mean(values(rows, Cell(quantity, str(arm), x))) for quantity in question.shown]
        lines.append([str(arm), x if isinstance(x, str) else f"{x:g}", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_HEAD = f"""# Staleness, exactly: the tabular twin

    python -m async_rlhf.experiments.tabular

Written by that command from the rows beside it; no sentence below is written by hand. A policy is a softmax table
over {NUM_PROMPTS} prompts with 125 completions each, trained by the learner's own losses, estimators, corrections and guard on
samples of its own past. One update sees {GROUPS} groups of {MEMBERS}; {NUM_UPDATES} updates in all, Adam at {LEARNING_RATE:g}
unless the rate is what is varied. What is reported is exact: sums over all completions under the policy, not samples. The proxy
reward is the gold one but for {OVERRATED * 100:g} % of the completions, which it takes to be {BONUS:g} better than they are.
Lengths alone are asked of an emulated queue, in which nothing is learned.

Numbers are means over seeds and, in brackets, 95 % t intervals over seeds; comparisons are within a seed. A
difference is said to be there when its p value, after Holm's correction over all comparisons of its question, is below 0.05."""


def _section(question: Question, rows: Sequence[Row]) -> str:
    shown = "\n".join(f"- `{quantity}`: {words}" for quantity, words in {**question.shown, **question.also}.items())
    found = findings(question, rows)
    count = f"{sum(each.shown for each in found)} of {len(found)} comparisons show a difference."
    return "\n\n".join(
        [
            f"## {question.title}",
            f"    {command(question, rows)}",
            shown,
            table(question, rows),
            f"![{question.title}]({question.name}.png)",
            count,
            "\n".join(f"- {sentence}" for sentence in sentences(question, rows)),
        ]
    )


def _mean(numbers: Sequence[float]) -> str:
    found = paired(numbers, [0.0] * len(numbers))
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"
