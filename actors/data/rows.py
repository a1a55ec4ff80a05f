"""From `[data]` to rows: read, renamed, held out, and how often each is in an epoch where sources have weights.

Pure functions of the configuration and of what lies on disk: every process that calls them gets the same rows.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_rlhf.actors.chat import chat_of
from async_rlhf.actors.data.config import CALLER_ROWS, HELD_OUT_SEED, SPOOL_PREFIX, TASK_PREFIX, DataConfig, MixedSource, Source
from async_rlhf.actors.data.files import Located, plain, read_file
from async_rlhf.actors.data.images import COLUMNS, ImageLoader, Read, has_images, with_images
from async_rlhf.actors.data.tasks import task_rows
from async_rlhf.actors.prompts import Row, RowSequence
from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.images.store import scratch
from async_rlhf.buffers.record import SOURCE

# Held out by default: of a task so many, of a file at most so many and at most this share.
_HELD_OUT, _HELD_OUT_SHARE = 200, 10
# A list of more rows takes gigabytes; weights that ask for it are a slip.
_LARGEST_EPOCH = 50_000_000


def load_rows(config: DataConfig, given: Iterable[Any] | None = None) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows): each row once, source after source. Of a spool, whose rows come later, none.

    given: the rows themselves, instead of what `source` names. Images are put into the `scratch` store. A file may repeat a
    held-out prompt before its end: what the model reads decides that, so `run.checks.preflight` leaves such rows out.

    Raises ConfigError for a source, option or column that does not exist, a row that is not one, or too few rows.
    """
    if config.spool is not None:
        _check_spool(config)
        return [], []
    training: list[Row] = []
    held_out: list[Row] = []
    for source in _sources(config):
        rows, kept_out = _rows(source, config, given)
        if isinstance(source, MixedSource):
            for row in (*rows, *kept_out):
                _name_source(row, source.label)
        training += rows
        held_out += kept_out
    return training, held_out


class Mixed(RowSequence):
    """The parts of some rows one after another, each as often as is asked for, again from its beginning at its end."""

    def __init__(self, rows: Sequence[Row], parts: Iterable[tuple[range, int]]) -> None:
        self._rows, self._parts = rows, [*parts]

    def __len__(self) -> int:
        return sum(count for _, count in self._parts)

    def at(self, number: int) -> Row:
        for part, count in self._parts:
            if number < count:
                return self._rows[part[number % len(part)]]
            number -= count
        raise IndexError(number)


def epoch_of(config: DataConfig, training: Sequence[Row]) -> Sequence[Row]:
    """The rows of one epoch, `training` being each once, as `load_rows` gave them: all of them once, or by weight as often as
    the shares of their sources need.

    The smallest epoch in which every row is there and the sources have their shares: rows of a source that is too small for
    its share come again from its beginning. Raises ConfigError for weights that would make it too long.
    """
    weights = {source.label: source.weight for source in config.sources if source.weight is not None}
    if not weights:
        return training
    order = {name: place for place, name in enumerate(weights)}  # in which their rows were loaded
    ends = [bisect_right(training, place, key=lambda row: order[row.columns[SOURCE]]) for place in order.values()]
    parts = {name: range(begin, end) for name, begin, end in zip(weights, [0, *ends], ends, strict=False)}
    if empty := next((name for name, part in parts.items() if not part), None):
        raise ConfigError(f"data.sources: {empty!r} has a weight and no row to train on; leave it out")
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    total, longest = max((len(part) / shares[name], name) for name, part in parts.items())
    if total > _LARGEST_EPOCH:
        raise ConfigError(
            f"data.sources: with {len(parts[longest])} rows of {longest!r} at a share of {shares[longest]:.2g} an epoch has "
            f"{total:.3g} prompts, most are {_LARGEST_EPOCH}; raise its weight"
        )
    return Mixed(training, ((part, round(total * shares[name])) for name, part in parts.items()))


def _sources(config: DataConfig) -> Sequence[Source]:
    if bool(config.source) == bool(config.sources):
        have = f"data.source = {config.source!r} and data.sources" if config.source else "neither data.source nor data.sources"
        raise ConfigError(f"{have}: give one of them (a file, reasoning_gym:<task>, or [[data.sources]])")
    if not config.sources:
        return (config,)
    if spool := next((source.source for source in config.sources if source.source.startswith(SPOOL_PREFIX)), None):
        raise ConfigError(f"data.sources names {spool!r}, whose rows come while the run goes on: data.source = it alone")
    names = [source.label for source in config.sources]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two of data.sources are called {twice!r}; give one of them another name")
    unweighted = [source.label for source in config.sources if source.weight is None]
    if 0 < len(unweighted) < len(names):
        raise ConfigError(f"data.sources: {unweighted[0]!r} has no weight and others have; give all of them one, or none")
    for name in ("options", "columns"):
        if getattr(config, name):
            raise ConfigError(f"data.{name} is of one source; with data.sources write it into each of them")
    return config.sources


def _check_spool(config: DataConfig) -> None:
    """Raises ConfigError for settings that only rows which are there have."""
    _sources(config)
    if config.held_out:
        raise ConfigError(
            f"data.held_out = {config.held_out} of {config.source!r}: its rows come while the run goes on, and evaluations "
            "begin before. Leave it out, and name prompts to evaluate on: evaluation.source"
        )
    if config.options:
        raise ConfigError(f"data.options is not for {config.source!r}, which holds files of one row a line; leave it out")


def _rows(source: Source, config: DataConfig, given: Iterable[Any] | None) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) of one source."""
    if source.source.startswith(TASK_PREFIX):
        held_out = _HELD_OUT if config.held_out is None else config.held_out
        return task_rows(source, held_out, HELD_OUT_SEED)
    if source.options:
        raise ConfigError(f"data.options are for {TASK_PREFIX}<task>; {source.source} is a file, remove them")
    with _uncollected():
        read = ImageLoader(_folder(source), lambda data: scratch().add(data))
        rows = [row_of(where, value, source.columns, read) for where, value in _located(source, given)]
    if not rows:
        raise ConfigError(f"data.source {source.source!r} has no rows; it needs one object with a column 'prompt' at least")
    held_out = min(_HELD_OUT, len(rows) // _HELD_OUT_SHARE) if config.held_out is None else config.held_out
    if held_out >= len(rows):
        raise ConfigError(
            f"data.held_out = {held_out} keeps all {len(rows)} rows of {source.source} out of training; "
            f"highest: {len(rows) - 1}"
        )
    split = len(rows) - held_out
    return rows[:split], rows[split:]


def _folder(source: Source) -> Path:
    """From which the paths of its images are seen."""
    path = Path() if source.source == CALLER_ROWS else Path(source.source)
    return path if path.is_dir() else path.parent


@contextmanager
def _uncollected() -> Iterator[None]:
    """Rows are no garbage: while a million of them are made, the collector would look at each several times."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _located(source: Source, given: Iterable[Any] | None) -> Iterable[Located]:
    seen = [source.columns.get(name, name) for name in ("prompt", *COLUMNS)]
    if source.source != CALLER_ROWS:
        return read_file(source.source, seen)
    if given is None:
        raise ConfigError(
            f"data.source = {CALLER_ROWS!r} stands for rows that are given in Python, train(..., data=rows), and none are; "
            "give them, or name a file"
        )
    if (
        isinstance(given, str | Mapping)
        or hasattr(given, "iterrows")
        or not (isinstance(given, Iterable) or hasattr(given, "__getitem__"))
    ):
        raise ConfigError(
            f"data is a {type(given).__name__}, and rows were expected: dictionaries, or a datasets.Dataset; a file is named "
            "by overrides={'data.source': FILE}, of a table of pandas give table.to_dict('records')"
        )
    rows = ((f"data, row {number}", dict(row) if hasattr(row, "keys") else row) for number, row in enumerate(given, 1))
    return plain(rows, seen)


def row_of(where: str, given: Any, renames: dict[str, str], read: Read) -> Row:
    """The row given at `where`, which names it in errors. A renamed column replaces one that had our name already. read: of its
    images.

    Raises ConfigError for what is no row.
    """
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is a {type(given).__name__}, not an object; write one object a row")
    for theirs in renames.values():
        if theirs not in given:
            raise ConfigError(f"data.columns names {theirs!r}, which {where} does not have; {did_you_mean(theirs, given)}")
    if renames:
        columns = {name: value for name, value in given.items() if name not in renames.values()}
        columns |= {ours: given[theirs] for ours, theirs in renames.items()}
    else:
        columns = dict(given)
    if "prompt" not in columns:
        raise ConfigError(
            f"{where} has no column 'prompt', it has {', '.join(given) or 'none'}; "
            f'name the one to use: data.columns.prompt = "{next(iter(given), "question")}"'
        )
    prompt = columns.pop("prompt")
    if not (isinstance(prompt, str) or (isinstance(prompt, list) and prompt)):
        raise ConfigError(f"{where}: a prompt is text or a list of messages with role and content, got {prompt!r:.80}")
    if has_images(prompt, columns):
        try:
            prompt = with_images(prompt, columns, read)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    try:
        return Row(prompt if isinstance(prompt, str) else chat_of(prompt, with_images=True), columns)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: a prompt is text or a list of messages with role and content: {error}") from error


def _name_source(row: Row, name: str) -> None:
    if row.columns.get(SOURCE, name) != name:
        raise ConfigError(
            f"data.sources: a row of {name!r} has a column {SOURCE!r} of its own ({row.columns[SOURCE]!r:.60}), which would be "
            f'lost; rename it: columns = {{ origin = "{SOURCE}" }}'
        )
    row.columns[SOURCE] = name
