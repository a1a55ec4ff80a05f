"""A process of TRL's that makes one step of its part whenever it is told, so that it can take turns with other sides."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from async_rlhf.experiments.throughput.sides import ROOT, trl_process_environment


class TrlProcess:
    """Runs PART of `trl_side`: one step for every line it is sent. Ends when its standard input closes.

    spec: what that part reads, with its `threads`. directory: for the spec and what the process writes.
    """

    def __init__(self, python: Path, part: str, spec: Mapping[str, Any], directory: Path) -> None:
        (directory / "spec.json").write_text(json.dumps(spec))
        self._log = directory / "trl.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "async_rlhf.experiments.throughput.trl_side", part, str(directory / "spec.json")],
                cwd=ROOT,
                env=trl_process_environment(spec["threads"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def step(self) -> dict[str, Any]:
        """What the process says of the step. Raises RuntimeError with the end of what TRL wrote when it fails."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
            # What libraries write there is passed over.
            answer = next((line for line in self._process.stdout if line.startswith("{")), "")
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"TRL's side has ended: {self._log.read_text(errors='replace')[-2000:]}")
        said: dict[str, Any] = json.loads(answer)
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
