"""Whether a model can read along, by what its directory says of it. No torch here: looked at before a run."""

from __future__ import annotations

import json
from pathlib import Path

from buffers.errors import ConfigError

# Model types whose tokens see only what is before them, and which keep nothing but keys and values.
_DECODERS = (
    "gemma", "gemma2", "glm", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo", "olmo2", "phi", "phi3", "qwen2",
    "qwen3", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


def check_reads_along(path: str, longest: int, of: str, shorten: str) -> None:
    """Raises ConfigError for a directory whose model cannot read a text while it is being written.

    longest: tokens of the longest text. of: who asks. shorten: the setting that makes texts shorter.
    """
    config = json.loads((Path(path) / "config.json").read_text())
    kind, window = config.get("model_type"), config.get("sliding_window")
    if kind not in _DECODERS:
        raise ConfigError(
            f"{of}: {path!r} is of type {kind!r}, which is not known to read from left to right, so it cannot read along; "
            f"set stream_tokens = 0, or use one of {', '.join(_DECODERS)}"
        )
    if window and config.get("use_sliding_window", True) and window < longest:
        raise ConfigError(
            f"{of}: {path!r} forgets what is {window} tokens back and cannot read along further, texts have up to {longest}; "
            f"set stream_tokens = 0, or {shorten} {window}"
        )
