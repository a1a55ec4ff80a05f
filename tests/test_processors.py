"""Numbers are right also where libraries use kernels of other processors: a choice of the tests of engine and learner, with
fewer instruction sets than there are, with MKL's kernels for Intel, and with two threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from async_rlhf.launch.processor import LIMITS, described
from tests.conftest import REPOSITORY

# By heads whose products each library has ways of its own for.
_INVARIANCE = "actors/test_torch_engine_invariance.py::test_a_{}_has_the_same_bits_in_any_company[{}]"
ENGINE = (
    *(_INVARIANCE.format("completion", f"{heads}-torch.float32") for heads in ("multi-head", "one key head", "tiny heads")),
    *(_INVARIANCE.format("long_completion", heads) for heads in ("multi-head", "one key head")),
    "actors/test_torch_engine_llama.py",
)
LEARNER = ("learner/test_batch.py", "learner/test_logprobs.py")
# What ATen, oneDNN and MKL are told of, from the fewest instructions on, and the instruction set that each needs.
LEVELS = (
    ("sse4_1", "default", "SSE41", "SSE4_2"),
    ("avx2", "avx2", "AVX2", "AVX2"),
    ("avx512f", "avx512", "AVX512_CORE", "AVX512"),
    ("avx512_bf16", "avx512", "AVX512_CORE_BF16", "AVX512"),
    ("amx_tile", "avx512", "AVX512_CORE_AMX", "AVX512"),
)


def pretended(name: str, instructions: tuple[str, ...], *, mkl: bool) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Further words for pytest, and variables, by what they make of the processor: each level below its own, and the lowest for
    each library alone. MKL hears of levels on Intel's processors. On others it can be told to use the kernels for all of them,
    or be made to take the processor for one of Intel."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {"two threads": ([], {"OMP_NUM_THREADS": "2"})}
    known = [(needs, dict(zip(LIMITS, told, strict=False))) for needs, *told in LEVELS if needs in instructions]
    found |= {needs: ([], told) for needs, told in known[:-1]}
    if known[1:]:
        lowest, told = known[0]
        if is_foreign := mkl and "Intel" not in name:
            told["MKL_CBWR"] = "COMPATIBLE"
            found["MKL as on Intel"] = ["-p", "tests.as_intel"], {}
            found[f"MKL as on Intel: {lowest}"] = ["-p", "tests.as_intel"], {LIMITS[2]: told[LIMITS[2]]}
        alone = {"ATen": LIMITS[0], "oneDNN": LIMITS[1]} | ({"MKL": LIMITS[3 if is_foreign else 2]} if mkl else {})
        found |= {f"{library}: {lowest}": ([], {variable: told[variable]}) for library, variable in alone.items()}
    if "asimd" in instructions:
        found["ATen: asimd"] = [], {LIMITS[0]: "default"}
    return found


def assert_passing(tests: tuple[str, ...], words: list[str], told: dict[str, str], folder: Path) -> None:
    """These tests do, in a pytest of their own."""
    named = [str(REPOSITORY / "tests" / each) for each in tests]
    command = [sys.executable, "-m", "pytest", *named, *words, "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not rest"]
    own = {name: value for name, value in os.environ.items() if name not in LIMITS} | told
    ended = subprocess.run(
        [*command, f"--basetemp={folder / 'own'}"], cwd=REPOSITORY, env=own, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.rest
@pytest.mark.parametrize(
    ("words", "told"), (here := pretended(*described(), mkl=torch.backends.mkl.is_available())).values(), ids=here
)
def test_numbers_are_right_on_a_processor_that_is_pretended_here(
    words: list[str], told: dict[str, str], tmp_path: Path
) -> None:
    assert_passing(ENGINE + LEARNER, words, told, tmp_path)


@pytest.mark.rest
def test_the_learner_keeps_its_promises_where_every_shape_of_a_product_rounds_otherwise(tmp_path: Path) -> None:
    assert_passing((*LEARNER, "learner/test_torch_machine.py"), ["-p", "tests.by_shape"], {}, tmp_path)


def test_a_processor_pretends_to_have_less_than_it_has() -> None:
    amd, zen_4 = ("sse4_1", "avx2", "fma"), ("sse4_1", "avx2", "fma", "avx512f", "avx512_bf16")
    alone = {"ATen: sse4_1", "oneDNN: sse4_1", "sse4_1", "MKL: sse4_1"}
    other = {"MKL as on Intel", "MKL as on Intel: sse4_1"}
    assert pretended("AMD EPYC", amd, mkl=True).keys() == {"two threads", *alone, *other}
    assert pretended("AMD EPYC", amd, mkl=False).keys() == {"two threads", *alone} - {"MKL: sse4_1"}
    assert pretended("AMD EPYC", zen_4, mkl=True).keys() == {"two threads", "avx2", "avx512f", *alone, *other}
    rapids = pretended("Intel(R) Xeon(R)", (*zen_4, "amx_tile"), mkl=True)
    assert rapids.keys() == {"two threads", "avx2", "avx512f", "avx512_bf16", *alone}
    assert rapids["avx2"][1] == dict(zip(LIMITS, ("avx2", "AVX2", "AVX2"), strict=False))
    assert pretended("Neoverse", ("asimd", "sve"), mkl=False).keys() == {"two threads", "ATen: asimd"}
    assert pretended("a new one", (), mkl=False).keys() == {"two threads"}
