"""MLflow, with its own variables (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from async_rlhf.run.config import flat
from async_rlhf.run.tracking import Row, Tracked

_TAG, _MOST_PARAMS, _LONGEST = "async_rlhf.id", 100, 500
_NO_NAME = re.compile(r"[^\w\-./ ]")


def open_tracker(run: Tracked) -> MLflow:
    """The run of the experiment `async-rlhf` that has this `id` as a tag, or a new one with the configuration as parameters."""
    client, name = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", "async-rlhf")
    experiment = client.get_experiment_by_name(name)
    place = client.create_experiment(name) if experiment is None else experiment.experiment_id
    if found := client.search_runs([place], f"tags.`{_TAG}` = '{run.id}'", max_results=1):
        client.update_run(found[0].info.run_id, status="RUNNING")
        return MLflow(client, found[0].info.run_id)
    made = client.create_run(place, run_name=run.name, tags={_TAG: run.id}).info.run_id
    params = [Param(_NO_NAME.sub("_", key), str(value)[:_LONGEST]) for key, value in flat(run.config)]
    for first in range(0, len(params), _MOST_PARAMS):
        client.log_batch(made, params=params[first : first + _MOST_PARAMS])
    return MLflow(client, made)


class MLflow:
    """Each call is a request that has been answered when it returns."""

    def __init__(self, client: MlflowClient, run: str) -> None:
        self._client, self._run = client, run

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        shown = [Metric(_NO_NAME.sub("_", name), value, int(at * 1000), step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=shown)

    def table(self, name: str, step: int, at: float, rows: Sequence[Row]) -> None:
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        self._client.log_table(self._run, columns, f"{name}/step_{step:06d}.json")

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._client.set_terminated(self._run)
