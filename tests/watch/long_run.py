"""What a long history costs who looks at a run: `python tests/watch/long_run.py [STEPS]`, 10^6 steps by default (1 GB).

A run directory of so many steps is made; then, thirty times each, behind a line that was just added: a status, and a scrape
over HTTP for which the page's server looks at the run first; once the first opening of the page. Of a live run both also wait
for its hub, whatever the history.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import typer
from made_runs import made_run, records, write_lines
from serving import serving

from async_rlhf.inspect import status
from async_rlhf.run.run_dir import RunDir
from async_rlhf.watch.runs import Runs

_TIMES = 30


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = made_run(Path(directory) / "long", steps)
        typer.echo(f"{steps:,} steps, metrics.jsonl has {(path / 'metrics.jsonl').stat().st_size / 1e9:.2f} GB")
        newest = iter(records(steps + 2 * _TIMES, begin=steps + 1))

        def took(look: Callable[[], object]) -> float:
            write_lines(path / "metrics.jsonl", [next(newest)])
            began = time.perf_counter()
            look()
            return 1000 * (time.perf_counter() - began)

        runs = Runs(path)
        with serving(runs) as site:
            looks: dict[str, Callable[[], object]] = {
                "status": lambda: status.read(RunDir.existing(path)),
                "scrape": lambda: (runs.refresh(), site.get("/metrics")),
            }
            for name, look in looks.items():
                times = [took(look) for _ in range(_TIMES)]
                typer.echo(f"{name}: median {median(times):.1f} ms, longest {max(times):.1f} ms")
            began = time.perf_counter()
            site.get("/api/runs/long?step=0")
            typer.echo(f"first opening of the page: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10**6)
