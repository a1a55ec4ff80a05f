"""`python -m async_rlhf.experiments.doctor.kit DIRECTORY` (`make kit`): what a machine without a package index needs.

The directory gets wheels of async-rlhf and of what it requires, but for torch (2.11 or newer), transformers and what belongs to
those, which such a machine has; and `run.sh`, which installs them into a folder of their own there, runs
`doctor --device cuda --speeds` and writes `report.md` and `report.json`. A requirement of which the index has no wheel is built
here when it is pure Python; else its source comes along, and is left out there when it cannot be built.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from async_rlhf.buffers import interpreter

ROOT = Path(__file__).resolve().parents[2]
# With torch and transformers, in versions that fit those.
_THERE = {"torch", "transformers", "huggingface-hub", "hf-xet", "tokenizers", "safetensors", "numpy", "regex", "pyyaml",
          "pillow"}  # fmt: skip
# glibc versions that wheels name; pip matches each exactly.
_GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
_MAX_BYTES = 60 << 20
_RUN = """\
#!/usr/bin/env bash
# Install beside the torch that is here, check and measure the device, write report.md and report.json: under nine minutes.
#   run.sh [OUTPUT [OPTIONS OF doctor]]     DEVICE=cuda PYTHON=python3 SITE=/tmp/async-rlhf-site
# COMPARE=natural: then completions a second beside TRL's AsyncGRPOTrainer, where vllm and trl are installed too.
set -euo pipefail
kit=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} site=${SITE:-/tmp/async-rlhf-site} device=${DEVICE:-cuda}
install=("$python" -m pip install --quiet --no-index --no-deps --no-cache-dir --upgrade --target "$site")
"${install[@]}" "$kit"/wheels/*.whl
for source in "$kit"/wheels/*.tar.gz; do
    [[ -e $source ]] || continue
    "${install[@]}" --no-build-isolation "$source" >/dev/null 2>&1 || echo "left out: $(basename "$source")"
done
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "${1:-.}"
cd "${1:-.}"
"$python" -m async_rlhf doctor --device "$device" --speeds --report "$PWD" "${@:2}"
[[ -z ${COMPARE:-} ]] || "$python" -m async_rlhf.experiments.throughput asynchronous --device "$device" --load "$COMPARE"
"""


def needed() -> list[str]:
    """`name==version` of each distribution that comes along, in the version that is installed here."""
    there = _THERE | _closure("torch", set()) - {"typing-extensions"}  # older ones are common, and too old for pydantic
    return sorted(f"{name}=={metadata.version(name)}" for name in _closure("async-rlhf", there) - {"async-rlhf"})


def _closure(name: str, without: AbstractSet[str]) -> set[str]:
    """This distribution and all that it requires without extras, canonical names; what is left out is not looked into."""
    found, left = set[str](), [name]
    while left:
        if (each := left.pop()) not in found and each not in without:
            found.add(each)
            left += _requires(each)
    return found


def _requires(name: str) -> Iterator[str]:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def build(directory: Path, python: str, machine: str) -> list[str]:
    """Write the kit; what it holds only as a source is returned. python: as `3.12`. Raises CalledProcessError as pip fails."""
    wheels = directory / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for old in wheels.iterdir():
        old.unlink()
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in _GLIBC] + [f"--platform=manylinux2014_{machine}"]
    foreign = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    sources = []
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools' own: what is left of an earlier build would come along
    _pip("wheel", f"--wheel-dir={wheels}", str(ROOT))
    for pin in needed():
        if not _tried("download", f"--dest={wheels}", *foreign, pin) and not _built(wheels, pin):
            _pip("download", f"--dest={wheels}", "--no-binary=:all:", pin)
            sources.append(pin)
    script = directory / "run.sh"
    script.write_text(_RUN)
    script.chmod(0o755)
    return sources


def _built(wheels: Path, pin: str) -> bool:
    """Whether a wheel that any machine takes could be built."""
    before = set(wheels.iterdir())
    if not _tried("wheel", f"--wheel-dir={wheels}", pin):
        return False
    (made,) = set(wheels.iterdir()) - before
    if not made.name.endswith("-none-any.whl"):
        made.unlink()
        return False
    return True


def _tried(*arguments: str) -> bool:
    try:
        _pip(*arguments)
    except subprocess.CalledProcessError:
        return False
    return True


def _pip(verb: str, *arguments: str) -> None:
    command = interpreter.python("-m", "pip", verb, "--quiet", "--disable-pip-version-check", "--no-deps", *arguments)
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT)


def main(
    directory: Path,
    python: Annotated[str, typer.Option(help="Version on the machine that it is for.")] = "3.12",
    machine: Annotated[str, typer.Option(help="Its architecture, as `uname -m` prints it.")] = "x86_64",
) -> None:
    """Write a kit for a machine without a package index."""
    sources = build(directory, python, machine)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    typer.echo(f"{directory}: {size / 1e6:.0f} MB for Python {python} on {machine}; run.sh installs, checks and measures")
    if sources:
        typer.echo(f"only as sources, which are built there if they can be: {', '.join(sources)}")
    if size > _MAX_BYTES:
        typer.echo(f"it is larger than {_MAX_BYTES / 1e6:.0f} MB", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
