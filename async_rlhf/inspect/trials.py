"""Rewards tried before a run depends on them.

On completions that exist already: values, failures, timings. They run exactly as in a run: same processes, same
time-outs, same limits. Completions come from a JSONL file (each object a `completion`, or `completions` of one group, and the
columns of its prompt) or from a run directory's samples.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from async_rlhf.actors.config import RewardsConfig, ScoringConfig
from async_rlhf.actors.data.images import ImageLoader, as_text, has_images, taken_images, with_images
from async_rlhf.actors.environments.rendering import as_messages
from async_rlhf.actors.prompts import Row
from async_rlhf.actors.scoring.pool import GroupMember, Scored, ScoringInterval, ScoringPool
from async_rlhf.buffers.errors import ConfigError, DeadlineError, RewardError
from async_rlhf.buffers.images import IMAGE, IMAGES, images_of
from async_rlhf.buffers.images.store import scratch
from async_rlhf.buffers.parsing import json_value
from async_rlhf.buffers.record import source_of
from async_rlhf.buffers.score import Score
from async_rlhf.run.caller import specs_of, split
from async_rlhf.run.config import Config
from async_rlhf.run.loading import section
from async_rlhf.run.scoring import played_by, reward_specs

_TOKENS = ("completion_ids", "prompt_ids")
# Fields that may be a list with one item for each of several completions.
_OF_MEMBERS = ("completion_ids", "finish_reason", "sampled")
_BINS = 10
_BARS = " ▁▂▃▄▅▆▇█"
# Longer than any single call may take, retries included; only a defect of ours reaches it.
_PATIENCE_S = 600.0
_MADE_UP = "The answer is 42."


@dataclass(frozen=True)
class RewardTrial:
    """One reward's result on the completions."""

    name: str
    num_scored: int
    num_not_applicable: int
    failures: Mapping[str, int]
    """Counts by reason."""
    mean: float | None
    std: float | None
    lowest: float | None
    highest: float | None
    histogram: Sequence[tuple[float, float, int]]
    """(from, to, how many)"""
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    """mean, p50, p95 and max over the calls"""


@dataclass(frozen=True)
class TrialReport:
    rewards: Sequence[RewardTrial]
    num_completions: int
    wall_s: float
    """Seconds from the first call to the last answer."""
    scores: Sequence[Mapping[str, Score]] = field(repr=False)
    """The scores of each completion, in the order of the data."""

    @property
    def num_failed(self) -> int:
        return sum(sum(reward.failures.values()) for reward in self.rewards)

    @property
    def has_scores(self) -> bool:
        """Whether any reward gave any completion a score."""
        return any(reward.num_scored for reward in self.rewards)

    def plain(self) -> dict[str, Any]:
        """The trial as values for JSON, without the single scores."""
        found = asdict(self)
        del found["scores"]
        return {**found, "num_failed": self.num_failed}


def try_rewards(
    rewards: Iterable[Callable[..., Any] | str] | Callable[..., Any] | str,
    data: str | Path | Sequence[Mapping[str, Any]],
    *,
    limit: int | None = None,
    patience_s: float = _PATIENCE_S,
    scoring: Mapping[str, Any] | None = None,
    **settings: Any,
) -> TrialReport:
    """Score completions with rewards given as functions or by name, or with one. What no other process can import runs in
    threads of this one, as under `train`.

    data: a JSONL file, a run directory, or the objects themselves. limit: completions to score. scoring: keys of that
    section (`timeout_s`, `stages`, ...); settings: keys of the section `rewards` (`options`, ...). Raises ConfigError and
    RewardError as a run would before its start, DeadlineError when for `patience_s` nothing is answered.
    """
    several = [rewards] if isinstance(rewards, str) or callable(rewards) else [*rewards]
    targets, callables = split([reward for reward in several if not isinstance(reward, str)])
    named = iter(targets)
    names = [reward if isinstance(reward, str) else next(named) for reward in several]
    config: RewardsConfig = section("rewards", {**settings, "functions": names})
    running: ScoringConfig = section("scoring", scoring or {})
    folder = Path(data).parent if isinstance(data, str | Path) else Path()
    groups = _groups(_objects(data), limit, partial(_seen, folder))
    members = [member for group in groups for member in group]
    columns = set.intersection(*map(set, members))
    functions, of_own = specs_of(callables, config, running.stages, [Row("", member) for member in members])
    known = {spec.name: spec for spec in config.specs(Path.cwd(), running.stages)}
    others = [spec for name, spec in known.items() if name not in callables]
    for source in {source_of(member) for member in members}:
        config.check_columns(others, source, set.intersection(*(set(each) for each in members if source_of(each) == source)))
    specs = tuple((known | {spec.name: spec for spec in of_own}).values())
    for spec in specs:
        for missing in set(spec.fields or ()) & set(_TOKENS) - columns:
            raise ConfigError(
                f"reward {spec.name!r} asks for {missing!r}, which the data does not have: give it as a list of token "
                "numbers in every object, or use a run directory as data"
            )
    began = time.monotonic()
    bell = threading.Event()
    pool = ScoringPool[int](specs, running, wake=bell.set, by_source=config.by_source, functions=functions)
    scored = _score(pool, groups, bell, patience_s)
    wall_s = time.monotonic() - began
    trials = [
        _trial(name, [each.scores[name] for each in scored], [each.stages[name] for each in scored if name in each.stages])
        for name in (spec.name for spec in specs)
    ]
    return TrialReport(trials, len(scored), wall_s, [each.scores for each in scored])


def call_once(config: Config, rows: Iterable[Row], *, deep: bool) -> list[str]:
    """Call every reward on a made-up completion, as a run does, for a prompt of each source, of text and of messages, and with
    null in a column that they may ask for.

    deep: those too that load a model. Returns what came of it. Raises RewardError for one that fails, unless any share of
    failed scores is allowed.
    """
    specs = reward_specs(config)
    remarks = [f"reward {spec.name} loads a model: only --deep calls it" for spec in specs if spec.holds_model and not deep]
    asked = {name for spec in specs for name in spec.fields or ()}
    takes_all = any(spec.fields is None for spec in specs)
    kinds: dict[Any, Row] = {}
    for row in rows:
        nulls = [name for name, value in row.columns.items() if value is None and (takes_all or name in asked)]
        for kind in (isinstance(row.prompt, str), *nulls):
            kinds.setdefault((source_of(row.columns), kind), row)
    several = {id(row): row for row in kinds.values()}.values()
    members = [_made_up(row, played_by(config, source_of(row.columns)) is not None) for row in several]
    for scope, size in (("completion", 1), ("group", config.generation.group_size)) if members else ():
        chosen = [spec for spec in specs if spec.scope == scope and (deep or not spec.holds_model)]
        bell = threading.Event()
        pool = ScoringPool[int](chosen, config.scoring, wake=bell.set, by_source=config.rewards.by_source)
        scored = _score(pool, [[member] * size for member in members], bell, _PATIENCE_S)
        for member, scores in zip(members, scored[::size], strict=True):
            for name in scores.stages:  # of those that judge its source
                score, about = scores.scores[name], f"a made-up completion of the prompt {str(member['prompt'])[:60]!r}"
                if score.failure is not None and config.rewards.max_failed_ratio < 1:
                    raise RewardError(
                        f"reward {name!r} fails on {about}, {_MADE_UP!r}: {score.failure}. Return None for what it does not "
                        "judge, or allow that scores fail: rewards.max_failed_ratio = 1"
                    )
                remarks.append(f"reward {name} on {about}: {score.failure or score.value}")
    return remarks


def _made_up(row: Row, is_episode: bool) -> dict[str, Any]:
    """The fields of a completion, whose text and tokens are made up."""
    ids, turn = list(range(8)), [{"role": "assistant", "content": _MADE_UP}]
    fields = {"completion": _MADE_UP, "completion_ids": ids, "prompt_ids": ids, "finish_reason": "stop"}
    if is_episode:
        messages = [*as_messages(row.prompt), *turn]
        fields |= {"messages": messages, "completion_messages": turn, "turns": [_MADE_UP], "sampled": [True] * len(ids)}
    images = {IMAGES: [*row.images]} if row.images else {}
    return {**row.columns, **images, "prompt": row.prompt, **fields}


def lines(trial: TrialReport) -> list[str]:
    """A trial as a person reads it: a few lines for each reward, so that several stand on one screen."""
    text = [f"{trial.num_completions} completions in {trial.wall_s:.2f} s"]
    for reward in trial.rewards:
        failed, absent = sum(reward.failures.values()), reward.num_not_applicable
        text.append(f"{reward.name}: {reward.num_scored} scored, {absent} not applicable, {failed} failed")
        if absent == trial.num_completions:
            text.append("  it returned None for every completion: a run would learn nothing from it. Is a `return` missing?")
        if reward.mean is not None and reward.std is not None:
            text.append(f"  {_bars(reward.histogram)}  mean {reward.mean:.4g}, std {reward.std:.4g}")
        if reward.seconds:
            text.append(f"  seconds a call: {in_words(reward.seconds)}")
        text += [f"  {name}: {value:.4g}" for name, value in reward.metrics.items()]
        text += [f"  failed {count} times: {reason}" for reason, count in reward.failures.items()]
    return text


def _bars(histogram: Sequence[tuple[float, float, int]]) -> str:
    """The lowest value, a bar for each tenth of the range, the highest value. A single value has a visible bar."""
    most = max(count for *_, count in histogram)
    bars = "".join(_BARS[-(-(len(_BARS) - 1) * count // most)] for *_, count in histogram)
    return f"{histogram[0][0]:.3g} |{bars}| {histogram[-1][1]:.3g}"


def _objects(data: str | Path | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if not isinstance(data, str | Path):
        return list(data)
    path = Path(data)
    if path.is_dir():
        return _of_run(path)
    try:
        return [json_value(line) for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"data {str(path)!r} cannot be read: {error}; give a JSONL file or a run directory") from error


def _of_run(path: Path) -> list[Mapping[str, Any]]:
    """The groups a run sampled into its `rollouts.jsonl`."""
    from async_rlhf.run.reading import Reading
    from async_rlhf.run.run_dir import RunDir

    run = RunDir.existing(path)
    return [
        {
            **group["columns"],
            **({IMAGES: [str(run.images.path(digest)) for digest in group[IMAGES]]} if group.get(IMAGES) else {}),
            "prompt": group["prompt"],
            "completions": [rollout["text"] for rollout in group["rollouts"]],
            "completion_ids": [rollout["tokens"] for rollout in group["rollouts"]],
            "finish_reason": [rollout["finish_reason"] for rollout in group["rollouts"]],
            **_sampled([rollout.get("spans", ()) for rollout in group["rollouts"]]),
        }
        for group in Reading(run).groups()
    ]


def _sampled(spans: Sequence[Sequence[Sequence[int | None]]]) -> dict[str, list[list[bool]]]:
    """`sampled`, for episodes: whether the model wrote each token of each member; empty where it wrote all."""
    if all(version is not None for own in spans for version, _ in own):
        return {}
    return {"sampled": [[version is not None for version, count in own for _ in range(count or 0)] for own in spans]}


def _seen(folder: Path, number: int, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """An object whose images, given as in rows of data, are put into the store of this process."""
    columns = dict(given)
    if not has_images(prompt := columns.get("prompt", ""), columns):
        return given
    load = ImageLoader(folder, lambda data: scratch().add(data))
    try:
        if isinstance(prompt, str):  # what was trained on is written out, with its places
            found = [load(as_text(each)) for each in taken_images(columns)]
        else:
            columns["prompt"] = with_images(as_text(prompt), columns, load)
            found = [*images_of(columns["prompt"])]
    except ValueError as error:
        raise ConfigError(f"object {number} of the data: {error}") from error
    return {**columns, IMAGES: found, **({IMAGE: found[0]} if len(found) == 1 else {})}


def _groups(
    objects: Sequence[Mapping[str, Any]], limit: int | None, seen: Callable[[int, Mapping[str, Any]], Mapping[str, Any]]
) -> list[list[dict[str, Any]]]:
    """The fields of each completion, those of one group together; cut after `limit` completions, between groups."""
    groups: list[list[dict[str, Any]]] = []
    for number, given in enumerate(objects):
        if limit is not None and sum(map(len, groups)) >= limit:
            break
        if not isinstance(given, Mapping) or ("completion" in given) == ("completions" in given):
            raise ConfigError(
                f"object {number + 1} of the data has no 'completion' (or a list 'completions'); nothing to score"
            )
        shared = {"prompt": "", "finish_reason": "stop", **seen(number + 1, given)}
        if "completion" in given:
            groups.append([shared])
            continue
        several = shared.pop("completions")
        lists = {name: shared.pop(name) for name in _OF_MEMBERS if isinstance(shared.get(name), list)}
        if not isinstance(several, list) or any(len(each) != len(several) for each in lists.values()):
            raise ConfigError(
                f"object {number + 1} of the data: 'completions' must be a list, as long as {', '.join(_OF_MEMBERS)}"
            )
        fields = [{name: values[i] for name, values in lists.items()} for i in range(len(several))]
        groups.append([{**shared, **fields[i], "completion": completion} for i, completion in enumerate(several)])
    if not any(groups):
        raise ConfigError("the data holds no completion: nothing to score")
    return [group for group in groups if group]


def _score(
    pool: ScoringPool[int], groups: Sequence[Sequence[Mapping[str, Any]]], bell: threading.Event, patience_s: float
) -> list[Scored[int]]:
    scores: dict[int, Scored[int]] = {}
    try:
        key = 0
        for number, group in enumerate(groups):
            for member, fields in enumerate(group):
                pool.submit(key, fields, GroupMember(number, member, len(group)))
                key += 1
        last_answer = time.monotonic()
        while pool.num_pending:
            bell.wait(0.1)
            bell.clear()
            scored = {done.key: done for done in pool.poll()}
            scores |= scored
            last_answer = time.monotonic() if scored else last_answer
            if time.monotonic() - last_answer > patience_s:
                raise DeadlineError(f"waited {patience_s:.0f} s for the scores of {pool.num_pending} completions")
    finally:
        pool.close()
    return [scores[each] for each in range(key)]


def _trial(name: str, scores: Sequence[Score], calls: Sequence[ScoringInterval]) -> RewardTrial:
    values = [score.value for score in scores if score.value is not None]
    names = sorted({metric for score in scores for metric in score.metrics})
    return RewardTrial(
        name=name,
        num_scored=len(values),
        num_not_applicable=sum(score.state == "not_applicable" for score in scores),
        failures=failures(scores),
        mean=statistics.fmean(values) if values else None,
        std=statistics.pstdev(values) if values else None,
        lowest=min(values, default=None),
        highest=max(values, default=None),
        histogram=_histogram(values),
        metrics={
            metric: statistics.fmean(score.metrics[metric] for score in scores if metric in score.metrics) for metric in names
        },
        seconds=quantiles([call.ended - call.began for call in calls]),
    )


def failures(scores: Iterable[Score]) -> dict[str, int]:
    """Counts of failures by reason; addresses of objects in it are ignored."""
    reasons = (score.failure for score in scores if score.failure is not None)
    return dict(Counter(re.sub(r"(?<= at )0x[0-9A-Fa-f]+", "0x...", reason) for reason in reasons).most_common())


def _histogram(values: Sequence[float]) -> list[tuple[float, float, int]]:
    if not values:
        return []
    low, high = min(values), max(values)
    if low == high:
        return [(low, high, len(values))]
    counts, edges = np.histogram(values, _BINS)
    return [(float(begin), float(end), int(count)) for (begin, end), count in zip(pairwise(edges), counts, strict=True)]


def quantiles(took: Sequence[float]) -> dict[str, float]:
    """Mean and quantiles of durations; empty for none."""
    if not (ordered := sorted(took)):
        return {}
    at = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    values = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}
    return {"mean": statistics.fmean(ordered), **values}


def in_words(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in seconds.items())
