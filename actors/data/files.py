"""Files that hold rows: JSONL, JSON, CSV, Parquet, directories that Hugging Face `datasets` saves, and those of Harbor's tasks.

A reader gives each row as an object, and where it stands, for messages. What a row must be is decided in `rows`. pyarrow and
datasets are imported where a file needs them.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from async_rlhf.actors.data import images
from async_rlhf.buffers.config import check_installed
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.parsing import json_value

Located = tuple[str, Any]
"""Where a row stands, and what stands there."""

# The csv module's own limit of 128 KiB is below what a prompt with documents has.
_LONGEST_CELL = 1 << 30
# A comment at the beginning with which benchmarks mark their files.
_CANARY = re.compile(r"\A(\s*(<!--[^\n]*canary[^\n]*-->|#[^\n]*canary[^\n]*)\n)+", re.IGNORECASE)
# What JSON has no form for and everyone writes the same way.
_WRITTEN_AS_TEXT = (datetime.date, datetime.time, decimal.Decimal)
# Rows of tables that are held at once: each may have images.
_BATCH = 256


def read_file(source: str, seen: Collection[str] = ()) -> Iterator[Located]:
    """The rows of a file, by its suffix, or of a directory. seen: as of `plain`.

    Raises ConfigError for what cannot be read, or a package that is missing.
    """
    path = Path(source)
    if not path.is_dir() and path.suffix.lower() not in _READERS:
        raise ConfigError(
            f"data.source {source!r} is of no known kind; give {', '.join(_READERS)} (unpacked), a directory of datasets, "
            "reasoning_gym:<task>, or spool:DIR for prompts that come while the run goes on, also over HTTP (spool listen)"
        )
    try:
        if path.is_dir():
            yield from plain(_directory(path), seen)
        elif path.suffix.lower() == ".parquet":
            yield from plain(_parquet(path), seen)
        else:
            yield from _READERS[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.source {source!r} cannot be read: it is not UTF-8 ({error}); write it anew, as with iconv -t utf-8"
        ) from error
    except (OSError, csv.Error) as error:
        raise ConfigError(
            f"data.source {source!r} cannot be read: {error}; give a file ({', '.join(_READERS)}), a directory saved by "
            "datasets, or reasoning_gym:<task>"
        ) from error


def plain(located: Iterable[Located], seen: Collection[str] = ()) -> Iterator[Located]:
    """The same rows as JSON would bring them back: dates and decimals as text, numbers and lists of numpy as Python's.

    seen: columns that may hold images, which become data URLs. Raises ConfigError for a column whose values have no such form,
    and for an image that is refused.
    """
    for where, row in located:
        given = _with_urls(where, row, seen)
        try:
            yield where, json_value(json.dumps(given, default=_written))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: {_unwritable(given)}; leave it out, or write it as text or numbers") from error


def _with_urls(where: str, given: Any, seen: Collection[str]) -> Any:
    held = [name for name in seen if not isinstance(given.get(name), str | None)] if isinstance(given, dict) else []
    try:
        return {**given, **{name: images.as_text(given[name]) for name in held}} if held else given
    except ValueError as error:
        raise ConfigError(f"{where}: an image: {error}") from error


def _written(value: Any) -> Any:
    if isinstance(value, _WRITTEN_AS_TEXT):
        return str(value)
    if hasattr(value, "tolist"):  # numpy, torch and pandas have it
        return value.tolist()
    raise TypeError(type(value).__name__)


def _unwritable(given: Any) -> str:
    for name, value in given.items() if isinstance(given, dict) else ():
        try:
            json_value(json.dumps({name: value}, default=_written))
        except (TypeError, ValueError, RecursionError) as error:
            return f"column {name!r} has no form in JSON ({error})"
    return f"a {type(given).__name__} is no row; give an object with a column 'prompt'"


def _json_lines(path: Path) -> Iterator[Located]:
    name = str(path)
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            where = f"{name}:{number}"
            try:
                yield where, json_value(line.rstrip("\n"))
            except ValueError as error:
                raise ConfigError(f"{where} is not JSON: {error}; write one object a line") from error


def _json(path: Path) -> Iterator[Located]:
    try:
        found = json_value(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; a file with one object a line is called .jsonl") from error
    if not isinstance(found, list):
        raise ConfigError(f"{path} holds no list of objects but a {type(found).__name__}; write [{{...}}, {{...}}]")
    return ((f"{path}, row {number}", row) for number, row in enumerate(found, 1))


def _csv(path: Path) -> Iterator[Located]:
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        _check_names(f"{path}:1", rows.fieldnames or ())
        for row in rows:
            where = f"{path}:{rows.line_num}"
            names = len(rows.fieldnames or ())
            cells = len([value for name, value in row.items() if name is not None and value is not None])
            cells += len(row.get(None, ()))
            if cells != names:
                raise ConfigError(f"{where} has {cells} cells, the first line names {names} columns; quote commas in a cell")
            yield where, row


def _check_names(where: str, names: Sequence[str]) -> None:
    """Raises ConfigError where two columns have one name: which of them a row has cannot be said."""
    if len(set(names)) < len(names):
        twice, count = Counter(names).most_common(1)[0]
        raise ConfigError(f"{where} names {count} columns {twice!r}; give each a name of its own")


def _parquet(path: Path) -> Iterator[Located]:
    check_installed("pyarrow", "data.source", str(path), "data", "a .jsonl or .csv file")
    import pyarrow
    import pyarrow.parquet

    try:
        _check_names(str(path), pyarrow.parquet.read_schema(path).names)
        with pyarrow.parquet.ParquetFile(path) as file:
            parts = (part.to_pylist() for part in file.iter_batches(_BATCH))
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(chain.from_iterable(parts), 1))
    except pyarrow.ArrowException as error:
        raise ConfigError(f"data.source {str(path)!r} is no Parquet file that can be read: {error}") from error


def _directory(path: Path) -> Iterator[Located]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _dataset(path)
    tasks = [file.parent for file in task_files(path) if (file.parent / "instruction.md").is_file()]
    if not tasks:
        raise ConfigError(f"data.source {str(path)!r} is a directory that save_to_disk did not make; name a file in it instead")
    return ((str(task), {"prompt": _instruction(task), "task": task.relative_to(path).as_posix()}) for task in tasks)


def task_files(directory: Path) -> list[Path]:
    """The `task.toml` of Harbor's tasks, sorted: in the directory and two levels below, for it may be anything."""
    return sorted(file for below in ("", "*/", "*/*/") for file in directory.glob(f"{below}task.toml"))


def _instruction(task: Path) -> str:
    """The instruction of a Harbor task, without the lines that mark it as no training data."""
    return _CANARY.sub("", (task / "instruction.md").read_text(encoding="utf-8")).strip()


def _dataset(path: Path) -> Iterator[Located]:
    check_installed("datasets", "data.source", str(path), "data", "a .jsonl or .csv file")
    import datasets

    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        if len(found) != 1:
            choices = ", ".join(f"{path}/{split}" for split in found)
            raise ConfigError(f"data.source {str(path)!r} holds several data sets, or none; choose one: {choices}")
        (found,) = found.values()
    parts = (part.to_pylist() for part in found.with_format("arrow").iter(_BATCH))
    return ((f"{path}, row {number}", row) for number, row in enumerate(chain.from_iterable(parts), 1))


_READERS = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
