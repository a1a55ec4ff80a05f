"""All throughput benchmarks, or one: `python -m async_rlhf.experiments.throughput [PART]` (`make bench` runs all).

Without PART every part runs in a process of its own, so that threads and memory of one do not weigh on the next. A part
that fails, lacks a package or exceeds its limit is named at the end, the others run, and the exit code is 1. All rows go
into one file: runs/bench/DATE.json. With PART, that part runs in this process and takes its own options: `PART --help`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from typer.core import TyperGroup

from async_rlhf.experiments.throughput.harness import ROOT, Bench, MissingError, Part, Row, Watch, await_quiet
from async_rlhf.experiments.throughput.tables import save
from async_rlhf.launch.forked import adopt_orphans

# By name, in the order in which they run: the module here that has a function of this name.
PARTS = {"engine": "engine", "vllm_side": "engine", "queue": "queue", "learner": "learner", "pipeline": "pipeline",
         "weights": "weights", "publication": "weights", "whole": "whole"}  # fmt: skip
# Seconds after which a part is ended: several times what it takes on a quiet machine.
LIMIT_S = 1500.0
# Exit code of a part whose package is not installed.
MISSING = 3
_PACKAGES = ("torch", "transformers", "pyzmq", "vllm", "trl")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a row.")]
Turns = Annotated[int | None, typer.Option(min=1, help="Timed turns of each side, instead of each part's own.")]
Small = Annotated[bool, typer.Option("--small", help="Small loads, one turn: that it works, not how fast.")]


def load(name: str) -> Part:
    """The part's function."""
    found: Part = getattr(importlib.import_module(f"async_rlhf.experiments.throughput.{PARTS[name]}"), name)
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

    common, own = (list(inspect.signature(each, eval_str=True).parameters.values()) for each in (run, part))
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*common[:-1], *own[1:])]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
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
    run, outcomes = describe_run(small), dict[str, Outcome]()
    path = output or ROOT / "runs" / "bench" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    for part in only or PARTS:
        found = outcomes[part] = measure(part, options, quiet=not small)
        if not as_json:
            typer.echo(f"-- {part}: {found.how} in {found.seconds:.0f} s")
        for row in found.rows:
            typer.echo(json.dumps(asdict(row)) if as_json else row)
        run["parts"][part] = {"outcome": found.how, "seconds": found.seconds}
        rows = [{"run": run["date"], **asdict(row)} for each in outcomes.values() for row in each.rows]
        save(path, {"runs": {run["date"]: run}, "rows": rows})
    typer.echo(f"results: {path}", err=as_json)
    if unmeasured := [f"{part} ({each.how})" for part, each in outcomes.items() if each.how != "measured"]:
        typer.echo(f"not measured: {', '.join(unmeasured)}", err=True)
        raise typer.Exit(1)


@dataclass(frozen=True)
class Outcome:
    """How a part ended: "measured", "missing a package", "failed (CODE)" or "ended after SECONDS s"."""

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
    return Outcome(how, rows, round(time.monotonic() - began, 1))


def describe_run(small: bool) -> dict[str, Any]:
    """Date (UTC), commit (with "+" where files differ from it), machine and versions; what is unknown is null. A small run is
    no measurement."""
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory_gib = round(psutil.virtual_memory().total / 2**30, 1)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        "small": small,
        "commit": commit,
        "conditions": None,
        "machine": {"cores": psutil.cpu_count(), "cpu": cpu and cpu[1], "memory_gib": memory_gib},
        "versions": {name: _version(name) for name in _PACKAGES},
        "parts": {},
    }


def _version(name: str) -> str | None:
    """Of this interpreter's package or its CPU build."""
    for distribution in (name, f"{name}-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return None


if __name__ == "__main__":
    adopt_orphans()
    app()
