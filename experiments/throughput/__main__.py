"""All throughput benchmarks, or one: `python -m async_rlhf.experiments.throughput [PART]` (`make bench` runs all).

Without PART every part runs in a process of its own, so that threads and memory of one do not weigh on the next. A part
that fails, lacks a package or exceeds its limit is named at the end, the others run, and the exit code is 1. All rows go
into one file (see `results`). With PART, that part runs in this process and takes its own options: `PART --help`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from async_rlhf.experiments.throughput import results
from async_rlhf.experiments.throughput.harness import Bench, MissingError, Part, Row, Watch, await_quiet
from async_rlhf.launch.forked import adopt_orphans

ROOT = Path(__file__).resolve().parents[2]
# By name: the module here that has a function of this name, and what it measures; in the order in which they run.
PARTS = {
    "engine": ("engine", "generation beside transformers' generate"),
    "vllm_side": ("engine", "generation beside vLLM"),
    "queue": ("queue", "the replay queue beside raw ZeroMQ"),
    "learner": ("learner", "a learner step beside a bare loop and TRL's training part"),
    "pipeline": ("pipeline", "the whole beside TRL's GRPOTrainer"),
    "weights": ("weights", "weight transport beside memcpy and raw ZeroMQ"),
    "publication": ("publication", "what a publication costs learner and generation; what relays spare the hub"),
    "whole": (
        "whole",
        "time to the first step, and memory of each process: by default, with a million rows, with 400 M weights",
    ),
}
# Seconds after which a part is ended: several times what it takes on a quiet machine.
LIMIT_S = 1500.0
# Exit code of a part whose package is not installed.
MISSING = 3

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a row.")]
Turns = Annotated[int | None, typer.Option(min=1, help="Timed turns of each side, instead of each part's own.")]
Small = Annotated[bool, typer.Option("--small", help="Small loads, one turn: that it works, not how fast.")]


def load(name: str) -> Part:
    """The part's function."""
    found: Part = getattr(importlib.import_module(f"async_rlhf.experiments.throughput.{PARTS[name][0]}"), name)
    return found


def command(name: str, part: Part) -> Callable[..., None]:
    """A function for typer: the part's own options after those that all parts have."""

    def run(as_json: AsJson = False, turns: Turns = None, small: Small = False, **options: Any) -> None:
        watch = Watch()
        try:
            for row in part(Bench(turns, small), **options):
                found = replace(row, part=name, **watch.lap())  # type: ignore[arg-type]
                typer.echo(json.dumps(asdict(found)) if as_json else found)
        except MissingError as reason:
            typer.echo(f"{name}: {reason}", err=True)
            raise typer.Exit(MISSING) from reason

    common = list(inspect.signature(run, eval_str=True).parameters.values())[:-1]
    parameters = [*common, *list(inspect.signature(part, eval_str=True).parameters.values())[1:]]
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = part.__doc__
    return run


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
            formatter.write_dl([(name, what) for name, (_, what) in PARTS.items()])


app = typer.Typer(add_completion=False, cls=Parts, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    only: Annotated[list[str] | None, typer.Option(help="Only this part; may be repeated.")] = None,
    as_json: AsJson = False,
    turns: Turns = None,
    small: Small = False,
    output: Annotated[Path | None, typer.Option(help="Results file, instead of runs/bench/DATE.json.")] = None,
) -> None:
    """Measure ratios side by side: engine, queue, learner, weights and the whole, each beside what it replaces."""
    if context.invoked_subcommand is not None:
        return
    if unknown := set(only or ()) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options = ["--json", *(["--turns", str(turns)] if turns else []), *(["--small"] if small else [])]
    path, run, outcomes = output or results.new_path(ROOT), results.describe_run(ROOT, small), list[Outcome]()
    for part in only or PARTS:
        outcomes.append(measure(part, options, quiet=not small))
        if not as_json:
            typer.echo(f"-- {part}: {outcomes[-1].how} in {outcomes[-1].seconds:.0f} s")
        for row in outcomes[-1].rows:
            typer.echo(json.dumps(vars(row)) if as_json else row)
        ended = {each.part: (each.how, each.seconds) for each in outcomes}
        results.write(path, run, ended, [row for each in outcomes for row in each.rows])
    typer.echo(f"results: {path}", err=as_json)
    if unmeasured := [f"{each.part} ({each.how})" for each in outcomes if each.how != "measured"]:
        typer.echo(f"not measured: {', '.join(unmeasured)}", err=True)
        raise typer.Exit(1)


@dataclass(frozen=True)
class Outcome:
    """How a part ended: "measured", "missing a package", "failed (CODE)" or "ended after SECONDS s"."""

    part: str
    how: str
    rows: tuple[Row, ...]
    seconds: float


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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stdout.seek(0)
        rows = tuple(Row(**json.loads(text)) for text in stdout if text.startswith("{"))
    return Outcome(part, how, rows, round(time.monotonic() - began, 1))


if __name__ == "__main__":
    adopt_orphans()
    app()
