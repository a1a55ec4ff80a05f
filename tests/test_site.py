"""What people meet around the code: the site, the workflows, the forms of issues, the image, the notebook. What they run, copy
and ask for is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from typer.main import get_command

from async_rlhf.cli.commands import app
from async_rlhf.serve.queue_dir import QueueDir
from tests.conftest import REPOSITORY, SMALL, python

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
MAKEFILE = (REPOSITORY / "Makefile").read_text()
NOTEBOOK = REPOSITORY / "docs" / "staleness.ipynb"
CONTAINER = (REPOSITORY / "docs" / "Containerfile").read_text()


def read(name: str) -> Any:
    return yaml.safe_load((REPOSITORY / name).read_text())


@pytest.mark.rest
def test_the_site_is_built_without_a_warning_and_its_pages_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    assert built.returncode == 0 and "contains a link" not in built.stderr, built.stderr
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "docs/api/index.html", "experiments/staleness/index.html"} <= set(pages)
    loaded = [
        re.findall(r'<(?:script|img|source|link rel="(?:stylesheet|icon)")[^>]*"https?://[^>]*>', page)
        for page in pages.values()
    ]
    assert not any(loaded)
    assert "on_step" in pages["docs/api/index.html"] and (tmp_path / "docs" / "pictures" / "run.png").is_file()


def test_the_api_s_page_has_every_public_name() -> None:
    import async_rlhf

    shown = set(re.findall(r"(?m)^::: [\w.]+\.(\w+)$", (REPOSITORY / "docs" / "api.md").read_text()))
    assert set(async_rlhf.__all__) - shown == {"Config", "__version__"}, "a configuration has a page of its own"


def test_the_workflow_runs_the_readme_s_commands_on_every_python_that_is_supported() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"].values()
    commands = {step["run"] for job in jobs for step in job["steps"] if "run" in step}
    assert commands == {"make check docs", "make train", "make test"}
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert all(job["strategy"]["matrix"]["python"] == versions for job in jobs)


def test_what_runs_before_a_commit_are_the_tools_of_make_check() -> None:
    tools = {Path(hook["entry"].split()[0]).name for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}
    checked = re.search(r"(?m)^check:.*\n((?:\t.*\n)+)", MAKEFILE)
    assert checked is not None and tools == set(re.findall(r"\$\(BIN\)/(\w+)", checked[1]))


@pytest.mark.parametrize("form", sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_a_form_of_issues_asks_for_what_the_doctor_says(form: Path) -> None:
    fields = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(fields)
    assert len({each["id"] for each in fields["body"]}) == len(fields["body"])
    assert any("async-rlhf doctor --json" in each["attributes"]["label"] for each in fields["body"])


def test_the_image_installs_extras_that_exist_and_runs_commands_that_exist() -> None:
    (extras,) = re.findall(r"ARG EXTRAS=(\S+)", CONTAINER)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    verb, sub, *_ = json.loads(re.search(r"(?m)^CMD (.*)", CONTAINER)[1])  # type: ignore[index]
    assert sub in get_command(app).commands[verb].commands  # type: ignore[attr-defined]
    copied = re.findall(r"(?m)^COPY (\S+) ", CONTAINER)
    assert all((REPOSITORY / name).exists() for name in copied)
    left_out = (REPOSITORY / ".dockerignore").read_text().split()
    assert not {"actors", "async_rlhf", "buffers", "configs", "experiments", "learner", "constraints.txt", "README.md"} & set(
        left_out
    )


def test_the_image_is_healthy_while_a_daemon_holds_its_queue(tmp_path: Path) -> None:
    found = re.search(r'"sh", "-c", (".*")\]', CONTAINER)
    assert found is not None
    program = Path(sys.executable).with_name("async-rlhf")
    line = json.loads(found[1]).replace("/serve", str(tmp_path)).replace("async-rlhf", str(program), 1)
    queue = QueueDir.made(tmp_path)

    def is_healthy() -> bool:
        return subprocess.run(["sh", "-c", line], capture_output=True, timeout=120).returncode == 0

    assert not is_healthy()
    lock = queue.take()
    try:
        assert is_healthy()
    finally:
        lock.release()
    assert not is_healthy()


def test_the_notebook_is_executed_small_and_names_nothing_of_a_machine() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    assert not any(output.output_type == "error" for output in shown)
    assert len(text := NOTEBOOK.read_text()) < 300_000 and not re.search(r'["\s(](/\w+){2,}', text)


@pytest.mark.rest
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    book = nbformat.read(NOTEBOOK, as_version=4)
    cell = next(each for each in book.cells if each.source.startswith("STEPS = 60"))
    sizes = {key: value for key, value in SMALL.items() if key.startswith(("data", "generation", "learner", "engine"))}
    cell.source = cell.source.replace("STEPS = 60", "STEPS = 3").replace("settings = {", f"settings = {sizes} | {{")
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "S = 16" in book.cells[-2].outputs[0]["data"]["text/plain"]
