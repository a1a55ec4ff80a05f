"""Where prompts come from, which one a group gets, and how it becomes tokens.

Everything here is a pure function of the configuration, the run's seed and a group number, so any actor can begin any
group, again if need be, without asking anybody. Holds no cursor, draws no random number from outside, knows no engine.
Called by the actor's loop (rows, numbers, seeds, tokens), by evaluation (held-out rows) and by the check before a run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rlhf.actors.config import DataConfig
from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.record import Int32Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from async_rlhf.actors.gym_tasks import ProceduralDataset

TASK_PREFIX = "reasoning_gym:"
# The stream of training prompts of a procedural task; `options.seed` chooses another. It is not the run's seed, so that
# runs with different seeds see the same prompts in a different order.
TRAINING_SEED = 0
# Draws allowed per requested prompt. Finding all n prompts of a task that has just n takes about n ln n draws: 20 n is
# enough for every task, and one that has too few prompts is found out within seconds.
DRAWS_PER_PROMPT = 20
_U64 = (1 << 64) - 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One prompt, as text or as chat messages, and every further column of its row (values are JSON-serialisable).

    A reasoning-gym row has `answer` (text) and `entry` (the task's whole entry: question, answer, metadata).
    """

    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]


def load_rows(config: DataConfig) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows): the same for every caller; no training prompt is a held-out prompt.

    Some reasoning-gym tasks (`word_ladder`, `ransom_note`) walk over sets of strings: they are the same only for
    processes that share one PYTHONHASHSEED, which the launcher of the actors must set. `codeio` runs programs that draw
    as they like: it is never the same twice.
    Raises ConfigError for a source, option or column that does not exist, a row that is not one, or too few prompts.
    """
    if config.source.startswith(TASK_PREFIX):
        return _task_rows(config)
    return _file_rows(config)


def num_training_rows(config: DataConfig) -> int:
    """How many training rows `load_rows` gives. A task gives as many as asked for, or none: it is not imported for that."""
    return config.size if config.source.startswith(TASK_PREFIX) else len(load_rows(config)[0])


def prompt_number(seed: int, group: int, num_rows: int) -> int:
    """Index of the row that group number `group` gets: each epoch of `num_rows` groups is a permutation of its own."""
    if group < 0 or num_rows < 1:
        raise ConfigError(f"a prompt needs group >= 0 and at least one row, got group {group} of {num_rows} rows")
    epoch, position = divmod(group, num_rows)
    return int(_permutation(seed, epoch, num_rows)[position])


def rollout_seed(seed: int, group: int, member: int) -> int:
    """63-bit seed of one completion: a hash, so that neighbouring groups and members share nothing.

    The attempt does not enter: a group that is generated again after a crash is the same group.
    """
    packed = struct.pack("<3Q", seed & _U64, group, member)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def encode(row: Row, tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, list[int]]:
    """(text, token ids) given to the model. Text goes through `template`, messages through the chat template.

    Raises ConfigError for a template that names no column of the row, or messages that cannot be rendered.
    """
    if isinstance(row.prompt, str):
        text = _fill(template, row)
        return text, list(tokenizer(text)["input_ids"])
    if template != "{prompt}":
        raise ConfigError(
            f"data.template {template!r} cannot be applied to chat messages; leave it out, or give prompts as text"
        )
    if not tokenizer.chat_template:
        raise ConfigError("a prompt is a list of chat messages, but the tokenizer has no chat template; give text")
    text = str(tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True, tokenize=False))
    # The chat template has written every special token already.
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_prompts(rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, template: str, max_prompt_length: int) -> None:
    """Refuse, before a run starts, the first prompt that is empty or longer than `max_prompt_length` tokens.

    Raises ConfigError naming the row's number, its length, the limit and the beginning of its text.
    """
    for number, row in enumerate(rows):
        text, ids = encode(row, tokenizer, template)
        if not ids:
            raise ConfigError(f"prompt {number} has no tokens; remove the row or write a data.template around it")
        if len(ids) > max_prompt_length:
            raise ConfigError(
                f"prompt {number} has {len(ids)} tokens, generation.max_prompt_length is {max_prompt_length}; "
                f"raise the limit or shorten the prompt, which begins {text[:60]!r}"
            )


def _task_rows(config: DataConfig) -> tuple[list[Row], list[Row]]:
    if config.columns:
        raise ConfigError(f"data.columns renames columns of a file; {config.source} has prompt, answer and entry")
    seed = config.options.get("seed", TRAINING_SEED)
    if type(seed) is not int:
        raise ConfigError(f"data.options.seed must be a whole number, got {seed!r}")
    seen: set[str] = set()
    held_out = _draw(config, config.held_out_seed, config.held_out, "data.held_out", seen)
    training = _draw(config, seed, config.size, "data.size", seen)
    return training, held_out


def _draw(config: DataConfig, seed: int, wanted: int, setting: str, seen: set[str]) -> list[Row]:
    """`wanted` rows of a procedural task whose prompts are not in `seen`; adds them to it."""
    draws = DRAWS_PER_PROMPT * wanted
    dataset = _dataset(config, seed, draws)
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
            f"{setting} asks {config.source} for {wanted} distinct prompts, it gave {len(rows)} in {draws} draws; "
            f"set {setting} to at most {len(rows)} or widen data.options"
        )
    return rows


def _dataset(config: DataConfig, seed: int, size: int) -> ProceduralDataset:
    # The import takes half a second: only a run that uses it pays.
    from async_rlhf.actors.gym_tasks import DATASETS, create_dataset

    task = config.source.removeprefix(TASK_PREFIX)
    if task not in DATASETS:
        raise ConfigError(f"data.source names the unknown reasoning-gym task {task!r}; {did_you_mean(task, DATASETS)}")
    if "size" in config.options:
        raise ConfigError("data.options.size is the number of training prompts; set data.size instead")
    known = {field.name for field in fields(DATASETS[task][1])} - {"size"}
    for name in sorted(config.options.keys() - known):
        raise ConfigError(f"data.options.{name} is not an option of {task}; {did_you_mean(name, known)}")
    try:
        return create_dataset(task, **{**config.options, "seed": seed, "size": max(1, size)})
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym refuses data.options {config.options} for {task}: {error}") from error


@contextlib.contextmanager
def _global_random(seed: int) -> Iterator[None]:
    """Seed Python's global generator meanwhile: a few tasks (`list_functions`) draw from it beside their own."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


def _file_rows(config: DataConfig) -> tuple[list[Row], list[Row]]:
    if config.options:
        raise ConfigError(f"data.options are for {TASK_PREFIX}<task>; {config.source} is a file, remove them")
    path = Path(config.source)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.source {config.source!r} cannot be read: {error}; give a JSONL file or {TASK_PREFIX}<task>"
        ) from error
    rows = [_file_row(f"{path}:{number}", line, config.columns) for number, line in enumerate(lines, 1) if line.strip()]
    if len(rows) <= config.held_out:
        raise ConfigError(
            f"{path} has {len(rows)} rows, data.held_out keeps {config.held_out}: none is left; lower data.held_out"
        )
    split = len(rows) - config.held_out
    kept_out = {_key(row) for row in rows[split:]}
    training = [row for row in rows[:split] if _key(row) not in kept_out]
    if len(training) < split:
        logger.warning("left %d of %d training rows out: their prompts are held out", split - len(training), split)
    if not training:
        raise ConfigError(f"every training prompt of {path} is also held out; lower data.held_out or add rows")
    return training, rows[split:]


def _file_row(where: str, line: str, renames: dict[str, str]) -> Row:
    """One line of a JSONL file; `where` names it in errors. A renamed column replaces one that had our name already."""
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}; write one object a line") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is a {type(given).__name__}, not an object; write one object a line")
    for theirs in renames.values():
        if theirs not in given:
            raise ConfigError(f"data.columns names {theirs!r}, which {where} does not have; {did_you_mean(theirs, given)}")
    columns = {name: value for name, value in given.items() if name not in renames.values()}
    columns |= {ours: given[theirs] for ours, theirs in renames.items()}
    if "prompt" not in columns:
        raise ConfigError(
            f"{where} has no column 'prompt', it has {', '.join(given) or 'none'}; "
            f'name the one to use: data.columns.prompt = "{next(iter(given), "question")}"'
        )
    prompt = columns.pop("prompt")
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        raise ConfigError(f"{where}: a prompt is text or a list of messages with role and content, got {prompt!r:.80}")
    return Row(prompt, columns)


def _is_chat(prompt: object) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


def _key(row: Row) -> str:
    return json.dumps(row.prompt)


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_rows: int) -> Int32Array:
    # Philox takes its 128-bit key as it is: (seed, epoch) names the stream, nothing has to be drawn up to it.
    key = np.array([seed & _U64, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_rows).astype(np.int32)


def _fill(template: str, row: Row) -> str:
    columns = {**row.columns, "prompt": row.prompt}
    try:
        return template.format_map(columns)
    except KeyError as error:
        name = str(error.args[0])
        raise ConfigError(
            f"data.template names the column {name!r}, which a row does not have; {did_you_mean(name, columns)}"
        ) from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"data.template {template!r} cannot be filled: {error}; write a literal brace twice") from error
