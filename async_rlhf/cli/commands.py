"""The command line. Every command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import signal
import sys
from io import TextIOWrapper

# Each adds its commands to `app`.
from async_rlhf.cli import machines, queues, runs, trying, views
from async_rlhf.cli.app import app

__all__ = ["app", "machines", "main", "queues", "runs", "trying", "views"]


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # characters outside its encoding are written as escapes
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent process may have left it ignored
    app()
