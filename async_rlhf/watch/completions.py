"""Groups for a person, on the page and in a terminal: text in pieces, each with the version that sampled it.

A record holds tokens and a text of the whole; where more than one version has sampled a completion its tokens are decoded one
by one with the tokenizer of the newest checkpoint. Where they do not add up to the text, it stays one piece.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from async_rlhf.actors.config import REFERENCE
from async_rlhf.buffers.errors import AsyncRLHFError, DamagedError
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import is_number

Decode = Callable[[Sequence[int]], Sequence[str]]
"""Tokens to the text that each adds, as many as tokens."""

MAX_CHARACTERS = 20_000
"""The longest shown prompt or completion."""
_MAX_ROLLOUTS, _MAX_IMAGES = 32, 8
_MAX_TOKENIZER_BYTES = 64 << 20


def shown(sample: Mapping[str, Any], decode: Decode | None, store: ImageStore | None = None) -> dict[str, Any] | None:
    """A line of `rollouts.jsonl` for the page; None when it is not as the learner writes it. store: of the run's images."""
    try:
        digests = [str(each)[:40] for of in (sample, *sample["rollouts"]) for each in of.get("images", ())[:_MAX_IMAGES]]
        return {
            "step": int(sample["step"]),
            "group": int(sample["group"]),
            "actor": str(sample.get("actor", "")),
            "prompt": str(sample["prompt"])[:MAX_CHARACTERS],
            "images": [_image(digest, store) for digest in islice(dict.fromkeys(digests), _MAX_IMAGES)],
            "rollouts": [_rollout(rollout, decode) for rollout in sample["rollouts"][:_MAX_ROLLOUTS]],
            "more": max(0, len(sample["rollouts"]) - _MAX_ROLLOUTS),
        }
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None


def _image(digest: str, store: ImageStore | None) -> dict[str, str]:
    """Its name, and a thumbnail as a data URL; empty where it is missing, or none."""
    small = b""
    with suppress(DamagedError):
        small = b"" if store is None else store.thumbnail(digest)
    return {"name": digest, "source": f"data:image/jpeg;base64,{base64.b64encode(small).decode()}" if small else ""}


def pieces(
    text: str, tokens: Sequence[int], spans: Sequence[Sequence[Any]], decode: Decode | None, anew: Sequence[int] = ()
) -> list[tuple[int | None, str]]:
    """(version, text) one after another: what each version sampled, None for what was read. spans: (version, number of its
    tokens). anew: which of them begin the row anew; of what is read there the text has a part only, and the pieces all.

    The whole text is given to the last version where the parts cannot be distinguished.
    """
    if len(spans) > 1 and decode is not None:
        parts, at, texts = decode(tokens), 0, list[tuple[int | None, str]]()
        for version, count, *_ in spans:
            texts.append((version, "".join(parts[at : at + count])))
            at += count
        prompt = "".join(part for _, part in texts[: min(anew, default=len(texts))])
        if prompt == text or (anew and text.startswith(prompt)):
            return texts
    return [(spans[-1][0] if spans else 0, text)]


def group_lines(record: Mapping[str, Any], decode: Decode | None = None) -> str:
    """One group as text. With `decode` an episode has a line for each turn and each observation."""
    taken_back = "  QUARANTINED: " + "; ".join(map(str, record["quarantined"])) if record.get("quarantined") else ""
    lines = [f"step {record['step']}  group {record['group']} (attempt {record['attempt']}, {record['actor']}){taken_back}"]
    lines += [f"  prompt: {record['prompt']!r}"]
    lines += _image_lines(record)
    for rollout in record["rollouts"]:
        scores = ", ".join(
            f"{name} failed: {score['failure']}" if score["failure"] else f"{name} {score['value']}"
            for name, score in rollout["scores"].items()
            if name != REFERENCE or score["failure"]  # it has no value
        )
        of_turns = rollout.get("turn_scores", ())
        if any(score is not None for score in of_turns):
            scores += f"{scores and ', '}turns {' '.join('-' if score is None else f'{score:g}' for score in of_turns)}"
        versions = " ".join(
            f"{f'v{version}x' if version is not None else 'anew ' if at in rollout.get('restarts', ()) else 'read '}{count}"
            for at, (version, count) in enumerate(rollout["spans"])
        )
        turns = _turn_lines(rollout, decode)
        text = "" if turns else f" {rollout['text']!r}"
        lines += [f"  {scores:<28} {versions:<14} {rollout['finish_reason']:<7}{text}", *turns, *_image_lines(rollout)]
    return "\n".join(lines)


def _image_lines(of: Mapping[str, Any]) -> Iterator[str]:
    for number, image in enumerate(of.get("images", ()), 1):
        size = "missing" if image["size"] is None else "{} x {}".format(*image["size"])
        yield f"  image {number}: {size}, {image['file']}"


@lru_cache(maxsize=4)
def decoder(path: Path, changed: float) -> Decode | None:
    """The decoder of a tokenizer.json; None where none can be read. changed: the file's time, so that a new one is read."""
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


def decode_of(run: RunDir) -> Decode | None:
    """The decoder of the newest checkpoint's tokenizer, else of the run's model."""
    with suppress(OSError):
        path = run.latest / "model" / "tokenizer.json"
        return decoder(path, path.stat().st_mtime)
    with suppress(OSError, ValueError, AsyncRLHFError):
        path = Path(run.config().model) / "tokenizer.json"
        return decoder(path, path.stat().st_mtime)
    return None


def _turn_lines(rollout: Mapping[str, Any], decode: Decode | None) -> list[str]:
    """An episode's turns, under the number of its row where it has several; none where its text cannot be divided."""
    spans, anew = rollout["spans"], rollout.get("restarts", ())
    parts = pieces(rollout["text"], rollout.get("completion_ids") or rollout.get("tokens", ()), spans, decode, anew)
    if all(version is not None for version, _ in parts):
        return []
    lines, number = list[str](), 0
    for is_read, group in groupby(range(len(parts)), key=lambda at: parts[at][0] is None):
        places = list(group)
        if anew and (places[0] == 0 or places[0] in anew):
            number += 1
            lines.append(f"    row {number}")
        lines.append(f"      {'reads ' if is_read else 'writes'}  {''.join(parts[at][1] for at in places)!r}")
    return lines


def _cut(found: Iterable[tuple[int | None, str]], left: int) -> Iterator[tuple[int | None, str]]:
    """The pieces, cut to `left` characters in all."""
    for version, part in found:
        yield version, part[:left]
        left -= len(part[:left])


def _rollout(rollout: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    text, spans = str(rollout["text"])[:MAX_CHARACTERS], rollout["spans"]
    anew = [int(at) for at in rollout.get("restarts", ())]
    texts = pieces(text, rollout["tokens"], spans, decode, anew)
    return {
        "pieces": [*_cut(texts, MAX_CHARACTERS)],
        "anew": anew if len(texts) == len(spans) else [],
        "spans": [[None if version is None else int(version), int(count)] for version, count, *_ in spans],
        "tokens": len(rollout["tokens"]),
        "scores": {str(name): score if is_number(score) else None for name, score in rollout["scores"].items()},
        "advantage": rollout.get("advantage") if is_number(rollout.get("advantage")) else None,
        "weight": rollout.get("weight") if is_number(rollout.get("weight")) else None,
        "ended": str(rollout.get("finish_reason", "")),
    }
