"""A sweep file: what it means, and how it is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.staleness.config import Cell, load_sweep
from async_rlhf.experiments.staleness.sweep import Job
from async_rlhf.preparation import with_reward_settings
from async_rlhf.run.loading import dump, load
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, REPOSITORY
from tests.experiments.written import Lines, ended_run

STALENESS = REPOSITORY / "experiments" / "staleness"
HEAD = f'[sweep]\nname = "s"\nbase = "{QUICK}"\noutput_dir = "sweeps"\nseeds = [0, 1]\n'
VALUES = '[sweep.values]\n"queue.max_staleness" = [0, 2]\n'


AXIS = """[sweep.axes.correction]
none = { "loss.kind" = "ppo_clip", "loss.dual_clip" = "none" }
clipped = { loss = { kind = "ppo_clip", dual_clip = 3.0 } }
"""


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


def test_a_parameter_of_one_loss_is_set_where_that_loss_is_named(tmp_path: Path) -> None:
    clipped, near = "clipped = { loss.kind = 'ppo_clip' }\n", "near = { loss = { kind = 'dppo_tv', delta = 0.1 } }\n"
    cells = cells_of(tmp_path, HEAD + "[sweep.axes.loss]\n" + clipped + near)
    assert [cell.config.loss.parameters for cell in cells[:2]] == [{}, {"delta": 0.1}]
    with pytest.raises(ConfigError, match=r"'clipped' does not set 'loss.clip_low'"):
        cells_of(tmp_path, HEAD + "[sweep.axes.loss]\n" + clipped + "low = { loss = { kind = 'ppo_clip', clip_low = 0.1 } }\n")


def test_settings_given_with_the_command_are_laid_upon_the_overrides_of_every_cell(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "[sweep.overrides]\nmax_steps = 30\ngeneration.group_size = 4\n" + VALUES)
    given = {"max_steps": 9, "learner": {"learning_rate": 0.5}, "generation.group_size": 2}
    sweep, cells = load_sweep(path, {**given, "sweep.name": "other", "sweep.seeds": [7]})
    assert sweep.overrides == {"max_steps": 9, "generation.group_size": 2, "learner.learning_rate": 0.5}
    assert [str(cell.config.run_dir) for cell in cells] == [
        f"sweeps/other/queue.max_staleness-{bound}_seed-7" for bound in (0, 2)
    ]
    assert {(cell.config.max_steps, cell.config.generation.group_size) for cell in cells} == {(9, 2)}
    assert {cell.config.learner.learning_rate for cell in cells} == {0.5}


def test_the_shipped_sweep_goes_by_its_name() -> None:
    sweep, cells = load_sweep(Path("quick"))
    assert (sweep, cells) == load_sweep(STALENESS / "quick.toml")
    assert len(cells) == 6
    assert sweep.output_dir == "runs/sweeps"


EXPERIMENTS = {
    "ages": 10, "corrections": 90, "critics": 27, "in_flight": 9, "lengths": 9, "mini_batches": 60, "objectives": 160,
    "one_step": 18, "rates": 9, "sao": 20, "search": 12,
}  # fmt: skip


@pytest.mark.parametrize(("name", "num_cells"), EXPERIMENTS.items())
def test_an_experiment_is_a_valid_grid_that_keeps_its_results_beside_it(
    name: str, num_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    sweep, cells = load_sweep(STALENESS / name / f"{name}.toml")
    assert len(cells) == num_cells
    assert sweep.results_dir == STALENESS / name
    assert all(cell.config.queue.exact for cell in cells) == (name in ("ages", "corrections", "critics", "objectives", "sao"))


OVERRIDES = "[sweep.overrides]\n"
# what stands between the head of a sweep and its values
ADDED = {
    "unknown key": ("seed = [1]\n", "unknown key 'seed': did you mean 'seeds'"),
    "a cell that would hang": (OVERRIDES + "learner.publish_every = 3\n", "= 0, seed = 0: .*would hang"),
    "no end": (OVERRIDES + "max_steps = 'none'\n", "over the same steps and prompts, and .* has no max_steps"),
    "a spool": ("samples = 64\n" + OVERRIDES + "data = { source = 'spool:x', options = {} }\n", "has data.source = 'spool:"),
}
REFUSED = {
    **{name: (HEAD + text + VALUES, message) for name, (text, message) in ADDED.items()},
    "unknown table": (HEAD + VALUES + "[swep]\n", "unknown key 'swep': did you mean 'sweep'"),
    "no sweep": ("", r"has no table \[sweep\]"),
    "no values": (HEAD, "has no axis; give"),
    "no seeds": (HEAD.replace("[0, 1]", "[]") + VALUES, r"'seeds' = \[\]; give a list with at least one value"),
    "not TOML": (HEAD + "values", "cannot be read"),
    "a single value": (HEAD + VALUES.replace("[0, 2]", "2"), "'queue.max_staleness' = 2; give a list"),
    "a value twice": (HEAD + VALUES.replace("[0, 2]", "[2, 2]"), "hold one twice"),
    "key of a run": (HEAD + VALUES.replace("staleness", "stalenes"), "max_stalenes = 0, seed = 0: unknown key .*did you mean"),
    "one directory for two": (HEAD + '[sweep.values]\n"data.template" = ["{prompt}!", "{prompt}?"]\n', "share the directory"),
    "one run under two names": (
        HEAD + "[sweep.axes.clip]\nlow = { loss.clip_low = 0.1 }\nless = { loss.clip_low = 1e-1 }\n",
        "the cells with clip = low, seed = 0 and with clip = less, seed = 0 have the same configuration",
    ),
    "no base": (HEAD.replace("quick.toml", "quack.toml") + VALUES, "quack.toml' does not exist"),
    "not whole": (
        HEAD + AXIS + "other = { loss.kind = 'cispo' }\n",
        "axis 'correction': 'other' does not set 'loss.dual_clip'",
    ),
    "one value": (HEAD + "[sweep.axes.kind]\nnone = { loss.kind = 'ppo_clip' }\n", "'kind': it has fewer than two values"),
    "a key of two axes": (
        HEAD + AXIS + "[sweep.values]\n'loss.kind' = ['ppo_clip']\n",
        "'loss.kind' is set by the axes correction and loss.kind",
    ),
    "an axis with the name of another": (
        HEAD + AXIS.replace("correction", "'queue.max_staleness'") + VALUES,
        "axis 'queue.max_staleness' has the name of another axis",
    ),
    "an axis of seeds": (HEAD + AXIS.replace("correction", "seed"), "axis 'seed' has the name of another axis"),
    "steps beside samples": (
        HEAD + "samples = 64\n" + OVERRIDES + "max_steps = 3\n" + AXIS,
        "'max_steps' follows from sweep.samples = 64",
    ),
}


GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "swept": ({"queue.max_staleness": 1}, "'queue.max_staleness' is swept and overridden with 1; leave out one of the two"),
    "a seed": ({"seed": 4}, "'seed' is decided by the sweep; set sweep.seeds"),
    "no key": ({"max_step": 4}, "seed = 0: unknown key 'max_step': did you mean 'max_steps'"),
    "seeds given twice": ({"sweep.seeds": [2, 2]}, "'seeds' = .* hold one twice"),
    "samples that fill no batch": ({"sweep.samples": 1300}, "1300 is no multiple of the 128 completions of a step; .*: 1280"),
}


@pytest.mark.parametrize("case", [*REFUSED, *GIVEN])
def test_a_wrong_sweep_or_a_wrong_setting_given_with_the_command_is_refused_with_what_to_do(case: str, tmp_path: Path) -> None:
    text, message = REFUSED.get(case, (HEAD + VALUES, ""))
    given, message = GIVEN.get(case, ({}, message))
    with pytest.raises(ConfigError, match=message):
        load_sweep(write(tmp_path, text), given)


def test_a_sweep_that_does_not_exist_names_those_that_are_shipped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; shipped ones go by their names, .*: quick"):
        load_sweep(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="sweep 'quik' is neither a file nor a shipped configuration; did you mean 'quick'"):
        load_sweep(Path("quik"))


FOUR, END = [{"step": step} for step in range(1, 5)], [{"label": "end"}]
AT_END = {"evaluation.at_end": True}
SPENT = [{"step": step, "num_tokens_total": total} for step, total in ((1, 39), (2, 61))]

# settings of a cell of four steps, the metrics and the evaluations of its run, and how far that is
STATES: dict[str, tuple[dict[str, Any], Lines | None, Lines, str]] = {
    "without a directory": ({}, None, [], "new"),
    "with fewer steps": (AT_END, FOUR[:3], END, "unfinished"),
    "without its evaluation": (AT_END, FOUR, [{"label": "start"}], "unfinished"),
    "with all": (AT_END, FOUR, END, "finished"),
    # 64 prompts of 4 groups a step
    "the data ended first": ({"data.epochs": 1, "max_steps": 100}, [*FOUR, {"step": 16}], [], "finished"),
    "the tokens are not used up": ({"max_trained_tokens": 40, "max_steps": 100}, SPENT[:1], [], "unfinished"),
    "its last step used up the tokens": ({"max_trained_tokens": 40, "max_steps": 100}, SPENT, [], "finished"),
}


@pytest.mark.parametrize("case", STATES)
def test_how_far_a_cell_is_what_is_on_disk_says(case: str, small: Any) -> None:
    settings, metrics, evaluations, state = STATES[case]
    cell = Cell(small(**settings), {"queue.max_staleness": 1})
    if metrics is not None:
        ended_run(cell.config, metrics, evaluations)
        running = RunDir.reopen(cell.config)
        with pytest.raises(ConfigError, match=r"is being run by process \d+ on host .*; wait, or stop it"):
            Job(cell, "", 64, Path()).of_run()
        running.retire()
    assert Job(cell, "", 64, Path()).of_run() == state


def test_other_settings_than_those_of_its_run_are_refused(small: Any) -> None:
    two, one = ({"rewards.weights": weights} for weights in ({"a": 2.0, "b": 1.0}, {"a": 2.0}))
    for number, (before, now, change) in enumerate(
        (({}, {"max_steps": 5}, "max_steps: 4 -> 5"), (two, one, "rewards.weights.b: 1.0 -> 'default'"))
    ):
        ended_run(small(**before, name=str(number)), FOUR)
        with pytest.raises(ConfigError, match=rf"with other settings \({change}\)\. Restore them, those of --set too"):
            Job(Cell(small(**now, name=str(number)), {}), "", 64, Path()).of_run()


def test_how_a_run_is_watched_and_what_a_reward_says_of_itself_are_no_changed_settings(small: Any, tmp_path: Path) -> None:
    judge = "from async_rlhf import reward\n\n@reward(weight=2.0)\ndef judge(completion):\n    return 1.0\n"
    (tmp_path / "judge.py").write_text(judge)
    own = {"rewards.functions": [str(tmp_path / "judge.py:judge")]}
    ended_run(with_reward_settings(small(**own)), FOUR)
    assert Job(Cell(small(**own, stall_timeout_s=7.0), {}), "", 64, Path()).of_run() == "finished"


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


def test_a_budget_of_the_sweep_takes_the_place_of_that_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(dump(load(QUICK, {"max_trained_tokens": 77})))
    path = write(tmp_path, HEAD.replace(str(QUICK), "base.toml") + VALUES)
    for given, expected in (({}, (77, 150)), ({"sweep.samples": 1280}, (None, 10)), ({"max_trained_tokens": 900}, (900, 150))):
        assert {(each.config.max_trained_tokens, each.config.max_steps) for each in load_sweep(path, given)[1]} == {expected}
