"""What a sweep or a run measured, as pandas data frames, for a notebook.

    from async_rlhf.experiments.staleness.frames import curves, results
    curves("experiments/staleness/ages").groupby(["queue.max_staleness", "step"])["reward"].mean().unstack(0).plot()

Needs pandas (the extra `experiments`), only when one is made. Reads what is kept on disk, starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.staleness.archive import holds_cells, read_sweep
from async_rlhf.experiments.staleness.cells import CURVES, CellResult, read_cell
from async_rlhf.experiments.staleness.config import Cell
from async_rlhf.experiments.staleness.report import row
from async_rlhf.run.run_dir import RunDir

if TYPE_CHECKING:
    import pandas


def results(directory: str | Path) -> pandas.DataFrame:
    """One row a cell, or the one of a run: the columns of results.csv, which experiments/staleness/README.md explains.

    directory: of a sweep's results, or of a run. Raises ConfigError for any other, and without pandas; DamagedError.
    """
    return _frame([row(result) for result in _measured(Path(directory))])


def curves(directory: str | Path) -> pandas.DataFrame:
    """One row a step of each cell: the cell, its setting and seed; `step`; `seconds` (since the start), `samples` and
    `tokens` (trained on so far); `reward`; and the metrics of docs/metrics.md that were kept, NaN where one was not.

    directory, errors: as of `results`.
    """
    return _frame([each for result in _measured(Path(directory)) for each in _steps(result)])


def _measured(directory: Path) -> Sequence[CellResult]:
    if holds_cells(directory):
        return read_sweep(directory).results
    try:
        return [read_cell(Cell(RunDir.existing(directory).config(), {}), directory)]
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _steps(result: CellResult) -> Iterator[dict[str, Any]]:
    tokens = result.tokens or (None,) * result.steps
    for i in range(result.steps):
        yield {
            "cell": result.cell,
            **dict(result.setting),
            "seed": result.seed,
            "step": i + 1,
            "seconds": result.seconds[i],
            "samples": result.samples[i],
            "tokens": tokens[i],
            "reward": result.rewards[i],
            **{name: result.curves[name][i] for name in CURVES if name in result.curves},
        }


def _frame(rows: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    try:
        import pandas
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pandas":
            raise
        raise ConfigError("data frames need pandas: pip install 'async-rlhf[experiments]'") from error
    frame = pandas.DataFrame(rows)
    # a column of None alone would be of objects
    return frame.astype({name: "float64" for name in frame if frame[name].isna().all()})
