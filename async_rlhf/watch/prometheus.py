"""Runs as Prometheus metrics: of each run, by the label `run`, its newest step, ledger and actors.

Names and units follow Prometheus' own practice (base units, `_total` for what only rises); `alerts.yml` rests on them. A run
that has not said a number has no sample of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from async_rlhf.watch.runs import Runs
from async_rlhf.watch.series import is_number

ALERTS = Path(__file__).with_name("alerts.yml")

# Gauges of the newest step: name, metric of metrics.jsonl, help.
_STEP = (
    ("reward", "reward", "Mean reward of the completions of the newest step"),
    ("tokens_per_second", "tokens_per_second", "Completion tokens trained on a second"),
    ("step_seconds", "step_time", "Duration of the newest step"),
    ("staleness_mean_steps", "staleness/mean", "Mean staleness of its tokens"),
    ("staleness_max_steps", "staleness/max", "Largest staleness of its tokens"),
    ("staleness_violations", "staleness/violations", "Tokens over the bound; always 0"),
    ("learner_idle_ratio", "idle/learner", "Share of the step in which the learner waited for its batch"),
    ("actor_idle_ratio", "idle/actor", "Share of the actors' time in which no sequence was decoded"),
    ("queue_depth_groups", "queue/depth", "Groups that are ready and not taken"),
    ("completion_tokens_mean", "completions/mean_length", "Mean length of completions"),
    ("completions_clipped_ratio", "completions/clipped_ratio", "Share of completions that a budget of tokens cut"),
    ("reward_failed_ratio", "rewards/failed_ratio", "Share of scores that failed"),
    ("constant_groups_ratio", "frac_reward_zero_std", "Share of groups that teach nothing"),
    ("entropy_nats", "entropy", "Entropy of the policy, per token"),
    ("kl_behaviour_nats", "kl/behaviour", "Mean log-ratio to the sampling policy, per token"),
    ("kl_reference_nats", "kl/reference", "Mean log-ratio to the frozen initial model, per token"),
    ("importance_ratio_max", "is/ratio_max", "Largest ratio proximal / behaviour"),
    ("effective_sample_ratio", "is/ess", "Effective sample size as a share of tokens"),
    ("mismatch_nats", "mismatch/abs_log_ratio", "Engine against learner on tokens of the same weights alone"),
    ("gradient_norm", "grad_norm", "Norm of the gradient before it is cut"),
    ("learning_rate", "learning_rate", "Of the policy's optimizer"),
    ("checkpoints_failed", "checkpoint/failed", "Checkpoints that could not be written since the learner's start"),
    ("records_lost_lines", "records/lost_lines", "Lines that the run's records should have and have not"),
)
_EVALUATION = (
    ("evaluation_reward", "mean_reward", "Mean reward on held-out prompts, newest evaluation"),
    ("evaluation_accuracy_ratio", "accuracy", "Share of held-out prompts solved, newest evaluation"),
)
_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)
_ROLES = ("hub", "actor", "learner")  # every run has them; those that it may have besides are shown once one was started again
_PLACES = ("leased", "queued", "in_flight", "trained", "stale", "filtered", "failed", "quarantined")


class RunsCollector(Collector):
    """Answers a scrape from what was read last."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def describe(self) -> list[Metric]:
        """Nothing is asked before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        found = self._runs.summaries()
        yield _gauge("runs", "Runs that are watched", {"": {"runs": len(found)}}, "runs", labels=())
        yield _gauge("up", "Whether a process of the run lives", found, "alive")
        yield _gauge(
            "problems", "Files of the run that cannot be read", {n: {"n": len(s["problems"])} for n, s in found.items()}, "n"
        )
        yield _gauge("max_steps", "Steps at which the run ends", found, "max_steps")
        yield _gauge("staleness_bound_steps", "queue.max_staleness", _part(found, "config"), "max_staleness")
        yield _gauge("exit_code", "How the run ended, as its command's exit code", _part(found, "ended"), "code")
        last, hub = _part(found, "last"), _part(found, "hub")
        yield _counter("steps", "Steps the learner has done", found, "step")
        yield _counter("trained_tokens", "Completion tokens trained on", last, "num_tokens_total")
        yield _gauge("last_step_timestamp_seconds", "When the newest step was recorded", last, "time")
        for name, metric, words in _STEP:
            yield _gauge(name, words, last, metric)
        newest = {name: (summary["evaluations"] or [{}])[-1] for name, summary in found.items()}
        for name, metric, words in _EVALUATION:
            yield _gauge(name, words, newest, metric)
        yield _gauge("weights_version", "Newest published weights", hub, "version")
        yield _counter("learner_starts", "Lives of the learner", hub, "fence")
        yield _restarts(_part(found, "restarts"))
        yield _gauge("waits_for_prompts", "Whether the learner waits and the spool has no prompts", hub, "lacks_prompts")
        yield _gauge("waits_for_room", "Whether too little is left on the disk to begin a group", hub, "lacks_room")
        yield from _spool(_part(hub, "spool"))
        yield from _ledger(hub)
        yield from _actors(hub)


def exposition(runs: Runs) -> bytes:
    """What a scrape is answered with, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunsCollector(runs))
    return generate_latest(registry)


def _restarts(counts: Mapping[str, Mapping[str, Any]]) -> Metric:
    family = CounterMetricFamily("async_rlhf_restarts", "Processes that were started again", labels=("run", "role"))
    for name, roles in counts.items():
        for role in {**dict.fromkeys(_ROLES, 0), **roles}:
            family.add_metric((name, role), roles.get(role, 0))
    return family


def _spool(spools: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    yield _counter("spool_rows", "Rows that have come into the spool and are bound to groups", spools, "rows")
    yield _counter("spool_rejected_lines", "Lines of the spool that were set aside", spools, "rejected")
    problems = {name: {"is": bool(spool.get("problem"))} for name, spool in spools.items()}
    yield _gauge("spool_problem", "Whether the spool cannot be used now", problems, "is")


def _ledger(hubs: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    groups = GaugeMetricFamily("async_rlhf_ledger_groups", "Attempts at groups, by where they are", labels=("run", "place"))
    ledgers = {name: hub["ledger"] for name, hub in hubs.items() if isinstance(hub.get("ledger"), Mapping)}
    for name, ledger in ledgers.items():
        for place in _PLACES:
            if is_number(ledger.get(place)):
                groups.add_metric((name, place), ledger[place])
    yield groups
    yield _counter("credited_groups", "Attempts at groups that were permitted", ledgers, "credited")
    yield _gauge("ledger_closes", "Whether the ledger adds up; always 1", ledgers, "closes")


def _actors(hubs: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("run", "actor")
    version = GaugeMetricFamily("async_rlhf_actor_version", "Weights that the actor serves", labels=labels)
    groups = GaugeMetricFamily("async_rlhf_actor_groups", "Groups that the actor has begun", labels=labels)
    silent = GaugeMetricFamily("async_rlhf_actor_silent_seconds", "Since the actor was last heard", labels=labels)
    number = {name: {"n": len(hub["actors"])} for name, hub in hubs.items() if isinstance(hub.get("actors"), Mapping)}
    for name in number:
        for actor, about in hubs[name]["actors"].items():
            for family, key in ((version, "version"), (groups, "groups"), (silent, "silent_s")):
                if is_number(about.get(key)):
                    family.add_metric((name, actor), about[key])
    yield _gauge("actors", "Actors that the hub knows", number, "n")
    yield from (version, groups, silent)


def _gauge(
    name: str, words: str, found: Mapping[str, Mapping[str, Any]], key: str, labels: tuple[str, ...] = ("run",)
) -> GaugeMetricFamily:
    return _filled(GaugeMetricFamily(f"async_rlhf_{name}", words, labels=labels), found, key, bool(labels))


def _counter(name: str, words: str, found: Mapping[str, Mapping[str, Any]], key: str) -> CounterMetricFamily:
    return _filled(CounterMetricFamily(f"async_rlhf_{name}", words, labels=("run",)), found, key, True)


def _filled(family: _Family, found: Mapping[str, Mapping[str, Any]], key: str, labelled: bool) -> _Family:
    for run, values in found.items():
        value = values.get(key)
        if isinstance(value, bool) or is_number(value):
            family.add_metric((run,) if labelled else (), float(value))
    return family


def _part(found: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Mapping[str, Any]]:
    return {name: summary[key] for name, summary in found.items() if isinstance(summary.get(key), Mapping)}
