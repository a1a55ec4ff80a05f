"""Starts nodes as processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from async_rlhf.launch.program import Node


class LocalProcess:
    """A child process. The pipe to its standard input stays open while the supervisor lives; it ends when that closes."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll(self) -> int | None:
        code = self._child.poll()
        if code is not None and self._child.stdin is not None:
            self._child.stdin.close()
        return code

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(timeout=30)
        self.poll()


class LocalLauncher:
    """See `program.Launcher`."""

    def start(self, run_dir: Path, node: Node) -> LocalProcess:
        command = [sys.executable, "-m", "async_rlhf.roles", node.role, str(run_dir), *node.arguments]
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONHASHSEED": "0",  # some tasks draw from sets: every actor must see the same prompts
            "HF_HUB_OFFLINE": "1",  # models are local directories; nothing is ever fetched
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",  # bars of libraries do not belong into a log
        }
        with node.log.open("ab") as log:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment)
        return LocalProcess(child)
