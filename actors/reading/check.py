"""Whether a model can read along, by what its directory says of it. No torch here: looked at before a run."""

from __future__ import annotations

import json
from pathlib import Path

from buffers.attention import FAMILIES, angle_limit, attention
from buffers.errors import ConfigError


def check_reads_along(path: str, longest: int, of: str, shorten: str) -> None:
    """Raises ConfigError for a directory whose model cannot read a text while it is being written.

    longest: tokens of the longest text. of: who asks. shorten: the setting that makes texts shorter.
    """
    config = json.loads((Path(path) / "config.json").read_text())
    kind, limit = config.get("model_type"), angle_limit(config)
    if attention(config) is None:
        raise ConfigError(
            f"{of}: {path!r} is of type {kind!r}, which is not known to read from left to right and to keep nothing but keys "
            f"and values, so it cannot read along; set stream_tokens = 0, or use one of {', '.join(sorted(FAMILIES))}"
        )
    if limit is not None and limit < longest:
        raise ConfigError(
            f"{of}: {path!r} reads texts of {limit} tokens alike, they have up to {longest}; set stream_tokens = 0, "
            f"or {shorten} {limit}"
        )
