"""The command line. Every command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

from async_rlhf.cli import calibrating, planning, runs, services, serving, spool, views  # each adds its commands to `app`
from async_rlhf.cli.app import app

__all__ = ["app", "calibrating", "main", "planning", "runs", "services", "serving", "spool", "views"]


def main() -> None:
    app()
