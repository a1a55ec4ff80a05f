"""A run directory that was kept, where a test can change it."""

from __future__ import annotations

import shutil
from pathlib import Path

from async_rlhf.run.run_dir import RunDir

SAMPLES = {number: Path(__file__).parent / f"run-{number}" for number in (1, 2, 3, 4)}


def copied(folder: Path, number: int) -> RunDir:
    """A copy of the sample of this format in this folder."""
    sample = SAMPLES[number]
    copy = shutil.copytree(sample, folder / sample.name, symlinks=True)
    config = copy / "config.toml"
    config.write_text(config.read_text().replace("@HERE@", str(folder)))
    return RunDir.existing(copy)
