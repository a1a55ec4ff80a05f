"""What keeps a daemon running: a unit of systemd. Text only; nothing is installed. Of a container: docs/Containerfile."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from pathlib import Path

_DRAIN_S = 900  # for a run to finish what has begun and write a checkpoint; then it is killed, and resumed later


def unit(directory: Path, at_once: int, options: Sequence[str] = ()) -> str:
    """Of a daemon of this directory, run by this user with this Python. options: of `queue serve`, beside these.

    Only the daemon is signalled, for it drains its runs; what is left after that is killed. A process of a run that the
    kernel kills for want of memory is for the run to start again, not for systemd.
    """
    command = (sys.executable, "-m", "async_rlhf", "queue", "serve", str(directory.absolute()))
    words = [*command, "--at-once", str(at_once), *options]
    return f"""\
[Unit]
Description=async-rlhf, the queue of runs in {_literal(str(directory.absolute()))}
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
User={getpass.getuser()}
ExecStart={" ".join(map(_quoted, words))}
KillMode=mixed
TimeoutStopSec={_DRAIN_S}
OOMPolicy=continue
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2 3

[Install]
WantedBy=multi-user.target
"""


def _quoted(word: str) -> str:
    """A word of a command line of systemd."""
    text = _literal(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{text}"' if set(text) & set(" \t'\"\\;") or not text else text


def _literal(text: str) -> str:
    return text.replace("%", "%%")
