"""A run directory that was kept, where a test can change it."""

from __future__ import annotations

import shutil
from pathlib import Path

from async_rlhf.run.run_dir import RunDir

SAMPLE = Path(__file__).parent / "run-1"


def copied(folder: Path) -> RunDir:
    """A copy of the sample in this folder."""
    copy = shutil.copytree(SAMPLE, folder / SAMPLE.name, symlinks=True)
    config = copy / "config.toml"
    config.write_text(config.read_text().replace("@HERE@", str(folder)))
    return RunDir.existing(copy)
