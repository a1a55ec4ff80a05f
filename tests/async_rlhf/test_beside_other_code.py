"""A run begun beside a project whose files have the names that reinforcement learning projects have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

NAMES = ("actors/__init__.py", "learner/__init__.py", "experiments/__init__.py", "buffers.py", "queue.py", "types.py")


def test_files_of_the_working_directory_hide_no_module_of_ours_nor_of_the_standard_library(
    tmp_path: Path, small_arguments: Callable[..., list[str]]
) -> None:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('this is not the file that was meant')\n")
    (tmp_path / "my_rewards.py").write_text("def short(completion):\n    return -len(completion) / 32\n")
    arguments = small_arguments(max_steps=1, **{"rewards.functions": ["my_rewards:short"]})
    command = [str(Path(sys.executable).with_name("async-rlhf")), *arguments]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
