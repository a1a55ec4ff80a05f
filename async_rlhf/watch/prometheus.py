"""Runs as Prometheus metrics: of each run, by the label `run`, its newest step, ledger and actors.

Names and units follow Prometheus' own practice (base units, `_total` for what only rises); the numbers of a step have their own
names as the label `metric`. `alerts.yml` rests on them. A run that has not reported a number has no sample of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from async_rlhf.run.run_files import is_number
from async_rlhf.watch.runs import Runs
from async_rlhf.watch.series import numbers

ALERTS = Path(__file__).with_name("alerts.yml")

# Of each run: name, which part of its summary, key there, help; `_TOTALS` only rise.
_GAUGES = (
    ("up", "", "alive", "Whether a process of the run lives"),
    ("problems", "counts", "problems", "Files of the run that cannot be read"),
    ("max_steps", "", "max_steps", "Steps at which the run ends"),
    ("staleness_bound_steps", "config", "max_staleness", "queue.max_staleness"),
    ("exit_code", "ended", "code", "How the run ended, as its command's exit code"),
    ("last_step_timestamp_seconds", "last", "time", "When the newest step was recorded"),
    ("weights_version", "hub", "version", "Newest published weights"),
    ("waits_for_prompts", "hub", "waits_for_prompts", "Whether the learner waits and the spool has no prompts"),
    ("waits_for_room", "hub", "waits_for_room", "Whether too little is left on the disk to begin a group"),
    ("spool_problem", "spool", "has_problem", "Whether the spool cannot be used now"),
    ("ledger_closes", "ledger", "closes", "Whether the ledger adds up; always 1"),
    ("actors", "counts", "actors", "Actors that the hub knows"),
)
_TOTALS = (
    ("steps", "", "step", "Steps the learner has done"),
    ("trained_tokens", "last", "num_tokens_total", "Completion tokens trained on"),
    ("learner_starts", "hub", "fence", "Lives of the learner"),
    ("spool_rows", "spool", "rows", "Rows that have come into the spool and are bound to groups"),
    ("spool_rejected_lines", "spool", "rejected", "Lines of the spool that were set aside"),
    ("credited_groups", "ledger", "credited", "Attempts at groups that were permitted"),
)
_BY_METRIC = (
    ("step", "last", "Numbers of the newest step, as metrics.jsonl has them: docs/metrics.md"),
    ("evaluation", "evaluation", "Of the newest evaluation: mean_reward; accuracy, the share of held-out prompts solved"),
)
_ACTOR = (
    ("version", "version", "Weights that the actor serves"),
    ("groups", "groups", "Groups that the actor has begun"),
    ("silent_seconds", "silent_s", "Since the hub has received a message of the actor"),
)
_ROLES = ("hub", "actor", "learner")  # every run has them; those that it may have besides are shown once one was started again
_PLACES = ("leased", "queued", "in_flight", "trained", "stale", "filtered", "failed", "quarantined")


class RunsCollector(Collector):
    """Answers a scrape from the last reading."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def describe(self) -> list[Metric]:
        """Nothing is read before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        by_run = {name: _parts(summary) for name, summary in self._runs.summaries().items()}
        runs = GaugeMetricFamily("async_rlhf_runs", "Runs that are watched")
        runs.add_metric((), len(by_run))
        yield runs
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _TOTALS)):
            for name, part, key, words in rows:
                family = kind(f"async_rlhf_{name}", words, labels=("run",))
                for run, parts in by_run.items():
                    _add(family, (run,), parts[part].get(key))
                yield family
        for name, part, words in _BY_METRIC:
            family = GaugeMetricFamily(f"async_rlhf_{name}", words, labels=("run", "metric"))
            for run, parts in by_run.items():
                for metric, value in numbers(parts[part]).items():
                    family.add_metric((run, metric), value)
            yield family
        restarts = CounterMetricFamily("async_rlhf_restarts", "Processes that were started again", labels=("run", "role"))
        groups = GaugeMetricFamily("async_rlhf_ledger_groups", "Attempts at groups, by where they are", labels=("run", "place"))
        for run, parts in by_run.items():
            for role in {**dict.fromkeys(_ROLES, 0), **parts["restarts"]}:
                restarts.add_metric((run, role), parts["restarts"].get(role, 0))
            for place in _PLACES:
                _add(groups, (run, place), parts["ledger"].get(place))
        yield from (restarts, groups)
        for name, key, words in _ACTOR:
            family = GaugeMetricFamily(f"async_rlhf_actor_{name}", words, labels=("run", "actor"))
            for run, parts in by_run.items():
                for actor, about in parts["actors"].items():
                    _add(family, (run, actor), about.get(key))
            yield family


def exposition(runs: Runs) -> bytes:
    """The answer to a scrape, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunsCollector(runs))
    return generate_latest(registry)


def _parts(summary: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The parts of one run's summary that the tables name; missing ones are empty."""
    hub = summary["hub"]
    named = {**summary, **{key: hub.get(key) for key in ("spool", "ledger", "actors")}}
    parts = defaultdict(dict, {name: dict(value) for name, value in named.items() if isinstance(value, Mapping)})
    counts = {"problems": len(summary["problems"])} | ({"actors": len(parts["actors"])} if "actors" in parts else {})
    parts |= {"": dict(summary), "evaluation": (summary["evaluations"] or [{}])[-1], "counts": counts}
    if "spool" in parts:
        parts["spool"]["has_problem"] = bool(parts["spool"].get("problem"))
    return parts


def _add(family: GaugeMetricFamily | CounterMetricFamily, labels: tuple[str, ...], value: Any) -> None:
    """Add a sample for a value that is a number."""
    if isinstance(value, bool) or is_number(value):
        family.add_metric(labels, float(value))
