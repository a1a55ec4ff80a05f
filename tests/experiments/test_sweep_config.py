"""A sweep file: what it means, and how it is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.staleness.config import Cell, load_sweep
from async_rlhf.experiments.staleness.sweep import state_of
from async_rlhf.run.config import dump, load
from async_rlhf.run.preparation import as_rewards_want
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, REPOSITORY

STALENESS = REPOSITORY / "experiments" / "staleness"
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
    assert cells[1].label == "queue.max_staleness = 0, loss.clip_low = 0.2, seed = 0"
    assert cells[1].config.run_dir == Path("sweeps/s/queue.max_staleness-0_loss.clip_low-0.2_seed-0")
    assert (cells[2].config.queue.max_staleness, cells[2].config.loss.clip_low) == (2, 0.1)


def test_tables_and_dotted_keys_mean_the_same(tmp_path: Path) -> None:
    dotted = cells_of(tmp_path, HEAD + '[sweep.overrides]\n"learner.batch_size" = 16\n' + VALUES)
    tables = cells_of(
        tmp_path, HEAD + "[sweep.overrides.learner]\nbatch_size = 16\n[sweep.values.queue]\nmax_staleness = [0, 2]\n"
    )
    assert dotted == tables
    assert dotted[0].config.learner.batch_size == 16


def test_settings_given_with_the_command_are_laid_upon_the_overrides_of_every_cell(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "[sweep.overrides]\nmax_steps = 30\ngeneration.num_generations = 4\n" + VALUES)
    given = {"max_steps": 9, "learner": {"learning_rate": 0.5}, "generation.group_size": 2}
    sweep, cells = load_sweep(path, {**given, "sweep.name": "other", "sweep.seeds": [7]})
    assert sweep.overrides == {"max_steps": 9, "generation.group_size": 2, "learner.learning_rate": 0.5}
    assert [str(cell.config.run_dir) for cell in cells] == [
        f"sweeps/other/queue.max_staleness-{bound}_seed-7" for bound in (0, 2)
    ]
    assert {(cell.config.max_steps, cell.config.generation.group_size) for cell in cells} == {(9, 2)}
    assert {cell.config.learner.learning_rate for cell in cells} == {0.5}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"queue.max_staleness": 1}, "'queue.max_staleness' is swept and overridden with 1; leave out one of the two"),
        ({"seed": 4}, "'seed' is decided by the sweep; set sweep.seeds"),
        ({"max_step": 4}, "seed = 0: unknown key 'max_step': did you mean 'max_steps'"),
        ({"sweep.seeds": [2, 2]}, "'seeds' = .* hold one twice"),
    ],
)
def test_a_wrong_setting_given_with_the_command_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_sweep(write(tmp_path, HEAD + VALUES), given)


def test_the_shipped_sweep_goes_by_its_name() -> None:
    sweep, cells = load_sweep(Path("quick"))
    assert (sweep, cells) == load_sweep(STALENESS / "quick.toml")
    assert len(cells) == 6
    assert sweep.output_dir == "runs/sweeps"


EXPERIMENTS = {
    "ages": 10, "corrections": 90, "critics": 27, "in_flight": 9, "lengths": 9, "mini_batches": 60, "one_step": 18, "rates": 9,
    "search": 12,
}  # fmt: skip


@pytest.mark.parametrize(("name", "num_cells"), EXPERIMENTS.items())
def test_an_experiment_is_a_valid_grid_that_keeps_its_results_beside_it(
    name: str, num_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    sweep, cells = load_sweep(STALENESS / name / f"{name}.toml")
    assert len(cells) == num_cells
    assert sweep.results_dir == STALENESS / name
    assert all(cell.config.queue.exact for cell in cells) == (name in ("ages", "corrections", "critics"))


REFUSED = {
    "unknown key": (HEAD + 'seed = [1]\n' + VALUES, "unknown key 'seed': did you mean 'seeds'"),
    "unknown table": (HEAD + VALUES + "[swep]\n", "unknown key 'swep': did you mean 'sweep'"),
    "no sweep": ("", r"has no table \[sweep\]"),
    "no values": (HEAD, "has no axis; give"),
    "empty values": (HEAD + "[sweep.values]\n", "has no axis; give"),
    "no seeds": (HEAD.replace("[0, 1]", "[]") + VALUES, r"seeds = \(?\[?\(?"),
    "not TOML": (HEAD + "values", "cannot be read"),
    "a single value": (HEAD + VALUES.replace("[0, 2]", "2"), "'queue.max_staleness' = 2; give a list"),
    "a value twice": (HEAD + VALUES.replace("[0, 2]", "[2, 2]"), "hold one twice"),
    "a seed twice": (HEAD.replace("[0, 1]", "[3, 3]") + VALUES, "values of 'seeds' = .*hold one twice"),
    "swept and overridden": (HEAD + "[sweep.overrides]\nqueue.max_staleness = 1\n" + VALUES, "swept and overridden with 1"),
    "seed overridden": (HEAD + "[sweep.overrides]\nseed = 4\n" + VALUES, "'seed' is decided by the sweep; set sweep.seeds"),
    "key of a run": (HEAD + VALUES.replace("staleness", "stalenes"), "max_stalenes = 0, seed = 0: unknown key .*did you mean"),
    "a cell that would hang": (HEAD + "[sweep.overrides]\nlearner.publish_every = 3\n" + VALUES, "= 0, seed = 0: .*would hang"),
    "one directory for two": (HEAD + '[sweep.values]\n"data.template" = ["{prompt}!", "{prompt}?"]\n', "share the directory"),
    "one run under two names": (
        HEAD + "[sweep.axes.clip]\nlow = { loss.clip_low = 0.1 }\nless = { loss.clip_low = 1e-1 }\n",
        "the cells with clip = low, seed = 0 and with clip = less, seed = 0 have the same configuration",
    ),
    "no base": (HEAD.replace("quick.toml", "quack.toml") + VALUES, "quack.toml' does not exist"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_sweep_is_refused_with_what_to_do(case: str, tmp_path: Path) -> None:
    text, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        load_sweep(write(tmp_path, text))


def test_a_sweep_that_does_not_exist_names_those_that_are_shipped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; shipped ones go by their names, .*: quick"):
        load_sweep(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="sweep 'quik' is no file, and none of this name is shipped; did you mean 'quick'"):
        load_sweep(Path("quik"))


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

    def test_it_is_finished_when_its_last_step_has_used_up_the_tokens(self, small: Any) -> None:
        cell = Cell(small(max_trained_tokens=40, max_steps=100), {})
        self.wrote(cell, 3)
        lines = ['{"step": 1, "num_tokens_total": 39}\n', '{"step": 2, "num_tokens_total": 61}\n']
        cell.config.run_dir.joinpath("metrics.jsonl").write_text(lines[0])
        assert state_of(cell, 64) == "unfinished"
        cell.config.run_dir.joinpath("metrics.jsonl").write_text("".join(lines))
        assert state_of(cell, 64) == "finished"

    def test_other_settings_are_refused_even_those_a_resume_may_change(self, cell: Cell, small: Any) -> None:
        self.wrote(cell, 4, '{"label": "end"}\n')
        longer = Cell(small(**{"evaluation.at_end": True, "max_steps": 5}), cell.setting)
        with pytest.raises(
            ConfigError,
            match=r"run with other settings \(max_steps: 4 -> 5\)\. Restore them, those of --set too; or keep both",
        ):
            state_of(longer, 64)

    def test_how_a_run_is_watched_is_no_setting(self, cell: Cell, small: Any) -> None:
        self.wrote(cell, 4, '{"label": "end"}\n')
        patient = Cell(small(**{"evaluation.at_end": True, "stall_timeout_s": 7.0}), cell.setting)
        assert state_of(patient, 64) == "finished"

    def test_a_removed_option_is_a_changed_setting(self, small: Any) -> None:
        self.wrote(Cell(small(**{"rewards.weights": {"a": 2.0, "b": 1.0}}), {}), 1)
        with pytest.raises(ConfigError, match="run with other settings"):
            state_of(Cell(small(**{"rewards.weights": {"a": 2.0}}), {}), 64)

    def test_what_a_reward_says_of_itself_is_no_changed_setting(self, small: Any, tmp_path: Path) -> None:
        (tmp_path / "judge.py").write_text(
            "from async_rlhf import reward\n\n@reward(weight=2.0)\ndef judge(completion):\n    return 1.0\n"
        )
        cell = Cell(small(**{"rewards.functions": [str(tmp_path / "judge.py:judge")]}), {})
        self.wrote(Cell(as_rewards_want(cell.config), {}), 4)
        assert state_of(cell, 64) == "finished"

    def test_a_cell_that_somebody_runs_is_left_alone(self, cell: Cell) -> None:
        self.wrote(cell, 2)
        running = RunDir.reopen(cell.config)
        with pytest.raises(ConfigError, match=r"is being run by process \d+ on host .*; wait, or stop it"):
            state_of(cell, 64)
        running.retire()


AXIS = """[sweep.axes.correction]
none = { "loss.kind" = "ppo_clip", "loss.dual_clip" = "none" }
clipped = { loss = { kind = "ppo_clip", dual_clip = 3.0 } }
"""


def test_an_axis_of_named_values_sets_several_keys_at_once(tmp_path: Path) -> None:
    sweep, cells = load_sweep(write(tmp_path, HEAD + VALUES + AXIS))
    assert sweep.question == "What do correction and queue.max_staleness do to learning?"
    assert sweep.grid == "correction = none, clipped; queue.max_staleness = 0, 2"
    assert [cell.label for cell in cells[:2]] == [
        "correction = none, queue.max_staleness = 0, seed = 0",
        "correction = none, queue.max_staleness = 2, seed = 0",
    ]
    assert [cell.config.loss.dual_clip for cell in cells[:4]] == [None, None, 3.0, 3.0]
    assert {cell.swept for cell in cells} == {frozenset({"loss.kind", "loss.dual_clip", "queue.max_staleness"})}


def test_samples_decide_the_steps_where_batches_differ(tmp_path: Path) -> None:
    sizes = '[sweep.values]\n"learner.batch_size" = [64, 128]\n'
    cells = cells_of(tmp_path, HEAD + "samples = 1280\n" + sizes)
    assert [cell.config.max_steps for cell in cells[:2]] == [20, 10]
    assert all(cell.swept == {"learner.batch_size", "max_steps"} for cell in cells), "the steps may differ between cells"
    with pytest.raises(ConfigError, match=r"sweep.samples = 1300 is no multiple of the 64 completions of a step; .*: 1280"):
        cells_of(tmp_path, HEAD + "samples = 1300\n" + sizes)


@pytest.mark.parametrize(
    ("given", "limits", "words"),
    [
        ({"sweep.tokens": 900}, (900, None), "900 tokens trained on per run"),
        ({"sweep.seconds": 60}, (None, 60.0), "60 seconds of training per run"),
        ({"sweep.samples": 1280}, (None, None), "1,280 samples trained on per run"),
        ({}, (77, None), ""),
    ],
)
def test_a_budget_of_the_sweep_takes_the_place_of_that_of_its_base(
    tmp_path: Path, given: dict[str, Any], limits: tuple[Any, Any], words: str
) -> None:
    (tmp_path / "base.toml").write_text(dump(load(QUICK, {"max_trained_tokens": 77})))
    sweep, cells = load_sweep(write(tmp_path, HEAD.replace(str(QUICK), "base.toml") + VALUES), given)
    assert {(cell.config.max_trained_tokens, cell.config.max_seconds) for cell in cells} == {limits}
    assert sweep.budget == words
    assert {cell.config.max_steps for cell in cells} == {1280 // 128 if "sweep.samples" in given else 150}


@pytest.mark.parametrize(
    ("head", "text", "message"),
    [
        ("samples = 64\ntokens = 9\n", "", "sweep.samples = 64 and sweep.tokens = 9: a sweep has one budget"),
        ("tokens = 9\nseconds = 9\n", "", "sweep.tokens = 9 and sweep.seconds = 9.0: a sweep has one budget"),
        ("tokens = 0\n", "", "tokens = 0: Input should be greater than or equal to 1"),
        ("seconds = 0.5\n", "", "seconds = 0.5: Input should be greater than or equal to 1"),
        ("tokens = 9\n", "[sweep.overrides]\nmax_seconds = 9\n", "'max_seconds' is another budget beside sweep.tokens = 9"),
        ("samples = 64\n", "[sweep.overrides]\nmax_trained_tokens = 9\n", "another budget beside sweep.samples = 64"),
        ("", "[sweep.overrides]\nmax_seconds = 0\n", "max_seconds = 0: .*greater than or equal to 1"),
        ("", "[sweep.overrides]\nmax_steps = 'none'\n", "over the same steps and prompts, and .* has no max_steps"),
        ("samples = 640\n", "[sweep.overrides]\n'data.source' = 'spool:x'\n'data.options' = {}\n", "has data.source = 'spool:"),
    ],
)
def test_a_sweep_has_one_budget_of_one_at_least(tmp_path: Path, head: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_sweep(write(tmp_path, HEAD + head + text + VALUES))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AXIS + "clipper = { loss.kind = 'ppo_clip' }\n", "axis 'correction': 'clipper' does not set 'loss.dual_clip'"),
        ("[sweep.axes.correction]\nnone = { loss.kind = 'ppo_clip' }\n", "'correction': it has fewer than two values"),
        (AXIS + "[sweep.values]\n'loss.kind' = ['ppo_clip']\n", "'loss.kind' is set by the axes correction and loss.kind"),
        ("[sweep.overrides]\nmax_steps = 3\n" + AXIS, "'max_steps' follows from sweep.samples = 64"),
    ],
)
def test_axes_that_cannot_be_meant_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_sweep(write(tmp_path, HEAD + "samples = 64\n" + text))
