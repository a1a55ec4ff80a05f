"""A prompt: its row, which group gets it, and how it becomes tokens.

Everything here is a pure function of the rows, the run's seed and a group number, so any actor can begin any group, again if
need be. Holds no cursor, draws no random number from outside, knows no engine. Where rows come from: `actors/data/`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import string
import struct
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.images import images_of
from async_rlhf.buffers.parsing import loads
from async_rlhf.buffers.record import Int32Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from async_rlhf.buffers.images.processor import ImageProcessor

NO_CHAT_TEMPLATE = "a prompt is given as chat messages, but the tokenizer has no chat template; give text, without data.chat"

T = TypeVar("T")
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt, as text or as chat messages, and every further column of its row (values are JSON-serialisable).

    A reasoning-gym row has `answer` (text) and `entry` (the task's whole entry: question, answer, metadata).
    """

    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]

    @property
    def images(self) -> tuple[str, ...]:
        """The digests of its images, in the order of their places in the prompt, which are parts of its messages."""
        return () if isinstance(self.prompt, str) else images_of(self.prompt)


class RowSequence(Sequence[Row]):
    """Rows that no list holds. A kind of them has `__len__`, and `at(number)` for 0 <= number < len."""

    @abstractmethod
    def at(self, number: int) -> Row: ...

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        found = range(len(self))[number]
        return self.at(found) if isinstance(found, int) else list(map(self.at, found))


@dataclass(frozen=True)
class Template:
    """How a row becomes the model's input."""

    text: str = "{prompt}"
    """May name any column of the row."""
    chat: bool = False
    """Whether that text is one user message of the model's chat template, as prompts that are messages always are."""
    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Variables of the chat template."""

    def is_chat(self, row: Row) -> bool:
        """Whether the model's chat template writes the row; it writes every special token then."""
        return self.chat or not isinstance(row.prompt, str)

    def said(self, row: Row) -> str | list[dict[str, Any]]:
        """The model's input: text, or the messages for its chat template.

        Raises ConfigError where the text names no column of the row, or one that is no text, or is given for messages.
        """
        if isinstance(row.prompt, str):
            text = row.prompt if self.text == "{prompt}" else _fill(self.text, row)
            return [{"role": "user", "content": text}] if self.chat else text
        if self.text != "{prompt}":
            what = "a prompt with images, which is a chat; leave it out, and write" if row.images else "chat messages; leave it"
            way = " its text into the data" if row.images else " out, or give prompts as text"
            raise ConfigError(f"data.template {self.text!r} cannot be applied to {what}{way}")
        return row.prompt


def of_prompts(rows: Iterable[Row], read: Callable[[Row], T]) -> list[T]:
    """`read` applied to each row. Its ConfigError gets the number of the prompt."""
    found: list[T] = []
    try:
        for row in rows:
            found.append(read(row))
    except ConfigError as error:
        raise ConfigError(f"prompt {len(found)}: {error}") from error
    return found


PLAIN = Template()
"""The column `prompt` as it stands."""


def to_json(row: Row) -> str:
    """A row as one line of JSON, without its end. Raises ValueError for what has no such form, or is no text."""
    line = json.dumps({"prompt": row.prompt, **row.columns}, ensure_ascii=False, allow_nan=False)
    line.encode()
    return line


def from_json(line: str | bytes) -> Row:
    """The row that `to_json` wrote. Raises ValueError, KeyError, AttributeError, TypeError for what is none."""
    columns = loads(line)
    return Row(columns.pop("prompt"), columns)


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
    return _hashed(seed & _U64, group, member)


def environment_seed(seed: int, group: int) -> int:
    """63 bits for the environments of a group's members: the same for all, for they are compared."""
    return _hashed(seed & _U64, group, _U64)


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn: the completion's own for the first (0), another number of 63 bits for each other."""
    return _hashed(seed, turn) if turn else seed


def digest_of(numbers: Sequence[int]) -> int:
    """63 bits of whole numbers below 2**63, in their order."""
    return int.from_bytes(hashlib.blake2b(np.array(numbers, "<i8").tobytes(), digest_size=8).digest(), "little") >> 1


def _hashed(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def encode(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    max_length: int | None = None,
    images: ImageProcessor | None = None,
) -> tuple[str, list[int]]:
    """(text, token ids) given to the model. images: prepares those of rows, where rows have some.

    Raises ConfigError as `Template.said`, and for a prompt that is empty or longer than `max_length` tokens, which the check
    before a run has ruled out.
    """

    text = said = template.said(row)
    if images is not None and not isinstance(said, str):
        text, ids = images.encode(said, template.variables)
    else:
        if not isinstance(said, str):
            if not tokenizer.chat_template:
                raise ConfigError(NO_CHAT_TEMPLATE)
            text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False, **template.variables)
        ids = token_ids(text := str(text), tokenizer, is_rendered=not isinstance(said, str))
    if not ids or (max_length is not None and len(ids) > max_length):
        raise ConfigError(f"a prompt has {len(ids)} tokens, 1 to {max_length} are possible; it begins {text[:60]!r}")
    return text, ids


def token_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, is_rendered: bool, **options: Any) -> list[int]:
    """Token ids of a text, wherever one becomes them: a chat template has written every special token (`is_rendered`), to
    plain text the tokenizer adds its own. options: of the tokenizer."""
    return list(tokenizer(text, add_special_tokens=not is_rendered, **options)["input_ids"])


def _fill(template: str, row: Row) -> str:
    columns = {**row.columns, "prompt": row.prompt}
    try:
        for _, name, _, conversion in string.Formatter().parse(template):
            value = string.Formatter().get_field(name, (), columns)[0] if name and not conversion else ""
            if not isinstance(value, str | int | float):
                raise ConfigError(f"data.template names {name!r}, which is no text but {value!r:.60}; write it as text")
        return template.format_map(columns)
    except ConfigError:
        raise
    except KeyError as error:
        name = str(error.args[0])
        raise ConfigError(
            f"data.template names the column {name!r}, which a row does not have; {did_you_mean(name, columns)}"
        ) from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"data.template {template!r} cannot be filled: {error}; write a literal brace twice") from error


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_rows: int) -> Int32Array:
    # Philox takes its 128-bit key as it is: (seed, epoch) names the stream, nothing has to be drawn up to it.
    key = np.array([seed & _U64, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_rows).astype(np.int32)
