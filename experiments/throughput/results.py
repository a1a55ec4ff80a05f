"""The results file: rows, and for each the run that measured it (date, machine, commit, versions).

`runs/bench/DATE.json` holds one run. `results.json` beside this file is committed and may hold rows of several runs: a
row keeps its run until a later one replaces it. What is unknown of a run is null.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from async_rlhf.experiments.throughput.harness import Row

COMMITTED = Path(__file__).with_name("results.json")
_PACKAGES = ("torch", "transformers", "pyzmq", "vllm", "trl")


def new_path(root: Path) -> Path:
    """runs/bench/DATE-TIME.json, in UTC."""
    return root / "runs" / "bench" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def describe_run(root: Path, small: bool) -> dict[str, Any]:
    """Date (UTC), commit (with "+" where files differ from it), machine and versions. A small run is no measurement."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        "small": small,
        "commit": _commit(root),
        "conditions": None,
        "machine": {
            "cores": psutil.cpu_count(),
            "cpu": _cpu_name(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "versions": {name: _version(name, root) for name in _PACKAGES},
    }


def _commit(root: Path) -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _version(name: str, root: Path) -> str | None:
    """Of this interpreter's package or its CPU build; TRL's from its own environment."""
    for distribution in (name, f"{name}-cpu"):
        with suppress(PackageNotFoundError):
            return version(distribution)
    found = sorted(root.glob(f".venv-trl/lib/python*/site-packages/{name}-*.dist-info"))
    return found[-1].name.split("-")[1].removesuffix(".dist") if found else None


def write(path: Path, run: Mapping[str, Any], parts: Mapping[str, tuple[str, float]], rows: Sequence[Row]) -> None:
    """One run: how its parts ended, their seconds, and their rows."""
    name = str(run["date"])
    ended = {part: {"outcome": how, "seconds": seconds} for part, (how, seconds) in parts.items()}
    save(path, {"runs": {name: {**run, "parts": ended}}, "rows": [{"run": name, **asdict(row)} for row in rows]})


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Rows one a line, so that a changed number is one changed line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content["rows"])
    runs = json.dumps(content["runs"], indent=1, ensure_ascii=False)
    path.write_text(f'{{"runs": {runs},\n"rows": [\n{rows}\n]}}\n')


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of `new` replace those of the same part and load; runs without rows left are dropped.

    Raises ValueError when `new` holds a small run.
    """
    if small := [name for name, run in new["runs"].items() if run["small"]]:
        raise ValueError(f"{', '.join(small)} ran with --small: that measures nothing")
    rows = {(row["part"], row["load"]): row for row in [*old["rows"], *new["rows"]]}
    used = {row["run"] for row in rows.values()}
    runs = {name: run for name, run in {**old["runs"], **new["runs"]}.items() if name in used}
    return {"runs": runs, "rows": list(rows.values())}
