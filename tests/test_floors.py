"""The house keeps its floors: who may import whom, where each heavy dependency lives, how long a file may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, python
from tests.defects import DEFECTS, check

FLOORS = ("buffers", "actors", "learner", "experiments", "async_rlhf")
# Each floor and what it may import besides itself.
BELOW = {
    "buffers": set(),
    "actors": {"buffers"},
    "learner": {"buffers"},
    "async_rlhf": {"buffers", "actors", "learner"},
    "experiments": {"buffers", "actors", "learner", "async_rlhf"},
}
# Where a heavy dependency may be imported, as prefixes of paths.
ROOMS = {
    "zmq": (
        "buffers/transport/", "buffers/hub/hub.py", "buffers/weights/relay.py", "actors/environments/remote.py",
        "actors/workers/client.py", "actors/workers/service.py", "experiments/throughput/",
    ),
    "httpx2": (
        "actors/environments/from_openenv.py",
        "actors/rewards/endpoint.py",
        "async_rlhf/push/upload.py",
        "async_rlhf/run/supervision/hooks.py",
    ),
    "websockets": ("actors/environments/from_openenv.py",),
    "torch": (
        "buffers/device/", "buffers/images/tower.py", "actors/served_model/", "actors/torch_engine/",
        "actors/scoring/incremental.py", "actors/scoring/models.py", "actors/scoring/prefix_cache.py", "actors/vllm_engine/",
        "learner/", "experiments/",
    ),
    "vllm": ("actors/vllm_engine/",),
    "deepspeed": ("learner/step/deepspeed_machine.py",),
    "ray": ("async_rlhf/launch/ray.py", "experiments/staleness/on_ray.py"),
    "reasoning_gym": ("actors/gym_tasks.py",),
    "verifiers": ("actors/agents/from_verifiers.py",),
    "zstandard": ("buffers/weights/delta.py",),
    "PIL": ("buffers/images/", "experiments/warm_start/"),
    "pyarrow": ("actors/data/files.py",),
    "datasets": ("actors/data/files.py", "experiments/throughput/"),
    "matplotlib": ("async_rlhf/inspect/plot.py", "experiments/"),
    "pandas": ("experiments/staleness/table.py",),
    "scipy": ("experiments/statistics.py",),
    "markdown_it": ("experiments/page.py",),
    "tensorboard": ("async_rlhf/run/tracking/to_tensorboard.py",),
    "wandb": ("async_rlhf/run/tracking/to_wandb.py",),
    "trackio": ("async_rlhf/run/tracking/to_trackio.py",),
    "mlflow": ("async_rlhf/run/tracking/to_mlflow.py",),
    "starlette": (
        "actors/agents/endpoint.py", "async_rlhf/watch/http.py", "async_rlhf/watch/server.py", "async_rlhf/watch/intake.py",
    ),
    "uvicorn": ("actors/agents/endpoint.py", "async_rlhf/watch/http.py"),
    "prometheus_client": ("async_rlhf/watch/prometheus.py",),
    "tokenizers": ("actors/data/tokens.py", "async_rlhf/watch/completions.py", "experiments/warm_start/"),
    "subprocess": (
        "actors/environments/from_harbor.py", "async_rlhf/launch/", "async_rlhf/run/supervision/hooks.py",
        "async_rlhf/run/manifest.py", "learner/model/gguf.py", "experiments/",
    ),
}  # fmt: skip
FORBIDDEN = ("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle")


def floor_of(module: str) -> str:
    """The folder at the top level that a module lies in, or the package that it is of."""
    first, second, *_ = [*module.split("."), "", ""]
    return second if first == "async_rlhf" and second in FLOORS else first


# Every source file by its name in the repository, and its syntax tree.
SOURCES = {
    str(path.relative_to(REPOSITORY)): ast.parse(path.read_text())
    for path in sorted(path for floor in FLOORS for path in (REPOSITORY / floor).rglob("*.py"))
}


def imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append(node.module)
    return found


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_a_file_imports_only_downwards_and_stays_in_its_room() -> None:
    wrong = []
    for name, module in ((name, module) for name, tree in SOURCES.items() for module in imports(tree)):
        floor, top = name.split("/")[0], floor_of(module)
        if module.split(".")[0] in FLOORS[:-1]:
            wrong.append(f"{name} imports {module}, whose name is async_rlhf.{module}")
        if top in FLOORS and top != floor and top not in BELOW[floor]:
            wrong.append(f"{name} imports {module}: {floor} may import {sorted(BELOW[floor])}")
        if top in ROOMS and not name.startswith(ROOMS[top]):
            wrong.append(f"{name} imports {module}, which lives in {ROOMS[top]}")
        if top in FORBIDDEN:
            wrong.append(f"{name} imports {module}: nothing is pickled here")
    assert len(SOURCES) > 100 and not wrong


def test_no_two_folders_import_each_other() -> None:
    """The package's own `__init__` and `__main__` are doors: they lead to everything."""
    known: set[tuple[Path, Path]] = set()
    for name, tree in SOURCES.items():
        path = REPOSITORY / name
        if path.name == "__main__.py" or name == "async_rlhf/__init__.py":
            continue
        for module in imports(tree):
            first, *parts = module.split(".")
            if first == "async_rlhf":
                top = REPOSITORY if parts and parts[0] in FLOORS else REPOSITORY / first
                target = top.joinpath(*parts)
                known.add((path.parent, target.parent if target.with_suffix(".py").is_file() else target))
    both = {tuple(sorted((str(a.relative_to(REPOSITORY)), str(b.relative_to(REPOSITORY)))))
            for a, b in known if a != b and (b, a) in known}  # fmt: skip
    assert not both


def test_an_engine_is_a_folder_that_no_other_knows() -> None:
    """`ENGINES` names its settings, and they start it. What two engines need lies in `actors/served_model/`."""
    folders = {name.rpartition("/")[0] for name in SOURCES if re.fullmatch(r"actors/\w+_engine/settings\.py", name)}
    own_forward = {
        "actors/scoring/prefix_cache.py": {"async_rlhf.actors.torch_engine.chunks", "async_rlhf.actors.torch_engine.scheduler"}
    }
    wrong = []
    for name, tree in SOURCES.items():
        inside = {f"async_rlhf.{folder.replace('/', '.')}." for folder in folders if not name.startswith(f"{folder}/")}
        found = {module for module in imports(tree) if f"{module}.".startswith(tuple(inside))} - own_forward.get(name, set())
        wrong += [f"{name} imports {module}" for module in found if not name.startswith("experiments/")]
        asked = re.findall(r"engine\.kind [!=]= ", (REPOSITORY / name).read_text())
        wrong += [f"{name} asks which engine it is" for _ in asked]
    assert len(folders) == 2 and not wrong


def test_a_file_holds_one_idea_at_a_readable_length() -> None:
    lengths = {name: len((REPOSITORY / name).read_text().splitlines()) for name in SOURCES}
    assert not {name: length for name, length in lengths.items() if length > 400}
    assert not [name for name in SOURCES if Path(name).stem in {"utils", "helpers", "common", "misc"}]


# What is defined more than once, and why.
SEVERAL = {"Service": "a tracking service, one of the same kind in a file of each"}


def test_the_name_of_a_class_means_one_thing() -> None:
    places: dict[str, set[str]] = {}
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), set()).add(path)
    assert {name: own for name, own in places.items() if len(own) > 1 and name not in SEVERAL} == {}
    assert all(len(places[name]) > 1 for name in SEVERAL)


def test_a_function_fits_a_screen() -> None:
    functions = (
        (node.end_lineno - node.lineno + 1, f"{path}:{node.name}")
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    assert not [place for length, place in functions if length > 57]


def test_nothing_executes_data() -> None:
    forbidden = {"eval", "exec", "torch.load", "torch.save"}
    assert not [
        f"{name}:{call.lineno} calls {ast.unparse(call.func)}"
        for name, tree in SOURCES.items()
        for call in calls(tree)
        if ast.unparse(call.func) in forbidden
    ]


def test_a_python_process_is_begun_in_one_way() -> None:
    """What finds or spells an interpreter elsewhere may begin one that imports from a user's folder. Benchmarks and soaks start
    functions of their own by multiprocessing."""
    ways = {"sys.executable", "spawn.get_executable", "multiprocessing.Process", "multiprocessing.Pool"}
    found = {
        f"{name}: {ast.unparse(node)}"
        for name, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ways
    }
    assert found == {"buffers/interpreter.py: sys.executable"}
    lists = [
        (name, [each.value for each in node.elts if isinstance(each, ast.Constant)])
        for name, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple | ast.List)
    ]
    spelt = [name for name, words in lists if any(pair in (("python", "-m"), ("python", "-c")) for pair in pairwise(words))]
    assert not spelt


def test_code_that_a_model_brings_is_refused_wherever_a_model_is_loaded() -> None:
    """Left out, transformers would ask on standard input."""
    wrong = []
    for name, call in ((name, call) for name, tree in SOURCES.items() for call in calls(tree)):
        said = [ast.unparse(word.value) for word in call.keywords if word.arg == "trust_remote_code"]
        # A generation config holds numbers only.
        loads = re.search(r"(?<!GenerationConfig)\.from_(pretrained|config)$|\bpipeline$", ast.unparse(call.func))
        if said not in ([["False"]] if loads else [[], ["False"]]):
            wrong.append(f"{name}:{call.lineno} trusts remote code")
        own_process = name.startswith("experiments/") or Path(name).name == "model_directory.py"
        if loads and loads[1] == "pretrained" and not own_process:
            wrong.append(f"{name}:{call.lineno} loads beside other threads")
    assert not wrong


@pytest.mark.parametrize(
    "module",
    [
        "async_rlhf.cli.commands", "async_rlhf.run.config", "async_rlhf.api", "async_rlhf", "async_rlhf.buffers.hub.hub",
        "async_rlhf.experiments.planning.placement.search",
    ],
)  # fmt: skip
def test_the_roof_and_the_ground_import_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=300).returncode == 0


def test_help_answers_at_once_because_it_imports_no_library_but_that_of_the_command_line() -> None:
    shown = python("-X", "importtime", "-m", "async_rlhf", "--help")
    assert shown.returncode == 0 and "--version" in shown.stdout
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in shown.stderr.splitlines()}
    assert "typer" in imported and not imported & {"pydantic", "numpy", "torch", "rich", "zmq", "msgpack", "reasoning_gym"}


def test_every_planted_defect_can_still_be_planted() -> None:
    """`python -m tests.defects` plants them, and runs the tests that must find them."""
    check(DEFECTS)
    for file, _, name in {each.partition("::") for defect in DEFECTS for each in defect.tests}:
        text = (REPOSITORY / "tests" / file).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text, f"{file} has no {name}"
