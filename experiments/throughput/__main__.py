"""Throughput benchmarks: `python -m async_rlhf.experiments.throughput [PART]...` (`make bench` runs all).

One part runs in this process. Several run in a process each, so that threads and memory of one do not weigh on the next: a part
that fails, needs a package or exceeds its limit is named at the end, the others run, and the exit code is 1. Their rows go into
one file: runs/bench/DATE.json.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from async_rlhf.buffers.interpreter import python
from async_rlhf.experiments.throughput.harness import (
    ROOT,
    Bench,
    BenchmarkRow,
    Device,
    DType,
    MissingError,
    Part,
    Watch,
    await_quiet,
)
from async_rlhf.launch.forked import adopt_orphans
from async_rlhf.launch.processor import processor

# By name, in the order in which they run: the module here that has a function of this name.
PARTS = {"engine": "engine", "vllm_side": "engine", "queue": "queue", "learner": "learner", "learner_parts": "learner_parts",
         "pipeline": "pipeline", "asynchronous": "pipeline", "weights": "weights", "publication": "weights", "growth": "growth",
         "agents": "agents", "images": "images"}  # fmt: skip
# Seconds after which a part is ended: twice what the longest takes on a quiet machine.
LIMIT_S = 3000.0
# Exit codes of a part whose package is not installed, and of one that has no load of the name that is given.
MISSING, NO_LOAD = 3, 4
_NO_LOAD = "no load of this name"
_ENGINES = ("engine", "vllm_side")
# Options that some parts take.
_TAKEN_BY = {
    "--load": (*_ENGINES, "learner", "learner_parts", "pipeline", "asynchronous", "growth"),
    "--model": _ENGINES,
    "--dtype": _ENGINES,
    "--slots": _ENGINES,
    "--device": ("asynchronous",),
}
_PACKAGES = ("torch", "transformers", "pyzmq", "vllm", "trl")

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    parts: Annotated[list[str] | None, typer.Argument(metavar="[PART]...", help=f"Of {', '.join(PARTS)}; none: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row.")] = False,
    turns: Annotated[int | None, typer.Option(min=1, help="Timed turns of each side, instead of each part's own.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Small loads, one turn: that it works, not how fast.")] = False,
    load: Annotated[str, typer.Option(help="Of engines, learner, pipeline: only loads with this in their name.")] = "",
    model: Annotated[Path | None, typer.Option(help="Of engines: a directory or GGUF file, instead of a tiny model.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="Of engines: type of weights and activations; float32.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Of engines: sequences decoded together.")] = None,
    device: Annotated[Device | None, typer.Option(help="Of asynchronous: cuda, one GPU for all; cpu.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Results file, instead of runs/bench/DATE.json, which several parts have.")
    ] = None,
) -> None:
    """Measure ratios side by side: engine, queue, learner, pipeline, weights and agents, each beside what it replaces."""
    if unknown := set(parts or ()) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    given = {"--turns": turns, "--load": load, "--model": model, "--dtype": dtype, "--slots": slots, "--device": device}
    for name, takers in _TAKEN_BY.items():
        if given[name] and not set(parts or PARTS) & set(takers):
            raise typer.BadParameter(f"{name} is an option of {', '.join(takers)}")
    if parts and len(parts) == 1 and output is None:
        bench = Bench(turns, small, load, model, dtype or "float32", slots, device or "cpu")
        measure_here(parts[0], load_part(parts[0]), bench, as_json)
        return
    run, outcomes = describe_run(small), dict[str, Outcome]()
    path = output or ROOT / "runs" / "bench" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    for part in parts or PARTS:
        mine = [
            word for name, value in given.items() if value and part in _TAKEN_BY.get(name, PARTS) for word in (name, str(value))
        ]
        outcome = outcomes[part] = measure(part, ["--json", *(["--small"] if small else []), *mine], quiet=not small)
        if not as_json:
            typer.echo(f"-- {part}: {outcome.how} in {outcome.seconds:.0f} s")
        for row in outcome.rows:
            typer.echo(json.dumps(asdict(row)) if as_json else row)
        run["parts"][part] = {"outcome": outcome.how, "seconds": outcome.seconds}
        save(path, run, [row for each in outcomes.values() for row in each.rows])
    typer.echo(f"results: {path}", err=as_json)
    # A load is one part's or another's; of none it is a slip.
    right = {"measured", _NO_LOAD} if any(each.rows for each in outcomes.values()) else {"measured"}
    if unmeasured := [f"{part} ({each.how})" for part, each in outcomes.items() if each.how not in right]:
        typer.echo(f"not measured: {', '.join(unmeasured)}", err=True)
        raise typer.Exit(1)


def load_part(name: str) -> Part:
    """The part's function; imported when it is run, not before."""
    found: Part = getattr(importlib.import_module(f"async_rlhf.experiments.throughput.{PARTS[name]}"), name)
    return found


def measure_here(name: str, part: Part, bench: Bench, as_json: bool) -> None:
    """Print the rows as they come; exits with MISSING without its package, with NO_LOAD where no load was meant."""
    watch, found = Watch(), None
    try:
        for row in part(bench):
            found = replace(row, part=name, **watch.lap())  # type: ignore[arg-type]  # of two fields that are numbers
            typer.echo(json.dumps(asdict(found)) if as_json else found)
    except MissingError as reason:
        typer.echo(f"{name}: {reason}", err=True)
        raise typer.Exit(MISSING) from reason
    if bench.load and found is None:
        typer.echo(f"{name}: none of its loads has {bench.load!r} in its name", err=True)
        raise typer.Exit(NO_LOAD)


def save(path: Path, run: dict[str, Any], rows: Sequence[BenchmarkRow]) -> None:
    """Rows one a line, so that a changed number is one changed line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps({'run': run['date'], **asdict(row)}, ensure_ascii=False)}" for row in rows)
    path.write_text(f'{{"runs": {json.dumps({run["date"]: run}, indent=1, ensure_ascii=False)},\n"rows": [\n{lines}\n]}}\n')


@dataclass(frozen=True)
class Outcome:
    """How a part ended: "measured", "missing a package", "no load of this name", "failed (CODE)" or "ended after SECONDS s"."""

    how: str
    rows: tuple[BenchmarkRow, ...]
    seconds: float


def measure(part: str, options: list[str], quiet: bool) -> Outcome:
    """Run one part in its own process group, which is killed at the end or after `LIMIT_S`."""
    if quiet:
        await_quiet()
    began, how = time.monotonic(), "measured"
    arguments = python("-m", "async_rlhf.experiments.throughput", part, *options)
    with tempfile.TemporaryFile("w+") as stdout:
        process = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, start_new_session=True)
        try:
            if code := process.wait(LIMIT_S):
                how = {MISSING: "missing a package", NO_LOAD: _NO_LOAD}.get(code, f"failed ({code})")
        except subprocess.TimeoutExpired:
            how = f"ended after {LIMIT_S:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stdout.seek(0)
        rows = tuple(BenchmarkRow(**json.loads(text)) for text in stdout if text.startswith("{"))
    return Outcome(how, rows, round(time.monotonic() - began, 1))


def describe_run(small: bool) -> dict[str, Any]:
    """Date (UTC), commit (with "+" where files differ from it), machine and versions; what is unknown is null. A small run is
    no measurement."""
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    memory_gib = round(psutil.virtual_memory().total / 2**30, 1)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        "small": small,
        "commit": commit,
        "machine": {"cores": psutil.cpu_count(), "cpu": processor(), "memory_gib": memory_gib},
        "versions": {name: _version(name) for name in _PACKAGES},
        "parts": {},
    }


def _version(name: str) -> str | None:
    """The version of this interpreter's package, or of its CPU build."""
    for distribution in (name, f"{name}-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return None


if __name__ == "__main__":
    adopt_orphans()
    app()
