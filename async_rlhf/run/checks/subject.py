"""A run that is checked before it begins, as rules look at it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from async_rlhf.actors.data.rows import epoch_of, load_rows
from async_rlhf.actors.data.tokens import PromptLengths, PromptTokenizer
from async_rlhf.actors.environments import EnvironmentSpec
from async_rlhf.actors.prompts import Row, of_prompts
from async_rlhf.buffers.errors import check_all
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.record import source_of
from async_rlhf.run.checks import images
from async_rlhf.run.checks.model import longest_prompt
from async_rlhf.run.config import Config
from async_rlhf.run.run_data import Rows
from async_rlhf.run.scoring import environment_specs, played_by, score_names


class Subject:
    """A configuration and what it names; each part is read when the first rule asks for it. Parts raise ConfigError.

    rows, environments: where they are loaded already. is_here: whether the run will be on this machine.
    """

    def __init__(
        self,
        config: Config,
        rows: Rows | None = None,
        environments: Mapping[str, EnvironmentSpec] | None = None,
        *,
        is_here: bool = True,
    ) -> None:
        self.config, self.is_here, self._given, self._environments = config, is_here, rows, environments

    @cached_property
    def environments(self) -> Mapping[str, EnvironmentSpec]:
        """By source."""
        return environment_specs(self.config) if self._environments is None else self._environments

    @cached_property
    def rows(self) -> Rows:
        return self._given or load_rows(self.config.data)

    @cached_property
    def all_rows(self) -> list[Row]:
        """Training rows, then those held out."""
        return [*self.rows[0], *self.rows[1]]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all scores."""
        return score_names(self.config, self.environments.values())

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        return PromptTokenizer(Path(self.config.model))

    @cached_property
    def images(self) -> ImageProcessor | None:
        """What prepares the images of rows; None where none has any."""
        return images.processor_of(self.config, self.all_rows)

    @cached_property
    def texts(self) -> list[str]:
        """The text of each row that the model reads."""
        template = self.config.data.row_template
        if self.images is not None:
            return of_prompts(self.all_rows, partial(images.read_text, template=template, processor=self.images))
        return of_prompts(self.all_rows, partial(self.tokenizer.text, template=template))

    @cached_property
    def are_chats(self) -> list[bool]:
        """Whether the chat template wrote each text; of a run without rows, whether it will."""
        template = self.config.data.row_template
        return [template.is_chat(row) for row in self.all_rows] or [template.chat]

    @cached_property
    def lengths(self) -> PromptLengths:
        if self.images is None:
            return self.tokenizer.lengths(self.texts, self.are_chats[: len(self.texts)], self.limit[0])
        texts = [text.replace(self.images.mark, "") for text in self.texts]  # places are no text
        found = self.tokenizer.lengths(texts, self.are_chats[: len(texts)], self.limit[0])
        return images.with_images(found, self.all_rows, self.config.data.row_template, self.images, self.limit[0])

    @cached_property
    def limit(self) -> tuple[int, str]:
        """As `longest_prompt` gives it."""
        return longest_prompt(self.config)

    @cached_property
    def repeated(self) -> set[int]:
        """Numbers of training rows of which the model reads the same as of a held-out row, but for those that are too long."""
        training, held_out = self.rows
        if not held_out:
            return set()
        texts = list(map(self._read, self.all_rows, self.texts))
        known = set(texts[len(training) :])
        return {number for number in range(len(training)) if texts[number] in known} - self.lengths.too_long.keys()

    def _read(self, row: Row, text: str) -> str:
        source = played_by(self.config, source_of(row.columns))
        if source is None:
            return "\0".join((self.tokenizer.normal(text), *row.images))
        # An environment's own columns are a part of what it asks.
        return source + json.dumps(self.environments[source].usable({**row.columns, "prompt": row.prompt}), sort_keys=True)

    @property
    def has_model_directory(self) -> bool:
        """A model file is converted when the run starts, and looked into then."""
        return Path(self.config.model).is_dir()

    @cached_property
    def kept(self) -> Rows:
        """The rows that the model has room for, without those repeated."""
        if not self.has_model_directory:
            return self.rows
        too_long, first = self.lengths.too_long, len(self.rows[0])
        left_out = too_long.keys() | self.repeated
        return (
            [row for number, row in enumerate(self.rows[0]) if number not in left_out],
            [row for number, row in enumerate(self.rows[1], first) if number not in too_long],
        )

    @property
    def num_prompts(self) -> int:
        """Number of prompts of one epoch."""
        return len(epoch_of(self.config.data, self.kept[0]))


Rule = Callable[[Subject], Iterable[str] | None]
"""Raises ConfigError for what cannot be; gives remarks, which stop nothing."""


def of_config(rule: Callable[[Config], Iterable[str] | None]) -> Rule:
    return lambda subject: rule(subject.config)


class Stage:
    """Rules that are checked together. needs: a subject without it is not looked at by them."""

    def __init__(self, needs: Literal["settings", "this machine", "model directory"], *rules: Rule) -> None:
        self._needs, self._rules = needs, rules

    def check(self, subject: Subject) -> list[str]:
        """All remarks. Raises ConfigError with all that is found."""
        has = {"this machine": subject.is_here, "model directory": subject.has_model_directory}
        remarks = list[str]()
        if has.get(self._needs, True):
            check_all(*(partial(self._extend, remarks, subject, rule) for rule in self._rules))
        return remarks

    @staticmethod
    def _extend(remarks: list[str], subject: Subject, rule: Rule) -> None:
        remarks.extend(rule(subject) or ())
