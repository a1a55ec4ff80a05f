"""One real run that is watched in every way: evaluated while it goes on, tracked, drawn, shown. One evaluation is killed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from async_rlhf.api import train
from async_rlhf.launch.local import LocalLauncher, LocalProcess
from async_rlhf.launch.program import Node
from async_rlhf.learner.checkpoint.evaluated import best_step
from async_rlhf.run.config import Config
from async_rlhf.run.display import Progress
from async_rlhf.run.loading import load
from async_rlhf.run.processes.tracking import measures
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.supervisor import Supervisor
from tests.conftest import QUICK, SMALL, output_of

SETTINGS: dict[str, Any] = {
    **SMALL, "max_steps": 6, "checkpoint.keep_last": 1, "checkpoint.save_every": 4, "evaluation.every": 3,
    "evaluation.at_start": True, "evaluation.at_end": True, "evaluation.samples": 2, "learner.warmup_steps": 4,
    "queue.segment_bytes": 4096, "tracking.kind": "tensorboard",
}  # fmt: skip


class KillsTheFirst(LocalLauncher):
    """Kills the first evaluation when it has begun."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run.lock)
        self._killed = False

    def start(self, run_dir: Path, node: Node) -> LocalProcess:
        process = super().start(run_dir, node)
        if node.role == "evaluation" and not self._killed:
            self._killed = True
            process.kill()
        return process


class Heard(Progress):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.percents: dict[str, list[int | None]] = {}

    def evaluating(self, what: str, percent: int | None) -> None:
        self.percents.setdefault(what, []).append(percent)

    def event(self, text: str) -> None:
        self.events.append(text)


@dataclass(frozen=True)
class Watched:
    run: RunDir
    config: Config
    heard: Heard

    @property
    def made(self) -> list[dict[str, Any]]:
        return [record for record in self.run.read_evaluations() if "missing" not in record]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The finished run."""
    config = load(QUICK, {**SETTINGS, "output_dir": str(tmp_path_factory.mktemp("runs"))})
    run, heard = RunDir.create(config), Heard()
    assert Supervisor(config, run, KillsTheFirst(run), heard).run()
    yield Watched(run, config, heard)


def test_every_evaluation_that_was_due_has_a_line_and_the_killed_one_was_made_again(watched: Watched) -> None:
    assert [text for text in watched.heard.events if "made again" in text] == [
        f"the evaluation of the start ended by signal {signal.SIGKILL}; it is made again"
    ]
    assert [(record["label"], record["step"]) for record in watched.made] == [("start", 0), ("step", 3), ("end", 6)]
    assert all("/checkpoints/step_" in record["model"] for record in watched.made[1:])
    assert watched.run.read_evaluations() == watched.made, "none is missing"
    shown = watched.heard.percents
    assert set(shown) == {"the start", "step 3", "the end"}
    assert all((percents[0], percents[-1]) == (0, None) for percents in shown.values())
    known = [percent for percents in shown.values() for percent in percents if percent is not None]
    assert 0 < max(known) <= 100


def test_the_best_checkpoint_and_those_that_wait_for_an_evaluation_outlive_the_newest(watched: Watched) -> None:
    checkpoints = watched.run.path / "checkpoints"
    best = best_step(watched.made)
    assert (checkpoints / "best").readlink() == Path(f"step_{best:06d}")
    kept = {path.name for path in checkpoints.glob("step_*")}
    assert {f"step_{best:06d}", "step_000006"} <= kept and "step_000004" not in kept


def test_tensorboard_has_every_number_of_every_step_and_evaluation(watched: Watched) -> None:
    found: dict[tuple[str, int], float] = {}
    for file in (watched.run.path / "tensorboard").iterdir():
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found[value.tag, event.step] = value.tensor.float_val[0]
    wanted = {(name, r["step"]): v for r in watched.run.read_metrics() for name, v in measures(r)}
    wanted |= {(name, r["step"]): v for r in watched.made for name, v in measures(r, "evaluation/")}
    assert found == {key: pytest.approx(value, rel=1e-5) for key, value in wanted.items()}
    assert ("reward", 6) in found and ("evaluation/sampled/pass_at/2", 3) in found
    peak = watched.config.learner.learning_rate
    rates = [record["learning_rate"] / peak for record in watched.run.read_metrics()]
    assert rates == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 1])


def test_the_run_is_shown_and_drawn_with_its_evaluations(watched: Watched) -> None:
    out = watched.run.path / "picture.svg"
    output_of(0, "plot", watched.run.path, "--out", out)
    assert out.read_text().startswith("<?xml")
    output = output_of(0, "status", watched.run.path)
    assert "finished, step 6 of 6" in output
    assert re.search(r"held-out accuracy at step 3: .*; pass@1 \d\.\d+, pass@2 \d\.\d+ \(2 samples\)", output)


def test_a_resumed_finished_run_is_evaluated_no_more_and_shows_its_sampled_groups(watched: Watched) -> None:
    train(watched.config, resume=True, quiet=True)
    assert len(watched.made) == 3
    output = output_of(0, "rollouts", "show", watched.run.path, "--limit", "2")
    assert output.count("prompt:") == 2
    assert "4 more groups: --limit 6 shows all" in output and "the groups in rollouts.jsonl are shown" in output
    output_of(3, "rollouts", "show", watched.run.path, "--step", "99")
    assert "queue.keep_rollouts = true" in output_of(3, "rollouts", "replay", watched.run.path, "--name", "again")
    assert not (watched.run.path.parent / "again").exists()
