"""Settings of prompts: where they come from, and how a row becomes what the model reads. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from async_rlhf.actors.prompts import Template
from async_rlhf.buffers.config import CurriculumConfig, Section

HELD_OUT_SEED = 1_000_003
"""Of a procedural task's held-out prompts: fixed, so that runs with different seeds share the test set."""
TASK_PREFIX = "reasoning_gym:"
CALLER_ROWS = "caller"
"""The source of rows that are given in Python."""
HUB_PREFIX = "hub:"
"""Before a file of a data set on the Hugging Face Hub, which a checked configuration names by its place in the cache."""
SPOOL_PREFIX = "spool:"
"""Before the directory into which rows are dropped while the run goes on."""


def anchor_source(values: Any, base: Path) -> None:
    """Make the path in the raw values of a source absolute, seen from `base`."""
    source = values.get("source") if isinstance(values, dict) else None
    if isinstance(source, str) and source not in ("", "none", CALLER_ROWS) and not source.startswith((TASK_PREFIX, HUB_PREFIX)):
        prefix = SPOOL_PREFIX if source.startswith(SPOOL_PREFIX) else ""
        values["source"] = prefix + str(base / Path(source.removeprefix(prefix)).expanduser())


class Source(Section):
    """One place that prompts come from."""

    source: str
    """As `data.source`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym task (`min_word_len = 3`)."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Renames: our name = the file's name (`prompt = "question"`)."""
    size: int = Field(default=4096, ge=1, le=1 << 24)
    """Number of training prompts to draw from a procedural task; a file gives what it holds."""


class MixedSource(Source):
    """One of several."""

    name: str = ""
    """In the column `source` of its rows; left out: the name of the file or task."""
    weight: float | None = Field(default=None, gt=0)
    """Its share of the prompts, beside the other weights. `"none"`, and then for all: as many as it has rows."""

    @property
    def label(self) -> str:
        """The name in force."""
        return self.name or Path(self.source.removeprefix(TASK_PREFIX)).stem


class DataConfig(Source):
    """Where prompts come from: `source`, or several `[[data.sources]]`."""

    source: str = ""
    """`reasoning_gym:<task>`; a `.jsonl`, `.json`, `.csv` or `.parquet` file, a directory saved by Hugging Face `datasets` (of
    several splits `DIR/SPLIT`), or one of Harbor's tasks; `hub:OWNER/NAME[@REVISION]/FILE`: one of those files in a data set of
    the Hub (cached, or fetched once); `caller`: the rows of `train(..., data=rows)`; `spool:DIR`: files that arrive during the
    run. Empty: `sources`."""
    sources: tuple[MixedSource, ...] = ()
    """Several, each with its own `source`, `options`, `columns` and `size`, a `name` and a `weight`."""
    template: str = "{prompt}"
    """Text given to the model; `{prompt}` and any other column may appear."""
    chat: bool = False
    """That text is given as one user message through the model's chat template (what is chat messages already always is)."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template (`enable_thinking = false`)."""
    held_out: int | None = Field(default=None, ge=0, le=1 << 24)
    """Number of prompts of each source kept out of training for evaluation (of a task drawn first, of a file the last).
    `"none"`: 200, of a file at most a tenth, of a spool none. 0: no evaluation."""
    on_overlong: Literal["error", "drop"] = "error"
    """A prompt longer than `generation.max_prompt_length` is refused before the run, or left out and counted."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training prompts; `"none"`: until the run ends. Of a spool: uses of each row, `"none"` being one. With a
    curriculum: most uses of each."""
    images: bool = False
    """Images may come while the run goes on: from a spool, from environments, from agents. Those in its rows always may."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which prompt comes next by how often it has been solved."""

    @property
    def spool(self) -> Path | None:
        """The directory that rows are dropped into while the run goes on, where that is the source."""
        return Path(self.source.removeprefix(SPOOL_PREFIX)) if self.source.startswith(SPOOL_PREFIX) else None

    @property
    def repeat(self) -> int:
        """How often each row of a spool is used."""
        return self.epochs or 1

    @property
    def row_template(self) -> Template:
        """How a row becomes what the model reads."""
        return Template(self.template, self.chat, self.chat_template_kwargs)
