"""Whether a model can read along, by what its directory says of it. No torch here: looked at before a run."""

from __future__ import annotations

import json
from pathlib import Path

from async_rlhf.buffers.attention import FAMILIES, attention
from async_rlhf.buffers.errors import ConfigError


def check_reads_along(path: str, of: str) -> None:
    """Raises ConfigError for a directory whose model cannot read a text while it is being written. of: who asks."""
    config = json.loads((Path(path) / "config.json").read_text())
    if attention(config) is None:
        raise ConfigError(
            f"{of}: {path!r} is of type {config.get('model_type')!r}, which is not known to read from left to right and to "
            "keep nothing but keys and values, so it cannot read along; set stream_tokens = 0, or use one of "
            f"{', '.join(sorted(FAMILIES))}"
        )
