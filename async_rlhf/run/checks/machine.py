"""Rules about the machine that a run starts on: what it inherits, packages, devices, trackers and hooks."""

from __future__ import annotations

import codecs
import locale
import resource
import shutil
import signal
import sys
from pathlib import Path

from async_rlhf.buffers.config import check_installed
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.forked import umask
from async_rlhf.launch.sockets import socket_root
from async_rlhf.run.config import Config
from async_rlhf.run.tracking import check_place


def check_inherited() -> None:
    """Refuses inherited settings that a run cannot work with; docs/operating.md lists those it obeys or ignores. Raises
    ConfigError."""
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


def check_packages(config: Config) -> None:
    learner = config.learner
    if learner.backend == "deepspeed":
        check_installed("deepspeed", "learner.backend", learner.backend, "deepspeed", "'torch'")
    if learner.lora.rank:
        check_installed("peft", "learner.lora.rank", learner.lora.rank, "lora", "0")
    for package in config.engine.needs:
        check_installed(package, "engine.kind", config.engine.kind, config.engine.kind, "'torch'")
    if Path(config.model).suffix == ".gguf":
        for package in ("gguf", "accelerate"):
            check_installed(package, "model", config.model, "gguf", "a Hugging Face directory")


def check_devices(config: Config) -> None:
    """Raises ConfigError for a device that this torch does not have. Only a setting other than the CPU costs its import. How
    many there are is for the placement; other hosts, and those that are listed, are not looked at from here."""
    if config.placement.hosts:
        return
    asked, is_here = [("learner.device", config.learner.device)], config.launch.kind == "local"
    if is_here:
        asked.append(("engine.device", config.engine.device))
    if is_here and config.scoring.reference_is_stage:
        asked.append(("scoring.reference.device", config.scoring.reference.device))
    if asked := [each for each in asked if each[1] != "cpu"]:
        from async_rlhf.actors.served_model.devices import check_device

        for setting, device in asked:
            check_device(setting, device)


def check_trackers(config: Config) -> None:
    """Raises ConfigError for a tracker whose package is not installed, or that has nowhere to write."""
    kinds = config.tracking.kind
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ConfigError(f"tracking.kind = {list(kinds)} names {kind!r} twice, and a run is sent there once")
        without = f"'none', and async-rlhf track RUN_DIR --to {kind} from an environment that has it (docs/watching.md)"
        check_installed(kind, "tracking.kind", kind, kind, without)
        check_place(kind)


def check_hooks(config: Config) -> None:
    """Raises ConfigError for a program that is not there, and for an address that the environment does not have."""
    hooks = config.hooks
    if hooks.argv and shutil.which(hooks.argv[0]) is None:
        raise ConfigError("hooks.command: its first word is no program that can be started from here; give its whole path")
    if hooks.url is not None and not hooks.address:
        raise ConfigError(
            f"hooks.url = {hooks.url.get_secret_value()!r}: there is no such environment variable; set it, or give the "
            "address itself"
        )
