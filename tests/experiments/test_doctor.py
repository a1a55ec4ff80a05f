"""The doctor finds nothing wrong on a processor, and finds what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.doctor import kit
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
    """Of this machine's Python, on a processor."""
    version = ".".join(map(str, sys.version_info[:2]))
    kit.build(tmp_path / "kit", version, platform.machine())
    names = {path.name.split("-")[0] for path in (tmp_path / "kit/wheels").glob("*.whl")}
    assert {"async_rlhf", "pyzmq", "pydantic", "pydantic_core"} <= names and not names & {"torch", "transformers", "numpy"}
    command = [str(tmp_path / "kit/run.sh"), str(tmp_path / "out"), "--only", "learner"]
    own = {"DEVICE": "cpu", "PYTHON": sys.executable, "SITE": str(tmp_path / "site")}
    ended = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert [each["outcome"] for each in report["checks"]] == ["pass"]
    speeds = {each["name"]: each["value"] for each in report["speeds"]}
    assert all(value > 0 for value in speeds.values()) and speeds["bfloat16 against float32"] < 0.01
    assert {"copy on the device", "decoding, 8 rows", "weights, shared", "a whole run"} <= speeds.keys()
    assert "| a whole run |" in (tmp_path / "out/report.md").read_text()


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
    with pytest.raises(ConfigError, match="--only 'learners' is no check; did you mean 'learner'"):
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
