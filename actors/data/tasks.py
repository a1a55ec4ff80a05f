"""Prompts drawn from a reasoning-gym task: distinct, the held-out ones first, the same for everyone who draws."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from async_rlhf.actors.data.config import TASK_PREFIX, Source
from async_rlhf.actors.prompts import Row
from async_rlhf.buffers.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from async_rlhf.actors.gym_tasks import ProceduralDataset

# The stream of training prompts of a procedural task; `options.seed` chooses another. It is not the run's seed, so that
# runs with different seeds see the same prompts in a different order.
TRAINING_SEED = 0
# Draws allowed per requested prompt. Finding all n prompts of a task that has just n takes about n ln n draws: 20 n is
# enough for every task, and one that has too few prompts is found out within seconds.
DRAWS_PER_PROMPT = 20


def task_rows(source: Source, held_out: int, held_out_seed: int) -> tuple[list[Row], list[Row]]:
    """(training rows, `held_out` rows of the stream `held_out_seed`). A row has `answer` (text) and the task's whole `entry`.

    Some tasks (`word_ladder`, `ransom_note`) walk over sets of strings: they are the same only for processes that share one
    PYTHONHASHSEED. `codeio` runs programs that draw as they like: it is never the same twice.
    Raises ConfigError for a task or option that does not exist, or too few prompts.
    """
    if source.columns:
        raise ConfigError(f"data.columns renames columns of a file; {source.source} has prompt, answer and entry")
    seed = source.options.get("seed", TRAINING_SEED)
    if type(seed) is not int:
        raise ConfigError(f"data.options.seed must be a whole number, got {seed!r}")
    seen: set[str] = set()
    kept_out = _draw(source, held_out_seed, held_out, "data.held_out", seen)
    return _draw(source, seed, source.size, "data.size", seen), kept_out


def _draw(source: Source, seed: int, wanted: int, setting: str, seen: set[str]) -> list[Row]:
    """`wanted` rows of a procedural task whose prompts are not in `seen`; adds them to it."""
    draws = DRAWS_PER_PROMPT * wanted
    dataset = _dataset(source, seed, draws)
    rows: list[Row] = []
    with _global_random(seed):
        for index in range(draws):
            if len(rows) == wanted:
                break
            entry = dataset[index]
            if entry["question"] not in seen:
                seen.add(entry["question"])
                rows.append(Row(entry["question"], {"answer": entry["answer"], "entry": entry}))
    if len(rows) < wanted:
        raise ConfigError(
            f"{setting} asks {source.source} for {wanted} distinct prompts, it gave {len(rows)} in {draws} draws; "
            f"set {setting} to at most {len(rows)} or widen data.options"
        )
    return rows


def _dataset(source: Source, seed: int, size: int) -> ProceduralDataset:
    # The import takes half a second: only a run that uses it pays.
    from async_rlhf.actors.gym_tasks import DATASETS, create_dataset

    task = source.source.removeprefix(TASK_PREFIX)
    if task not in DATASETS:
        raise ConfigError(f"data.source names the unknown reasoning-gym task {task!r}; {did_you_mean(task, DATASETS)}")
    if "size" in source.options:
        raise ConfigError("data.options.size is the number of training prompts; set data.size instead")
    known = {field.name for field in fields(DATASETS[task][1])} - {"size"}
    for name in sorted(source.options.keys() - known):
        raise ConfigError(f"data.options.{name} is not an option of {task}; {did_you_mean(name, known)}")
    try:
        return create_dataset(task, **{**source.options, "seed": seed, "size": max(1, size)})
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym refuses data.options {source.options} for {task}: {error}") from error


@contextlib.contextmanager
def _global_random(seed: int) -> Iterator[None]:
    """Seed Python's global generator meanwhile: a few tasks (`list_functions`) draw from it beside their own."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
