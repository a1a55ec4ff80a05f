"""What a run inherits and cannot work with, refused by name; docs/operating.md lists what is obeyed or makes no difference."""

from __future__ import annotations

import codecs
import locale
import resource
import signal
import sys

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.forked import umask
from async_rlhf.launch.sockets import socket_root


def check_inherited() -> None:
    """Raises ConfigError."""
    socket_root()
    if codecs.lookup(encoding := locale.getpreferredencoding(False)).name != "utf-8":
        raise ConfigError(f"files are read as {encoding} (LC_ALL, LC_CTYPE, LANG), and they are UTF-8: set PYTHONUTF8=1")
    if sys.flags.optimize > 1:
        raise ConfigError(
            f"PYTHONOPTIMIZE={sys.flags.optimize} takes away docstrings, and transformers reads them: set it to 0"
        )
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise ConfigError("SIGCHLD is ignored in this process, so the end of a child cannot be seen: set it to SIG_DFL")
    if sys.platform == "linux" and (mask := umask()) & 0o700:
        raise ConfigError(f"umask {mask:04o} takes from you the rights to what the run makes: set umask 022, or 077")
    if (most := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) != resource.RLIM_INFINITY and most < 256:
        raise ConfigError(f"a process may open {most} files (ulimit -n), and a run needs 256: raise the limit")
