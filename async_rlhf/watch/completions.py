"""Sampled groups as they are read on the page: text in pieces, each with the version that sampled it.

A record holds tokens and a text of the whole; where more than one version has sampled a completion its tokens are decoded one
by one with the tokenizer of the newest checkpoint. Where they do not add up to the text, it stays one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from async_rlhf.watch.series import is_number

Decode = Callable[[Sequence[int]], Sequence[str]]
"""Tokens to the text that each adds, as many as tokens."""

MAX_CHARACTERS = 20_000
"""Of a prompt or completion that is shown."""
_MAX_ROLLOUTS = 32
_MAX_TOKENIZER_BYTES = 64 << 20


def shown(sample: Mapping[str, Any], decode: Decode | None) -> dict[str, Any] | None:
    """A line of `rollouts.jsonl` for the page; None when it is not as the learner writes it."""
    try:
        return {
            "step": int(sample["step"]),
            "group": int(sample["group"]),
            "actor": str(sample.get("actor", "")),
            "prompt": str(sample["prompt"])[:MAX_CHARACTERS],
            "rollouts": [_rollout(rollout, decode) for rollout in sample["rollouts"][:_MAX_ROLLOUTS]],
            "more": max(0, len(sample["rollouts"]) - _MAX_ROLLOUTS),
        }
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None


def pieces(
    text: str, tokens: Sequence[int], spans: Sequence[Sequence[Any]], decode: Decode | None
) -> list[tuple[int | None, str]]:
    """(version, text) one after another: what each version sampled, None for what an environment gave. spans: (version, number
    of its tokens).

    The whole text is given to the last version where the parts cannot be distinguished.
    """
    if len(spans) > 1 and decode is not None:
        parts, at, found = decode(tokens), 0, list[tuple[int | None, str]]()
        for version, count, *_ in spans:
            found.append((version, "".join(parts[at : at + count])))
            at += count
        if "".join(part for _, part in found) == text:
            return found
    return [(spans[-1][0] if spans else 0, text)]


@lru_cache(maxsize=4)
def decoder(path: Path, changed: float) -> Decode | None:
    """Of a tokenizer.json; None where there is none that can be read. changed: when the file was, so that a new one is read."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    tokenizer = None
    with suppress(Exception):  # the library raises nothing narrower
        if path.is_file() and path.stat().st_size <= _MAX_TOKENIZER_BYTES:
            tokenizer = Tokenizer.from_file(str(path))
    if tokenizer is None:
        return None

    def decode(tokens: Sequence[int]) -> Sequence[str]:
        stream = DecodeStream(skip_special_tokens=True)
        with suppress(Exception):
            return [stream.step(tokenizer, token) or "" for token in tokens]
        return [""] * len(tokens)

    return decode


def _rollout(rollout: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    text, spans = str(rollout["text"])[:MAX_CHARACTERS], rollout["spans"]
    return {
        "pieces": pieces(text, rollout["tokens"], spans, decode),
        "spans": [[None if version is None else int(version), int(count)] for version, count, *_ in spans],
        "tokens": len(rollout["tokens"]),
        "scores": {str(name): score if is_number(score) else None for name, score in rollout["scores"].items()},
        "advantage": rollout.get("advantage") if is_number(rollout.get("advantage")) else None,
        "weight": rollout.get("weight") if is_number(rollout.get("weight")) else None,
        "ended": str(rollout.get("finish_reason", "")),
    }
