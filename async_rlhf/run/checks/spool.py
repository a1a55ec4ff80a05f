"""A run's spool: which rows are of use to it, and where it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter

from async_rlhf.actors.data.images import ImageLoader, Read, take_none
from async_rlhf.actors.data.rows import row_of
from async_rlhf.actors.data.tokens import PromptTokenizer
from async_rlhf.actors.prompts import Row, to_json
from async_rlhf.buffers.errors import ConfigError, WireError
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.buffers.parsing import json_value
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.record import SOURCE, source_of
from async_rlhf.buffers.spool.claims import RejectedLine, Spool
from async_rlhf.buffers.spool.deposit import END, MAX_ROW_BYTES, is_ready
from async_rlhf.buffers.spool.stream import PromptStream
from async_rlhf.run.checks.model import longest_prompt
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import check_columns, check_judged, common_columns, environment_specs, stage_specs

_COLUMNS: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, JsonValue])
_KINDS_OF_ROWS = 256  # sets of columns whose check is remembered


def open_spool(run: RunDir, config: Config) -> Spool | None:
    """The spool of this run's hub; None for a run without one. Raises ConfigError, JournalError."""
    if (source := config.data.spool) is None:
        return None
    own = run.path / "data" / "spool"
    images = ImageStore(run.images.directory, durable=True)
    return Spool(source, own, PromptStream(own, config.data.repeat), RowCheck(config, images))


def check_spool(config: Config) -> list[str]:
    """Remarks on the run's spool. Raises ConfigError for one that no run could claim from."""
    if (directory := config.data.spool) is None:
        return []
    if not directory.exists():
        return [f"the spool {directory} does not exist yet: the run makes it, and waits for prompts"]
    if not directory.is_dir() or not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"data.source = 'spool:{directory}' is no directory that this user may read and write: files are claimed by "
            "renaming them; name another, or change its mode"
        )
    with os.scandir(directory) as found:
        files = sum(is_ready(each.name) and each.is_file(follow_symlinks=False) for each in found)
    remark, ended = f"prompts come from the spool {directory}; files that wait there: {files}", (directory / END).exists()
    return [f"{remark}; it has ended (it holds a file {END}), and no more will come" if ended else remark]


def make_spool(directory: Path) -> None:
    """Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"data.source = 'spool:{directory}' cannot be made: {error}; name another directory") from error


class RowCheck:
    """Lines of a spool to rows as they are credited, or why one is of no use to this run. images: of the run. Raises
    ConfigError for a model without a tokenizer, or without a processor where images may come."""

    def __init__(self, config: Config, images: ImageStore) -> None:
        self._config, self._template = config, config.data.row_template
        self._read: Read = take_none
        self._processor: ImageProcessor | None = None
        if config.data.images:
            self._read = ImageLoader(config.data.spool, images.add, images)
            self._processor = ImageProcessor(Path(config.model), images)
        self._limit, self._setting = longest_prompt(config)
        self._tokenizer = PromptTokenizer(Path(config.model))
        self._check_columns = lru_cache(_KINDS_OF_ROWS)(self._lack)

    def __call__(self, lines: Sequence[bytes]) -> list[str | RejectedLine]:
        looked = [self._look(line) for line in lines]
        good = [each for each in looked if not isinstance(each, RejectedLine)]
        lengths = self._tokenizer.lengths([text for _, text, _ in good], [chat for *_, chat in good], self._limit)
        rows: list[str | RejectedLine] = [row for row, *_ in good]
        for number, num_tokens in lengths.too_long.items():
            rows[number] = RejectedLine(f"its prompt has {num_tokens} tokens, the limit is {self._setting}")
        for number in lengths.empty:
            rows[number] = RejectedLine("its prompt has no tokens")
        left = iter(rows)
        return [each if isinstance(each, RejectedLine) else next(left) for each in looked]

    def _look(self, line: bytes) -> tuple[str, str, bool] | RejectedLine:
        """The row, what the model reads, and whether the chat template has written that."""
        try:
            row = row_of("the line", json_value(line, parse_constant=_refuse), self._config.data.columns, self._read)
            text = self._text(row)
            text.encode()
            # As a finished group carries them back, whatever their values are.
            wire.decode(
                wire.encode(wire.Status(status=_COLUMNS.validate_python(row.columns))), max_frame_bytes=4 * MAX_ROW_BYTES
            )
            found = to_json(row), text, self._template.is_chat(row)
        except (ConfigError, WireError) as error:
            return RejectedLine(str(error))
        except (ValueError, OverflowError, RecursionError) as error:
            return RejectedLine(f"it is not JSON, or not of text and numbers that can be sent: {error}")
        lacking = self._check_columns(frozenset(common_columns([row])), source_of(row.columns))
        return RejectedLine(lacking) if lacking else found

    def _text(self, row: Row) -> str:
        """What the model reads but for images, with which it has room. Raises ConfigError."""
        said = self._template.said(row)
        if self._processor is None or isinstance(said, str):
            return self._tokenizer.text(row, self._template)
        if row.images and (count := self._processor.num_tokens(said, self._template.variables)) > self._limit:
            raise ConfigError(f"its prompt has {count} tokens with its images, the limit is {self._setting}")
        return self._processor.text(said, self._template.variables).replace(self._processor.mark, "")

    def _lack(self, columns: frozenset[str], source: str | None) -> str:
        """The fields that a row of this source needs and these columns lack."""
        config = self._config
        try:
            environments = environment_specs(config)
            check_columns(config, stage_specs(config), environments, source, columns)
            check_judged(config, environments, source)
            config.scoring.reference.check_taught([{SOURCE: source}])
        except ConfigError as error:
            return str(error)
        return ""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
