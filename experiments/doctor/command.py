"""`async-rlhf doctor`: the facts, and with a device the checks; a report to read, or to paste into an issue."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from async_rlhf.buffers.errors import AsyncRLHFError
from async_rlhf.experiments.doctor.machine import Fact, facts

if TYPE_CHECKING:  # it imports torch
    from async_rlhf.experiments.doctor.speeds import Speed


@dataclass(frozen=True)
class Finding:
    """Of one check. outcome: `pass`, `fail` or `skip`."""

    check: str
    outcome: str
    detail: str
    seconds: float


def doctor(
    device: str | None, only: list[str], speeds: bool, report: Path | None, as_json: bool, echo: Callable[[str], None]
) -> bool:
    """Whether no check failed. device: `cpu`, `cuda` or `cuda:N`; None looks at the machine and runs nothing.

    only: names of checks; all without. speeds: measure too (on a CPU with small loads). report: folder for `report.md` and
    `report.json`, written again after each finding, so that what was found before an interruption is there. Raises ConfigError
    for a device or a check that is not there.
    """
    machine, findings = facts(), list[Finding]()
    measured: list[Speed] = []

    def texts() -> tuple[str, str]:
        found = {"device": device, "machine": machine, "checks": findings, "speeds": measured}
        return "\n".join(_report(machine, device, findings, measured)), json.dumps(found, indent=1, default=asdict)

    def write() -> None:
        if report is not None:
            report.mkdir(parents=True, exist_ok=True)
            for name, text in zip(("report.md", "report.json"), texts(), strict=True):
                (report / name).write_text(text + "\n")

    progress = (lambda _: None) if as_json else echo
    if device is not None:
        for finding in _checked(device, only, progress):
            findings.append(finding)
            write()
        for speed in _measured(device, progress) if speeds else ():
            measured.append(speed)
            write()
    write()
    echo(texts()[as_json])
    return all(finding.outcome != "fail" for finding in findings)


def _checked(device: str, only: list[str], echo: Callable[[str], None]) -> Iterator[Finding]:
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries do not belong into a report
    from async_rlhf.actors.torch_engine.devices import check_device
    from async_rlhf.buffers.errors import ConfigError, did_you_mean
    from async_rlhf.experiments.doctor.checks import CHECKS

    check_device("--device", device)
    if unknown := [name for name in only if name not in CHECKS]:
        raise ConfigError(f"--only {unknown[0]!r} is no check; {did_you_mean(unknown[0], CHECKS)}")
    with tempfile.TemporaryDirectory(prefix="doctor-") as directory:
        for number, name in enumerate(only or CHECKS):
            echo(f"checking {name} ...")
            yield (found := _find(name, device, Path(directory) / str(number)))
            echo(f"{found.outcome}  {name}: {found.detail}")


def _measured(device: str, echo: Callable[[str], None]) -> Iterator[Speed]:
    from async_rlhf.experiments.doctor.speeds import MEASUREMENTS, Place

    with tempfile.TemporaryDirectory(prefix="doctor-") as directory:
        place = Place(device, Path(directory), small=device == "cpu")
        for measurement in MEASUREMENTS:
            echo(f"measuring {measurement.__name__.replace('_', ' ')} ...")
            for speed in measurement(place):
                yield speed
                echo(f"{speed.name}: {speed.value:,.4g} {speed.unit}; {speed.detail}")


def _find(name: str, device: str, directory: Path) -> Finding:
    from async_rlhf.experiments.doctor.checks import CHECKS, Skipped

    began = time.monotonic()
    try:
        outcome, detail = "pass", CHECKS[name](device, directory)
    except Skipped as reason:
        outcome, detail = "skip", str(reason)
    except (AsyncRLHFError, RuntimeError, ImportError, OSError, ValueError) as error:  # a library's too: of a new device
        outcome, detail = "fail", f"{type(error).__name__}: {error}"
    return Finding(name, outcome, detail, round(time.monotonic() - began, 1))


def _report(machine: Iterable[Fact], device: str | None, findings: list[Finding], measured: list[Speed]) -> Iterable[str]:
    """Markdown."""
    yield from ("", "| machine | found | to do |", "|---|---|---|")
    yield from (f"| {fact.name} | {_cell(fact.value)} | {_cell(fact.remedy)} |" for fact in machine)
    if not findings:
        yield "\nasync-rlhf doctor --device cpu (or cuda) checks that this machine gets its numbers right: some minutes."
        return
    yield from ("", f"| check on {device} | | s | found |", "|---|---|---|---|")
    yield from (f"| {each.check} | {each.outcome} | {each.seconds:.1f} | {_cell(each.detail)} |" for each in findings)
    if measured:
        yield from ("", f"| measured on {device} | | |", "|---|---|---|")
        yield from (f"| {each.name} | {each.value:,.4g} {each.unit} | {_cell(each.detail)} |" for each in measured)
    failed = sum(each.outcome == "fail" for each in findings)
    skipped = sum(each.outcome == "skip" for each in findings)
    total = sum(each.seconds for each in findings)
    yield f"\n{len(findings) - failed - skipped} passed, {failed} failed, {skipped} skipped in {total:.0f} s; " + (
        f"async-rlhf {version('async-rlhf')}, torch {version('torch')}, {platform.machine()}"
    )


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
