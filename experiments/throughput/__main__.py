"""All throughput benchmarks, or one: `python -m async_rlhf.experiments.throughput [PART]` (`make bench` runs all).

Without PART every part runs in a process of its own, so that threads and memory of one do not weigh on the next. A part
that fails, lacks a package or exceeds its limit is named at the end, the others run, and the exit code is 1. All rows go
into one file (see `results`). With PART, that part runs in this process and takes its own options: `PART --help`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from async_rlhf.experiments.throughput import results
from async_rlhf.experiments.throughput.harness import MISSING, Row, await_quiet, command, line, table
from async_rlhf.launch.forked import adopt_orphans

ROOT = Path(__file__).resolve().parents[2]
# Each is a module here with a function of the same name; in the order in which they run.
PARTS = {
    "engine": "generation beside transformers' generate",
    "invariance": "processor time of batch-invariant decoding over plain decoding",
    "updates": "the gap at a weight update in each mode; sharing a prompt",
    "continuation": "first token of a later turn, held beside computed again",
    "episodes": "episodes of several turns beside one turn, and beside synchronous loops",
    "vllm_side": "generation beside vLLM",
    "vllm_updates": "the gap at a weight update with vLLM",
    "queue": "the replay queue beside raw ZeroMQ",
    "learner": "a learner step beside a bare loop and TRL's training part",
    "loss_memory": "peak memory of the loss, chunked beside plain",
    "checkpoint": "what a checkpoint in the background costs the steps beside it",
    "zero_memory": "bytes a rank holds under ZeRO beside the formulas",
    "pipeline": "the whole beside TRL's GRPOTrainer",
    "fusion": "the share of scoring time that is hidden",
    "weights": "weight transport beside memcpy and raw ZeroMQ",
    "publication": "what a publication costs learner and generation; what relays spare the hub",
    "adapters": "bytes of a published weight set, merged beside adapters alone",
}
# Seconds after which a part is ended: several times what it takes on a quiet machine.
LIMIT_S = 1500.0


class Parts(TyperGroup):
    """Imports a part when it is run, not before."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(PARTS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in PARTS:
            return None
        app = typer.Typer(add_completion=False)
        app.command(cmd_name)(command(cmd_name, load(cmd_name)))
        return typer.main.get_command(app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list in `--help`, without an import."""
        with formatter.section("Parts"):
            formatter.write_dl(list(PARTS.items()))


def load(name: str) -> Any:
    """The part's function."""
    return getattr(importlib.import_module(f"async_rlhf.experiments.throughput.{name}"), name)


@dataclass(frozen=True)
class Outcome:
    """How a part ended: "measured", "missing a package", "failed (CODE)" or "ended after SECONDS s"."""

    part: str
    how: str
    rows: tuple[Row, ...]
    seconds: float


app = typer.Typer(add_completion=False, cls=Parts, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    only: Annotated[list[str] | None, typer.Option(help="Only this part; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row instead of tables.")] = False,
    turns: Annotated[int | None, typer.Option(min=1, help="Timed turns of each side, instead of each part's own.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Small loads, one turn: that it works, not how fast.")] = False,
    output: Annotated[Path | None, typer.Option(help="Results file, instead of runs/bench/DATE.json.")] = None,
) -> None:
    """Measure ratios side by side: engine, queue, learner, weights and the whole, each beside what it replaces."""
    if context.invoked_subcommand is not None:
        return
    if unknown := set(only or ()) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options = ["--json", *(["--turns", str(turns)] if turns else []), *(["--small"] if small else [])]
    path = output or results.new_path(ROOT)
    run, outcomes = results.describe_run(ROOT, small), list[Outcome]()
    for part in only or PARTS:
        outcomes.append(measure(part, options, quiet=not small))
        report(outcomes[-1], as_json)
        results.write(
            path, run, {each.part: (each.how, each.seconds) for each in outcomes}, [r for o in outcomes for r in o.rows]
        )
    typer.echo(f"results: {path}", err=as_json)
    if unmeasured := [f"{each.part} ({each.how})" for each in outcomes if each.how != "measured"]:
        typer.echo(f"not measured: {', '.join(unmeasured)}", err=True)
        raise typer.Exit(1)


def measure(part: str, options: list[str], quiet: bool) -> Outcome:
    """Run one part in its own process group, which is killed at the end or after `LIMIT_S`."""
    if quiet:
        await_quiet()
    began, how = time.monotonic(), "measured"
    arguments = [sys.executable, "-m", "async_rlhf.experiments.throughput", part, *options]
    with tempfile.TemporaryFile("w+") as stdout:
        process = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, start_new_session=True)
        try:
            if code := process.wait(LIMIT_S):
                how = "missing a package" if code == MISSING else f"failed ({code})"
        except subprocess.TimeoutExpired:
            how = f"ended after {LIMIT_S:.0f} s"
        finally:
            _end_group(process)
        stdout.seek(0)
        rows = tuple(Row(**json.loads(text)) for text in stdout if text.startswith("{"))
    return Outcome(part, how, rows, round(time.monotonic() - began, 1))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(outcome: Outcome, as_json: bool) -> None:
    """Rows of one part, as JSON lines, as a table on a terminal, else as lines."""
    if as_json:
        for row in outcome.rows:
            typer.echo(json.dumps(vars(row)))
        return
    typer.echo(f"-- {outcome.part}: {outcome.how} in {outcome.seconds:.0f} s")
    if outcome.rows and Console().is_terminal:
        Console().print(table(outcome.rows))
    else:
        for row in outcome.rows:
            typer.echo(line(row))


if __name__ == "__main__":
    adopt_orphans()
    app()
