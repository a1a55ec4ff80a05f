"""What a sweep or a run measured, as pandas data frames, for a notebook.

    from async_rlhf.experiments.staleness.frames import curves, results
    curves("experiments/staleness/ages").groupby(["queue.max_staleness", "step"])["reward"].mean().unstack(0).plot()

Needs pandas (the extra `experiments`), only when one is made. Reads what is kept on disk, starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.staleness.archive import holds_cells, read_sweep
from async_rlhf.experiments.staleness.cells import CURVES, CellResult, read_run
from async_rlhf.experiments.staleness.report import row
from async_rlhf.run.run_dir import RunDir

if TYPE_CHECKING:
    import pandas


def results(directory: str | Path) -> pandas.DataFrame:
    """One row a cell, or the one of a run: the columns of results.csv, which docs/sweeps.md explains.

    directory: of a sweep's results, or of a run. Raises ConfigError for any other, and without pandas; DamagedError.
    """
    return _frame([row(result) for result in _measured(Path(directory))])


def curves(directory: str | Path) -> pandas.DataFrame:
    """One row a step of each cell: the cell, its setting and seed; `step`; `seconds` (since the start), `samples` and
    `tokens` (trained on so far); `reward`; and the metrics of docs/metrics.md that were kept, NaN where one was not.

    directory, errors: as of `results`.
    """
    return _frame([
        {
            "cell": result.cell, **dict(result.setting), "seed": result.seed, "step": i + 1, "seconds": result.seconds[i],
            "samples": result.samples[i], "tokens": result.tokens[i] if result.tokens else None, "reward": result.rewards[i],
            **{name: result.curves[name][i] for name in CURVES if name in result.curves},
        }
        for result in _measured(Path(directory)) for i in range(result.steps)
    ])  # fmt: skip


def _measured(directory: Path) -> Sequence[CellResult]:
    return read_sweep(directory).results if holds_cells(directory) else [read_run(RunDir.existing(directory))]


def _frame(rows: Sequence[dict[str, object]]) -> pandas.DataFrame:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ConfigError("data frames need pandas: pip install 'async-rlhf[experiments]'") from error
    frame = pandas.DataFrame(rows)
    # a column of None alone would be of objects
    return frame.astype({name: "float64" for name in frame if frame[name].isna().all()})
