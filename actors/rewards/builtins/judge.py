"""A language model that judges, behind an OpenAI-compatible HTTP interface (`/chat/completions`).

Answers that may be otherwise next time (408, 409, 425, 429, 5xx, a broken connection) are tried again, after as long as
the server demands; every other answer without a score is a failure that quotes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from async_rlhf.actors.rewards import endpoint
from async_rlhf.actors.rewards.answer import as_text, shown
from async_rlhf.actors.rewards.settings import reward
from async_rlhf.buffers.score import Score

TEMPLATE = """Judge the answer to a task.

Task:
{prompt}

Answer:
{completion}

Say in one sentence what is good and bad about the answer. Then write, alone on the last line, a score from 0 to 10."""
_MAX_BYTES = 1 << 20


@reward(retries=4, timeout_s=60.0, max_concurrency=32)
async def judge(
    completion: str,
    prompt: Any,
    url: str,
    model: str,
    template: str = TEMPLATE,
    pattern: str = r"(-?\d+(?:\.\d+)?)\D*$",
    lowest: float = 0.0,
    highest: float = 10.0,
    max_tokens: int = 256,
    api_key_env: str = "",
    **columns: Any,
) -> Score:
    """A judge's score, moved to 0.0 .. 1.0. Metrics: `tokens` (used by the call), `raw` (as the judge gave it).

    url: up to and without `/chat/completions`. template: what the judge reads; `{prompt}`, `{completion}` and every column
    may appear. pattern: its first group is the score; by default the last number. lowest, highest: the judge's scale.
    api_key_env: name of the environment variable that holds the key.
    """
    text = template.format_map({**columns, "prompt": as_text(prompt), "completion": completion})
    request = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
    }
    answer = await endpoint.posted(f"{url.rstrip('/')}/chat/completions", request, api_key_env, _MAX_BYTES)
    text = _text(answer)
    match = re.search(pattern, text, re.DOTALL)
    if match is None:
        raise ValueError(f"the judge gave no score: {text[-200:]!r}")
    raw = float(match[1])
    if not lowest <= raw <= highest:
        raise ValueError(f"the judge gave {raw:g}, its scale goes from {lowest:g} to {highest:g}")
    return Score((raw - lowest) / (highest - lowest), metrics={"raw": raw, **_usage(answer)})


def _text(answer: Any) -> str:
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the judge's answer has no choices[0].message.content: {shown(answer)}") from error
    if not isinstance(text, str):
        raise ValueError(f"the judge returned {shown(text)}; text was expected")
    return text


def _usage(answer: Any) -> dict[str, float]:
    usage = answer.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return {"tokens": float(total)} if isinstance(total, int) else {}
