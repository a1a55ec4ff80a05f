"""A sweep file: what it means, and how it is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.staleness.config import Cell, load_sweep
from async_rlhf.experiments.staleness.sweep import state_of
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, REPOSITORY

HEAD = f'[sweep]\nname = "s"\nbase = "{QUICK}"\noutput_dir = "sweeps"\nseeds = [0, 1]\n'
VALUES = '[sweep.values]\n"queue.max_staleness" = [0, 2]\n'


def write(directory: Path, text: str) -> Path:
    path = directory / "sweep.toml"
    path.write_text(text)
    return path


def cells_of(directory: Path, text: str) -> list[Cell]:
    return load_sweep(write(directory, text))[1]


def test_the_grid_is_every_setting_with_every_seed_whole_seeds_first(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, HEAD + VALUES + '"loss.clip_low" = [0.1, 0.2]\n')
    assert len(cells) == 8
    assert [cell.config.seed for cell in cells] == [0] * 4 + [1] * 4
    assert cells[1].label == "queue.max_staleness=0 loss.clip_low=0.2 seed=0"
    assert cells[1].config.run_dir == Path("sweeps/s/queue.max_staleness-0_loss.clip_low-0.2_seed-0")
    assert (cells[2].config.queue.max_staleness, cells[2].config.loss.clip_low) == (2, 0.1)


def test_tables_and_dotted_keys_mean_the_same(tmp_path: Path) -> None:
    dotted = cells_of(tmp_path, HEAD + '[sweep.overrides]\n"learner.batch_size" = 16\n' + VALUES)
    tables = cells_of(
        tmp_path, HEAD + "[sweep.overrides.learner]\nbatch_size = 16\n[sweep.values.queue]\nmax_staleness = [0, 2]\n"
    )
    assert dotted == tables
    assert dotted[0].config.learner.batch_size == 16


@pytest.mark.parametrize(("name", "num_cells"), [("quick", 6), ("study", 25)])
def test_a_shipped_sweep_is_a_valid_grid(name: str, num_cells: int) -> None:
    sweep, cells = load_sweep(REPOSITORY / "experiments" / "staleness" / f"{name}.toml")
    assert len(cells) == num_cells
    assert sweep.output_dir == "runs/sweeps"
    assert all(cell.config.queue.exact for cell in cells) == (name == "study")


REFUSED = {
    "unknown key": (HEAD + 'seed = [1]\n' + VALUES, "unknown key 'seed': did you mean 'seeds'"),
    "unknown table": (HEAD + VALUES + "[swep]\n", "unknown key 'swep': did you mean 'sweep'"),
    "no sweep": ("", r"has no table \[sweep\]"),
    "no values": (HEAD, "key 'values' is missing"),
    "empty values": (HEAD + "[sweep.values]\n", "values = {}"),
    "no seeds": (HEAD.replace("[0, 1]", "[]") + VALUES, r"seeds = \(?\[?\(?"),
    "not TOML": (HEAD + "values", "cannot be read"),
    "a single value": (HEAD + VALUES.replace("[0, 2]", "2"), "'queue.max_staleness' = 2; give a list"),
    "a value twice": (HEAD + VALUES.replace("[0, 2]", "[2, 2]"), "hold one twice"),
    "a seed twice": (HEAD.replace("[0, 1]", "[3, 3]") + VALUES, "values of 'seeds' = .*hold one twice"),
    "swept and overridden": (HEAD + "[sweep.overrides]\nqueue.max_staleness = 1\n" + VALUES, "is swept and overridden"),
    "seed overridden": (HEAD + "[sweep.overrides]\nseed = 4\n" + VALUES, "'seed' is decided by the sweep; set sweep.seeds"),
    "key of a run": (HEAD + VALUES.replace("staleness", "stalenes"), "max_stalenes = 0, seed 0: unknown key .*did you mean"),
    "a cell that would hang": (HEAD + "[sweep.overrides]\nlearner.publish_every = 3\n" + VALUES, "= 0, seed 0: .*would hang"),
    "one directory for two": (HEAD + '[sweep.values]\n"data.template" = ["{prompt}!", "{prompt}?"]\n', "share the directory"),
    "no base": (HEAD.replace("quick.toml", "quack.toml") + VALUES, "quack.toml' does not exist"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_sweep_is_refused_with_what_to_do(case: str, tmp_path: Path) -> None:
    text, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        load_sweep(write(tmp_path, text))


def test_a_sweep_that_does_not_exist_names_where_sweeps_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; shipped ones are in experiments/staleness/"):
        load_sweep(tmp_path / "none.toml")


class TestHowFarACellIs:
    @pytest.fixture
    def cell(self, small: Any) -> Cell:
        return Cell(small(**{"evaluation.at_end": True}), {"queue.max_staleness": 1})

    def wrote(self, cell: Cell, steps: int, evaluations: str = "") -> None:
        run = RunDir.create(cell.config)
        run.retire()
        run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
        run.evaluations.write_text(evaluations)

    def test_without_a_directory_it_is_new(self, cell: Cell) -> None:
        assert state_of(cell, 64) == "new"

    def test_with_fewer_steps_it_is_unfinished(self, cell: Cell) -> None:
        self.wrote(cell, 3, '{"label": "end"}\n')
        assert state_of(cell, 64) == "unfinished"

    def test_without_its_evaluation_it_is_unfinished(self, cell: Cell) -> None:
        self.wrote(cell, 4, '{"label": "start"}\n')
        assert state_of(cell, 64) == "unfinished"

    def test_with_all_steps_and_its_evaluation_it_is_finished(self, cell: Cell) -> None:
        self.wrote(cell, 4, '{"label": "end"}\n')
        assert state_of(cell, 64) == "finished"

    def test_it_is_finished_when_the_data_ended_before_max_steps(self, small: Any) -> None:
        cell = Cell(small(**{"data.epochs": 1, "max_steps": 100}), {})
        self.wrote(cell, 16)  # 64 prompts of 4 groups a step
        assert state_of(cell, 64) == "finished"

    def test_other_settings_are_refused_even_those_a_resume_may_change(self, cell: Cell, small: Any) -> None:
        self.wrote(cell, 4, '{"label": "end"}\n')
        longer = Cell(small(**{"evaluation.at_end": True, "max_steps": 5}), cell.setting)
        with pytest.raises(ConfigError, match=r"run with other settings \(max_steps: 4 -> 5\)\. Restore them, choose another"):
            state_of(longer, 64)

    def test_how_a_run_is_watched_is_no_setting(self, cell: Cell, small: Any) -> None:
        self.wrote(cell, 4, '{"label": "end"}\n')
        patient = Cell(small(**{"evaluation.at_end": True, "stall_timeout_s": 7.0}), cell.setting)
        assert state_of(patient, 64) == "finished"

    def test_a_removed_option_is_a_changed_setting(self, small: Any) -> None:
        self.wrote(Cell(small(**{"rewards.weights": {"a": 2.0, "b": 1.0}}), {}), 1)
        with pytest.raises(ConfigError, match="run with other settings"):
            state_of(Cell(small(**{"rewards.weights": {"a": 2.0}}), {}), 64)

    def test_a_cell_that_somebody_runs_is_left_alone(self, cell: Cell) -> None:
        self.wrote(cell, 2)
        running = RunDir.reopen(cell.config)
        with pytest.raises(ConfigError, match=r"is being run by process \d+ on host .*; wait, or stop it"):
            state_of(cell, 64)
        running.retire()
