"""MLflow, with its own variables (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from async_rlhf.run.tables import flat
from async_rlhf.run.tracking import PROJECT, Row, Tracked

# A server that does not answer is an error within seconds; by itself MLflow tries for many minutes.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
_TAG, _MOST_PARAMS, _LONGEST = "async_rlhf.id", 100, 500


class Service:
    """The run of the experiment that has the run's `id` as a tag, or a new one. Each call returns when it has been answered."""

    def __init__(self, run: Tracked) -> None:
        for limit, value in _PATIENCE.items():
            os.environ.setdefault(limit, value)
        self._client, name = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        if runs := self._client.search_runs([place], f"tags.`{_TAG}` = '{run.id}'", max_results=1):
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(place, run_name=run.name, tags={_TAG: run.id}).info.run_id
        params = [Param(_named(key), str(value)[:_LONGEST]) for key, value in flat(run.config)]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _MOST_PARAMS])

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        metrics = [Metric(_named(name), value, int(at * 1000), step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def table(self, name: str, step: int, at: float, rows: Sequence[Row]) -> None:
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        self._client.log_table(self._run, columns, f"{name}/step_{step:06d}.json")

    def images(self, name: str, step: int, at: float, shown: Mapping[str, Any]) -> None:
        for digest, image in shown.items():
            self._client.log_image(self._run, image, artifact_file=f"{name}/step_{step:06d}/{digest}.png")

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _named(text: str) -> str:
    """The text with only the characters that MLflow's names may have."""
    return re.sub(r"[^\w\-./ ]", "_", text)[:250]
