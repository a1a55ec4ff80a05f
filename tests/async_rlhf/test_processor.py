"""The processor has a name: of each kind, in a run's manifest, and where a test has failed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.launch.processor import described, processor
from async_rlhf.push.card import card
from async_rlhf.run import manifest
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from tests.conftest import REPOSITORY

_AMD = (
    "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_1 fma avx avx2 vaes\n\nmodel name\t: Other\nflags\t\t: fpu\n"
)
_INTEL = (
    "model name\t: Intel(R) Xeon(R) 8481C\nflags\t\t: sse4_1 avx2 fma avx512f avx512dq avx512bw avx512vl avx512cd avx512_bf16 "
    "avx512_vnni amx_bf16 amx_tile amx_int8\n"
)
_ARM = "Features\t: fp asimd asimddp sve i8mm bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
_APPLE = (
    "machdep.cpu.brand_string: Apple M2\nhw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_I8MM: 1\n"
    "hw.optional.arm.FEAT_SME: 0\nhw.optional.AdvSIMD: 1\n"
)
_INTEL_MAC = (
    "machdep.cpu.brand_string: Intel(R) Core(TM) i7\nhw.optional.avx2_0: 1\nhw.optional.fma: 1\nhw.optional.avx512f: 0\n"
)


@pytest.mark.parametrize(
    ("text", "name", "instructions"),
    [
        (_AMD, "AMD EPYC", "sse4_1 avx2 fma"),
        (
            _INTEL,
            "Intel(R) Xeon(R) 8481C",
            "sse4_1 avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8",
        ),
        (_ARM, f"{platform.machine()} implementer 0x41 part 0xd40", "asimd asimddp sve bf16 i8mm"),
        (_APPLE, "Apple M2", "asimd bf16 i8mm"),
        (_INTEL_MAC, "Intel(R) Core(TM) i7", "avx2 fma"),
        ("", platform.machine(), ""),
    ],
    ids=["AMD", "Intel", "ARM", "Apple", "Intel Mac", "unknown"],
)
def test_a_processor_is_described_as_its_system_does(text: str, name: str, instructions: str) -> None:
    assert described(text) == (name, tuple(instructions.split()))


def test_what_libraries_were_told_of_a_processor_is_part_of_its_name() -> None:
    plain = processor({})
    told = processor({"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "3"})
    assert plain == processor({"PATH": "/bin"})
    assert told == f"{plain.removesuffix(')')}; ATEN_CPU_CAPABILITY=default; MKL_CBWR=COMPATIBLE)"


def test_a_run_that_goes_on_with_another_processor_says_so_its_card_too(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(config := small())
    run.retire()
    RunDir.reopen(config).retire()
    made = json.loads((run.path / "manifest.json").read_text())
    assert made["processor"] == processor() and "later" not in made
    monkeypatch.setattr(manifest, "processor", lambda: "Apple M2 (asimd bf16)")
    RunDir.reopen(config).retire()
    (since,) = json.loads((run.path / "manifest.json").read_text())["later"]
    assert since.pop("since") and since == {key: made[key] for key in since} | {"processor": "Apple M2 (asimd bf16)"}
    said = card(Reading(run), run.path / "checkpoints" / "step_000000", "me/x", is_adapter=False, has_picture=False)
    assert f"processor {processor()}, sources" in said and "processor Apple M2 (asimd bf16), sources" in said


def test_a_failed_test_names_the_processor_in_its_report_and_at_the_end(tmp_path: Path) -> None:
    """Also of a worker, whose header nobody sees."""
    written = tmp_path / "test_written.py"
    written.write_text("import torch\n\ndef test_wrong():\n    torch.set_num_threads(1)\n    assert False\n")
    words = ["-m", "pytest", str(written), "-p", "tests.conftest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-n", "1"]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    own = {**os.environ, "PYTHONPATH": path, "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}
    ended = subprocess.run([sys.executable, *words], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=300)
    name = processor(own)
    assert ended.returncode == 1 and ended.stdout.count(f"processor: {name}\n") == 2, ended.stdout + ended.stderr
    assert f"- processor -{'-' * 10}" in ended.stdout and f"{name}; torch: DEFAULT, 1 threads\n" in ended.stdout
